"""Any differentiable ``fn(outputs, targets)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import BatchError
from gaussnewton.losses.autodiff import output_derivatives
from gaussnewton.losses.geometry import Geometry
from gaussnewton.losses.registry import register_loss
from gaussnewton.perdatum import Dense, Diagonal, PerDatum
from gaussnewton.perdatum.dense import psd_part

Sampler = Callable[[Tensor, torch.Generator], Any]


class Loss(nn.Module):
    """A criterion made of a plain function.

    Its Hessian at the outputs comes from automatic differentiation and is replaced by its
    positive semi-definite part where it is not PSD.

    Args:
        fn: ``fn(outputs, targets)``, a scalar; a sum or mean of terms of one datum each.
        reduction: "mean" or "sum", which of the two ``fn`` computes. It decides how
            curvature adds up over batches, and scales KFAC's samples.
        sample: ``sample(outputs, generator)`` draws targets from the model distribution
            p(y | outputs) of which ``fn`` is the negative log-likelihood, for KFAC. Without it
            KFAC draws vectors whose covariance is the Hessian at the outputs, which needs no
            model distribution and has the same expectation as KFLR.
        outputs: how many of the first arguments are outputs of the model, as a reconstruction,
            a mean and a variance may be.

    Example:
        >>> import torch, gaussnewton as gn
        >>> criterion = gn.Loss(lambda h, y: (h - y).cosh().log().sum(1).mean())
        >>> model = torch.nn.Linear(3, 2)
        >>> x, y = torch.randn(5, 3), torch.randn(5, 2)
        >>> gn.curvature(model, criterion, (x, y), method="kflr")[""].G.shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        fn: Callable[..., Tensor],
        *,
        reduction: Literal["mean", "sum"] = "mean",
        sample: Sampler | None = None,
        outputs: int = 1,
    ) -> None:
        super().__init__()
        self.fn, self.reduction, self.sample = fn, checked_reduction(reduction), sample
        self.outputs = outputs

    def extra_repr(self) -> str:
        """The function's name, for ``repr``."""
        return f"{getattr(self.fn, '__name__', self.fn)}, reduction={self.reduction!r}"

    def forward(self, *arguments: Any) -> Tensor:
        """Call the function."""
        return self.fn(*arguments)


@dataclass(frozen=True)
class Several:
    """Targets of a loss of several outputs, which are laid side by side for curvature.

    Attributes:
        shapes: of the outputs of one datum, one for each.
        targets: the rest of the arguments.
    """

    shapes: tuple[torch.Size, ...]
    targets: tuple[Any, ...]

    def apart(self, outputs: Float[Tensor, "n d"]) -> list[Tensor]:
        """The outputs as the function takes them."""
        parts = outputs.split([shape.numel() for shape in self.shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)]


def checked_reduction(reduction: str) -> str:
    """The reduction, if it is one that gives a scalar."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", not {reduction!r}')
    return reduction


@register_loss(Loss)
class CustomGeometry(Geometry):
    """The geometry of a :class:`Loss`, by automatic differentiation."""

    criterion: Loss

    def bind(self, outputs: Any, *targets: Any) -> tuple[Tensor, Any]:
        count = getattr(self.criterion, "outputs", 1)
        if count == 1 and not (isinstance(outputs, Tensor) and outputs.ndim == 1):
            return super().bind(outputs, *targets)
        tensors, rest = (outputs, *targets)[:count], (outputs, *targets)[count:]
        if len(tensors) < count or not all(isinstance(part, Tensor) for part in tensors):
            raise BatchError(
                f"{self.criterion} takes {count} outputs of the model, and was called with "
                f"{len(tensors) + len(rest)} arguments whose first {count} are not all tensors."
            )
        side_by_side = torch.cat([part.reshape(part.shape[0], -1) for part in tensors], dim=1)
        return side_by_side, Several(tuple(part.shape[1:] for part in tensors), rest)

    def value(self, outputs: Tensor, targets: Any) -> Tensor:
        if isinstance(targets, Several):
            return self.criterion.forward(*targets.apart(outputs), *targets.targets)
        return super().value(outputs, targets)

    def hessian(self, outputs: Tensor, targets: Any) -> PerDatum:
        H, _ = output_derivatives(self, outputs, targets)
        if H.ndim == 2:
            return Diagonal(H.clamp(min=0), outputs.shape[0])
        return Dense(psd_part(H))

    def sample(
        self, outputs: Tensor, targets: Any, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "n s d"]:
        if self.criterion.sample is None:
            return self._random_combinations(outputs, targets, samples, generator)
        h = outputs.detach().requires_grad_()
        scores = []
        for _ in range(samples):
            drawn = self.criterion.sample(h.detach(), generator)
            with torch.enable_grad():
                (g,) = torch.autograd.grad(self.value(h, drawn), h)
            scores.append(g.flatten(1))
        # A mean scales the score of each datum by 1/n where its Fisher matrix wants √(1/n).
        scale = outputs.shape[0] if self.averages else 1
        return torch.stack(scores, dim=1) * (scale / samples) ** 0.5

    def _random_combinations(
        self, outputs: Tensor, targets: Any, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "n s d"]:
        """Σ_k ε_k r_k with random signs ε, of vectors with Σ_k r_k r_kᵀ = 𝓗_L."""
        hessian = self.hessian(outputs, targets)
        if isinstance(hessian, Diagonal):  # its roots would be as many as outputs
            size = (outputs.shape[0], samples, hessian.width)
            roots = hessian.values.sqrt().unsqueeze(1)
            return _signs(size, outputs, generator) * roots / samples**0.5
        rows = hessian.roots().rows
        signs = _signs((rows.shape[0], samples, rows.shape[1]), outputs, generator)
        return signs @ rows / samples**0.5


def _signs(size: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    coins = torch.randint(2, size, generator=generator, device=like.device)
    return (2 * coins - 1).to(like.dtype)
