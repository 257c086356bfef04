"""The Kronecker-factored block of KFLR, KFRA and KFAC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks.base import Block, Inverse, Inversion, cholesky
from gaussnewton.errors import FactorisationError
from gaussnewton.precision import condition, fitted, widened


@dataclass(frozen=True, eq=False)
class KroneckerBlock(Block):
    r"""C = Q ⊗ G (eq. gn:approx).

    With V a matrix ``[out, in + 1]`` and vec column by column,
    :math:`(Q ⊗ G)\,\mathrm{vec}(V) = \mathrm{vec}(G V Q)`.

    Attributes:
        Q: the average of a aᵀ over data, ``[in + 1, in + 1]``.
        G: the pre-activation curvature, ``[out, out]``; it carries the scale of the loss.

    Example:
        >>> import torch, gaussnewton as gn
        >>> block = gn.KroneckerBlock(Q=2 * torch.eye(3), G=torch.eye(2))
        >>> V = torch.ones(2, 3)
        >>> torch.equal(block @ V, 2 * V), block.dense().shape, block.trace().item()
        (True, torch.Size([6, 6]), 12.0)
        >>> torch.allclose(block.solve(V, damping=2.0), V / 4)
        True
    """

    Q: Float[Tensor, "columns columns"]
    G: Float[Tensor, "rows rows"]

    @property
    def rows(self) -> int:  # type: ignore[override]
        """The number of outputs of the layer."""
        return self.G.shape[0]

    @property
    def columns(self) -> int:  # type: ignore[override]
        """The number of inputs of the layer, the bias included."""
        return self.Q.shape[0]

    def __matmul__(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return self.G @ V.to(self.G.dtype) @ self.Q

    def dense(self) -> Float[Tensor, "size size"]:
        return torch.kron(self.Q, self.G)

    def trace(self) -> Float[Tensor, ""]:
        return self.Q.trace() * self.G.trace()

    def omega(self) -> Float[Tensor, ""]:
        """ω = √(tr(Q) dim(G) / (tr(G) dim(Q))), which shares damping out to the factors.

        Where either trace is zero there is nothing to balance and ω is 1.
        """
        q, g = self.Q.trace() / self.columns, self.G.trace() / self.rows
        usable = (q > 0) & (g > 0)
        return torch.where(usable, q / torch.where(usable, g, 1.0), 1.0).sqrt()

    def invert(self, damping: float, inversion: Inversion = "exact") -> Inverse:
        """The inverse of C + damping · I (appendix B.1).

        Args:
            damping: k = γ + η.
            inversion: "exact", by two eigendecompositions; or "factored", which inverts
                (Q + ω√k I) ⊗ (G + ω⁻¹√k I) instead and is cheaper (eq. approx:pi).
        """
        if damping < 0:
            raise ValueError(f"damping must not be negative, got {damping}")
        if inversion == "exact":
            return EigenInverse.of(self, damping)
        if inversion == "factored":
            return FactoredInverse.of(self, damping)
        raise ValueError(f'inversion must be "exact" or "factored", not {inversion!r}')

    def scaled(self, factor: float) -> KroneckerBlock:
        return KroneckerBlock(self.Q, self.G * factor)

    @property
    def kind(self) -> str:
        return "Kronecker"

    def numbers(self) -> dict[str, Tensor]:
        return {"Q": self.Q, "G": self.G}

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> KroneckerBlock:
        return KroneckerBlock(numbers["Q"], numbers["G"])

    def average(self, newer: KroneckerBlock, decay: float) -> KroneckerBlock:
        return KroneckerBlock(
            newer.Q.lerp(self.Q, decay),
            newer.G.lerp(self.G, decay),
        )

    def absorb(self, newer: KroneckerBlock, decay: float) -> KroneckerBlock:
        self.Q.lerp_(newer.Q, 1 - decay)
        self.G.lerp_(newer.G, 1 - decay)
        return self

    def merge(
        self, other: KroneckerBlock, data: tuple[int, int], shares: tuple[float, float]
    ) -> KroneckerBlock:
        mine, theirs = data
        Q = (self.Q * mine + other.Q * theirs) / (mine + theirs)
        return KroneckerBlock(Q, self.G * shares[0] + other.G * shares[1])

    def state_dict(self) -> dict[str, Any]:
        return {"type": "kronecker", "Q": self.Q, "G": self.G}


@dataclass(frozen=True, eq=False)
class FactoredInverse(Inverse):
    """(Q + ω√k I)⁻¹ ⊗ (G + ω⁻¹√k I)⁻¹, by two Cholesky factors."""

    L_Q: Float[Tensor, "columns columns"]
    L_G: Float[Tensor, "rows rows"]

    @classmethod
    def of(cls, block: KroneckerBlock, damping: float) -> FactoredInverse:
        """Factorise the damped factors of a block."""
        omega, k = block.omega(), damping**0.5
        return cls(
            cholesky(_plus(block.Q, omega * k), "the damped factor Q"),
            cholesky(_plus(block.G, k / omega), "the damped factor G"),
        )

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        half = torch.cholesky_solve(V.to(self.L_G.dtype), self.L_G)
        return torch.cholesky_solve(half.T, self.L_Q).T

    def logdet(self) -> Float[Tensor, ""]:
        rows, columns = self.L_G.shape[0], self.L_Q.shape[0]
        return 2 * (rows * _log_diagonal(self.L_Q) + columns * _log_diagonal(self.L_G))

    def multiplied_out(self, choices: Sequence[torch.dtype] = ()) -> MultipliedInverse:
        inverses = [torch.cholesky_inverse(L) for L in (self.L_Q, self.L_G)]
        kappas = [
            condition(L.square().sum() / len(L), inverse)
            for L, inverse in zip((self.L_Q, self.L_G), inverses, strict=True)
        ]
        Q, G = (fitted(M, kappa, choices) for M, kappa in zip(inverses, kappas, strict=True))
        return MultipliedInverse(Q, G, max(kappas))

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        Z = _noise(self.L_G, self.L_Q, generator)
        half = torch.linalg.solve_triangular(self.L_G.T, Z, upper=True)
        return torch.linalg.solve_triangular(self.L_Q, half, upper=False, left=False)


@dataclass(frozen=True, eq=False)
class MultipliedInverse(Inverse):
    """A Kronecker product of two inverses written out: faster to apply than triangular solves.

    Each is applied in its own precision.
    """

    Q_inverse: Float[Tensor, "columns columns"]
    G_inverse: Float[Tensor, "rows rows"]
    kappa: float = 1.0

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        half = self.G_inverse @ V.to(self.G_inverse.dtype)
        return widened(half.to(self.Q_inverse.dtype) @ self.Q_inverse)

    @property
    def condition(self) -> float:
        return self.kappa

    def logdet(self) -> Float[Tensor, ""]:
        Q, G = widened(self.Q_inverse), widened(self.G_inverse)
        return -(G.shape[0] * Q.logdet() + Q.shape[0] * G.logdet())

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        dtype = torch.promote_types(widened(self.Q_inverse).dtype, widened(self.G_inverse).dtype)
        L_Q, L_G = (
            cholesky(part.to(dtype), "the inverse of a damped factor")
            for part in (self.Q_inverse, self.G_inverse)
        )
        return L_G @ _noise(L_G, L_Q, generator) @ L_Q.T


@dataclass(frozen=True, eq=False)
class EigenInverse(Inverse):
    """(Q ⊗ G + k I)⁻¹ in the eigenvectors of both factors."""

    U_Q: Float[Tensor, "columns columns"]
    U_G: Float[Tensor, "rows rows"]
    values: Float[Tensor, "rows columns"]

    @classmethod
    def of(cls, block: KroneckerBlock, damping: float) -> EigenInverse:
        """Decompose both factors of a block; rounding below zero counts as zero."""
        q, U_Q = eigh(block.Q, "Q")
        g, U_G = eigh(block.G, "G")
        values = torch.outer(g.clamp(min=0), q.clamp(min=0)) + damping
        if not bool((values > 0).all()):
            raise FactorisationError(
                "the block is singular and there is no damping: give a damping above zero."
            )
        return cls(U_Q, U_G, values)

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        inner = (self.U_G.T @ V.to(self.values.dtype) @ self.U_Q) / self.values
        return self.U_G @ inner @ self.U_Q.T

    def logdet(self) -> Float[Tensor, ""]:
        return self.values.log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        Z = _noise(self.U_G, self.U_Q, generator)
        return self.U_G @ (Z / self.values.sqrt()) @ self.U_Q.T


def eigh(
    matrix: Float[Tensor, "d d"], what: str
) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Eigenvalues and vectors, by way of float64 where LAPACK gives up in float32.

    It does for some finite matrices with many eigenvalues of zero, such as Q of images that
    share a blank border.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # torch's LinAlgError is one
        try:
            values, vectors = torch.linalg.eigh(matrix.double())
        except RuntimeError as error:
            raise FactorisationError(
                f"the factor {what} has no eigendecomposition, not even in float64: {error}"
            ) from error
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def _plus(matrix: Float[Tensor, "d d"], amount: Tensor) -> Float[Tensor, "d d"]:
    result = matrix.clone()
    result.diagonal().add_(amount)
    return result


def _log_diagonal(L: Float[Tensor, "d d"]) -> Float[Tensor, ""]:
    return L.diagonal().log().sum()


def _noise(left: Tensor, right: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(
        left.shape[0],
        right.shape[0],
        generator=generator,
        dtype=left.dtype,
        device=left.device,
    )
