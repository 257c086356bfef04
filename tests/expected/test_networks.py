"""KFRA in any graph, beside chains, exact blocks and a slow re-statement."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.blocks import Block
from gaussnewton.network import Network
from tests.problems import relative

Batch = tuple[Tensor, Tensor]


def as_network(model: nn.Module, criterion: nn.Module, batch: Batch) -> dict[str, Block]:
    """KFRA by the frontier, although the model may be a chain."""
    with gn.Tape(model, criterion) as tape:
        criterion(model(batch[0]), batch[1])
    return gn.KFRA().estimate_network(Network(tape.record, Exception("asked for")))


class Branches(nn.Module):
    """Residuals, a gate, a norm, parts that are cut and joined, a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 5, bias=False)
        self.gate, self.c = nn.Linear(4, 5), nn.Linear(5, 5)
        self.norm, self.last = nn.LayerNorm(5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        u = h - 0.5 * self.b(h).sigmoid() + self.b(h * h)
        v = u * torch.sigmoid(self.gate(x))
        w = self.norm(v) + self.c(u)
        left, right = w.split([3, 2], dim=1)
        return self.last(torch.cat([w, left.exp() * right[:, :1]], dim=1))


class Images(nn.Module):
    """A residual block with a norm, pooling, groups; and a head on the flattened features."""

    def __init__(self, norm: nn.Module, inplace: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm, self.c = norm, nn.Conv2d(4, 6, 2, groups=2, dilation=2)
        self.last, self.inplace = nn.Linear(6, 3), inplace

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x), inplace=self.inplace)
        x = F.max_pool2d(x + self.norm(self.b(x)), 2)
        return self.last(torch.tanh(self.c(x)).flatten(1))


class Sentences(nn.Module):
    """An embedding with padding, attention of two heads, norms, the mean."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=0)
        self.q, self.k, self.v, self.out = (nn.Linear(6, 6) for _ in range(4))
        self.norm, self.up, self.down = nn.RMSNorm(6), nn.Linear(6, 7), nn.Linear(7, 6)
        self.last, self.fused = nn.Linear(6, 3), fused

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = (f(x).unflatten(2, (2, 3)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(2, 3) / 3**0.5, dim=3) @ v
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.last(x.mean(1))


def classes(n: int) -> Tensor:
    return torch.randint(3, (n,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "branches": (Branches, lambda n: torch.randn(n, 4).double()),
    "images": (lambda: Images(nn.GroupNorm(2, 4)), lambda n: torch.randn(n, 2, 6, 6).double()),
    "in place": (
        lambda: Images(nn.BatchNorm2d(4).eval(), inplace=True),
        lambda n: torch.randn(n, 2, 6, 6).double(),
    ),
    "instances": (
        lambda: Images(nn.InstanceNorm2d(4, affine=True)),
        lambda n: torch.randn(n, 2, 6, 6).double(),
    ),
    "attention": (lambda: Sentences(fused=False), lambda n: torch.randint(9, (n, 5))),
    "fused attention": (lambda: Sentences(fused=True), lambda n: torch.randint(9, (n, 5))),
}


def made(name: str, n: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    return model().double(), (inputs(n), classes(n))


@pytest.mark.parametrize(
    "f",
    [
        torch.tanh,
        F.relu,
        lambda x: x.softmax(1),
        lambda x: x.flip(1),
        lambda x: x * x.sigmoid() + x.exp(),  # several operations, all entry by entry
        lambda x: torch.maximum(0.1 * x, x).unsqueeze(2).squeeze(2),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_chain_is_a_network_too(f: Callable[[Tensor], Tensor], bias: bool) -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Linear(a, b, bias=bias) for a, b in ((3, 5), (5, 4), (4, 2))
            )

        def forward(self, x: Tensor) -> Tensor:
            first, second, last = self.layers
            return last(f(second(f(first(x)))))

    model, batch = Net().double(), (torch.randn(7, 3).double(), torch.randn(7, 2).double())
    expected = gn.curvature(model, nn.MSELoss(), batch, method="kfra")
    found = as_network(model, nn.MSELoss(), batch)
    for name, block in expected.items():
        assert relative(found[name].G, block.G) < 1e-12
        assert relative(found[name].Q, block.Q) < 1e-12


def test_one_datum_is_exact_in_any_graph_of_vectors() -> None:
    model, batch = made("branches", 1)
    criterion = nn.CrossEntropyLoss()
    found = gn.curvature(model, criterion, batch, method="kfra")
    kflr = gn.curvature(model, criterion, batch, method="kflr")
    exact = gn.exact.gauss_newton_blocks(model, criterion, batch)
    for name, block in found.items():
        assert relative(block.dense(), kflr[name].dense()) < 1e-12, name
        if name != "b":  # called twice, as at two positions
            assert relative(block.dense(), exact[name]) < 1e-12, name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_one_datum_is_exact_where_tensors_are_kept_whole(name: str, sharing: str) -> None:
    model, batch = made(name, 1)
    criterion = nn.CrossEntropyLoss()
    estimator = gn.KFRA(sharing=sharing, whole=10**6)
    found = gn.curvature(model, criterion, batch, method=estimator)
    kflr = gn.curvature(model, criterion, batch, method=gn.KFLR(sharing=sharing))
    for layer, block in found.items():
        if sharing == "expand" or layer != "b" or name != "branches":
            mine, theirs = block.dense(), kflr[layer].dense()
            # Summed over positions, what a norm or a softmax is behind of may vanish.
            assert float((mine - theirs).norm()) < 1e-11 * float(theirs.norm()) + 1e-15, layer


class Straight(nn.Module):
    """Residual and branching, and linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + self.c(x - 2 * self.b(x))
        return self.last(torch.cat([x, self.b(x)[:, [3, 2, 0, 1]]], dim=1))


