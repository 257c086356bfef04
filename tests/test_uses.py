"""Parameters used outside of layers' calls, beside equal models made of plain layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaussnewton as gn
from tests.problems import relative

METHODS = ["kflr", "kfac"]


def curvature(model: nn.Module, batch: tuple[Tensor, Tensor], method: str) -> gn.Curvature:
    return gn.curvature(model, nn.CrossEntropyLoss(), batch, method=method)


def batch_of(*shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(shape).double(), torch.randint(classes, (shape[0],))


class Functional(nn.Module):
    """Two linear layers as functions, one by ``@`` and one by ``F.linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))
        self.U = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias)) @ self.U


class Plain(nn.Module):
    """The same of plain layers."""

    def __init__(self, functional: Functional) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)
        with torch.no_grad():
            self.a.weight.copy_(functional.weight)
            self.a.bias.copy_(functional.bias)
            self.b.weight.copy_(functional.U.T)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize(
    ("method", "shape"), [("kflr", (6, 4)), ("kfac", (6, 4)), ("kflr", (6, 4, 4))]
)
def test_functions_are_layers(method: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    functional = Functional().double()
    plain = Plain(functional).double()
    x, y = batch_of(*shape)
    criterion = nn.CrossEntropyLoss() if len(shape) == 2 else gn.Loss(sequence_loss)
    found, expected = (
        gn.curvature(model, criterion, (x, y), method=method) for model in (functional, plain)
    )
    assert list(found) == ["weight", "U"]
    assert relative(found["weight"].Q, expected["a"].Q) < 1e-12
    assert relative(found["weight"].G, expected["a"].G) < 1e-12
    assert relative(found["U"].Q, expected["b"].G) < 1e-12  # the transposed matrix
    assert relative(found["U"].G, expected["b"].Q) < 1e-12


def sequence_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.mean(1), targets)


