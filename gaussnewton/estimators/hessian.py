"""The diagonal blocks of the Hessian (section 2.2, appendix A)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks import DenseBlock
from gaussnewton.chain import Chain, Link
from gaussnewton.errors import MemoryLimitError
from gaussnewton.estimators.base import Estimator, Exactness
from gaussnewton.losses.autodiff import output_derivatives
from gaussnewton.precision import widened


@dataclass(frozen=True)
class BlockHessian(Estimator):
    r"""Exact diagonal blocks of the parameter Hessian, by one backward recursion.

    .. math::
        H_λ = E[(a_{λ-1} a_{λ-1}^T) ⊗ 𝓗_λ], \qquad
        𝓗_λ = B_λ W_{λ+1}^T 𝓗_{λ+1} W_{λ+1} B_λ + D_λ

    with B = diag(f'(h)) and D = diag(f''(h) ∂E/∂a) (eq. hess:kron, hess:recursion). The
    average of Kronecker products is not one, so the blocks are dense: for small layers.

    Args:
        memory_limit: the most bytes that the blocks and their parts may take.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 1)
        >>> gn.curvature(model, torch.nn.MSELoss(), (x, y), method="hessian")[""].matrix
        tensor([[10., 14.],
                [14., 20.]])
    """

    memory_limit: int = 4 * 2**30

    promise: ClassVar[Exactness] = "block"

    def estimate(self, chain: Chain) -> dict[str, DenseBlock]:
        self._check_size(chain)
        # In the dtype of the user's own call, which the criterion's weights fit.
        record = chain.record
        H, gradient = output_derivatives(record.geometry, record.outputs.detach(), record.targets)
        H = widened(H.diag_embed() if H.ndim == 2 else H)
        gradient = widened(gradient)
        blocks: dict[str, DenseBlock] = {}
        for link in chain:
            H = link.segment.pull_hessian(H, gradient)
            gradient = link.segment.pull_rows(gradient)
            if link.trained:
                blocks[link.call.name] = _block(link, H)
            if link is not chain.links[-1]:
                rule, module = link.rule, link.call.module
                half = rule.pull_rows(module, H)
                H = rule.pull_rows(module, half.mT)
                gradient = rule.pull_rows(module, gradient)
        return {name: blocks[name] for name in record.theta.groups}

    def _check_size(self, chain: Chain) -> None:
        size, data = widened(chain.record.outputs).element_size(), chain.record.data
        for link in chain:
            group = chain.record.theta.groups.get(link.call.name)
            need = size * (3 * data * link.call.width**2 + (3 * group.size**2 if group else 0))
            if need > self.memory_limit:
                raise MemoryLimitError(
                    f"the dense Hessian block of layer '{link.call.name}' needs about "
                    f"{need / 2**30:.1f} GiB, more than the limit of "
                    f"{self.memory_limit / 2**30:.1f} GiB. Use 'kflr' or 'kfra', whose blocks are "
                    "factored, or raise gn.BlockHessian(memory_limit=…)."
                )


def _block(link: Link, H: Float[Tensor, "n d d"]) -> DenseBlock:
    """Σ_n (a_n a_nᵀ) ⊗ H_n."""
    a = link.rule.rows(link.call.module, link.call.unspoiled_input())
    rows, columns = H.shape[1], a.shape[1]
    # In parts of so many data that their a aᵀ take no more than the block itself.
    step = max(1, rows**2)
    product = a.new_zeros(columns**2, rows**2)
    for part, matrices in zip(a.split(step), H.split(step), strict=True):
        outer = (part.unsqueeze(2) * part.unsqueeze(1)).flatten(1)
        product.addmm_(outer.T, matrices.flatten(1))
    tiles = product.reshape(columns, columns, rows, rows).permute(0, 2, 1, 3)
    return DenseBlock(tiles.reshape(rows * columns, rows * columns), rows, columns)
