"""Bad input gets a named error that says what, where and what to do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton import errors

X, Y = torch.randn(6, 4), torch.randint(3, (6,))
METHODS = ["kflr", "kfra", "kfac", "hessian"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("method", ["kfra", "hessian"])
def test_a_layer_that_a_chain_has_no_place_for_is_named(method: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.PReLU()), nn.Linear(5, 3))
    with pytest.raises(errors.UnsupportedGraphError, match=r"'1\.0'.*PReLU"):
        gn.curvature(model, nn.CrossEntropyLoss(), (X, Y), method=method)
    model[1].requires_grad_(False)
    assert list(gn.curvature(model, nn.CrossEntropyLoss(), (X, Y), method=method)) == ["0", "2"]


@pytest.mark.parametrize(
    ("criterion", "targets", "message"),
    [
        (nn.CrossEntropyLoss(), torch.zeros(5).long(), r"need targets of shape \(6,\).*\(5,\)"),
        (nn.CrossEntropyLoss(), torch.rand(6, 2), r"\(6, 3\).*\(6, 2\)"),
        (nn.CrossEntropyLoss(), torch.full((6,), 3), "from 3 to 3.*3 classes"),
        (nn.CrossEntropyLoss(), torch.full((6,), -1), "from -1 to -1"),
        (nn.CrossEntropyLoss(), torch.full((6,), -100), "all 6 targets are ignore_index"),
        (nn.CrossEntropyLoss(), [0, 1], "tuple, not a tensor"),
        (nn.MSELoss(), torch.randn(6), r"\(6, 3\) but targets \(6,\).*broadcast"),
        (nn.MSELoss(), torch.randn(6, 1), r"\(6, 3\) but targets \(6, 1\)"),
        (nn.BCEWithLogitsLoss(), torch.rand(3, 3), r"\(6, 3\) but targets \(3, 3\)"),
        (nn.GaussianNLLLoss(), torch.randn(6, 3), "needs a variance"),
        (nn.GaussianNLLLoss(), (torch.randn(6, 2), torch.ones(6, 2)), "means have shape"),
        (nn.NLLLoss(), Y, "not log-probabilities.*LogSoftmax"),
    ],
)
def test_outputs_and_targets_that_do_not_fit(criterion, targets, message: str) -> None:
    with pytest.raises(errors.BatchError, match=message):
        gn.curvature(mlp(), criterion, (X, targets))


def test_empty_batch() -> None:
    with pytest.raises(errors.BatchError, match="the batch is empty"):
        gn.curvature(mlp(), nn.CrossEntropyLoss(), (X[:0], Y[:0]))
    with pytest.raises(errors.BatchError, match="no batch at all"):
        gn.curvature(mlp(), nn.CrossEntropyLoss(), iter(()))


def test_outputs_without_a_batch_dimension() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    with pytest.raises(errors.BatchError, match="needs a batch dimension"):
        gn.curvature(model, nn.CrossEntropyLoss(), (X, torch.tensor(1)))


@pytest.mark.parametrize("bad", [X, None, 3, (X,), (X, Y, Y), [X], iter([X])])
def test_data_that_are_no_batch(bad: object) -> None:
    with pytest.raises(errors.BatchError, match=r"\(inputs, targets\)"):
        gn.curvature(mlp(), nn.CrossEntropyLoss(), bad)


@pytest.mark.parametrize("method", METHODS)
def test_non_finite_numbers_are_located(method: str) -> None:
    bad = X.clone()
    bad[1, 2] = float("nan")
    with pytest.raises(errors.NonFiniteError, match="1 of 24 numbers that enter layer '0'"):
        gn.curvature(mlp(), nn.CrossEntropyLoss(), (bad, Y), method=method)
    model = mlp()
    with torch.no_grad():
        model[0].bias[3] = float("nan")
    with pytest.raises(errors.NonFiniteError, match="6 of 30 numbers that enter layer '2'"):
        gn.curvature(model, nn.CrossEntropyLoss(), (X, Y), method=method)
    model = mlp()
    with torch.no_grad():
        model[2].bias[0] = float("inf")
    with pytest.raises(errors.NonFiniteError, match=r"in the outputs.*last layer"):
        gn.curvature(model, nn.CrossEntropyLoss(), (X, Y), method=method)
    targets = torch.full((6, 3), float("nan"))
    with pytest.raises(errors.NonFiniteError, match="in the loss, but not the outputs"):
        gn.curvature(mlp(), nn.MSELoss(), (X, targets), method=method)


def test_model_with_nothing_to_train() -> None:
    with pytest.raises(errors.NoTrainableParametersError, match="requires_grad=True"):
        gn.curvature(mlp().requires_grad_(False), nn.CrossEntropyLoss(), (X, Y))
    with pytest.raises(errors.NoTrainableParametersError, match="Tanh has no parameter"):
        gn.curvature(nn.Tanh(), nn.CrossEntropyLoss(), (X, Y))


def test_unknown_method() -> None:
    with pytest.raises(ValueError, match=r"no method 'adam'.*'kflr', 'kfra', 'kfac'"):
        gn.curvature(mlp(), nn.CrossEntropyLoss(), (X, Y), method="adam")


class Graph(nn.Module):
    """Two layers and a forward given from outside."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