def test_linear_networks_are_exact_for_any_batch() -> None:
    torch.manual_seed(0)
    model, batch = Straight().double(), (torch.randn(9, 3).double(), torch.randint(2, (9,)))
    found, expected = (
        gn.curvature(model, nn.CrossEntropyLoss(), batch, method=m) for m in ("kfra", "kflr")
    )
    for name, block in expected.items():
        assert relative(found[name].G, block.G) < 1e-12, name


def test_a_slow_restatement_of_a_residual_network() -> None:
    """E[𝒥ᵀ M 𝒥] literally, 𝒥 being written out for all tensors and each datum."""
    torch.manual_seed(0)
    first, second, last = (nn.Linear(a, b).double() for a, b in ((3, 4), (4, 4), (4, 2)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = first, second, last

        def forward(self, x: Tensor) -> Tensor:
            a = torch.tanh(first(x))
            return last(a + torch.tanh(second(a)))

    x, y = torch.randn(7, 3).double(), torch.randint(2, (7,))
    criterion = nn.CrossEntropyLoss()
    model = Net()
    H = gn.exact.output_hessian(criterion, model(x).detach(), y).sum(0)
    eye = torch.eye(4).double()

    def expected(M: Tensor, jacobians: list[Tensor]) -> Tensor:
        total = torch.zeros(jacobians[0].shape[1], jacobians[0].shape[1]).double()
        for J in jacobians:
            total += J.T @ M @ J / len(jacobians)
        return total

    h0 = first(x)
    h1 = second(torch.tanh(h0))
    at_sum = expected(H, [last.weight.detach()])
    # The sum is replaced by (a, tanh(h1)), then tanh(h1) by h1, then h1 by a, then a by h0.
    joint = expected(at_sum, [torch.cat([eye, eye], dim=1)])
    slopes = [torch.diag(1 - torch.tanh(h).square()).detach() for h in h1]
    joint = expected(joint, [torch.block_diag(eye, s) for s in slopes])
    G1 = joint[4:, 4:]
    at_a = expected(joint, [torch.cat([eye, second.weight.detach()])])
    G0 = expected(at_a, [torch.diag(1 - torch.tanh(h).square()).detach() for h in h0])
    found = gn.curvature(model, criterion, (x, y), method="kfra")
    assert relative(found["first"].G, G0) < 1e-12
    assert relative(found["second"].G, G1) < 1e-12
    # The cross terms matter.
    apart = expected(at_sum, [eye]) + expected(G1, [second.weight.detach()])
    assert relative(apart, at_a) > 0.1


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_linear_convolutions_before_a_mean(sharing: str, kernel: int) -> None:
    """The derivative is the same at all positions, and without borders it stays so."""
    torch.manual_seed(0)
    pad = {"padding": kernel // 2, "padding_mode": "circular"}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 3, kernel, **pad), nn.Conv2d(3, 3, kernel, **pad)
            self.c, self.last = nn.Conv2d(3, 4, kernel, bias=False, **pad), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            x = x + self.b(x)
            return self.last(self.c(x).mean((2, 3)))

    model, batch = Net().double(), (torch.randn(5, 2, 4, 3).double(), torch.randint(2, (5,)))
    found, expected = (
        gn.curvature(model, nn.CrossEntropyLoss(), batch, method=kind(sharing=sharing))
        for kind in (gn.KFRA, gn.KFLR)
    )
    for name, block in expected.items():
        assert relative(found[name].G, block.G) < 1e-11, name


def test_linear_layers_on_sequences_with_a_loss_at_each_step() -> None:
    """No correlation between positions at all; an average over classes' curvature at each."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.last(x + self.b(x)).transpose(1, 2)

    model, x = Net().double(), torch.randn(5, 6, 3).double()
    batch = x, torch.randint(2, (5, 6))
    found, expected = (
        gn.curvature(model, nn.CrossEntropyLoss(), batch, method=m) for m in ("kfra", "kflr")
    )
    for name, block in expected.items():
        assert relative(found[name].G, block.G) < 1e-12, name


def test_a_padded_word_gets_no_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 2)).double()
    batch = torch.tensor([[0, 1, 2], [3, 0, 0]]), torch.randn(2, 3, 2).double()
    found, expected = (gn.curvature(model, nn.MSELoss(), batch, method=m) for m in ("kfra", "kflr"))
    assert relative(found["0"].dense(), expected["0"].dense()) < 1e-12


@pytest.mark.parametrize("name", [name for name in MODELS if name != "branches"])
def test_channels_are_near_to_the_exact_factors(name: str) -> None:
    model, batch = made(name, 40)
    found, expected = (
        gn.curvature(model, nn.CrossEntropyLoss(), batch, method=m) for m in ("kfra", "kflr")
    )
    for layer, block in expected.items():
        mine = found[layer].dense()
        cosine = float((mine * block.dense()).sum() / mine.norm() / block.dense().norm())
        assert cosine > (0.6 if "norm" in layer else 0.8), layer
        assert 0.4 < float(mine.trace() / block.trace()) < 2.5, layer
        values = torch.linalg.eigvalsh(mine)
        assert float(values.min()) > -1e-10 * float(values.max())


def test_a_norm_before_an_activation_is_exact_for_any_batch() -> None:
    """Which entries an activation lets through has much to do with x̂."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 2)).double()
    nn.init.normal_(model[1].bias)
    batch = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    found = gn.curvature(model, nn.MSELoss(), batch, method="kfra")
    exact = gn.exact.gauss_newton_blocks(model, nn.MSELoss(), batch)
    assert relative(found["1"].dense(), exact["1"]) < 1e-12


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.GroupNorm(1, 4), nn.GroupNorm(4, 4)])
def test_what_all_positions_have_in_common_goes_back_through_a_norm(
    norm: nn.Module, sharing: str
) -> None:
    torch.manual_seed(0)
    norm = copy.deepcopy(norm)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(
        nn.Conv1d(2, 4, 2), norm, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)
    ).double()
    batch = torch.randn(7, 2, 6).double(), torch.randn(7, 2).double()
    found, expected = (
        gn.curvature(model, nn.MSELoss(), batch, method=kind(sharing=sharing))
        for kind in (gn.KFRA, gn.KFLR)
    )
    scale = float(expected["4"].G.norm())
    assert float((found["0"].G - expected["0"].G).norm()) < 1e-12 * scale


