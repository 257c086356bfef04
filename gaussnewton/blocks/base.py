"""What every block can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.errors import FactorisationError

Inversion = Literal["exact", "factored"]
"""How k is added before inverting: to the block itself, or shared out to its factors."""


class Inverse(ABC):
    """The inverse of a damped block, factorised once and used many times."""

    @abstractmethod
    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """(C + k I)⁻¹ vec(V), as a matrix."""

    @abstractmethod
    def logdet(self) -> Float[Tensor, ""]:
        """log det (C + k I)."""

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        """A draw from the Gaussian of covariance (C + k I)⁻¹."""

    def multiplied_out(self, choices: Sequence[torch.dtype] = ()) -> Inverse:
        """The same in the form that solves fastest, where making it pays off after a few solves.

        Args:
            choices: in which precisions it may be applied where they are precise enough, the
                first one that is; in its own otherwise.
        """
        del choices
        return self

    @property
    def condition(self) -> float:
        """κ of the factor that rounding does most harm to (:mod:`gaussnewton.precision`).

        1, that of the identity, where it is not looked at.
        """
        return 1.0


class Block(ABC):
    """A symmetric matrix C that acts on the gradient of a layer's matrix ``[W | b]``."""

    rows: int
    columns: int

    @abstractmethod
    def __matmul__(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """C vec(V), as a matrix."""

    @abstractmethod
    def invert(self, damping: float, inversion: Inversion = "exact") -> Inverse:
        """The inverse of C + damping · I."""

    @abstractmethod
    def dense(self) -> Float[Tensor, "size size"]:
        """C written out; vec goes column by column."""

    @abstractmethod
    def trace(self) -> Float[Tensor, ""]:
        """The trace of C."""

    @abstractmethod
    def scaled(self, factor: float) -> Block:
        """factor · C."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """What it is, in words."""

    @abstractmethod
    def numbers(self) -> dict[str, Tensor]:
        """The tensors it is made of."""

    @abstractmethod
    def with_numbers(self, numbers: Mapping[str, Tensor]) -> Block:
        """A block of this kind and size of other tensors."""

    def double(self) -> Block:
        """C in float64."""
        return self.to(torch.float64)

    def to(self, dtype: torch.dtype) -> Block:
        """C in another precision."""
        return self.with_numbers({key: part.to(dtype) for key, part in self.numbers().items()})

    @abstractmethod
    def average(self, newer: Any, decay: float) -> Block:
        """The running average decay · self + (1 − decay) · newer."""

    def absorb(self, newer: Any, decay: float) -> Block:
        """The same, in this block's own tensors where it can be; do not use the block after it."""
        return self.average(newer, decay)

    @abstractmethod
    def merge(self, other: Any, data: tuple[int, int], shares: tuple[float, float]) -> Block:
        """The block of two batches together.

        Args:
            other: the block of the other batch.
            data: how many data each batch has.
            shares: the weight of each batch's loss in the loss of both together: (1, 1)
                for sums, fractions that add up to one for means.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and strings, from which :func:`load_block` makes the block again."""

    def solve(
        self,
        V: Float[Tensor, "rows columns"],
        damping: float,
        inversion: Inversion = "exact",
    ) -> Float[Tensor, "rows columns"]:
        """(C + damping · I)⁻¹ vec(V), as a matrix."""
        return self.invert(damping, inversion).solve(V)

    def logdet(self, damping: float = 0.0, inversion: Inversion = "exact") -> Float[Tensor, ""]:
        """log det (C + damping · I)."""
        return self.invert(damping, inversion).logdet()


def cholesky(matrix: Float[Tensor, "d d"], what: str) -> Float[Tensor, "d d"]:
    """The lower Cholesky factor, or an error that says which matrix has none."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        raise FactorisationError(
            f"{what} is not positive definite: its Cholesky factorisation failed at row "
            f"{int(failed)} of {matrix.shape[0]}. Use more damping."
        )
    return factor
