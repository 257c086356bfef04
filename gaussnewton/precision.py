r"""In which precision curvature is computed and its inverses are applied.

Rounding a factor M to a relative precision ε puts a random error of ε |M| on each of its entries.
In the coordinates in which M is the identity, where steps and their noise are measured, that is a
relative error of about

.. math:: ε\,κ, \qquad κ = \frac{\operatorname{tr} M}{d} \sqrt{\frac{\|M^{-1}\|_F^2}{d}},

the mean eigenvalue times the root mean square of the inverses of all, and so it is where M⁻¹ is
rounded. Little damping makes κ large.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

TOLERATED = {torch.float32: 0.01, torch.bfloat16: 0.2}
"""The greatest error that a precision may put on a factor. With more than float32's the FACES
autoencoder is slower: with hardly any damping, what is left to be learnt lies in the directions
that rounding spoils. bfloat16 is only thought of where there is more damping than that."""

FASTER = 1.5
"""bfloat16 is used where products in it take less than float32's seconds by this factor."""

WORTH_IT = 256
"""Factors that are less wide than this gain nothing by it, numbers being rounded to it first."""

_factors: ContextVar[torch.dtype] = ContextVar("factors", default=torch.float32)


@contextmanager
def factors_in(dtype: torch.dtype) -> Iterator[None]:
    """What is computed of curvature inside is in this precision or wider, as in autocast's scope.

    Example:
        >>> import torch
        >>> from gaussnewton.precision import factors_in, widened
        >>> with factors_in(torch.float64):
        ...     widened(torch.ones(1)).dtype
        torch.float64
    """
    outside = _factors.set(dtype)
    try:
        yield
    finally:
        _factors.reset(outside)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in the precision of factors, float32 by default, where it is narrower."""
    return tensor.to(torch.promote_types(tensor.dtype, _factors.get()))


def single(tensor: Tensor) -> Tensor:
    """The tensor in float32 where it is narrower, whatever precision factors have."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_precision(precision: torch.dtype) -> None:
    """Refuse what factors cannot be computed in."""
    if precision not in (torch.float32, torch.float64):
        raise ValueError(f"precision is torch.float32 or torch.float64, not {precision}")


def condition(mean: Tensor, inverse: Float[Tensor, "d d"]) -> float:
    """κ of a factor: infinite where its inverse is.

    Args:
        mean: the factor's mean eigenvalue.
        inverse: of the factor.

    Example:
        >>> import torch
        >>> from gaussnewton.precision import condition
        >>> round(condition(torch.tensor(2.0), torch.diag(torch.tensor([1.0, 1 / 3]))), 3)
        1.491
    """
    kappa = float(mean * inverse.norm() / len(inverse) ** 0.5)
    return kappa if kappa < torch.inf else torch.inf


def precise_enough(dtype: torch.dtype, kappa: float) -> bool:
    """Whether ε κ is small enough.

    Example:
        >>> import torch
        >>> from gaussnewton.precision import precise_enough
        >>> [precise_enough(dtype, 1e3) for dtype in (torch.bfloat16, torch.float32)]
        [False, True]
    """
    return kappa * torch.finfo(dtype).eps / 2 <= TOLERATED[dtype]


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64 at all."""
    return device.type != "mps"


def too_narrow(kappa: float) -> bool:
    """Whether float32 is too narrow for factors of this κ."""
    return not precise_enough(torch.float32, kappa)


def fitted(
    inverse: Float[Tensor, "d d"], kappa: float, choices: Sequence[torch.dtype]
) -> Float[Tensor, "d d"]:
    """An inverse in the precision that it is to be applied in.

    Args:
        inverse: of a factor.
        kappa: κ of it.
        choices: of which the first that is precise enough is taken, or else its own.
    """
    for dtype in choices:
        wide_enough = dtype.itemsize >= 4 or len(inverse) >= WORTH_IT
        if wide_enough and precise_enough(dtype, kappa):
            return inverse.to(dtype)
    return inverse


@cache
def bfloat16_pays(device: torch.device) -> bool:
    """Whether products in bfloat16 are that much faster, as where a processor has units for it.

    It is tried once, and takes some milliseconds.
    """
    wide, narrow = (
        _seconds(torch.ones(512, 512, dtype=dtype, device=device))
        for dtype in (torch.float32, torch.bfloat16)
    )
    return narrow * FASTER < wide


def _seconds(a: Float[Tensor, "d d"], times: int = 5) -> float:
    """Of a product of a matrix with itself, the best of some."""
    best = torch.inf
    for _ in range(times + 1):
        begun = time.perf_counter()
        _ = a @ a
        if a.device.type != "cpu":
            torch.accelerator.synchronize(a.device)
        best = min(best, time.perf_counter() - begun)
    return best
