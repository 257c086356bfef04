"""Endless shuffled batches of data in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gaussnewton.errors import BatchError


class Batches(Iterator[tuple[Tensor, Tensor]]):
    """Batches of equal size, each datum at most once an epoch, in a new order each epoch.

    What does not fill a batch at the end of an epoch is left out of that epoch. A batch is one
    gather from memory. The order depends on the seed alone, not on torch's random state, and the
    iterator can be saved and resumed anywhere, bit for bit.

    Args:
        x: inputs, one a row.
        y: targets, one a row; without them a batch is its own target, as for an autoencoder.
        size: data in a batch.
        seed: the same seed gives the same batches.

    Example:
        >>> import torch
        >>> from gaussnewton.experiments.data import Batches
        >>> data = Batches(torch.arange(6), size=3, seed=0)
        >>> first, second = next(data)[0], next(data)[0]
        >>> torch.cat([first, second]).sort().values
        tensor([0, 1, 2, 3, 4, 5])
        >>> saved = data.state_dict()
        >>> x, _ = next(data)
        >>> again = Batches(torch.arange(6), size=3, seed=1)
        >>> again.load_state_dict(saved)
        >>> torch.equal(next(again)[0], x)
        True
    """

    def __init__(self, x: Tensor, y: Tensor | None = None, size: int = 1000, seed: int = 0) -> None:
        if y is not None and len(y) != len(x):
            raise BatchError(f"there are {len(x)} inputs and {len(y)} targets.")
        if not 1 <= size <= len(x):
            raise BatchError(f"batches of {size} cannot be taken from {len(x)} data.")
        self.x, self.y, self.size = x, y, size
        self._generator = torch.Generator().manual_seed(seed)
        self._shuffle()

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._position + self.size > len(self.x):
            self._shuffle()
        chosen = self._order[self._position : self._position + self.size]
        self._position += self.size
        x = self.x.index_select(0, chosen)
        return x, x if self.y is None else self.y.index_select(0, chosen)

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator is: plain numbers and a tensor, which load with ``weights_only``."""
        return {
            "count": len(self.x),
            "position": self._position,
            "generator": self._epoch_start.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another iterator over the same data was saved."""
        if state["count"] != len(self.x):
            raise BatchError(
                f"the saved iterator went over {state['count']} data, this one has {len(self.x)}."
            )
        self._generator.set_state(state["generator"])
        self._shuffle()
        self._position = state["position"]

    def _shuffle(self) -> None:
        """Begin an epoch. The random state before it is what its order can be had from again."""
        self._epoch_start = self._generator.get_state()
        order = torch.randperm(len(self.x), generator=self._generator)
        self._order, self._position = order.to(self.x.device), 0


def batches(x: Tensor, y: Tensor | None = None, size: int = 1000, seed: int = 0) -> Batches:
    """Endless shuffled batches of data in memory; see :class:`Batches`.

    Example:
        >>> from gaussnewton.experiments.data import batches, curves
        >>> x, target = next(batches(curves(count=20), size=5))
        >>> x.shape, target is x
        (torch.Size([5, 784]), True)
    """
    return Batches(x, y, size, seed)
