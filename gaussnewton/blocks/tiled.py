"""A Kronecker block whose factors are cut to blocks of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks.base import Block, Inverse, Inversion
from gaussnewton.blocks.kronecker import KroneckerBlock, eigh
from gaussnewton.errors import FactorisationError
from gaussnewton.tiles import (
    diagonal_of,
    each_tile,
    plus_diagonal,
    stacks,
    times,
    untiled,
    with_tiles,
)


@dataclass(frozen=True, eq=False)
class TiledBlock(Block):
    """C = Q ⊗ G with block-diagonal Q and G: what a layer gets that is wider than a limit.

    The layer's matrix falls into tiles, each with the Kronecker product of its own part of Q and
    its own part of G; what two tiles have in common is left out. With tiles of b columns and rows,
    d³ to invert a factor becomes d b², and d² to keep it becomes d b.

    Attributes:
        Q: the tiles of the average of a aᵀ, as :mod:`gaussnewton.tiles` stores them.
        G: the tiles of the pre-activation curvature; it carries the scale of the loss.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, criterion = torch.nn.Linear(6, 2), torch.nn.MSELoss()
        >>> batch = torch.randn(8, 6), torch.randn(8, 2)
        >>> block = gn.curvature(model, criterion, batch, method=gn.KFLR(largest=4))[""]
        >>> block.kind, block.Q.shape, block.G.shape
        ('Kronecker in tiles, G 2 and Q 4 wide', torch.Size([7, 4]), torch.Size([2, 2]))
        >>> whole = gn.curvature(model, criterion, batch)[""]
        >>> torch.allclose(block.trace(), whole.trace())
        True
    """

    Q: Float[Tensor, "columns q"]
    G: Float[Tensor, "rows g"]

    @property
    def rows(self) -> int:  # type: ignore[override]
        """The number of outputs of the layer."""
        return self.G.shape[0]

    @property
    def columns(self) -> int:  # type: ignore[override]
        """The number of inputs of the layer, the bias included."""
        return self.Q.shape[0]

    def __matmul__(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return times(self.Q, times(self.G, V.to(self.G.dtype)).T).T

    def dense(self) -> Float[Tensor, "size size"]:
        return torch.kron(untiled(self.Q), untiled(self.G))

    def trace(self) -> Float[Tensor, ""]:
        return diagonal_of(self.Q).sum() * diagonal_of(self.G).sum()

    def omega(self) -> Float[Tensor, ""]:
        """As in :meth:`gaussnewton.KroneckerBlock.omega`; one for all tiles.

        One for each pair of tiles would take as many factorisations as there are pairs.
        """
        q, g = diagonal_of(self.Q).mean(), diagonal_of(self.G).mean()
        usable = (q > 0) & (g > 0)
        return torch.where(usable, q / torch.where(usable, g, 1.0), 1.0).sqrt()

    def invert(self, damping: float, inversion: Inversion = "exact") -> Inverse:
        """The inverse of C + damping · I, or of the damped factors; tile by tile."""
        if damping < 0:
            raise ValueError(f"damping must not be negative, got {damping}")
        if inversion == "exact":
            return TiledEigenInverse.of(self, damping)
        if inversion == "factored":
            return TiledFactoredInverse.of(self, damping)
        raise ValueError(f'inversion must be "exact" or "factored", not {inversion!r}')

    def scaled(self, factor: float) -> TiledBlock:
        return TiledBlock(self.Q, self.G * factor)

    @property
    def kind(self) -> str:
        return f"Kronecker in tiles, G {self.G.shape[1]} and Q {self.Q.shape[1]} wide"

    def numbers(self) -> dict[str, Tensor]:
        return {"Q": self.Q, "G": self.G}

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> TiledBlock:
        return TiledBlock(numbers["Q"], numbers["G"])

    def average(self, newer: TiledBlock, decay: float) -> TiledBlock:
        return TiledBlock(newer.Q.lerp(self.Q, decay), newer.G.lerp(self.G, decay))

    def absorb(self, newer: TiledBlock, decay: float) -> TiledBlock:
        self.Q.lerp_(newer.Q, 1 - decay)
        self.G.lerp_(newer.G, 1 - decay)
        return self

    def merge(
        self, other: TiledBlock, data: tuple[int, int], shares: tuple[float, float]
    ) -> TiledBlock:
        mine, theirs = data
        Q = (self.Q * mine + other.Q * theirs) / (mine + theirs)
        return TiledBlock(Q, self.G * shares[0] + other.G * shares[1])

    def state_dict(self) -> dict[str, Any]:
        return {"type": "tiled", "Q": self.Q, "G": self.G}


@dataclass(frozen=True, eq=False)
class TiledFactoredInverse(Inverse):
    """(Q + ω√k I)⁻¹ ⊗ (G + ω⁻¹√k I)⁻¹, by the Cholesky factors of all tiles."""

    L_Q: Float[Tensor, "columns q"]
    L_G: Float[Tensor, "rows g"]

    @classmethod
    def of(cls, block: TiledBlock, damping: float) -> TiledFactoredInverse:
        """Factorise the tiles of the damped factors."""
        omega, k = block.omega(), damping**0.5
        return cls(
            _cholesky(plus_diagonal(block.Q, omega * k), "Q"),
            _cholesky(plus_diagonal(block.G, k / omega), "G"),
        )

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        half = _cholesky_solve(self.L_G, V.to(self.L_G.dtype))
        return _cholesky_solve(self.L_Q, half.T).T

    def logdet(self) -> Float[Tensor, ""]:
        q, g = (diagonal_of(L).log().sum() for L in (self.L_Q, self.L_G))
        return 2 * (len(self.L_G) * q + len(self.L_Q) * g)

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        Z = _noise(self.L_G, self.L_Q, generator)
        half = with_tiles(_solve_transposed, self.L_G, Z)
        return with_tiles(_solve_transposed, self.L_Q, half.T).T


@dataclass(frozen=True, eq=False)
class TiledEigenInverse(Inverse):
    """(Q ⊗ G + k I)⁻¹ in the eigenvectors of the tiles of both factors."""

    U_Q: Float[Tensor, "columns q"]
    U_G: Float[Tensor, "rows g"]
    values: Float[Tensor, "rows columns"]

    @classmethod
    def of(cls, block: TiledBlock, damping: float) -> TiledEigenInverse:
        """Decompose every tile; rounding below zero counts as zero."""
        q, U_Q = _eigh(block.Q, "Q")
        g, U_G = _eigh(block.G, "G")
        values = torch.outer(g.clamp(min=0), q.clamp(min=0)) + damping
        if not bool((values > 0).all()):
            raise FactorisationError(
                "the block is singular and there is no damping: give a damping above zero."
            )
        return cls(U_Q, U_G, values)

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        half = with_tiles(_transposed_times, self.U_G, V.to(self.values.dtype))
        inner = with_tiles(_transposed_times, self.U_Q, half.T).T / self.values
        return self._back(inner)

    def logdet(self) -> Float[Tensor, ""]:
        return self.values.log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        return self._back(_noise(self.U_G, self.U_Q, generator) / self.values.sqrt())

    def _back(self, inner: Tensor) -> Tensor:
        return times(self.U_Q, times(self.U_G, inner).T).T


def of_factors(Q: Float[Tensor, "c q"], G: Float[Tensor, "r g"]) -> KroneckerBlock | TiledBlock:
    """The block of two factors: plain where neither is cut."""
    whole = Q.shape[0] == Q.shape[1] and G.shape[0] == G.shape[1]
    return KroneckerBlock(Q, G) if whole else TiledBlock(Q, G)


def _cholesky(T: Float[Tensor, "d b"], what: str) -> Float[Tensor, "d b"]:
    if T.shape[1] == 1 and bool((T > 0).all()):
        return T.sqrt()

    def factor(tiles: Float[Tensor, "p s s"]) -> Float[Tensor, "p s s"]:
        found, failed = torch.linalg.cholesky_ex(tiles)
        if bool(failed.any()):
            raise FactorisationError(
                f"a tile of the damped factor {what} is not positive definite. Use more damping."
            )
        return found

    return each_tile(factor, T)


def _cholesky_solve(L: Float[Tensor, "d b"], V: Float[Tensor, "d m"]) -> Float[Tensor, "d m"]:
    if L.shape[1] == 1:
        return V / L.square()
    return with_tiles(lambda tiles, rows: torch.cholesky_solve(rows, tiles), L, V)


def _solve_transposed(tiles: Float[Tensor, "p s s"], rows: Float[Tensor, "p s m"]) -> Tensor:
    return torch.linalg.solve_triangular(tiles.mT, rows, upper=True)


def _transposed_times(tiles: Float[Tensor, "p s s"], rows: Float[Tensor, "p s m"]) -> Tensor:
    return tiles.mT @ rows


def _eigh(T: Float[Tensor, "d b"], what: str) -> tuple[Float[Tensor, " d"], Float[Tensor, "d b"]]:
    """Eigenvalues of all tiles, and their vectors, tiled."""
    if T.shape[1] == 1:
        return T[:, 0], torch.ones_like(T)
    values, vectors = [], []
    for _, tiles in stacks(T):
        for tile in tiles:
            found, U = eigh(tile, f"{what}, in one of its tiles,")
            values.append(found)
            vectors.append(torch.nn.functional.pad(U, (0, T.shape[1] - len(U))))
    return torch.cat(values), torch.cat(vectors)


def _noise(left: Tensor, right: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(
        len(left), len(right), generator=generator, dtype=left.dtype, device=left.device
    )
