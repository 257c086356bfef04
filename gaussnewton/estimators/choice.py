"""Which estimator to take when the user leaves it open: by what each would cost on this chain."""

from __future__ import annotations

from dataclasses import dataclass

from gaussnewton.chain import Chain
from gaussnewton.estimators.base import Estimator
from gaussnewton.estimators.kfac import KFAC
from gaussnewton.estimators.kflr import KFLR
from gaussnewton.estimators.kfra import KFRA
from gaussnewton.network import Network
from gaussnewton.passage import Passage
from gaussnewton.segments import General
from gaussnewton.tiles import tile_size

AFFORDABLE = 1.0
"""KFLR is taken where it costs at most so many forward and backward passes of the batch. It is
exact, but training with KFRA is hardly worse, and with many outputs far cheaper."""


FEW = 2
"""So many outputs make KFLR as cheap as the backward pass itself in any network."""


@dataclass(frozen=True)
class Choice:
    """An estimator, and why."""

    estimator: Estimator
    reason: str


def choose(chain: Passage, largest: int | None = None) -> Choice:
    """KFLR where it is affordable or the cheaper one, else KFRA; KFAC where there is no chain.

    KFRA is dear where a function between layers is not elementwise: it must then send as many
    rows through autograd as the function is wide.

    Args:
        chain: the layers.
        largest: the limit on factors, in whose tiles both cost less.
    """
    outputs = chain.record.outputs[0].numel()
    if isinstance(chain, Network):
        if chain.mixing is None and outputs <= FEW:
            return Choice(KFLR(), f"KFLR is exact, and cheap with {_count(outputs)}")
        return Choice(KFAC(), f"KFAC is the cheapest where there is no chain: {chain.objection}")
    kflr = _rows_back(chain, outputs, largest) / _pass(chain)
    kfra = _expected_back(chain, largest) / _pass(chain)
    costs = f"{kflr:.2g} forward and backward passes of the batch; KFRA: {kfra:.2g}"
    if kflr <= AFFORDABLE:
        return Choice(KFLR(), f"KFLR is exact, and cheap with {_count(outputs)} ({costs})")
    if kflr <= kfra:
        return Choice(KFLR(), f"KFLR is exact, and cheaper than KFRA here ({costs})")
    return Choice(KFRA(), f"KFLR would be exact, but dear with {_count(outputs)} ({costs})")


def _count(outputs: int) -> str:
    return "1 output" if outputs == 1 else f"{outputs} outputs"


def _sizes(chain: Chain) -> list[tuple[int, int, bool]]:
    """Width in and out of each layer, the last first, and whether what follows it is general."""
    sizes = []
    for link in chain:
        width_in = link.call.input.shape[1:].numel()
        sizes.append((width_in, link.call.width, isinstance(link.segment, General)))
    return sizes


def _pass(chain: Chain) -> float:
    """Multiplications of a forward and backward pass: three products a layer."""
    return 3.0 * chain.record.data * sum(a * b for a, b, _ in _sizes(chain))


def _rows_back(chain: Chain, rows: int, largest: int | None) -> float:
    """Of sending some rows of each datum back through all layers, with their moments.

    Where there are more rows than a layer is wide, they are folded to as many.
    """
    total, n = 0.0, chain.record.data
    for width_in, width_out, _ in _sizes(chain):
        rows = min(rows, width_out)
        total += n * rows * width_out * (tile_size(width_out, largest) + width_in)
    return total


def _expected_back(chain: Chain, largest: int | None) -> float:
    """Of sending one matrix back: Wᵀ G W, and the moment of f' or, if general, its rows."""
    total, n = 0.0, chain.record.data
    for width_in, width_out, general in _sizes(chain):
        tile_in, tile_out = tile_size(width_in, largest), tile_size(width_out, largest)
        total += width_out * width_in * (tile_out + tile_in)
        total += n * width_out * (width_out**2 if general else tile_out)
    return total
