"""A convolution at the size of its channels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.estimators.expected.frontier import Step
from gaussnewton.estimators.expected.homogeneous import from_sums
from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.region import Place
from gaussnewton.layers.convolution import Convolution
from gaussnewton.precision import widened


class ConvolutionStep(Step):
    r"""A convolution between two feature maps, each kept as channels.

    :math:`y_q = \sum_k W_k x_{sq + dk - r}` in every dimension, with stride s, dilation d and
    padding r. With :math:`n_k` the number of q for which tap k is inside of x, :math:`U_q` the sum
    of the taps that are inside at q, and :math:`V_p` the sum of those that position p of x is seen
    by,

    .. math::
        \sum_p M[x_p, x_p] &= \sum_k n_k W_k^T D W_k + \sum_p V_p^T B V_p, \\
        \sum_{pp'} M[x_p, x_{p'}] &= \sum_q U_q^T D U_q + N^T B N, \qquad N = \sum_k n_k W_k.

    Args:
        input: x.
        module: the layer.
        layout: of y.
        own: of x.
    """

    def __init__(self, input: Place, module: Convolution, layout: Layout, own: Layout) -> None:
        self.inputs, self.layout, self.own = (input,), layout, own
        self.W: Float[Tensor, "k out in"] = _taps(module)
        self.reached = [_reached(module, i, layout, own) for i in range(len(own.spatial))]

    def second(self, M: Float[Tensor, "2 c c"]) -> dict[tuple[int, int], Tensor]:
        D, B, W = M[0], M[1], self.W.to(M)
        N = torch.einsum("k,koi->oi", self._counts(W), W)
        # Of pairs of positions: one tap leads from q to p, or several where borders are reflected.
        same = self._pulled([table.flatten(0, 1) for table in self.reached], D)
        same = same + self._pulled([table.sum(0) for table in self.reached], B)
        all = self._pulled([table.sum(1) for table in self.reached], D) + N.mT @ B @ N
        return {(0, 0): from_sums(same, all, (self.own.positions, self.own.positions))}

    def cross(self, M: Float[Tensor, "2 c e"], positions: int) -> list[Tensor]:
        W = self.W.to(M)
        N = torch.einsum("k,koi->oi", self._counts(W), W)
        has_own = positions == self.layout.positions
        all = positions * (N.mT @ M[1]) + (N.mT @ M[0] if has_own else 0)
        P, same = self.own.positions, None
        if positions == P:
            same = N.mT @ M[1]
            if has_own and self.layout.spatial == self.own.spatial:
                same = same + torch.einsum("k,koi->oi", self._home(W), W).mT @ M[0]
        return [from_sums(same, all, (P, positions))]

    def _pulled(self, tables: list[Tensor], S: Float[Tensor, "c c"]) -> Float[Tensor, "a a"]:
        """Σ Uᵀ S U over all sets of taps, U being the sum of a set, and one table a dimension."""
        W = self.W.to(S)
        total = S.new_zeros(W.shape[2], W.shape[2])
        for taps, count in _patterns(tables):
            U = torch.einsum("k,koi->oi", taps.to(W), W)
            total += count * (U.mT @ S @ U)
        return total

    def _counts(self, like: Tensor) -> Float[Tensor, " k"]:
        """n_k."""
        return _outer([inside.sum((0, 1)) for inside in self.reached]).to(like)

    def _home(self, like: Tensor) -> Float[Tensor, " k"]:
        """For how many q tap k is at q itself."""
        return _outer([inside.diagonal().sum(1) for inside in self.reached]).to(like)


def _taps(module: Convolution) -> Float[Tensor, "k out in"]:
    """W_k of each place of the kernel, between all channels, zero between those of other groups."""
    weight = widened(module.weight.detach()).flatten(2).movedim(2, 0)  # k, out, in / groups
    return torch.stack([torch.block_diag(*W.chunk(module.groups)) for W in weight])


def _reached(module: Convolution, i: int, layout: Layout, own: Layout) -> Float[Tensor, "q p k"]:
    """In one dimension, whether position q of y sees position p of x by tap k."""
    # Pairs of the amounts before and after, the last dimension first, as F.pad wants them.
    last = len(module.kernel_size) - 1
    before = module._reversed_padding_repeated_twice[2 * (last - i)]
    q = torch.arange(layout.spatial[i]).unsqueeze(1)
    k = torch.arange(module.kernel_size[i])
    at, size = module.stride[i] * q + module.dilation[i] * k - before, own.spatial[i]
    if module.padding_mode == "circular":
        at = at % size
    elif module.padding_mode == "replicate":
        at = at.clamp(0, size - 1)
    elif module.padding_mode == "reflect":
        at = (size - 1) - ((size - 1) - at.abs()).abs()
    return (at.unsqueeze(1) == torch.arange(size).reshape(1, -1, 1)).double()


def _outer(vectors: list[Tensor]) -> Tensor:
    """Over the kernel of all dimensions, from one vector for each."""
    result = vectors[0]
    for vector in vectors[1:]:
        result = (result.unsqueeze(-1) * vector).flatten()
    return result


def _patterns(tables: list[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """The sets of taps in the rows of all tables together, and how often each is there."""
    found = [torch.unique(table, dim=0, return_counts=True) for table in tables]
    for chosen in product(*(range(len(rows)) for rows, _ in found)):
        taps = _outer([found[i][0][index] for i, index in enumerate(chosen)])
        if bool(taps.any()):
            yield taps, prod(int(found[i][1][index]) for i, index in enumerate(chosen))
