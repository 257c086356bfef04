"""The pre-activation recursion (eq. gn:recursion), for every datum and summed over data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxtyping import Float
from torch import Tensor

from gaussnewton.chain import Chain, Link
from gaussnewton.perdatum import Dense, PerDatum, Roots

Carried = tuple[Link, slice, PerDatum]
"""A trained layer, some of the data, and their matrices 𝒢_λ at the layer's outputs."""


def recursion(chain: Chain, start: PerDatum, workspace: int) -> Iterator[Carried]:
    r"""𝒢_λ of each datum at each trained layer, exactly.

    .. math:: 𝒢_λ = B_λ W_{λ+1}^T 𝒢_{λ+1} W_{λ+1} B_λ

    Args:
        chain: the layers.
        start: 𝒢_L of each datum at the outputs.
        workspace: about how many bytes the per-datum matrices may take; the data go
            through in parts of as many as fit.
    """
    for part in _parts(chain, start, workspace):
        matrices = start.select(part)
        for link in chain:
            matrices = _cheapest(link.segment.pull(matrices, part))
            if link.trained:
                yield link, part, matrices
            if link is not chain.links[-1]:
                matrices = link.rule.pull(link.call.module, matrices)


def summed(
    carried: Iterable[Carried], largest: int | None = None
) -> dict[str, Float[Tensor, "d b"]]:
    """Σ_n 𝒢_λ of each trained layer, in tiles of a limit."""
    totals: dict[str, Tensor] = {}
    for link, _, matrices in carried:
        total = matrices.tiled_total(largest)
        known = totals.get(link.call.name)
        totals[link.call.name] = total if known is None else known.add_(total)
    return totals


def fits_at_once(chain: Chain, start: PerDatum, workspace: int) -> bool:
    """Whether the matrices of all data at all layers may be kept at the same time."""
    entries, rank = start.rank * start.width, start.rank
    for link in chain:
        rank = min(rank, link.call.width)
        entries += rank * link.call.width
    return entries * start.data * chain.record.outputs.element_size() <= workspace


def _cheapest(matrices: PerDatum) -> PerDatum:
    # Summing RᵀR over the data costs as much as forming it for each datum, so matrices that
    # are no wider than their roots have rows are better written out.
    if isinstance(matrices, Roots) and matrices.rows.shape[1] >= matrices.width:
        return Dense(matrices.dense())
    return matrices


def _parts(chain: Chain, start: PerDatum, workspace: int) -> Iterator[slice]:
    bytes_each = _entries_per_datum(chain, start) * chain.record.outputs.element_size()
    step = max(1, workspace // max(bytes_each, 1))
    for begin in range(0, start.data, step):
        yield slice(begin, min(begin + step, start.data))


def _entries_per_datum(chain: Chain, start: PerDatum) -> int:
    """The most numbers that one datum's matrices take on the way back."""
    rank, before, peak = start.rank, start.rank * start.width, 0
    for link in chain:
        width = link.call.width
        moved = rank * width
        rank = min(rank, width)
        peak = max(peak, before + moved, moved + rank * width)
        before = rank * width
    return peak
