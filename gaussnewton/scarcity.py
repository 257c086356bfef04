"""How many batches it takes to know their curvature: one, or more where that says little."""

from __future__ import annotations

from collections.abc import Sequence

from gaussnewton.chain import Chain
from gaussnewton.layers import MatrixRule
from gaussnewton.observer import Observation
from gaussnewton.passage import Passage
from gaussnewton.tape import LayerCall
from gaussnewton.tiles import tile_size

TOLERATED = 1.5
"""A batch has data enough for up to so many inputs to each datum."""


STEADY = 0.25
"""Mean curvature is known well enough if it is off by no more than this, as a logarithm."""


def batches_to_agree(spread: float) -> float:
    """How many batches have a steady mean curvature, if single ones are off it by a spread.

    A few data can have thousands of times the curvature of others. A batch that has one of them
    and a batch that has none say different things.

    Args:
        spread: as a logarithm; see :class:`~gaussnewton.progress.Progress`.

    Example:
        >>> from gaussnewton.scarcity import batches_to_agree
        >>> batches_to_agree(1.0)
        16.0
    """
    return (spread / STEADY) ** 2


def batches_wanted(observations: Sequence[Observation], largest: int | None) -> float:
    """How many batches like this one a layer's Q would have data enough of; the most of all layers.

    Q = Σ a aᵀ / m of m vectors has at most m eigenvalues that are not zero. With d inputs their
    mean is d / m times that of all: the batch shows a steep part, and says nothing of a flat one.
    m is here the number of data, not of positions in them, which resemble each other.

    A pass that several losses were taken of counts once. Layers without such a factor, as a
    normalisation or a table, have no say, nor have those that had no part in a pass.

    Args:
        observations: the passes that curvature is estimated from.
        largest: the width of tiles that wider factors are cut to. Each tile has as many data as
            the whole.
    """
    data: dict[str, dict[int, int]] = {}
    inputs: dict[str, int] = {}
    for observation in observations:
        passage = observation.passage
        for call in _matrix_calls(passage):
            data.setdefault(call.name, {})[id(observation.start)] = passage.data
            width = tile_size(_inputs(call), largest)
            inputs[call.name] = max(inputs.get(call.name, 0), width)
    wanted = [width / (TOLERATED * sum(data[name].values())) for name, width in inputs.items()]
    return max(wanted, default=0.0)


def _matrix_calls(passage: Passage) -> list[LayerCall]:
    """The calls of trained layers that multiply vectors by a matrix."""
    if isinstance(passage, Chain):
        return [link.call for link in passage if link.trained]
    calls = [call for calls in passage.calls.values() for call in calls]
    return [call for call in calls if isinstance(call.rule, MatrixRule)]


def _inputs(call: LayerCall) -> int:
    """How wide the vectors are that the matrix multiplies, the bias included."""
    assert isinstance(call.rule, MatrixRule)
    return call.rule.columns(call.module, call.input)
