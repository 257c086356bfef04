"""Kronecker Factored Recursive Approximation (section 3.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from gaussnewton.blocks import Block
from gaussnewton.chain import Chain
from gaussnewton.estimators.base import (
    Estimator,
    Exactness,
    check_largest,
    kronecker_block,
)
from gaussnewton.estimators.eigenvalues import Eigenvalues, check_eigenvalues
from gaussnewton.estimators.expected.blocks import expected_blocks, refuse_unknown
from gaussnewton.estimators.expected.recursion import expected_matrices
from gaussnewton.estimators.sharing import Sharings, check_sharing
from gaussnewton.network import Network
from gaussnewton.precision import check_precision


@dataclass(frozen=True)
class KFRA(Estimator):
    r"""E[Q] ⊗ Ĝ with the expected matrix passed through the network.

    .. math:: Ĝ_λ = E[B_λ W_{λ+1}^T Ĝ_{λ+1} W_{λ+1} B_λ]
                  = (W_{λ+1}^T Ĝ_{λ+1} W_{λ+1}) ⊙ E[f_λ' {f_λ'}^T]

    It starts from the exact E[𝓗_L], is exact for one datum, and costs the same for any
    number of outputs as they are wide.

    In a network that is no chain the expected matrix of all tensors reached so far goes back
    through one operation after another. Feature maps and sequences are kept as channels, all of
    their positions being taken for alike; docs/kfra.md says what is exact and what is not.

    Args:
        sharing: in such a network, as in :class:`~gaussnewton.KFLR`.
        whole: in such a network, feature maps and sequences of up to so many entries a datum are
            kept with all of their positions. It costs the square of that.
        eigenvalues: "factored". There are no "corrected" ones, as :class:`~gaussnewton.KFLR` has,
            because nothing is known of single data.
        largest: as in :class:`~gaussnewton.KFLR`. In a chain the recursion goes on from the tiles
            alone, so that it costs d² times the limit and not d³; the layers before a wide one then
            miss what its tiles had in common. In a network it goes on from whole matrices, and
            the blocks are cut.
        precision: as in :class:`~gaussnewton.KFLR`.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(),
        ...                             torch.nn.Linear(3, 2)).double()
        >>> batch = torch.randn(1, 4).double(), torch.randn(1, 2).double()
        >>> kfra, kflr = (gn.curvature(model, torch.nn.MSELoss(), batch, method=method)
        ...               for method in ("kfra", "kflr"))
        >>> torch.allclose(kfra["0"].G, kflr["0"].G)
        True
    """

    sharing: Sharings = "expand"
    whole: int = 0
    eigenvalues: Eigenvalues = "factored"
    largest: int | None = None
    precision: torch.dtype = torch.float32

    promise: ClassVar[Exactness] = "recursion"

    def __post_init__(self) -> None:
        check_eigenvalues(self.eigenvalues)
        check_sharing(self.sharing)
        check_largest(self.largest)
        check_precision(self.precision)
        if self.eigenvalues == "corrected":
            raise ValueError(
                "KFRA has no corrected eigenvalues: it sends one expected matrix back, and they "
                "need the matrix of each datum. Use gn.KFLR(eigenvalues='corrected') or "
                "gn.KFAC(eigenvalues='corrected')."
            )

    def estimate(self, chain: Chain) -> Iterator[tuple[str, Block]]:
        """Ĝ_λ from the last layer to the first, each joined with its Q on the way."""
        start = chain.record.geometry.hessian(*chain.record.wide).widened()
        matrix = start.tiled_total(self.largest)
        for link in chain:
            matrix = link.segment.pull_expected(matrix, self.largest)
            if link.trained:
                yield link.call.name, kronecker_block(link, matrix, self.largest)
            if link is not chain.links[-1]:
                matrix = link.rule.pull_expected(link.call.module, matrix, self.largest)

    def estimate_network(self, network: Network) -> dict[str, Block]:
        refuse_unknown(network)
        found = expected_matrices(network, self.whole)
        return expected_blocks(network, found, self.sharing, self.largest)
