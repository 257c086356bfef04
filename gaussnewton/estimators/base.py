"""What every estimator does."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks import Block, KroneckerBlock, TiledBlock, bounded, of_factors
from gaussnewton.chain import Chain, Link, check_finite
from gaussnewton.errors import NonFiniteError, UnsupportedGraphError
from gaussnewton.estimators.eigenvalues import Eigenvalues
from gaussnewton.network import Network
from gaussnewton.passage import Passage, passage_of
from gaussnewton.precision import factors_in
from gaussnewton.tape import Record

Exactness = Literal["G", "recursion", "block", "sampled"]
"""What :func:`~gaussnewton.verify` may hold an estimator to: the exact E[𝒢], the nested
expectation of KFRA, the whole block, or nothing because it is random."""


class Estimator(ABC):
    """Turns the record of one batch into one block for each trained layer."""

    promise: ClassVar[Exactness]
    eigenvalues: Eigenvalues = "factored"
    largest: int | None = None
    precision: torch.dtype = torch.float32

    def with_precision(self, precision: torch.dtype) -> Estimator:
        """The same with factors in this precision or wider; a wider one of its own stays."""
        wider = torch.promote_types(precision, self.precision)
        return self if wider == self.precision else self._with("precision", wider)

    def with_largest(self, largest: int | None) -> Estimator:
        """The same with a limit on the width of factors; a lower one of its own stays."""
        if largest is None or (self.largest is not None and self.largest <= largest):
            return self
        return self._with("largest", largest)

    def _with(self, setting: str, value: Any) -> Estimator:
        result = copy.copy(self)
        object.__setattr__(result, setting, value)  # some are frozen
        return result

    def __call__(self, record: Record, passage: Passage | None = None) -> Mapping[str, Block]:
        """The blocks, by the qualified names of the layers, in the order of θ."""
        check_finite(record)
        return self.of(passage_of(record) if passage is None else passage)

    def of(self, passage: Passage) -> Mapping[str, Block]:
        """The same, where the structure of layers is known already."""
        found = dict(self.each(passage))
        return {name: found[name] for name in passage.record.theta.groups if name in found}

    def each(self, passage: Passage) -> Iterator[tuple[str, Block]]:
        """The same one by one, in any order, so that whoever uses them needs not hold them all."""
        remaining = self._estimated(passage)
        while True:
            autocast = torch.autocast(passage.record.outputs.device.type, enabled=False)
            with autocast, factors_in(self.precision):
                pair = next(remaining, None)
            if pair is None:
                return
            name, block = pair
            check_finite_blocks({name: block})
            yield name, bounded(block, self.largest)
            del pair, block

    def _estimated(self, passage: Passage) -> Iterator[tuple[str, Block]]:
        """The blocks as they are found, not looked at yet."""
        if isinstance(passage, Chain):
            found = self.estimate(passage)
        else:
            found = self.estimate_network(passage)
        if not isinstance(found, Mapping):
            yield from found
            return
        blocks = dict(found)
        del found
        while blocks:
            yield blocks.popitem()

    @abstractmethod
    def estimate(self, chain: Chain) -> Mapping[str, Block] | Iterator[tuple[str, Block]]:
        """The blocks of a chain of layers, all together or one after the other."""

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
    return {
        name: kronecker_block(links[name], G[name], largest) for name in chain.record.theta.groups
    }


def kronecker_block(
    link: Link, G: Float[Tensor, "d b"], largest: int | None = None
) -> KroneckerBlock | TiledBlock:
    """The same of one layer."""
    call = link.call
    return of_factors(link.rule.input_moment(call.module, call.unspoiled_input(), largest), G)


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