NO_CHAINS = {
    "residual": (lambda m, x: m.c(m.a(x) + m.b(m.a(x).tanh())), "not a chain|called"),
    "branches": (
        lambda m, x: m.c(m.a(x).tanh() + m.b(x).tanh()),
        "'[ab]' and '[ab]' meet before layer 'c'",
    ),
    "called twice": (lambda m, x: m.c(m.b(m.b(m.a(x)))), "'b' is called 2 times"),
    "called again before all others": (
        lambda m, x: m.c(m.b(m.a(m.b(x)))),
        "'b' is called more than once",
    ),
    "used before all others": (
        lambda m, x: m.c(m.b(m.a(x @ m.b.weight))),
        r"'b\.weight' is used before layer|'b' \(Product\) is a Product",
    ),
    "unused": (lambda m, x: m.c(m.a(x)), "'b' has trainable parameters but its output does not"),
    "detached": (lambda m, x: m.c(m.b(m.a(x).detach())), "'a' has trainable parameters but"),
    "sequences": (
        lambda m, x: m.c(m.b(m.a(x.unsqueeze(1))).squeeze(1)),
        r"'a' \(Linear\).*\(6, 1, 4\)",
    ),
    "bare parameter": (
        lambda m, x: m.c(m.b(m.a(x)) @ m.b.weight),
        r"'b\.weight' is used before layer|'b' \(Product\) is a Product",
    ),
    "more rows than data": (
        lambda m, x: m.c(m.b(m.a(x.view(3, 8).repeat(1, 2).view(12, 4))))[:6],
        "'[abc]' was called on 12 rows but the outputs have 6",
    ),
}


@pytest.mark.parametrize("name", NO_CHAINS)
@pytest.mark.parametrize("method", METHODS)
def test_graphs_that_are_not_chains(name: str, method: str) -> None:
    forward, message = NO_CHAINS[name]
    torch.manual_seed(0)
    model = Graph(forward)
    refused_by_kfra = name in ("bare parameter", "used before all others", "more rows than data")
    if method == "kfra" and refused_by_kfra:  # and not left at zero
        message = "'[abc]'.*(outside of the calls|does not count the data).*'kfac'"
    if method == "hessian" or (method == "kfra" and refused_by_kfra):
        with pytest.raises(errors.UnsupportedGraphError, match=message):
            gn.curvature(model, nn.CrossEntropyLoss(), (X, Y), method=method)
    else:
        assert list(gn.curvature(model, nn.CrossEntropyLoss(), (X, Y), method)) == ["a", "b", "c"]


@pytest.mark.parametrize("method", ["kflr", "kfra", "hessian"])
def test_data_that_are_mixed(method: str) -> None:
    model = Graph(
        lambda m, x: m.c(m.b(torch.nn.functional.batch_norm(m.a(x), None, None, training=True)))
    )
    message = r"between layer 'a' and the outputs mixes the data.*use 'kfac'.*eval"
    if method == "kfra":  # which knows the operation
        message = r"NativeBatchNormBackward0 behind layer 'a' mixes the data.*use 'kfac'.*eval"
    with pytest.raises(errors.UnsupportedGraphError, match=message):
        gn.curvature(model, nn.CrossEntropyLoss(), (X, Y), method=method)


def test_tied_weights_are_no_chain() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    with pytest.raises(errors.UnsupportedGraphError, match="'2' and '0' share a parameter"):
        gn.curvature(model, nn.MSELoss(), (X, X), method="hessian")


