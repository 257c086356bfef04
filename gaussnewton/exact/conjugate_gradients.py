"""Solving A x = b with products by A alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.errors import FactorisationError

Stopping = Literal["residual", "martens", "both"]
Operator = Callable[[Tensor], Tensor]

_PROGRESS = 5e-4  # ε of Martens' rule
_SPACING = 1.3  # kept iterates lie this factor apart


class Reason(str, Enum):
    """Why the iterations ended."""

    CONVERGED = "converged"
    PROGRESS = "progress"
    MAX_ITERATIONS = "max_iterations"
    NEGATIVE_CURVATURE = "negative_curvature"
    NON_FINITE = "non_finite"


@dataclass(frozen=True)
class ConjugateGradientsResult:
    """Where the iterations ended, and why.

    Attributes:
        solution: The last x. After :attr:`Reason.NEGATIVE_CURVATURE` or
            :attr:`Reason.NON_FINITE` it is the one before the step that failed.
        iterations: How many steps were made.
        residual_norm: ‖b - A x‖ as the recursion has it.
        quadratic: φ(x) = ½ xᵀ A x - bᵀ x.
        reason: Why the iterations ended.
        iterates: Pairs (iteration, x) at iterations about 1.3 times apart, the last included;
            empty unless they were asked for.
    """

    solution: Float[Tensor, " p"]
    iterations: int
    residual_norm: float
    quadratic: float
    reason: Reason
    iterates: tuple[tuple[int, Tensor], ...] = ()


def conjugate_gradients(
    product: Operator,
    b: Float[Tensor, " p"],
    *,
    x0: Float[Tensor, " p"] | None = None,
    preconditioner: Operator | None = None,
    max_iterations: int = 250,
    tolerance: float = 1e-10,
    stopping: Stopping = "residual",
    keep_iterates: bool = False,
) -> ConjugateGradientsResult:
    r"""Minimise :math:`φ(x) = \tfrac12 x^T A x - b^T x` for a positive definite A.

    Preconditioned conjugate gradients. ``stopping`` says when it is enough:

    - ``"residual"``: :math:`‖b - Ax‖ ≤ \text{tolerance} · ‖b‖`;
    - ``"martens"``: :math:`i > k`, :math:`φ(x_i) < 0` and
      :math:`(φ(x_i) - φ(x_{i-k})) / φ(x_i) < kε` with :math:`k = \max(10, ⌈0.1 i⌉)` and
      :math:`ε = 5·10^{-4}`, the rule of Hessian-free optimisation;
    - ``"both"``: whichever comes first.

    Args:
        product: Multiplies with A.
        b: The right-hand side. If it is zero so is the solution.
        x0: Where to begin; zero by default.
        preconditioner: Multiplies with M⁻¹, the inverse of a positive definite M like A.
        max_iterations: The most steps to make.
        tolerance: Of the residual, relative to ‖b‖.
        stopping: The rule, see above.
        keep_iterates: Keep iterates at iterations about 1.3 times apart, for backtracking.

    Raises:
        FactorisationError: If the preconditioner is not positive definite.

    Example:
        >>> import torch, gaussnewton as gn
        >>> A, b = torch.diag(torch.tensor([1.0, 2.0, 4.0])), torch.ones(3)
        >>> result = gn.exact.conjugate_gradients(lambda v: A @ v, b, tolerance=1e-6)
        >>> result.solution, result.iterations, result.reason.value
        (tensor([1.0000, 0.5000, 0.2500]), 3, 'converged')
    """
    if stopping not in ("residual", "martens", "both"):
        raise ValueError(f'stopping is {stopping!r}; it must be "residual", "martens" or "both"')
    target = float(b.norm()) * (0.0 if stopping == "martens" else tolerance)
    x = torch.zeros_like(b) if x0 is None or not b.any() else x0.clone()
    r = b - product(x) if x.any() else b.clone()
    residual, values = float(r.norm()), [_quadratic(x, r, b)]
    kept: dict[int, Tensor] = {}
    p, rz, i = torch.zeros_like(b), 1.0, 0
    reason = None if math.isfinite(residual) else Reason.NON_FINITE

    while reason is None:
        if residual <= target:
            reason = Reason.CONVERGED
        elif stopping != "residual" and _little_progress(values):
            reason = Reason.PROGRESS
        elif i == max_iterations:
            reason = Reason.MAX_ITERATIONS
        else:
            z = r if preconditioner is None else preconditioner(r)
            rz, previous = _positive(float(r @ z), preconditioner), rz
            p = z + (rz / previous if i else 0.0) * p
            ap = product(p)
            curvature = float(p @ ap)
            if curvature <= 0:
                reason = Reason.NEGATIVE_CURVATURE
                break
            step = rz / curvature
            new_x, new_r = x + step * p, r - step * ap
            value, norm = _quadratic(new_x, new_r, b), float(new_r.norm())
            if not (math.isfinite(value) and math.isfinite(norm)):
                reason = Reason.NON_FINITE
                break
            x, r, residual, i = new_x, new_r, norm, i + 1
            values.append(value)
            if keep_iterates and _is_spaced(i):
                kept[i] = x

    if keep_iterates:
        kept[i] = x
    return ConjugateGradientsResult(x, i, residual, values[-1], reason, tuple(kept.items()))


def _quadratic(x: Tensor, r: Tensor, b: Tensor) -> float:
    """φ(x) without another product: A x = b - r."""
    return float(-0.5 * (x @ (b + r)))


def _little_progress(values: list[float]) -> bool:
    """Martens' rule, on the values of φ so far."""
    i = len(values) - 1
    k = max(10, math.ceil(0.1 * i))
    return i > k and values[i] < 0 and (values[i] - values[i - k]) / values[i] < k * _PROGRESS


def _positive(rz: float, preconditioner: Operator | None) -> float:
    if preconditioner is not None and rz <= 0:
        raise FactorisationError(
            f"rᵀ M⁻¹ r is {rz:.3g} for a residual r that is not zero: the preconditioner is not "
            "positive definite. Damp it, or leave it out."
        )
    return rz


def _is_spaced(i: int) -> bool:
    """Whether i is ⌈1.3ʲ⌉ for a whole number j."""
    j = math.floor(math.log(i) / math.log(_SPACING))
    return any(math.ceil(_SPACING**power) == i for power in (j - 1, j, j + 1))
