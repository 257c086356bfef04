"""Kronecker Factored Low Rank (section 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from gaussnewton.blocks import Block
from gaussnewton.chain import Chain
from gaussnewton.estimators.base import Estimator, Exactness, check_largest
from gaussnewton.estimators.corrected import chain_blocks
from gaussnewton.estimators.eigenvalues import Eigenvalues, check_eigenvalues
from gaussnewton.estimators.shared import shared_blocks
from gaussnewton.estimators.sharing import Sharings, check_sharing
from gaussnewton.network import Network
from gaussnewton.precision import check_precision


@dataclass(frozen=True)
class KFLR(Estimator):
    r"""E[Q] ⊗ E[𝒢] with the exact expectation of 𝒢, for any number of outputs.

    .. math:: E[𝒢_λ] = E\Big[\sum_k C_λ^k {C_λ^k}^T\Big], \quad C_λ^k = B_λ W_{λ+1}^T C_{λ+1}^k

    The K columns C are carried back only where nothing cheaper is exact: the last layer
    has a closed form; a loss of constant Hessian stays one matrix for all data until the
    second non-linearity; where the width is below K the matrices themselves are carried,
    and at a bottleneck they are factorised anew with as many columns as it is wide.

    Args:
        workspace: about how many bytes the per-datum matrices may take. The data go
            through in parts that fit; small parts also stay in the processor's cache. In a
            network that is no chain: the positions of Q, and the vectors on their way back, of
            which one for each datum is the least.
        sharing: how the positions of a datum are taken where a layer uses its weights at many,
            as a convolution does: "expand" or "reduce", or by the names of layers, as
            ``{"conv1": "reduce"}``, of which the others have "expand".
        eigenvalues: of Kronecker blocks: "factored", the products of those of Q and G; or
            "corrected", in the same eigenvectors the diagonal of the exact block, which makes a
            :class:`~gaussnewton.EigenBlock` as near to it as that basis allows (EKFAC).
        largest: factors wider than this are cut to tiles on their diagonal, at most so wide, which
            makes a :class:`~gaussnewton.TiledBlock`; None for no limit. What lies outside of
            the tiles is not computed.
        precision: ``torch.float32`` or ``torch.float64``, in which factors are computed and kept
            where the model's own is narrower. Float32 is too narrow for solves with hardly any
            damping where activations are nearly dependent.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(),
        ...                             torch.nn.Linear(3, 2))
        >>> batch = torch.randn(8, 4), torch.randn(8, 2)
        >>> curvature = gn.curvature(model, torch.nn.MSELoss(), batch, method=gn.KFLR())
        >>> torch.allclose(curvature["2"].G, torch.eye(2))      # 2 / (number of outputs)
        True
    """

    workspace: int = 64 * 2**20
    sharing: Sharings = "expand"
    eigenvalues: Eigenvalues = "factored"
    largest: int | None = None
    precision: torch.dtype = torch.float32

    promise: ClassVar[Exactness] = "G"

    def __post_init__(self) -> None:
        check_eigenvalues(self.eigenvalues)
        check_sharing(self.sharing)
        check_largest(self.largest)
        check_precision(self.precision)

    def estimate(self, chain: Chain) -> Mapping[str, Block]:
        start = chain.record.geometry.hessian(*chain.record.wide).widened()
        return chain_blocks(chain, start, self.workspace, self.eigenvalues, self.largest)

    def estimate_network(self, network: Network) -> dict[str, Block]:
        network.refuse_mixed("KFLR")
        roots = network.record.geometry.hessian(*network.record.wide).widened().roots().rows
        roots = network.by_datum(roots)
        return shared_blocks(
            network, roots, self.sharing, self.workspace, self.eigenvalues, largest=self.largest
        )