class Attention(nn.Module):
    """Attention by torch, or of separate projections."""

    def __init__(self, whole: bool, width: int = 6, heads: int = 2, keys: int = 6) -> None:
        super().__init__()
        self.whole, self.heads = whole, heads
        if whole:
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True, kdim=keys)
        else:
            self.q, self.k = nn.Linear(width, width), nn.Linear(keys, width)
            self.v, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = x[:, 1:, : self.keys]
        if self.whole:
            return self.head(self.attention(x, keys, x[:, 1:])[0].mean(1))
        q, k, v = self.q(x), self.k(keys), self.v(x[:, 1:])
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.o(mixed).mean(1))

    @property
    def keys(self) -> int:
        if not self.whole:
            return self.k.in_features
        return self.attention.kdim

    def copy_from(self, other: Attention) -> None:
        """Take the weights of a whole one."""
        whole, width = other.attention, self.q.in_features
        weights = (
            whole.in_proj_weight.chunk(3)
            if whole.in_proj_weight is not None
            else (whole.q_proj_weight, whole.k_proj_weight, whole.v_proj_weight)
        )
        biases = whole.in_proj_bias.split(width)
        with torch.no_grad():
            for layer, weight, bias in zip((self.q, self.k, self.v), weights, biases, strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
        self.o.load_state_dict(whole.out_proj.state_dict())
        self.head.load_state_dict(other.head.state_dict())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keys", [6, 4])
def test_attention_is_its_projections(method: str, keys: int) -> None:
    torch.manual_seed(0)
    whole, apart = Attention(True, keys=keys).double(), Attention(False, keys=keys).double()
    nn.init.normal_(whole.attention.in_proj_bias)
    apart.copy_from(whole)
    batch = batch_of(5, 4, 6)
    assert torch.allclose(whole(batch[0]), apart(batch[0]))
    found, expected = curvature(whole, batch, method), curvature(apart, batch, method)
    for name in ("q", "k", "v"):
        i = "qkv".index(name)
        if keys == 6:
            part = found["attention.in_proj_weight"].parts[i]
            Q, G = part.Q, part.G
        else:  # weights apart, but one bias
            weight, bias = found[f"attention.{name}_proj_weight"], found["attention.in_proj_bias"]
            Q, G = torch.zeros_like(expected[name].Q), weight.G
            Q[:-1, :-1], Q[-1, -1] = weight.Q, bias.parts[i].Q
            Q[-1, :-1] = Q[:-1, -1] = expected[name].Q[-1, :-1]  # they are groups of their own
            assert relative(bias.parts[i].G, expected[name].G) < 1e-10 or name == "k"
        assert relative(Q, expected[name].Q) < 1e-10
        assert relative(G, expected[name].G) < 1e-10
    for mine, theirs in (("attention.out_proj", "o"), ("head", "head")):
        assert relative(found[mine].Q, expected[theirs].Q) < 1e-10
        assert relative(found[mine].G, expected[theirs].G) < 1e-10


class Recurrent(nn.Module):
    """A recurrent layer by torch, or step by step with linear layers; its last output."""

    def __init__(self, kind: str, whole: bool) -> None:
        super().__init__()
        self.kind, self.whole = kind, whole
        gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
        if whole:
            self.layer = getattr(nn, kind)(3, 4)
        else:
            self.x, self.h = nn.Linear(3, 4 * gates), nn.Linear(4, 4 * gates)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            return self.head(self.layer(x.transpose(0, 1))[0][-1])
        h = c = torch.zeros(len(x), 4, dtype=x.dtype)
        for step in self.x(x).unbind(1):
            if self.kind == "LSTM":
                i, f, g, o = (step + self.h(h)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            elif self.kind == "GRU":
                (a, b, d), (r, z, n) = step.chunk(3, 1), self.h(h).chunk(3, 1)
                z = (b + z).sigmoid()
                h = (1 - z) * (d + (a + r).sigmoid() * n).tanh() + z * h
            else:
                h = (step + self.h(h)).tanh()
        return self.head(h)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_their_products(kind: str, method: str) -> None:
    torch.manual_seed(0)
    whole, apart = Recurrent(kind, True).double(), Recurrent(kind, False).double()
    with torch.no_grad():
        for layer, part in ((apart.x, "ih"), (apart.h, "hh")):
            layer.weight.copy_(getattr(whole.layer, f"weight_{part}_l0"))
            layer.bias.copy_(getattr(whole.layer, f"bias_{part}_l0"))
    apart.head.load_state_dict(whole.head.state_dict())
    batch = batch_of(5, 4, 3)
    assert torch.allclose(whole(batch[0]), apart(batch[0]))
    found, expected = curvature(whole, batch, method), curvature(apart, batch, method)
    for mine, theirs in (("layer.weight_ih_l0", "x"), ("layer.weight_hh_l0", "h"), ("head",) * 2):
        assert relative(found[mine].Q, expected[theirs].Q) < 1e-10
        assert relative(found[mine].G, expected[theirs].G) < 1e-10


RECURRENT = {
    "two layers, both ways": {"num_layers": 2, "bidirectional": True, "dropout": 0.4},
    "data first, no bias": {"batch_first": True, "bias": False},
    "projected": {"proj_size": 2, "num_layers": 2},
}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", RECURRENT)
def test_recurrent_layers_written_out_are_the_same_function(
    kind: type[nn.Module], options: str
) -> None:
    if options == "projected" and kind is not nn.LSTM:
        pytest.skip("only LSTMs have projections")
    torch.manual_seed(0)
    layer, x = kind(3, 4, **RECURRENT[options]).double(), torch.randn(5, 6, 3).double()
    torch.manual_seed(2)
    expected = layer(x)
    model, criterion = nn.Sequential(layer), nn.MSELoss()
    with gn.Tape(model, criterion):
        torch.manual_seed(2)
        found = layer(x)
    assert torch.allclose(found[0], expected[0], atol=1e-12)
    ends = zip(
        *(r[1] if isinstance(r[1], tuple) else (r[1],) for r in (found, expected)), strict=True
    )
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in ends)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_cells_get_kronecker_blocks(kind: str) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = getattr(nn, kind)(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = self.cell(x)
            for _ in range(2):
                state = self.cell(x, state)
            return self.head(state[0] if isinstance(state, tuple) else state)

    torch.manual_seed(0)
    model, batch = Steps().double(), batch_of(5, 3)
    found = curvature(model, batch, "kflr")
    assert {block.kind for block in found.values()} == {"Kronecker"}
    one = (batch[0][:1], batch[1][:1])
    assert relative(curvature(model, one, "kflr")["head"].dense(), exact(model, one)["head"]) < 1e-9


def exact(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return gn.exact.gauss_newton_blocks(model, nn.CrossEntropyLoss(), batch)


class Bare(nn.Module):
    """Parameters that are added, multiplied, expanded, cut, and used in ways nobody foresaw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.offset = nn.Parameter(torch.randn(9, 4))
        self.scale = nn.Parameter(torch.rand(1, 1, 4) + 0.5)
        self.start = nn.Parameter(torch.randn(1, 1, 4))
        self.power = nn.Parameter(torch.tensor(0.3))
        self.mixed = nn.Parameter(torch.randn(4, 4))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.slopes = nn.PReLU(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.scale.exp() - self.offset[: x.shape[1]]
        h = torch.cat([self.start.expand(len(x), -1, -1), h], dim=1)
        h = torch.einsum("ntd,de->nte", h, self.mixed).tanh() * self.power
        h = self.normed(h)
        return self.last(self.slopes(h.mean(1)))


def test_bare_parameters_have_exact_blocks() -> None:
    torch.manual_seed(0)
    model, batch = Bare().double(), batch_of(5, 3, 4)
    found, expected = curvature(model, batch, "kflr"), exact(model, batch)
    kinds = {name: block.kind for name, block in found.items()}
    assert kinds == {
        "offset": "dense",
        "scale": "dense",
        "start": "dense",
        "power": "dense",
        "mixed": "diagonal",
        "first": "Kronecker",
        "last": "Kronecker",
        "normed": "diagonal",
        "normed.parametrizations.weight.original0": "diagonal",
        "normed.parametrizations.weight.original1": "diagonal",
        "slopes": "dense",
    }
    for name, kind in kinds.items():
        block, truth = found[name].dense(), expected[name]
        if kind == "dense":
            assert relative(block, truth) < 1e-10, name
        elif kind == "diagonal":
            assert relative(block.diagonal(), truth.diagonal()) < 1e-10, name


def test_kfac_of_bare_parameters_is_right_on_average() -> None:
    torch.manual_seed(0)
    model, batch = Bare().double(), batch_of(5, 3, 4)
    found = gn.curvature(model, nn.CrossEntropyLoss(), batch, method=gn.KFAC(samples=4000))
    for name, truth in exact(model, batch).items():
        if found[name].kind in ("dense", "diagonal"):
            assert relative(found[name].dense().diagonal(), truth.diagonal()) < 0.1, name


class Tied(nn.Module):
    """A table that is the head's weight too."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.table, self.functional = nn.Embedding(7, 4), functional
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.middle(self.table(x)))
        if self.functional:
            return F.linear(h, self.table.weight, self.head.bias).transpose(1, 2)
        return self.head(h).transpose(1, 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("functional", [False, True])
def test_tied_weights_have_the_nearest_kronecker_block(method: str, functional: bool) -> None:
    torch.manual_seed(0)
    tied = Tied(functional).double()
    torch.manual_seed(0)
    apart = Tied(False).double()
    apart.head.weight = nn.Parameter(apart.table.weight.detach().clone())
    x, y = torch.randint(7, (5, 3)), torch.randint(7, (5, 3))
    found, expected = curvature(tied, (x, y), method), curvature(apart, (x, y), method)
    assert list(found) == ["table", "middle", "head"]
    assert relative(found["middle"].G, expected["middle"].G) < 1e-10
    table, head = expected["table"], expected["head"]
    sum_of_both = torch.kron(table.M, torch.diag(table.f)) + torch.kron(head.Q[:-1, :-1], head.G)
    rearranged = sum_of_both.reshape(4, 7, 4, 7).permute(0, 2, 1, 3).reshape(16, 49)
    U, S, V = torch.linalg.svd(rearranged)
    nearest = torch.kron((S[0] * U[:, 0]).reshape(4, 4), V[0].reshape(7, 7))
    assert relative(found["table"].dense(), nearest) < 1e-9
    assert relative(found["head"].G, head.G) < 1e-10  # its bias is its own
    assert found["head"].Q.item() == pytest.approx(1)


def test_tied_linear_layers_are_one_with_more_positions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model = model.double()
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    twice = nn.Sequential(model[0], nn.Tanh(), model[0], nn.Tanh(), model[4])
    batch = batch_of(5, 4)
    found, expected = curvature(model, batch, "kflr"), curvature(twice, batch, "kflr")
    assert relative(found["0"].dense(), expected["0"].dense()) < 1e-12


def test_a_tied_weight_without_its_bias() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[2].weight = model[0].weight  # each keeps a bias of its own
    x = torch.randn(5, 4).double()
    found = gn.curvature(model, nn.MSELoss(), (x, x))
    assert [(b.rows, b.columns) for b in found.values()] == [(4, 5), (4, 1)]
    a = torch.tanh(model[0](x))
    Q = torch.zeros(5, 5).double()
    one = torch.cat([x, torch.ones(5, 1).double()], 1)
    Q = one.T @ one
    Q[:-1, :-1] += a.T @ a
    assert relative(found["0"].Q, Q / 10) < 1e-12


def test_flattened_outputs_are_those_of_the_data() -> None:
    class Model(nn.Module):
        def __init__(self, flat: bool) -> None:
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 5)
            self.flat = flat

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.table(x))
            h = self.head(torch.tanh(h + h.mean(1, keepdim=True)))
            return h.flatten(0, 1) if self.flat else h.transpose(1, 2)

    torch.manual_seed(0)
    flat, deep = Model(True).double(), Model(False).double()
    deep.load_state_dict(flat.state_dict())
    x, y = torch.randint(7, (4, 3)), torch.randint(5, (4, 3))
    found = curvature(flat, (x, y.flatten()), "kflr")
    expected = curvature(deep, (x, y), "kflr")
    for name in ("table", "norm", "head"):
        assert relative(found[name].dense(), expected[name].dense()) < 1e-10
    truth = gn.exact.gauss_newton_blocks(deep, nn.CrossEntropyLoss(), (x, y))
    assert relative(found["norm"].dense(), truth["norm"]) < 1e-10
