"""Averaged parameters (appendix B.4)."""

from __future__ import annotations

from torch import Tensor

MEMORY = 0.95
"""β as the paper has it."""


def memory_at(t: int, memory: float, last: float) -> float:
    """β at update t: that of the last share of all updates, and at least ``memory``.

    Example:
        >>> from gaussnewton.averaging import memory_at
        >>> [memory_at(t, memory=0.9, last=0.1) for t in (10, 100, 200, 1000)]
        [0.9, 0.9, 0.95, 0.99]
    """
    return memory if last * t <= 1 else max(memory, 1 - 1 / (last * t))


def update_average(
    average: Tensor | None, parameter: Tensor, t: int, memory: float = MEMORY
) -> Tensor:
    r"""θ̂_t = β_t θ̂_{t−1} + (1 − β_t) θ_t with β_t = min(β, 1 − 1/t).

    At first it is the plain mean of all parameters so far.

    Example:
        >>> import torch
        >>> from gaussnewton.averaging import update_average
        >>> mean = update_average(None, torch.tensor(1.0), t=1)
        >>> update_average(mean, torch.tensor(3.0), t=2)
        tensor(2.)
    """
    beta = min(memory, 1 - 1 / t)
    if average is None:
        return parameter.detach().clone()
    return average.lerp_(parameter.detach(), 1 - beta)


def carry_on(average: Tensor, parameter: Tensor, t: int, memory: float, carried: float) -> None:
    r"""Average, and let the parameter go on by a share μ of what its average moved by; in place.

    .. math:: \hatθ_t = β_t \hatθ_{t−1} + (1 − β_t) θ_t, \quad
              θ_t ← θ_t + μ (\hatθ_t − \hatθ_{t−1})

    Where μ is 0 it is :func:`update_average`.

    Args:
        average: θ̂_{t−1}, then θ̂_t.
        parameter: θ_t, as the step has left it.
        t: the number of the update.
        memory: β.
        carried: μ.

    Example:
        >>> import torch
        >>> from gaussnewton.averaging import carry_on
        >>> mean, parameter = torch.tensor(1.0), torch.tensor(3.0)
        >>> carry_on(mean, parameter, t=2, memory=0.95, carried=0.5)
        >>> mean, parameter
        (tensor(2.), tensor(3.5000))
    """
    beta = min(memory, 1 - 1 / t)
    update_average(average, parameter, t, memory)
    if carried and beta:  # θ_t − θ̂_t is β_t / (1 − β_t) times what the average moved by
        parameter.lerp_(average, -carried * (1 - beta) / beta)


def without_last(
    average: Tensor, parameter: Tensor, t: int, memory: float = MEMORY, carried: float = 0.0
) -> Tensor | None:
    """θ̂_{t−1}, from θ̂_t and where :func:`carry_on` left θ_t; None if there was none before.

    Example:
        >>> import torch
        >>> from gaussnewton.averaging import without_last
        >>> without_last(torch.tensor(2.0), torch.tensor(3.0), t=2)
        tensor(1.)
        >>> without_last(torch.tensor(2.0), torch.tensor(3.5), t=2, carried=0.5)
        tensor(1.)
    """
    beta = min(memory, 1 - 1 / t)
    if beta == 0:
        return None
    moved = (1 - beta) / (beta + carried * (1 - beta))  # of θ_t − θ̂_t, by the average
    return average - moved * (parameter.detach() - average)
