"""From a direction to a step: how far to go, by the quadratic model (appendix B.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gaussnewton.observing import Matrices, inner
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
    """

    update: Matrices
    model: Quadratic
    coefficients: Tensor
    scales: dict[str, Tensor]

    def predicted(self, lr: float = 1.0) -> Tensor:
        """f̂ − f at a multiple of the step."""
        return self.model.change(self.coefficients * lr)


def plain(
    gradient: Matrices,
    direction: Matrices,
    previous: Matrices | None,
    gram: Gram,
    shift: Shift,
    share: float = 1.0,
) -> Proposal:
    """α and, where there is a last update, a momentum coefficient, together.

    Args:
        gradient: ∇f.
        direction: δ̃ = −C̃⁻¹ ∇f.
        previous: the last update.
        gram: of the full Gauss-Newton matrix.
        shift: τ + η of each layer, or of each of its parameters.
        share: how much of the model's best step to take.
    """
    spans = [direction] if previous is None else [direction, previous]
    together = {name: torch.stack([d[name] for d in spans]) for name in direction}
    M = gram(None, together) + _shifted(spans, shift)
    model = Quadratic(M, torch.stack([inner(gradient, d) for d in spans]))
    c = share * model.minimum()
    return Proposal(combine(c, spans), model, c, {})


def calibrated(
    gradient: Matrices,
    direction: Matrices,
    previous: Matrices | None,
    gram: Gram,
    shift: Shift,
    names: Sequence[str],
    blend: Callable[[str, Tensor], Tensor],
    most: float,
    share: float,
) -> Proposal:
    """Scale each layer by its own exact line search, then solve for all together.

    Layer λ alone would go −b_λ / M_λλ along its direction.

    Args:
        gradient: as in :func:`plain`, as are the next four.
        direction: see above.
        previous: see above.
        gram: see above.
        shift: see above.
        names: the layers, in the order in which ``gram`` has them.
        blend: from a layer's name and the logarithm of its own step size, which need not be
            finite, to the one to use.
        most: neither coefficient may be greater.
        share: see above.
    """
    others = None if previous is None else {n: p.unsqueeze(0) for n, p in previous.items()}
    spans: list[Matrices] = [{name: direction[name]} for name in names]
    spans += [] if previous is None else [previous]
    M = gram(direction, others) + _shifted(spans, shift)
    b = torch.stack([inner(gradient, d) for d in spans])
    count = len(names)
    own = (-b[:count] / M.diagonal()[:count]).log()  # no number where a gradient is zero
    scales = torch.stack([blend(name, s) for name, s in zip(names, own, strict=True)])
    basis = torch.zeros(len(spans), len(spans) - count + 1, dtype=M.dtype, device=M.device)
    basis[:count, 0] = scales.exp()
    if previous is not None:
        basis[count, 1] = 1
    model = Quadratic(M, b).project(basis)
    c = share * model.minimum(most)
    scaled = {
        name: direction[name] * scale.to(direction[name].dtype)
        for name, scale in zip(names, scales.exp(), strict=True)
    }
    update = combine(c, [scaled] if previous is None else [scaled, previous])
    return Proposal(update, model, c, dict(zip(names, scales, strict=True)))


def combine(c: Tensor, spans: Sequence[Matrices]) -> Matrices:
    """Σ c_i d_i."""
    return {
        name: sum(
            (s.to(d[name].dtype) * d[name] for s, d in zip(c[1:], spans[1:], strict=True)),
            start=c[0].to(spans[0][name].dtype) * spans[0][name],
        )
        for name in spans[0]
    }


def squared(direction: Matrices, shift: Shift) -> Tensor:
    """dᵀ (τ + η) d."""
    return _dot(direction, direction, shift)


def _shifted(spans: Sequence[Matrices], shift: Shift) -> Tensor:
    """d_iᵀ (τ + η) d_j."""
    return torch.stack([torch.stack([_dot(a, b, shift) for b in spans]) for a in spans])


def _dot(a: Matrices, b: Matrices, shift: Shift) -> Tensor:
    terms = [
        (shift[name] * (a[name].double() * b[name].double())).sum()
        if isinstance(shift[name], Tensor)
        else shift[name] * (a[name].double() * b[name].double()).sum()
        for name in a
        if name in b
    ]
    like = next(iter(a.values()))
    return torch.stack(terms).sum() if terms else like.new_zeros((), dtype=torch.float64)
