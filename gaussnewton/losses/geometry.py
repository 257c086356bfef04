"""What every loss tells the curvature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import BatchError, UnsupportedLossError
from gaussnewton.perdatum import PerDatum


class Geometry(ABC):
    """The Hessian of a criterion at the outputs of each datum, and its model distribution.

    All methods take the outputs as the criterion got them, the first dimension counting
    data, and answer for the outputs flattened to ``[n, d]``. Everything carries the scale
    of the scalar that the criterion returns: with reduction "mean" a Hessian is small as
    1/n. For reduction "none" the scalar is the sum, as in ``loss.sum().backward()``.
    """

    nonnegative: ClassVar[bool] = False
    """Whether the criterion is known to be zero at the least."""

    def __init__(self, criterion: nn.Module) -> None:
        self.criterion = criterion

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.criterion})"

    @property
    def averages(self) -> bool:
        """Whether the scalar is a mean over data rather than a sum."""
        return getattr(self.criterion, "reduction", "mean") == "mean"

    def bind(self, outputs: Any, *targets: Any) -> tuple[Tensor, Any]:
        """From the arguments of a call to (outputs, targets), the outputs one tensor."""
        if not isinstance(outputs, Tensor):
            raise BatchError(
                f"{type(self.criterion).__name__} got outputs of type "
                f"{type(outputs).__name__}; curvature needs one tensor whose first dimension "
                "counts data. Say which it is: outputs=lambda returned: …."
            )
        return outputs, targets[0] if len(targets) == 1 else targets

    def value(self, outputs: Tensor, targets: Any) -> Tensor:
        """The scalar, from outputs and targets as :meth:`bind` returns them."""
        arguments = targets if isinstance(targets, tuple) else (targets,)
        # Past the hooks: what is looked at here is not a call by the user.
        loss = self.criterion.forward(outputs, *arguments)
        if getattr(self.criterion, "reduction", None) == "none":
            loss = loss.sum()
        if loss.ndim:
            raise UnsupportedLossError(
                f"{self.criterion} returned a tensor of shape {tuple(loss.shape)}; curvature is "
                "that of a scalar: take its mean or sum in the function."
            )
        return loss

    def check(self, outputs: Tensor, targets: Any) -> None:
        """Raise :class:`BatchError` where outputs and targets do not fit."""
        del targets
        if outputs.ndim < 2:
            raise BatchError(
                f"outputs have shape {tuple(outputs.shape)}; curvature needs a batch dimension "
                "and then the outputs of each datum, e.g. [n, 1] for one output."
            )
        if outputs.shape[0] == 0 or outputs.numel() == 0:
            raise BatchError(
                f"the batch is empty: outputs have shape {tuple(outputs.shape)}. "
                "Skip empty batches before asking for curvature."
            )

    def weight(self, outputs: Tensor, targets: Any) -> float:  # noqa: ARG002
        """What the mean divides by: the weight of this batch in a mean over batches."""
        return float(outputs.shape[0])

    @abstractmethod
    def hessian(self, outputs: Tensor, targets: Any) -> PerDatum:
        """𝓗_L of each datum, or its positive semi-definite part."""

    @abstractmethod
    def sample(
        self, outputs: Tensor, targets: Any, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "n s d"]:
        """Score vectors of targets drawn from the model distribution.

        They are scaled so that the sum over s of s sᵀ has the Fisher matrix of the
        scalar at the outputs as its expectation, which is 𝓗_L for exponential families.
        """


class ElementwiseGeometry(Geometry):
    """A loss that is a sum, or mean, over output elements: 𝓗_L is diagonal."""

    def bind(self, outputs: Any, *targets: Any) -> tuple[Tensor, Any]:
        outputs, bound = super().bind(outputs, *targets)
        weight = getattr(self.criterion, "weight", None)
        single = outputs.ndim == 1 and isinstance(bound, Tensor) and bound.shape == outputs.shape
        if single and (weight is None or weight.numel() == 1):  # one output a datum
            return outputs.unsqueeze(1), bound.unsqueeze(1)
        return outputs, bound

    def check(self, outputs: Tensor, targets: Any) -> None:
        super().check(outputs, targets)
        if not isinstance(targets, Tensor) or targets.shape != outputs.shape:
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise BatchError(
                f"{type(self.criterion).__name__}: outputs have shape {tuple(outputs.shape)} but "
                f"targets {shape}. They must be equal; torch would broadcast them and compare "
                "each output with the wrong target."
            )

    def factor(self, outputs: Tensor) -> float:
        """The weight of one element in the scalar."""
        return 1.0 / outputs.numel() if self.averages else 1.0
