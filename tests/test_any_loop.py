"""Models and loops as people write them, each of which went wrong once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gaussnewton as gn
from gaussnewton.arguments import check_arguments
from tests.problems import relative

N = 5


def log_cosh(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).cosh().log().mean()


def classes(count: int = 3, n: int = N) -> Tensor:
    return torch.randint(count, (n,), generator=torch.Generator().manual_seed(1))


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def taken(
    model: nn.Module, x: Tensor, y: Tensor, change: Callable[[Any], Tensor], **settings: Any
) -> list[float]:
    """Losses of a loop that changes what the model returns, in the call of the criterion."""
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion, **settings)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = criterion(change(model(x)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class OnlyParameters(nn.Module):
    """No layer anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([inputs(4, 6), inputs(6)])
        self.others = nn.ParameterDict({"head": inputs(3, 6), "heat": torch.tensor(1.3).double()})

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.weights[0] + self.weights[1]).tanh()
        return F.linear(h, self.others["head"]) / self.others["heat"]


class TiedAutoencoder(nn.Module):
    """All that is trained is loose: the weight is used both ways, and has a bias in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.encoder(x).tanh(), self.encoder.weight.t(), self.bias)


class TiedConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(2, 3, 3, padding=1)
        self.up = nn.ConvTranspose1d(3, 2, 3, padding=1)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x).tanh()).flatten(1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.rand(6))

    def middle(self, h: Tensor) -> Tensor:
        return (self.second(h) * self.scale).tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.head(checkpoint(self.middle, h, use_reentrant=False))


@pytest.mark.parametrize(
    ("kind", "shape", "outputs"),
    [
        (OnlyParameters, (4,), 3),
        (TiedAutoencoder, (4,), 4),
        (TiedConvolutions, (2, 4), 8),
        (Checkpointed, (4,), 3),
    ],
)
def test_small_and_diagonal_blocks_are_exact(kind, shape, outputs) -> None:
    torch.manual_seed(0)
    model, batch = kind().double(), (inputs(N, *shape), classes(outputs))
    criterion = nn.CrossEntropyLoss()
    found = gn.curvature(model, criterion, batch, method="kflr")
    expected = gn.exact.gauss_newton_blocks(model, criterion, batch)
    small = {name for name, block in found.items() if block.kind in ("dense", "diagonal")}
    for name in small:
        block, true = found[name].dense(), expected[name]
        if found[name].kind == "diagonal":
            block, true = block.diagonal(), true.diagonal()
        assert relative(block, true) < 1e-10, name
    assert small
    losses = taken(model, *batch, lambda returned: returned)
    assert losses[-1] < losses[0]


class Steps(nn.Module):
    """Positions in the first dimension, or in the second."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.positions = 0 if first else 1

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.linear(x)).tanh().mean(self.positions))


@pytest.mark.parametrize("n", [N, 6])  # six could be three data with two rows of outputs each
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("eigenvalues", ["factored", "corrected"])
def test_positions_may_come_before_data(n, sharing, eigenvalues) -> None:
    first, second = Steps(first=True).double(), Steps(first=False).double()
    second.load_state_dict(first.state_dict())
    x, y, method = inputs(n, 3, 4), classes(n=n), gn.KFLR(sharing=sharing, eigenvalues=eigenvalues)
    found = gn.curvature(first, nn.CrossEntropyLoss(), (x.transpose(0, 1), y), method=method)
    expected = gn.curvature(second, nn.CrossEntropyLoss(), (x, y), method=method)
    for name, block in expected.items():
        assert found[name].kind == block.kind
        assert relative(found[name].dense(), block.dense()) < 1e-10, name


def test_kfra_leaves_no_layer_out_silently() -> None:
    batch = inputs(3, N, 4), classes()
    with pytest.raises(gn.errors.UnsupportedGraphError, match="'linear'"):
        gn.curvature(Steps(first=True).double(), nn.CrossEntropyLoss(), batch, method="kfra")


def test_kfra_says_that_it_does_not_know_bare_parameters() -> None:
    batch = inputs(N, 4), classes()
    with pytest.raises(gn.errors.UnsupportedGraphError, match="used by functions"):
        gn.curvature(OnlyParameters(), nn.CrossEntropyLoss(), batch, method="kfra")


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words).cumsum(1))


def test_outputs_that_are_reshaped_and_let_go_of() -> None:
    """Nobody holds what the model returned when the criterion is called."""
    torch.manual_seed(0)
    words = torch.randint(7, (N, 3))
    losses = taken(Language().double(), words, words.flatten(), lambda out: out.reshape(-1, 7))
    assert losses[-1] < losses[0]


