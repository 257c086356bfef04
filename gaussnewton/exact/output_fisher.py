r"""The Fisher of the outputs, :math:`E_{p_θ(y|x)}[s s^T]` with :math:`s = ∇_{h_L} \log p_θ`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.errors import NonFiniteError
from gaussnewton.exact.batch import Criterion, loss, one_tensor
from gaussnewton.exact.distributions import model_distribution


@dataclass(frozen=True)
class FisherBlocks:
    """The Fisher of each independent variable; between two of them it is zero.

    Calling it multiplies a tensor shaped like the outputs.
    """

    blocks: Float[Tensor, "n r k k"]

    def __call__(self, u: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Multiply each variable's outputs with its block."""
        n, r, k, _ = self.blocks.shape
        return torch.einsum("nrkl,nlr->nkr", self.blocks, u.reshape(n, k, r)).reshape(u.shape)

    def dense(self) -> Float[Tensor, "n d d"]:
        """One matrix a datum, with the zeros between the variables."""
        n, r, k, _ = self.blocks.shape
        full = self.blocks.new_zeros(n, k, r, k, r)
        full.diagonal(dim1=2, dim2=4).copy_(self.blocks.permute(0, 2, 3, 1))
        return full.reshape(n, k * r, k * r)


def output_fisher(criterion: Criterion, outputs: Any, targets: Any) -> Float[Tensor, "n d d"]:
    r"""The matrices :math:`\sum_r c_{nr} \, E_{y ∼ p_θ(y|x_n)}[s_{nr} s_{nr}^T]`, one a datum.

    The expectation over y is exact: a sum over all values of y, or a quadrature rule that
    integrates its polynomial without error. The scores s come from autograd. The
    observed targets enter through the weight :math:`c_{nr}` of a datum alone.

    Args:
        criterion: A negative log-likelihood of torch, or an object with ``support(outputs)``.
        outputs: As in :func:`gaussnewton.exact.output_hessian`.
        targets: The observed targets.

    Raises:
        UnsupportedLossError: If the criterion does not tell a distribution.
        NonFiniteError: If a score or a weight is NaN or infinite.

    Example:
        >>> import torch, gaussnewton as gn
        >>> outputs, targets = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])
        >>> gn.exact.output_fisher(torch.nn.CrossEntropyLoss(reduction="sum"), outputs, targets)[0]
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
    """
    return fisher_blocks_of_outputs(criterion, outputs, targets).dense()


def fisher_blocks_of_outputs(criterion: Criterion, outputs: Any, targets: Any) -> FisherBlocks:
    """The same without the zeros, for many outputs."""
    with torch.inference_mode(False), torch.enable_grad():
        outputs = one_tensor(criterion, outputs).detach().clone()
        distribution = model_distribution(criterion, outputs, targets)
        leaf = outputs.clone().requires_grad_()
        n, k = len(outputs), distribution.outputs_each
        blocks = outputs.new_zeros(n, outputs[0].numel() // k, k, k)
        for values, probability in distribution.support:
            value = loss(distribution.criterion, leaf, values)
            score = torch.autograd.grad(value, leaf)[0].reshape(n, k, -1)
            blocks += torch.einsum("nr,nkr,nlr->nrkl", probability, score, score)
        blocks *= distribution.weight[:, :, None, None]
    if not blocks.isfinite().all():
        raise NonFiniteError(
            "the Fisher of the outputs is NaN or infinite; look at the outputs of this batch, and "
            "whether a mean is taken over targets that are all ignored"
        )
    return FisherBlocks(blocks)
