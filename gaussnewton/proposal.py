"""From a direction to a step: how far to go, by the quadratic model (appendix B.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.matrices import Matrices, dot, inner
from gaussnewton.quadratic import Quadratic

Gram = Callable[[Matrices | None, Matrices | None], Tensor]
"""d_iᵀ Ḡ d_j of directions that each move one layer, and of a stack that moves all."""


Shift = dict[str, float | Tensor]
"""For each layer what damping and penalty add to the diagonal: a number, or one a parameter."""


@dataclass(frozen=True)
class Proposal:
    """A step that could be taken, and the quadratic model that proposes it.

    Attributes:
        update: the step.
        model: f̂ on the span of what the step is made of.
        coefficients: of the direction, and of the last update if there is momentum.
        scales: the logarithm of each layer's scale, if layers are calibrated.
        gram: where the model's curvature is from.
        damped: how much of the model's curvature along the direction is damping.
    """

    update: Matrices
    model: Quadratic
    coefficients: Tensor
    scales: dict[str, Tensor]
    gram: Gram
    damped: Tensor

    def predicted(self, lr: float = 1.0) -> Tensor:
        """f̂ − f at a multiple of the step."""
        return self.model.change(self.coefficients * lr)

    def whole(self) -> Tensor:
        """f − f̂ at the minimum along the direction, if there were no damping in f̂."""
        return 0.5 * self.model.b[0].square() / (self.model.M[0, 0] * (1 - self.damped))


def plain(
    gradient: Mapping[str, Tensor],
    direction: Matrices,
    previous: Matrices | None,
    looks: Sequence[Gram],
    shift: Shift,
    share: float = 1.0,
    most: float = math.inf,
    believed: float = math.inf,
    allowed: float = math.inf,
) -> Proposal:
    """α and, where there is a last update, a momentum coefficient, together.

    Args:
        gradient: ∇f.
        direction: δ̃ = −S C̃⁻¹ ∇f, S having the layers' scales; the step is written over it.
        previous: the last update.
        looks: ways to the full Gauss-Newton matrix, the cheapest first.
        shift: τ + η of each layer, or of each of its parameters.
        share: how much of the model's best step to take.
        most: neither coefficient may be greater.
        believed: a greater fall in loss is believed of the last look only.
        allowed: a step that promises a greater one is made shorter.
    """
    spans = [direction] if previous is None else [direction, previous]
    together = {name: _stacked([d[name] for d in spans]) for name in direction}
    damped, b = _shifted(spans, shift), torch.stack([inner(gradient, d) for d in spans])
    for gram in looks:
        model = Quadratic(gram(None, together) + damped, b)
        c = share * model.minimum(most)
        if not float(model.change(c)) < -believed:
            break
    c = _within(model, c, allowed)
    return Proposal(combine(c, spans), model, c, {}, gram, damped[0, 0] / model.M[0, 0])


def calibrated(
    gradient: Mapping[str, Tensor],
    direction: Matrices,
    previous: Matrices | None,
    looks: Sequence[Gram],
    shift: Shift,
    names: Sequence[str],
    blend: Callable[[str, Tensor], Tensor],
    most: float,
    share: float,
    favour: float,
    believed: float = math.inf,
    allowed: float = math.inf,
) -> Proposal:
    """Scale each layer by its own exact line search, then solve for all together.

    Layer λ alone would go −b_λ / M_λλ along its direction, and gain b_λ² / 2 M_λλ. Layers that
    gain more are favoured over others, because all of them move at once and much of what they
    gain is the same.

    Args:
        gradient: as in :func:`plain`, as are the next four.
        direction: see above.
        previous: see above.
        looks: see above.
        shift: see above.
        names: the layers, in the order in which ``looks`` have them.
        blend: from a layer's name and the logarithm of its own step size, which need not be
            finite, to the one to use.
        most: neither coefficient may be greater.
        share: see above.
        favour: see :func:`own_scales`.
        believed: see above.
        allowed: see above.
    """
    others = None if previous is None else {n: p.unsqueeze(0) for n, p in previous.items()}
    spans: list[Matrices] = [{name: direction[name]} for name in names]
    spans += [] if previous is None else [previous]
    damped, b = _shifted(spans, shift), torch.stack([inner(gradient, d) for d in spans])
    count = len(names)
    for gram in looks:
        M = gram(direction, others) + damped
        own = own_scales(M.diagonal()[:count], b[:count], favour)
        scales = torch.stack([blend(name, s) for name, s in zip(names, own, strict=True)])
        basis = _basis(scales, len(spans))
        model = Quadratic(M, b).project(basis)
        c = share * model.minimum(most)
        if not float(model.change(c)) < -believed:
            break
    c = _within(model, c, allowed)
    lengths = dict(zip(names, c[0] * scales.exp(), strict=True))
    last = {} if previous is None else {name: [part] for name, part in previous.items()}
    update = {
        name: _added(
            direction[name].mul_(length.to(direction[name].dtype)), c[1:], last.get(name, [])
        )
        for name, length in lengths.items()
    }
    held = basis[:, 0] @ damped @ basis[:, 0] / model.M[0, 0]
    return Proposal(update, model, c, dict(zip(names, scales, strict=True)), gram, held)


def _within(model: Quadratic, c: Float[Tensor, " k"], allowed: float) -> Float[Tensor, " k"]:
    """The coefficients, made smaller where they promise a greater fall than they may."""
    promise = -float(model.change(c))
    return c * (allowed / promise) if promise > allowed else c


def _basis(scales: Float[Tensor, " layers"], spans: int) -> Float[Tensor, "spans bases"]:
    """All layers together, each scaled; and each direction behind them by itself."""
    count = len(scales)
    basis = scales.new_zeros(spans, spans - count + 1)
    basis[:count, 0] = scales.exp()
    basis[count:, 1:] = torch.eye(spans - count).to(basis)
    return basis


def own_scales(
    M: Float[Tensor, " layers"], b: Float[Tensor, " layers"], favour: float
) -> Float[Tensor, " layers"]:
    """The logarithm of each layer's own step size; no number where its gradient is zero.

    Args:
        M: the curvature along each layer's direction.
        b: the slope along it.
        favour: the power of what a layer gains by itself, in units of the layers' mean, that its
            step is multiplied by.
    """
    gains = b.square() / M
    return (-b / M).log() + favour * (gains / gains.nanmean()).log()


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))


def combine(c: Tensor, spans: Sequence[Matrices]) -> Matrices:
    """Σ c_i d_i, in place of the first of them."""
    return {
        name: _added(first.mul_(c[0].to(first.dtype)), c[1:], [d[name] for d in spans[1:]])
        for name, first in spans[0].items()
    }


def _added(total: Tensor, c: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """total + Σ c_i d_i, in place."""
    for s, part in zip(c, parts, strict=True):
        total.addcmul_(part, s.to(total.dtype))
    return total


def squared(direction: Matrices, shift: Shift) -> Tensor:
    """dᵀ (τ + η) d."""
    return _dot(direction, direction, shift)


def _shifted(spans: Sequence[Matrices], shift: Shift) -> Tensor:
    """d_iᵀ (τ + η) d_j."""
    result = next(iter(spans[0].values())).new_zeros(len(spans), len(spans), dtype=torch.float64)
    for i, a in enumerate(spans):
        for j, b in enumerate(spans[: i + 1]):
            if a.keys() & b.keys():
                result[i, j] = result[j, i] = _dot(a, b, shift)
    return result


def _dot(a: Matrices, b: Matrices, shift: Shift) -> Tensor:
    terms = [
        (amount * (a[name].double() * b[name].double())).sum()
        if isinstance(amount := shift[name], Tensor)
        else amount * dot(a[name], b[name])
        for name in a
        if name in b
    ]
    like = next(iter(a.values()))
    return torch.stack(terms).sum() if terms else like.new_zeros((), dtype=torch.float64)
