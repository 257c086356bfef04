"""J v by forward mode and by two backward passes; which data are known to be apart."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.apart import keeps_apart
from gaussnewton.network import Network
from gaussnewton.observer import Observer
from gaussnewton.quadratic import gauss_newton_gram
from gaussnewton.tangents import by_two_backwards, push
from tests.estimators.test_shared import again_first, images, residual, twice
from tests.problems import relative


def network_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Network, Observer, Tensor]:
    """The network of an observed pass, and the Jacobian of its outputs by θ, row by row."""
    criterion = nn.CrossEntropyLoss()
    observer = Observer(model, criterion)
    outputs = model(x)
    rows = []
    for output in outputs.flatten():
        found = torch.autograd.grad(
            output, list(model.parameters()), retain_graph=True, materialize_grads=True
        )
        named = dict(zip(dict(model.named_parameters()), found, strict=True))
        rows.append(observer.theta.vector(named))
    criterion(outputs, y).backward()
    (observation,) = observer.take()
    assert isinstance(observation.passage, Network)
    return observation.passage, observer, torch.stack(rows)


def directions(observer: Observer, count: int = 3) -> tuple[list[dict[str, Tensor]], Tensor]:
    torch.manual_seed(1)
    like = next(observer.model.parameters()).dtype
    V = torch.randn(count, observer.theta.size, dtype=like)
    return [observer.theta.matrices(v) for v in V], V


def check(model: nn.Module, x: Tensor, y: Tensor, *, forward: bool, tolerance: float = 1e-10):
    """The first product, which is compared, and the next, and one of a part."""
    network, observer, J = network_of(model, x, y)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    each, V = directions(observer)
    expected = (V @ J.T).unflatten(1, (len(x), -1))
    for part in (slice(None), slice(None), slice(1, 3)):
        assert relative(push(network.repeat, each, part), expected[:, part]) < tolerance
    assert observer._forward_mode.trusted == forward
    assert observer._forward_mode.refused != forward
    assert not observer.observations  # nothing of this was taken for the user's own
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("problem", [residual, images, twice, again_first])
def test_both_ways_are_exact(problem) -> None:
    model, (x, y) = problem(5)
    network, observer, J = network_of(model, x, y)
    each, V = directions(observer)
    expected = (V @ J.T).unflatten(1, (len(x), -1))
    tangents = [
        {k: t for n, m in one.items() for k, t in observer.theta[n].tensors(m).items()}
        for one in each
    ]
    forward = network.again.forward(tangents, slice(None))
    assert relative(forward, expected) < 1e-10
    assert relative(by_two_backwards(network.repeat, tangents, slice(None)), expected) < 1e-10
    assert relative(push(network.repeat, each, slice(None), workspace=1), expected) < 1e-10


def convolution(*between: nn.Module) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv1d(2, 3, 2), *between, nn.Flatten(), nn.Linear(6, 2))
    return nn.Sequential(*layers).double(), torch.randn(5, 2, 3).double(), torch.randint(2, (5,))


def test_dropout_draws_what_the_pass_drew() -> None:
    check(*convolution(nn.Dropout(0.5)), forward=True)


def test_batch_normalisation_keeps_its_buffers() -> None:
    model, x, y = convolution(nn.BatchNorm1d(3), nn.Tanh())
    model(x)
    check(model, x, y, forward=True)


class Partly(nn.Module):
    """A function that backward does not see all of, but forward mode would."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.square()
        return x * scale


class Ruleless(torch.autograd.Function):
    """A function that forward mode has no rule for."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.exp()


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Ruleless.apply(x)


class Looking(nn.Module):
    """A function that looks at its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if float(x.detach().sum()) > -1e9 else x


@pytest.mark.parametrize("between", [Partly, Exponential])
def test_what_forward_mode_cannot_do_goes_by_two_backwards(between: type[nn.Module]) -> None:
    check(*convolution(between()), forward=False)


def test_a_model_that_looks_at_its_numbers() -> None:
    model, x, y = convolution(Looking())
    network, observer, J = network_of(model, x, y)
    each, V = directions(observer)
    expected = (V @ J.T).unflatten(1, (len(x), -1))
    for _ in range(2):
        assert relative(push(network.repeat, each, slice(None)), expected) < 1e-10


def test_in_low_precision() -> None:
    model, x, y = convolution(nn.Tanh())
    check(model.bfloat16(), x.bfloat16(), y, forward=True, tolerance=0.05)


