"""Any differentiable ``fn(outputs, targets)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import UnsupportedLossError
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
            p(y | outputs) of which ``fn`` is the negative log-likelihood. Only KFAC
            needs it; KFLR and KFRA do without a model distribution.

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
    ) -> None:
        super().__init__()
        self.fn, self.reduction, self.sample = fn, checked_reduction(reduction), sample

    def extra_repr(self) -> str:
        """The function's name, for ``repr``."""
        return f"{getattr(self.fn, '__name__', self.fn)}, reduction={self.reduction!r}"

    def forward(self, outputs: Tensor, *targets: Any) -> Tensor:
        """Call the function."""
        return self.fn(outputs, *targets)


def checked_reduction(reduction: str) -> str:
    """The reduction, if it is one that gives a scalar."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", not {reduction!r}')
    return reduction


@register_loss(Loss)
class CustomGeometry(Geometry):
    """The geometry of a :class:`Loss`, by automatic differentiation."""

    criterion: Loss

    def hessian(self, outputs: Tensor, targets: Any) -> PerDatum:
        H, _ = output_derivatives(self, outputs, targets)
        if H.ndim == 2:
            return Diagonal(H.clamp(min=0), outputs.shape[0])
        return Dense(psd_part(H))

    def sample(
        self, outputs: Tensor, targets: Any, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "n s d"]:
        del targets
        if self.criterion.sample is None:
            raise UnsupportedLossError(
                f"KFAC needs targets drawn from the model's own distribution, and "
                f"{self.criterion} does not say what that is. Give it one, "
                "gn.Loss(fn, sample=lambda outputs, generator: …), or use method='kflr' or "
                "'kfra', which need no model distribution."
            )
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