def test_statistics_of_a_batch_are_constants() -> None:
    model, (x, y) = made("images", 6)
    assert isinstance(model, Images)
    model.norm = nn.BatchNorm2d(4).double()
    nn.init.normal_(model.norm.weight)
    fixed = copy.deepcopy(model)
    seen = model.b(F.relu(model.a(x))).detach()
    fixed.norm.running_mean.copy_(seen.mean((0, 2, 3)))
    fixed.norm.running_var.copy_(seen.var((0, 2, 3), correction=0))
    fixed.norm.eval()
    found = gn.curvature(model, nn.CrossEntropyLoss(), (x, y), method="kfra")
    expected = gn.curvature(fixed, nn.CrossEntropyLoss(), (x, y), method="kfra")
    for name, block in expected.items():
        assert relative(found[name].dense(), block.dense()) < 1e-12, name


def test_frozen_layers_are_passed_through() -> None:
    model, batch = made("images", 5)
    whole = gn.curvature(model, nn.CrossEntropyLoss(), batch, method="kfra")
    model.b.requires_grad_(False)
    model.norm.requires_grad_(False)
    found = gn.curvature(model, nn.CrossEntropyLoss(), batch, method="kfra")
    assert list(found) == ["a", "c", "last"]
    for name, block in found.items():
        assert relative(block.dense(), whole[name].dense()) < 1e-12, name


def test_what_mixes_data_is_named() -> None:
    class Net(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.a(x), self.gate(x)[:, :3].softmax(0)], dim=1))

    torch.manual_seed(0)
    model, batch = Net().double(), (torch.randn(4, 4).double(), classes(4))
    with pytest.raises(
        gn.errors.UnsupportedGraphError, match=r"SoftmaxBackward0.*layer 'gate'.*mixes"
    ):
        gn.curvature(model, nn.CrossEntropyLoss(), batch, method="kfra")


def test_a_matrix_that_is_too_wide_is_refused() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.Flatten(), nn.Linear(20_000, 2))
    batch = torch.randn(2, 1, 10_000), torch.randint(2, (2,))
    with pytest.raises(gn.errors.UnsupportedGraphError, match=r"20000 × 20000.*layer '0'"):
        gn.curvature(model, nn.CrossEntropyLoss(), batch, method="kfra")


@pytest.mark.parametrize("name", ["branches", "images", "fused attention"])
def test_the_optimiser_trains_with_it(name: str) -> None:
    model, batch = made(name, 60)
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion, curvature="kfra")
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = criterion(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0], losses


def test_verify_shows_it_and_does_not_judge_it() -> None:
    model, batch = made("branches", 6)
    report = gn.verify(model, nn.CrossEntropyLoss(), batch, ("kflr", "kfra"), show=False)
    assert {row.verdict for row in report.rows if row.method == "kfra"} <= {"approximate", "exact"}