def test_optimisers_train_where_forward_mode_fails() -> None:
    model, x, y = convolution(Partly())
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert optimizer._observer._forward_mode.refused


def test_what_is_known_to_keep_data_apart() -> None:
    x = torch.randn(4, 4, 4, requires_grad=True)
    y = torch.randn(4, 4, requires_grad=True)

    def known(z: Tensor, data: int = 4) -> bool:
        return keeps_apart([z.grad_fn], data)

    assert known(x.relu())
    assert known(x * x)
    assert known(x.view(4, 16))
    assert known(x.flatten(1))
    assert known(x.view(4, 1, 4, 4))
    assert not known(x + y)  # which would be broadcast over the data
    assert not known(x.view(16, 4))
    assert not known(x.transpose(0, 1))
    assert not known(x.sum(0))
    assert not known(torch.randn(4, 4) @ y)
    assert not known(x.relu(), data=3)


@pytest.mark.parametrize("centred", [True, False])
def test_data_that_the_graph_does_not_show_to_be_apart_are_tried(centred: bool) -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0 if centred else 1, keepdim=True)

    model, x, y = convolution(Centred())
    network, _, _ = network_of(model, x, y)
    assert not network._apart
    assert network.mixing == ("0" if centred else None)


def test_data_apart_take_no_pass() -> None:
    model, x, y = convolution(nn.Tanh())
    network, _, _ = network_of(model, x, y)
    assert network._apart
    network._pull = None  # type: ignore[assignment, method-assign]
    assert network.mixing is None


def passes_of(model: nn.Module, run) -> int:
    """How often the model is called."""
    count = []
    handle = model.register_forward_pre_hook(lambda *_: count.append(1))
    run()
    handle.remove()
    return len(count)


def observed(observer: Observer, x: Tensor, y: Tensor):
    observer.criterion(observer.model(x), y).backward()
    (observation,) = observer.take()
    return observation


class MayMix(nn.Module):
    """Centres what it gets by the mean of the batch where an attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = False

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.mixes else x


@pytest.mark.parametrize("part", [0.4, 1.0])
@pytest.mark.parametrize("count", [1, 3])
def test_the_quadratic_model_is_that_of_the_pass_as_it_is(part: float, count: int) -> None:
    """Also where the model does something else than in the pass whose layers were recorded."""
    between = MayMix()
    model, x, y = convolution(between)
    network, observer, _ = network_of(model, x, y)
    assert network.repeat.outline.apart
    _, V = directions(observer, count)
    between.mixes = True
    later = observed(observer, x, y)
    stacks = {g.name: torch.stack([observer.theta.matrices(v)[g.name] for v in V])
              for g in observer.theta}  # fmt: skip
    found = gauss_newton_gram([later], None, stacks, part, least=1)
    named, taken = dict(model.named_parameters()), round(part * len(x))
    J = torch.stack([
        torch.func.jvp(
            lambda p: torch.func.functional_call(model, p, x),
            (named,), (observer.theta.tensors(v),),
        )[1][:taken]
        for v in V
    ])  # fmt: skip
    p = model(x)[:taken].softmax(1).detach()
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    expected = torch.einsum("inc,ncd,jnd->ij", J, H, J) / taken
    assert relative(found, expected) < 1e-10


def test_all_of_a_batch_takes_one_pass_and_no_record() -> None:
    model, x, y = convolution()
    network, observer, _ = network_of(model, x, y)
    each, V = directions(observer)
    push(network.repeat, each, slice(None))  # the first is compared with two backward passes
    later = observed(observer, x, y)
    stacks = {g.name: observer.theta.matrices(V[0])[g.name][None] for g in observer.theta}
    whole = passes_of(model, lambda: gauss_newton_gram([later], None, stacks, 1.0, least=1))
    assert (whole, later.layers) == (1, None)
    gauss_newton_gram([later], None, stacks, 0.4, least=1)
    assert later.layers is not None


def test_what_is_known_of_passes_holds_none_of_their_data() -> None:
    model, x, y = convolution()
    _, observer, _ = network_of(model, x, y)
    fresh = x[:4].clone()
    seen, recorded = weakref.ref(fresh), observed(observer, fresh, y[:4])
    held = weakref.ref(recorded.passage.record.outputs)
    recorded.as_a_whole  # noqa: B018
    del fresh, recorded
    gc.collect()
    assert seen() is None
    assert held() is None
