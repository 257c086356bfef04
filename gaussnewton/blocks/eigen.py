"""A Kronecker block with eigenvalues of its own (EKFAC, George et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks.base import Block, Inverse, Inversion
from gaussnewton.blocks.kronecker import EigenInverse, eigh
from gaussnewton.errors import FactorisationError


@dataclass(frozen=True, eq=False)
class EigenBlock(Block):
    r"""C = (U_Q ⊗ U_G) diag(vec(Λ)) (U_Q ⊗ U_G)ᵀ, in the eigenvectors of Q and G.

    With Λ_ij = g_i q_j, the products of both factors' eigenvalues, it is Q ⊗ G. With the
    diagonal of a layer's exact block in that basis no other Λ is nearer to the exact block in
    the Frobenius norm. Damping is exact and costs nothing: Λ + k.

    The basis is part of the block and not computed from Q and G when it is wanted: Λ belongs
    to these very vectors, and those of equal eigenvalues are not unique.

    Attributes:
        Q: as in :class:`~gaussnewton.KroneckerBlock`; only averages need it.
        G: likewise.
        U_Q: the eigenvectors of Q, in columns.
        U_G: the eigenvectors of G.
        values: Λ, in the shape of the layer's matrix; it carries the scale of the loss.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, criterion = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
        >>> batch = torch.randn(8, 3), torch.randint(2, (8,))
        >>> corrected = gn.KFLR(eigenvalues="corrected")
        >>> block = gn.curvature(model, criterion, batch, method=corrected)[""]
        >>> block.kind, block.values.shape
        ('Kronecker, corrected eigenvalues', torch.Size([2, 4]))
        >>> exact = gn.exact.gauss_newton_blocks(model, criterion, batch)[""]
        >>> torch.allclose(block.trace(), exact.trace())
        True
    """

    Q: Float[Tensor, "columns columns"]
    G: Float[Tensor, "rows rows"]
    U_Q: Float[Tensor, "columns columns"]
    U_G: Float[Tensor, "rows rows"]
    values: Float[Tensor, "rows columns"]

    @classmethod
    def of(cls, Q: Float[Tensor, "columns columns"], G: Float[Tensor, "rows rows"]) -> EigenBlock:
        """Q ⊗ G in its eigenvectors, with the factors' own eigenvalues."""
        (q, U_Q), (g, U_G) = eigh(Q, "Q"), eigh(G, "G")
        return cls(Q, G, U_Q, U_G, torch.outer(g.clamp(min=0), q.clamp(min=0)))

    def with_values(self, values: Float[Tensor, "rows columns"]) -> EigenBlock:
        """Other eigenvalues in the same basis."""
        return EigenBlock(self.Q, self.G, self.U_Q, self.U_G, values)

    @property
    def rows(self) -> int:  # type: ignore[override]
        """The number of outputs of the layer."""
        return self.G.shape[0]

    @property
    def columns(self) -> int:  # type: ignore[override]
        """The number of inputs of the layer, the bias included."""
        return self.Q.shape[0]

    def __matmul__(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        inner = self.values * (self.U_G.T @ V.to(self.values.dtype) @ self.U_Q)
        return self.U_G @ inner @ self.U_Q.T

    def invert(self, damping: float, inversion: Inversion = "exact") -> Inverse:
        """The inverse of C + damping · I, exactly: the eigenvectors are there already."""
        del inversion
        if damping < 0:
            raise ValueError(f"damping must not be negative, got {damping}")
        damped = self.values + damping
        if not bool((damped > 0).all()):
            raise FactorisationError(
                "the block is singular and there is no damping: give a damping above zero."
            )
        return EigenInverse(self.U_Q, self.U_G, damped)

    def dense(self) -> Float[Tensor, "size size"]:
        U = torch.kron(self.U_Q, self.U_G)
        return (U * self.values.T.reshape(-1)) @ U.T

    def trace(self) -> Float[Tensor, ""]:
        return self.values.sum()

    def diagonal_in(
        self, U_Q: Float[Tensor, "columns columns"], U_G: Float[Tensor, "rows rows"]
    ) -> Float[Tensor, "rows columns"]:
        """The diagonal of C in another basis: (B_G ∘ B_G) Λ (B_Q ∘ B_Q)ᵀ with B = U'ᵀ U."""
        B_Q, B_G = U_Q.T @ self.U_Q, U_G.T @ self.U_G
        return B_G.square() @ self.values @ B_Q.square().T

    def scaled(self, factor: float) -> EigenBlock:
        return EigenBlock(self.Q, self.G * factor, self.U_Q, self.U_G, self.values * factor)

    @property
    def kind(self) -> str:
        return "Kronecker, corrected eigenvalues"

    def numbers(self) -> dict[str, Tensor]:
        return {
            "Q": self.Q,
            "G": self.G,
            "U_Q": self.U_Q,
            "U_G": self.U_G,
            "values": self.values,
        }

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> EigenBlock:
        return EigenBlock(**{key: numbers[key] for key in ("Q", "G", "U_Q", "U_G", "values")})

    def average(self, newer: EigenBlock, decay: float) -> EigenBlock:
        """The averages of Q and G give the basis, in which both blocks' diagonals are averaged."""
        Q, G = newer.Q.lerp(self.Q, decay), newer.G.lerp(self.G, decay)
        return self._together(newer, Q, G, (decay, 1 - decay))

    def merge(
        self, other: EigenBlock, data: tuple[int, int], shares: tuple[float, float]
    ) -> EigenBlock:
        """As for averages. The off-diagonal part of each batch's exact block is not known any more.

        So Λ of several batches is not quite that of all their data at once.
        """
        mine, theirs = data
        Q = (self.Q * mine + other.Q * theirs) / (mine + theirs)
        return self._together(other, Q, self.G * shares[0] + other.G * shares[1], shares)

    def _together(
        self, other: EigenBlock, Q: Tensor, G: Tensor, shares: tuple[float, float]
    ) -> EigenBlock:
        basis = EigenBlock.of(Q, G)
        mine, theirs = (block.diagonal_in(basis.U_Q, basis.U_G) for block in (self, other))
        return basis.with_values(mine * shares[0] + theirs * shares[1])

    def state_dict(self) -> dict[str, Any]:
        return {"type": "eigen", **self.numbers()}
