"""What every estimator does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks import Block, KroneckerBlock
from gaussnewton.chain import Chain
from gaussnewton.tape import Record


class Estimator(ABC):
    """Turns the record of one batch into one block for each trained layer."""

    @abstractmethod
    def __call__(self, record: Record) -> Mapping[str, Block]:
        """The blocks, by the qualified names of the layers, in the order of θ."""


def kronecker_blocks(
    chain: Chain, G: Mapping[str, Float[Tensor, "d d"]]
) -> dict[str, KroneckerBlock]:
    """Join each layer's G with its Q, the second moment of its inputs (eq. gn:approx)."""
    calls = {link.call.name: link.call for link in chain if link.trained}
    return {
        name: KroneckerBlock(
            calls[name].rule.input_moment(calls[name].module, calls[name].unspoiled_input()),
            G[name],
        )
        for name in chain.record.theta.groups
    }