def test_both_losses_of_outputs_that_were_let_go_of_are_seen() -> None:
    torch.manual_seed(0)
    model, criterion, words = Language().double(), nn.CrossEntropyLoss(), torch.randint(7, (N, 3))
    optimizer = gn.GaussNewton(model, criterion)
    outputs = model(words).reshape(-1, 7)
    loss = criterion(outputs, words.flatten()) + criterion(outputs, words.flip(1).flatten())
    loss.backward()
    optimizer.step()
    assert optimizer.diagnostics["loss"] == pytest.approx(loss.item())


@dataclass
class Returned:
    logits: Tensor


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def forward(self, x: Tensor) -> Returned:
        return Returned(self.layers(x))


@pytest.mark.parametrize("told", [False, True])
def test_models_that_return_a_dataclass(told: bool) -> None:
    torch.manual_seed(0)
    settings = {"outputs": lambda returned: returned.logits} if told else {}
    losses = taken(Wrapped(), inputs(N, 4), classes(), lambda out: out.logits, **settings)
    assert losses[-1] < losses[0]


def test_outputs_changed_in_place_are_not_what_the_model_returned() -> None:
    """Evaluating the pass again would leave the change out."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(gn.errors.RecordError, match="outputs="):
        taken(model, inputs(N, 4), classes(), lambda out: out.mul_(3))
    losses = taken(
        model, inputs(N, 4), classes(), lambda out: out.mul_(3), outputs=lambda out: out * 3
    )
    assert losses[-1] < losses[0]


class TiedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 3), nn.Linear(4, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x.tanh())


def test_verify_does_not_hold_tied_layers_to_the_factors_of_one_call() -> None:
    torch.manual_seed(0)
    report = gn.verify(
        TiedHeads().double(), nn.CrossEntropyLoss(), (inputs(N, 4), classes()), show=False
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("criterion", [nn.MSELoss(), nn.BCEWithLogitsLoss(), gn.Loss(log_cosh)])
@pytest.mark.parametrize("squeezed_by", ["loop", "model"])
def test_one_output_without_a_dimension(criterion: nn.Module, squeezed_by: str) -> None:
    class Squeezed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze(-1)

    torch.manual_seed(0)
    layers = (nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    model = (Squeezed if squeezed_by == "model" else nn.Sequential)(*layers).double()
    x = torch.randn(40, 3).double()
    y = (x.sum(1) > 0).double()
    optimizer = gn.GaussNewton(model, criterion)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        outputs = model(x)
        loss = criterion(outputs if squeezed_by == "model" else outputs.squeeze(-1), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    if squeezed_by == "model":
        wide = nn.Sequential(*layers)
        found = gn.curvature(model, criterion, (x, y))
        if isinstance(criterion, gn.Loss):
            return
        expected = gn.curvature(wide, criterion, (x, y.unsqueeze(1)))
        assert relative(found["0"].dense(), expected["0"].dense()) < 1e-12


@pytest.mark.parametrize("method", ["kflr", "kfac"])
def test_as_many_positions_as_data(method: str) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4))
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)
            self.register_buffer("table", torch.randn(5, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm((x + self.table * self.scale).transpose(0, 1))  # positions first
            return self.head(torch.tanh(h).mean(0))

    torch.manual_seed(0)
    model = Positions().double()
    x, y = torch.randn(5, 5, 4).double(), torch.randint(3, (5,))
    estimator = gn.KFLR() if method == "kflr" else gn.KFAC(samples=4000)
    found = gn.curvature(model, nn.CrossEntropyLoss(), (x, y), method=estimator)
    exact = gn.exact.gauss_newton_blocks(model, nn.CrossEntropyLoss(), (x, y))
    for name in ("scale", "norm"):
        error = relative(found[name].dense().diagonal(), exact[name].diagonal())
        assert error < (1e-9 if method == "kflr" else 0.15)


def test_parameters_in_the_place_of_the_criterion() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="second argument is the criterion, not generator"):
        check_arguments(model, model.parameters(), 1.0, 0.0)


def test_a_dict_of_outputs_says_how_to_choose() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": super().forward(x)}

    model, batch = Named(3, 2), (torch.randn(4, 3), classes(2, 4))
    with pytest.raises(gn.errors.BatchError, match="outputs=lambda returned"):
        gn.curvature(model, nn.CrossEntropyLoss(), batch)
    found = gn.curvature(model, nn.CrossEntropyLoss(), batch, outputs=lambda r: r["logits"])
    assert found[""].G.shape == (2, 2)
