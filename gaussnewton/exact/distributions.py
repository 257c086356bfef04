r"""The model distribution :math:`p_θ(y|x)` behind a criterion, for exact expectations over y.

The outputs ``[N, …]`` of a datum fall into R independent variables with K outputs each: one
categorical variable with K = C logits for each position of a segmentation, one Bernoulli
variable with K = 1 for each pixel. Outputs are viewed as ``[N, K, R]`` throughout.

Weights belong to a datum as it was observed: the scalar E is :math:`Σ_{n,r} c_{nr} E_{nr}`
with :math:`E_{nr}` an unweighted negative log-likelihood, and :math:`c_{nr}` holds the class
weight of the observed target, ``pos_weight``, ``ignore_index`` (weight 0), label smoothing
and the denominator of a mean.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import UnsupportedLossError
from gaussnewton.exact.batch import Criterion, predicts_variance
from gaussnewton.exact.output_hessian import is_plainly

Support = Iterable[tuple[Any, Float[Tensor, "n r"]]]
"""Targets for the whole batch, each with its probability for every variable."""

_NODES = 8  # exact for polynomials in y up to degree 15; the highest that occurs is 4


@dataclass(frozen=True)
class ModelDistribution:
    """Targets with their probabilities, and how much each observed datum counts.

    Attributes:
        outputs_each: K, how many outputs make up one variable.
        support: Values of the targets and their probabilities, or quadrature nodes and weights.
        criterion: The negative log-likelihood, summed and unweighted.
        weight: :math:`c_{nr}`.
    """

    outputs_each: int
    support: Support
    criterion: Criterion
    weight: Float[Tensor, "n r"]


def model_distribution(criterion: Criterion, outputs: Tensor, targets: Any) -> ModelDistribution:
    """The distribution that the criterion is the negative log-likelihood of.

    Raises:
        UnsupportedLossError: If it is not known to be that of any distribution.
    """
    if callable(getattr(criterion, "support", None)):
        return _own_support(criterion, outputs)
    for known, build in _KNOWN.items():
        if is_plainly(criterion, known):
            return build(criterion, outputs, targets)
    names = ", ".join(known.__name__ for known in _KNOWN)
    raise UnsupportedLossError(
        f"{getattr(criterion, '__name__', type(criterion).__name__)} is not known to be the "
        "negative log-likelihood of a distribution over targets, so it has no Fisher. Use one of "
        f"{names}, or give the criterion a method support(outputs) that yields (targets, "
        'probabilities [N]) and an attribute reduction ("mean" or "sum"); the Gauss-Newton '
        "matrix needs neither"
    )


def _own_support(criterion: Any, outputs: Tensor) -> ModelDistribution:
    reduction = getattr(criterion, "reduction", None)
    if reduction not in ("mean", "sum"):
        raise UnsupportedLossError(
            f"{type(criterion).__name__} has a method support but its reduction is {reduction!r}; "
            'the weight of a datum in its value is known only for "mean" and "sum"'
        )
    twin = copy.copy(criterion)
    twin.reduction = "sum"
    support = ((y, p.reshape(-1, 1)) for y, p in criterion.support(outputs))
    weight = outputs.new_full((len(outputs), 1), 1 / len(outputs) if reduction == "mean" else 1)
    return ModelDistribution(outputs[0].numel(), support, twin, weight)


def _categorical(criterion: Any, outputs: Tensor, targets: Tensor) -> ModelDistribution:
    """Classes along dimension 1; log-probabilities are logits that log_softmax does not change."""
    n, classes = outputs.shape[:2]
    probabilities = outputs.softmax(dim=1)
    values = torch.arange(classes, device=outputs.device)
    support = (
        (value.expand(outputs[:, 0].shape), probabilities[:, value].reshape(n, -1))
        for value in values
    )
    weight = _class_weight(criterion, outputs, targets).reshape(n, -1)
    return ModelDistribution(classes, support, nn.CrossEntropyLoss(reduction="sum"), weight)


def _class_weight(criterion: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    r"""The total weight of :math:`-\log p` in E at each position.

    Every target, smoothed or not, is a vector t over classes with E = -Σ_c w_c t_c log p_c,
    whose second derivative by the logits is (Σ_c w_c t_c)(diag(p) - p pᵀ).
    """
    classes = outputs.shape[1]
    smoothing = getattr(criterion, "label_smoothing", 0.0)
    of_class = outputs.new_ones(classes) if criterion.weight is None else criterion.weight
    if targets.is_floating_point():
        smooth = targets * (1 - smoothing) + smoothing / classes
        weight = torch.einsum("c,nc...->n...", of_class, smooth)
        total = weight.new_tensor(weight.numel())
    else:
        kept = targets != criterion.ignore_index
        observed = of_class[targets.where(kept, 0)] * kept
        weight = (1 - smoothing) * observed + smoothing * of_class.mean() * kept
        total = observed.sum()
    return weight / total if criterion.reduction == "mean" else weight


def _bernoulli_logits(criterion: Any, outputs: Tensor, targets: Tensor) -> ModelDistribution:
    weight = _element_weight(criterion, outputs)
    if criterion.pos_weight is not None:
        weight = weight * (1 + (criterion.pos_weight - 1) * targets)
    twin = nn.BCEWithLogitsLoss(reduction="sum")
    return _elementwise(outputs, _zero_one(outputs.sigmoid()), twin, weight)


def _bernoulli(criterion: Any, outputs: Tensor, _: Tensor) -> ModelDistribution:
    weight = _element_weight(criterion, outputs)
    return _elementwise(outputs, _zero_one(outputs), nn.BCELoss(reduction="sum"), weight)


def _zero_one(probability: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.zeros_like(probability), 1 - probability
    yield torch.ones_like(probability), probability


def _squared_error(criterion: Any, outputs: Tensor, _: Tensor) -> ModelDistribution:
    r"""(o - y)² is, up to a constant, -log of a Gaussian with variance ½."""
    support = _gaussian(outputs, torch.full_like(outputs, 0.5))
    weight = _element_weight(criterion, outputs)
    return _elementwise(outputs, support, nn.MSELoss(reduction="sum"), weight)


def _gaussian_nll(criterion: Any, outputs: Tensor, targets: Any) -> ModelDistribution:
    twin = nn.GaussianNLLLoss(eps=criterion.eps, reduction="sum")
    if predicts_variance(criterion, targets):
        mean, variance = outputs.unbind(1)
        support = _gaussian(mean, variance.clamp(min=criterion.eps))
        return _elementwise(mean, support, twin, _element_weight(criterion, mean), each=2)
    variance = torch.as_tensor(targets[1], dtype=outputs.dtype, device=outputs.device)
    if variance.shape == outputs.shape[:-1] and variance.ndim > 0:
        variance = variance.unsqueeze(-1)
    variance = variance.expand_as(outputs).clamp(min=criterion.eps)
    given = (((y, variance), p) for y, p in _gaussian(outputs, variance))
    return _elementwise(outputs, given, twin, _element_weight(criterion, outputs))


def _gaussian(mean: Tensor, variance: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Gauss-Hermite nodes and weights of a Gaussian for each element (Golub and Welsch)."""
    beside_diagonal = torch.arange(1, _NODES, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(beside_diagonal.diag(1) + beside_diagonal.diag(-1))
    for node, weight in zip(nodes.tolist(), vectors[0].square().tolist(), strict=True):
        yield mean + variance.sqrt() * node, torch.full_like(mean, weight)


def _poisson(criterion: Any, outputs: Tensor, _: Tensor) -> ModelDistribution:
    rate = outputs.exp() if criterion.log_input else outputs
    twin = nn.PoissonNLLLoss(log_input=criterion.log_input, eps=criterion.eps, reduction="sum")
    weight = _element_weight(criterion, outputs)
    return _elementwise(outputs, _counts(rate), twin, weight)


def _counts(rate: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Counts within 12 standard deviations (and 30) of each element's rate.

    What is left out has a probability below 1e-20.
    """
    reach = math.ceil(12 * math.sqrt(float(rate.max())) + 30)
    for offset in range(-reach, reach + 1):
        count = rate.floor() + offset
        possible = count.clamp(min=0)
        log_probability = torch.xlogy(possible, rate) - rate - torch.lgamma(possible + 1)
        yield possible, log_probability.exp() * (count >= 0)


def _element_weight(criterion: Any, outputs: Tensor) -> Tensor:
    weight = torch.ones_like(outputs)
    if isinstance(getattr(criterion, "weight", None), Tensor):
        weight = weight * criterion.weight
    return weight / outputs.numel() if criterion.reduction == "mean" else weight


def _elementwise(
    elements: Tensor,
    support: Iterable[tuple[Any, Tensor]],
    criterion: Criterion,
    weight: Tensor,
    each: int = 1,
) -> ModelDistribution:
    """One variable an element."""
    n = len(elements)
    flat = ((y, p.reshape(n, -1)) for y, p in support)
    return ModelDistribution(each, flat, criterion, weight.reshape(n, -1))


_KNOWN: dict[type[nn.Module], Callable[[Any, Tensor, Any], ModelDistribution]] = {
    nn.CrossEntropyLoss: _categorical,
    nn.NLLLoss: _categorical,
    nn.BCEWithLogitsLoss: _bernoulli_logits,
    nn.BCELoss: _bernoulli,
    nn.MSELoss: _squared_error,
    nn.GaussianNLLLoss: _gaussian_nll,
    nn.PoissonNLLLoss: _poisson,
}
