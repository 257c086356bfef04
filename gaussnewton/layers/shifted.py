r"""The second moment of a convolution's patches, from shifts of its input.

With x_u the input's row u (of an image: one line of pixels, patched along the line only), entry
(i, i') of the sum over patches is

.. math:: Q_{i,i'} = \sum_o x_{o+i} x_{o+i'}^T = \sum_u x_u x_{u+i'-i}^T

over a window of rows u that moves with i. All entries with the same shift i' − i have all rows in
common but those at the border, so a kernel of k lines takes k products, not k (k + 1) / 2, and the
patches in memory are k times fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.gram import gram


@dataclass(frozen=True)
class Lines:
    """How a kernel moves along the first dimension of its input, one line at a time.

    Attributes:
        kernel: how many lines it sees.
        dilation: how far they are apart.
        before: how many lines of zeros are thought to lie before the first.
        outputs: how many places it takes.
    """

    kernel: int
    dilation: int
    before: int
    outputs: int

    def window(self, i: int, lines: int) -> tuple[int, int]:
        """The lines that the kernel's line i sees, of so many."""
        start = i * self.dilation - self.before
        first, last = max(0, start), min(lines, start + self.outputs)
        return first, max(first, last)


def shifted_gram(
    x: Float[Tensor, "lines m width"], along: Lines
) -> Float[Tensor, "kernel width kernel width"]:
    """Σ a aᵀ over patches a = (x_o, x_{o+1}, …) of as many lines as the kernel has.

    Example:
        >>> import torch
        >>> from gaussnewton.layers.shifted import Lines, shifted_gram
        >>> x = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
        >>> a = torch.tensor([[1.0, 2.0], [2.0, 3.0]])
        >>> along = Lines(kernel=2, dilation=1, before=0, outputs=2)
        >>> torch.equal(shifted_gram(x, along).reshape(2, 2), a.T @ a)
        True
    """
    k, width = along.kernel, x.shape[2]
    result = x.new_zeros(k, width, k, width)
    for shift in range(k):
        for i, block in enumerate(_shift_sums(x, shift, along)):
            result[i, :, i + shift] = block
            if shift:
                result[i + shift, :, i] = block.T
    return result


def line_sums(x: Float[Tensor, "lines m width"], along: Lines) -> Float[Tensor, "kernel width"]:
    """Σ a over the same patches."""
    sums = torch.matmul(x.new_ones(x.shape[1]), x)  # faster than x.sum(1)
    windows = (along.window(i, len(x)) for i in range(along.kernel))
    return torch.stack([sums[first:last].sum(0) for first, last in windows])


def _shift_sums(
    x: Float[Tensor, "lines m width"], shift: int, along: Lines
) -> list[Float[Tensor, "width width"]]:
    """Q_{i, i+shift} for each i: what all windows share, and what lies at their ends."""
    apart = shift * along.dilation
    windows = [along.window(i, len(x) - apart) for i in range(along.kernel - shift)]
    first, last = min(w[0] for w in windows), max(w[1] for w in windows)
    start, stop = max(w[0] for w in windows), min(w[1] for w in windows)
    if start >= stop:  # so few lines that there is nothing in common
        each = _line_by_line(x, first, last, apart)
        return [each[a - first : b - first].sum(0) for a, b in windows]
    shared = _all_lines(x, start, stop, apart)
    head = _line_by_line(x, first, start, apart)
    tail = _line_by_line(x, stop, last, apart)
    return [shared + head[a - first :].sum(0) + tail[: b - stop].sum(0) for a, b in windows]


def _all_lines(x: Tensor, start: int, stop: int, apart: int) -> Float[Tensor, "width width"]:
    left = x[start:stop].flatten(0, 1)
    return left.T @ x[start + apart : stop + apart].flatten(0, 1) if apart else gram(left)


def _line_by_line(
    x: Tensor, start: int, stop: int, apart: int
) -> Float[Tensor, "lines width width"]:
    return torch.bmm(x[start:stop].mT, x[start + apart : stop + apart])
