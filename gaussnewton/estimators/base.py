"""What every estimator does."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks import Block, KroneckerBlock, TiledBlock, bounded, of_factors
from gaussnewton.chain import Chain, Link, check_finite
from gaussnewton.errors import NonFiniteError, UnsupportedGraphError
from gaussnewton.estimators.eigenvalues import Eigenvalues
from gaussnewton.network import Network
from gaussnewton.passage import Passage, passage_of
from gaussnewton.tape import Record

Exactness = Literal["G", "recursion", "block", "sampled"]
"""What :func:`~gaussnewton.verify` may hold an estimator to: the exact E[𝒢], the nested
expectation of KFRA, the whole block, or nothing because it is random."""


class Estimator(ABC):
    """Turns the record of one batch into one block for each trained layer."""

    promise: ClassVar[Exactness]
    eigenvalues: Eigenvalues = "factored"
    largest: int | None = None

    def with_largest(self, largest: int | None) -> Estimator:
        """The same with a limit on the width of factors; a lower one of its own stays."""
        if largest is None or (self.largest is not None and self.largest <= largest):
            return self
        result = copy.copy(self)
        object.__setattr__(result, "largest", largest)  # some are frozen
        return result

    def __call__(self, record: Record, passage: Passage | None = None) -> Mapping[str, Block]:
        """The blocks, by the qualified names of the layers, in the order of θ."""
        check_finite(record)
        return self.of(passage_of(record) if passage is None else passage)

    def of(self, passage: Passage) -> Mapping[str, Block]:
        """The same, where the structure of layers is known already."""
        with torch.autocast(passage.record.outputs.device.type, enabled=False):
            if isinstance(passage, Chain):
                blocks = self.estimate(passage)
            else:
                blocks = self.estimate_network(passage)
        check_finite_blocks(blocks)
        return {name: bounded(block, self.largest) for name, block in blocks.items()}

    @abstractmethod
    def estimate(self, chain: Chain) -> Mapping[str, Block]:
        """The blocks of a chain of layers."""

    def estimate_network(self, network: Network) -> Mapping[str, Block]:
        """The blocks of any other graph of layers; not every estimator can."""
        network.refuse_mixed(type(self).__name__)
        raise UnsupportedGraphError(
            f"{type(self).__name__} goes from layer to layer of a chain, and this network is none: "
            f"{network.objection} Use 'kflr' or 'kfac', which need no chain."
        )


def kronecker_blocks(
    chain: Chain, G: Mapping[str, Float[Tensor, "d b"]], largest: int | None = None
) -> dict[str, KroneckerBlock | TiledBlock]:
    """Join each layer's G with its Q, the second moment of its inputs (eq. gn:approx).

    Where there is a limit, G comes in tiles of it, and Q is made so.
    """
    links = {link.call.name: link for link in chain if link.trained}

    def moment(link: Link) -> Tensor:
        return link.rule.input_moment(link.call.module, link.call.unspoiled_input(), largest)

    return {name: of_factors(moment(links[name]), G[name]) for name in chain.record.theta.groups}


def check_largest(largest: int | None) -> None:
    """Raise where a limit leaves nothing."""
    if largest is not None and largest < 1:
        raise ValueError(f"largest is at least 1, or None for no limit, not {largest}")


def check_finite_blocks(blocks: Mapping[str, Block]) -> None:
    """Raise where a block is not finite, with its layer's name."""
    # A trace is enough: no entry of a PSD matrix is larger than its diagonal.
    traces = torch.stack([block.trace().double() for block in blocks.values()])
    for name, finite in zip(blocks, traces.isfinite().tolist(), strict=True):
        if not finite:
            raise NonFiniteError(
                f"the curvature of layer '{name}' is not finite, although outputs and loss are: "
                "its inputs or a derivative behind it are infinite, or too large to be squared. "
                "Check the data and scale them down."
            )
