"""What every form of a per-datum matrix can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from gaussnewton.tiles import tiled

if TYPE_CHECKING:
    from gaussnewton.perdatum.roots import Roots

Pullback = Callable[[Tensor], Tensor]
"""``[k, n, d'] -> [k, n, d]``: the transposed Jacobian of each datum, on k rows at once."""


class PerDatum(ABC):
    """N positive semi-definite matrices M_n of size d × d, one for each datum.

    Going back through a function (``scale``, ``pull_through``) may use the memory of the matrix:
    use only what is returned. Going back through a layer (``pull``) leaves it as it was.
    """

    data: int
    width: int

    @abstractmethod
    def total(self) -> Float[Tensor, "d d"]:
        """The sum of all M_n."""

    def tiled_total(self, largest: int | None) -> Float[Tensor, "d b"]:
        """The tiles of that sum; a form that can have them without the rest should."""
        return tiled(self.total(), largest)

    @abstractmethod
    def product(self, v: Float[Tensor, "*k n d"]) -> Float[Tensor, "*k n d"]:
        """M_n v_n for each datum."""

    @abstractmethod
    def scale(self, slope: Float[Tensor, "n d"]) -> PerDatum:
        """B_n M_n B_n with B_n = diag(slope_n): back through an elementwise function."""

    @abstractmethod
    def pull(self, W: Float[Tensor, "d e"]) -> PerDatum:
        """Wᵀ M_n W: back through a linear layer."""

    @abstractmethod
    def roots(self) -> Roots:
        """The same matrices as M_n = R_nᵀ R_n."""

    @abstractmethod
    def select(self, part: slice) -> PerDatum:
        """The matrices of some of the data."""

    @abstractmethod
    def widened(self) -> PerDatum:
        """The same matrices in the precision of factors."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """A bound on the rank of each M_n."""

    def pull_through(self, pullback: Pullback) -> PerDatum:
        """J_nᵀ M_n J_n for any function that treats each datum by itself."""
        return self.roots().pull_through(pullback)

    def dense(self) -> Float[Tensor, "n d d"]:
        """All M_n, written out."""
        R = self.roots().rows
        return R.mT @ R

    def diagonal_in(self, U: Float[Tensor, "d e"]) -> Float[Tensor, "n e"]:
        """The diagonal of Uᵀ M_n U for each datum."""
        R = self.roots().rows
        return (R.flatten(0, 1) @ U).square_().unflatten(0, R.shape[:2]).sum(1)

    def quadratic(self, v: Float[Tensor, "n d"]) -> Float[Tensor, ""]:
        """The sum of v_nᵀ M_n v_n."""
        return (v * self.product(v)).sum()
