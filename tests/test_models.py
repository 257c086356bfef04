"""Networks as people have them: every parameter has a block, and the optimiser trains them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from tests.models import Case, cases
from tests.problems import relative

CASES = cases()
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")


def made(name: str) -> tuple[Case, nn.Module]:
    torch.manual_seed(1)
    return CASES[name], CASES[name].model().double()


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> float:
    for _ in range(updates):
        optimizer.zero_grad()
        loss = case.loss(model)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", CASES)
def test_the_optimiser_trains_it(name: str) -> None:
    case, model = made(name)
    first = case.loss(copy.deepcopy(model)).item()
    last = train(case, model, gn.GaussNewton(model, case.criterion), 10)
    assert last < (0.95 if name == "VAE" else 0.75) * first


@pytest.mark.parametrize("name", ["transformer", "VAE", "experts", "returns its loss"])
def test_it_resumes_bit_for_bit(name: str) -> None:
    case, model = made(name)
    optimizer = gn.GaussNewton(model, case.criterion)
    train(case, model, optimizer, 3)
    other = copy.deepcopy(model)
    again = gn.GaussNewton(other, case.criterion)
    again.load_state_dict(optimizer.state_dict())
    losses = []
    for each, its in ((model, optimizer), (other, again)):
        torch.manual_seed(3)
        losses.append(train(case, each, its, 3))
    assert losses[0] == losses[1]
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


class Seen(nn.Module):
    """A model that returns what the criterion looks at."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__()
        self.case, self.model = case, model

    def forward(self, *inputs: Tensor) -> Tensor:
        returned = self.model(*inputs)
        return returned if self.case.outputs is None else self.case.outputs(returned)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("VAE", "returns its loss")])
def test_small_blocks_are_exact_and_nothing_is_left_out(name: str) -> None:
    case, model = made(name)
    seen = Seen(case, model).eval()
    batch = (case.inputs, case.targets[0])
    found = gn.curvature(seen, case.criterion, batch)
    assert {id(p) for g in found.theta for p in g.parameters.values()} == {
        id(p) for p in model.parameters()
    }
    truth = gn.exact.gauss_newton(seen, case.criterion, batch)
    for group, part in zip(found.theta, found.theta.slices.values(), strict=True):
        block, exact = found[group.name], truth[part, part]
        if block.kind == "dense":
            assert relative(block.dense(), exact) < 1e-9
        elif block.kind == "diagonal":
            assert relative(block.dense().diagonal(), exact.diagonal()) < 1e-9
        elif block.kind == "zero":
            assert not exact.any()
        else:
            assert 0.1 < float(block.trace() / exact.trace()) < 10


def test_which_kinds_there_are() -> None:
    case, model = made("transformer")
    batch = (case.inputs, case.targets[0])
    found = gn.curvature(model.eval(), case.criterion, batch, outputs=case.outputs)
    kinds = {name.rpartition("layers.0.")[2]: block.kind for name, block in found.items()}
    assert kinds["position"] == "dense"
    assert kinds["table"] == "Kronecker"
    assert kinds["self_attn.in_proj_weight"] == "Kronecker, 3 groups"
    assert kinds["self_attn.out_proj"] == "Kronecker"
    assert kinds["norm1"] == "dense"


def test_outputs_of_a_dict_must_be_chosen() -> None:
    case, model = made("transformer")
    with pytest.raises(gn.errors.BatchError, match="dict"):
        gn.curvature(model, case.criterion, (case.inputs, case.targets[0]))


def test_a_cut_of_the_outputs_needs_a_function() -> None:
    def shifted(returned: dict[str, Tensor]) -> Tensor:
        return returned["logits"][:, :-1].flatten(0, 1)

    case, model = made("transformer")
    words = case.inputs[0]
    criterion = nn.CrossEntropyLoss()

    def step(optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = criterion(shifted(model(words)), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    with pytest.raises(gn.errors.RecordError, match=r"outputs=lambda returned"):
        step(gn.GaussNewton(model, criterion))
    optimizer = gn.GaussNewton(model, criterion, outputs=shifted)
    losses = [step(optimizer) for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_model_that_returns_its_loss_is_as_one_with_a_criterion() -> None:
    case, model = made("returns its loss")
    words = case.inputs[0]

    def shifted(returned: dict[str, Tensor]) -> Tensor:
        return returned["logits"][:, :-1].flatten(0, 1)

    model.eval()
    inner = gn.curvature(model, None, ({"x": words, "labels": words}, None))
    outer = gn.curvature(
        model, nn.CrossEntropyLoss(), (words, words[:, 1:].flatten()), outputs=shifted
    )
    for name, block in inner.items():
        assert relative(block.dense(), outer[name].dense()) < 1e-12


def test_a_model_without_a_loss_and_without_a_criterion() -> None:
    case, model = made("LeNet")
    optimizer = gn.GaussNewton(model)
    with pytest.raises(gn.errors.RecordError, match=r"LeNet must call one loss function.*none"):
        model(*case.inputs)
    del optimizer


def test_a_model_that_raises_leaves_no_watch_behind() -> None:
    case, model = made("returns its loss")
    optimizer = gn.GaussNewton(model)
    with pytest.raises(IndexError):
        model(case.inputs[0] + 100, case.inputs[0])
    assert torch.overrides._get_current_function_mode() is None
    train(case, model, optimizer, 1)


@pytest.mark.parametrize("samples", [3000])
def test_kfac_of_several_outputs_without_a_distribution(samples: int) -> None:
    case, model = made("VAE")
    case_model = copy.deepcopy(model)
    torch.manual_seed(5)
    kflr = gn.curvature(case_model, case.criterion, (case.inputs, case.targets[0]))
    torch.manual_seed(5)
    kfac = gn.curvature(
        case_model, case.criterion, (case.inputs, case.targets[0]), gn.KFAC(samples=samples)
    )
    for name, block in kfac.items():
        assert relative(block.G, kflr[name].G) < 0.1


@pytest.mark.parametrize("name", ["U-Net", "LSTM", "transformer", "siamese"])
def test_corrected_eigenvalues_have_exact_traces(name: str) -> None:
    case, model = made(name)
    seen = Seen(case, model).eval()
    batch = (case.inputs, case.targets[0])
    found = gn.curvature(seen, case.criterion, batch, gn.KFLR(eigenvalues="corrected"))
    truth = gn.exact.gauss_newton(seen, case.criterion, batch)
    corrected = 0
    for group, part in zip(found.theta, found.theta.slices.values(), strict=True):
        if "corrected" in found[group.name].kind:
            corrected += 1
            trace = truth[part, part].trace()
            assert float(found[group.name].trace()) == pytest.approx(float(trace), rel=1e-9)
    assert corrected >= 2
