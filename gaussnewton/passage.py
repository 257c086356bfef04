"""A recorded forward pass as a structure of layers: a chain where it is one, else a network."""

from __future__ import annotations

from gaussnewton.again import Again
from gaussnewton.chain import Chain
from gaussnewton.errors import UnsupportedGraphError
from gaussnewton.network import Network
from gaussnewton.tape import Record

Passage = Chain | Network


def passage_of(record: Record, again: Again | None = None) -> Passage:
    """The chain of a record, or, where it is none, the network.

    Args:
        record: of a forward pass whose graph has not been freed.
        again: runs the pass once more, for products with a network.
    """
    try:
        return Chain(record)
    except UnsupportedGraphError as objection:
        return Network(record, objection, again)


def refuse_loose(passage: Passage) -> None:
    """Raise where parameters are used in a way that only their diagonal is known of."""
    if isinstance(passage, Network) and passage.loose:
        names = ", ".join(f"'{name}'" for name in sorted(passage.loose))
        raise UnsupportedGraphError(
            f"{names}: used in a way that no block but a diagonal is known of, and strict=True "
            "forbids that. Call it as a layer, or through F.linear, @, + or *; or leave out "
            "strict=True."
        )