def test_input_overwritten_after_the_layer_read_it() -> None:
    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            h = self.layer(x)
            x.zero_()
            return h

    with pytest.raises(errors.RecordError, match="input of layer 'layer' was changed in place"):
        gn.curvature(Spoils(), nn.CrossEntropyLoss(), (X, Y))


def test_dense_hessian_of_a_large_layer() -> None:
    model = nn.Linear(300, 300)
    batch = torch.randn(2, 300), torch.randn(2, 300)
    with pytest.raises(errors.MemoryLimitError, match=r"layer '' needs about 91\.\d GiB.*kflr"):
        gn.curvature(model, nn.MSELoss(), batch, method="hessian")


@pytest.mark.parametrize("error", errors.GaussNewtonError.__subclasses__())
def test_every_error_is_also_a_built_in_one(error: type) -> None:
    assert len(error.__bases__) == 2
    assert error.__doc__


def test_classes_in_place_of_objects() -> None:
    plain = inspect.unwrap(gn.curvature)  # past the check of annotations, as users have it
    with pytest.raises(TypeError, match="criterion is the class CrossEntropyLoss"):
        plain(mlp(), nn.CrossEntropyLoss, (X, Y))
    with pytest.raises(TypeError, match="model is the class Linear"):
        plain(nn.Linear, nn.CrossEntropyLoss(), (X, Y))
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module"):
        plain(lambda x: x, nn.CrossEntropyLoss(), (X, Y))
    with pytest.raises(TypeError, match="cannot be called"):
        plain(mlp(), 3, (X, Y))


def test_a_tuple_of_batches() -> None:
    with pytest.raises(errors.BatchError, match="several batches go in a list"):
        gn.curvature(mlp(), nn.CrossEntropyLoss(), ((X, Y), (X, Y)))


def test_layers_without_a_shape_yet() -> None:
    with pytest.raises(errors.UnsupportedLayerError, match=r"'0' of type LazyLinear.*once before"):
        gn.curvature(nn.Sequential(nn.LazyLinear(3)), nn.CrossEntropyLoss(), (X, Y))


@pytest.mark.parametrize(
    ("vector", "error", "message"),
    [
        ({"0.weight": torch.zeros(5, 4)}, ValueError, "part for '0.bias'.*but is None"),
        ({"0.weight": torch.zeros(4, 5)}, ValueError, r"'0.weight' must have shape \(5, 4\)"),
        ([torch.zeros(5, 4)], TypeError, "not list"),
        (None, TypeError, "not NoneType"),
        (torch.zeros(3, 3), ValueError, "does not fit"),
    ],
)
def test_vectors_that_do_not_fit(vector: object, error: type, message: str) -> None:
    curvature = gn.curvature(mlp(), nn.CrossEntropyLoss(), (X, Y))
    with pytest.raises((error, TypeCheckError)):
        curvature.solve(vector, damping=1.0)
    if not isinstance(vector, torch.Tensor):
        with pytest.raises(error, match=message):
            curvature.solve(vector, damping=1.0)


def test_curvatures_that_do_not_go_together() -> None:
    model, criterion = mlp(), nn.CrossEntropyLoss()
    kflr = gn.curvature(model, criterion, (X, Y))
    hessian = gn.curvature(model, criterion, (X, Y), method="hessian")
    other = gn.curvature(nn.Linear(4, 3), criterion, (X, Y))
    for wrong in (hessian, other):
        with pytest.raises(ValueError, match="the two curvatures differ at layer"):
            kflr.average(wrong)
        with pytest.raises(ValueError, match="the two curvatures differ at layer"):
            kflr.merge(wrong)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (gn.Refresh, {"curvature": 0}, "number of updates and at least 1"),
        (gn.Refresh, {"inverse": 0}, "number of updates and at least 1"),
        (gn.Refresh, {"decay": 1.0}, "less than 1"),
        (gn.Refresh, {"average": -0.1}, "weight of the past"),
        (gn.Damping, {"tau_interval": 0}, "number of updates and at least 1"),
        (gn.Damping, {"gamma_interval": -1}, "number of updates and at least 1"),
        (gn.StepSize, {"ask": 0}, "number of updates and at least 1"),
        (gn.StepSize, {"smooth": 1.0}, "less than 1"),
        (gn.StepSize, {"memory": float("nan")}, "weight of the past"),
    ],
)
def test_settings_that_no_update_can_follow_are_refused(
    kind: Any, settings: dict[str, float], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        kind(**settings)
    assert f"{kind.__name__}({next(iter(settings))}=" in str(caught.value)
