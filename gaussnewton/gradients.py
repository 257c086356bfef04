"""∇f of each layer as a matrix ``[W | b]``, written only when it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from gaussnewton.parameters import Group, Theta
from gaussnewton.precision import widened


class Gradient(Mapping[str, Tensor]):
    """The gradients that the parameters hold, by layer; each look at a layer writes its matrix.

    So all of them are never there twice.

    Args:
        theta: the layers.
        decay: η of a parameter; the penalty's part η θ is included.

    Example:
        >>> import torch
        >>> from gaussnewton import Theta
        >>> from gaussnewton.gradients import Gradient
        >>> layer = torch.nn.Linear(2, 1)
        >>> layer(torch.tensor([[3.0, 4.0]])).backward()
        >>> Gradient(Theta(layer), lambda p: 0.0)[""]
        tensor([[3., 4., 1.]])
    """

    def __init__(self, theta: Theta, decay: Callable[[nn.Parameter], float]) -> None:
        self.theta, self._decay = theta, decay

    def __getitem__(self, name: str) -> Tensor:
        group = self.theta[name]
        return widened(
            group.matrix(
                {
                    # As everywhere in torch, without a gradient there is no decay either.
                    key: torch.zeros_like(p) if (slope := self.of(p)) is None else slope
                    for key, p in group.parameters.items()
                }
            )
        )

    def __contains__(self, name: object) -> bool:
        return name in self.theta.groups  # a look would write the matrix

    def __iter__(self) -> Iterator[str]:
        return iter(self.theta.groups)

    def __len__(self) -> int:
        return len(self.theta.groups)

    def of(self, p: nn.Parameter) -> Tensor | None:
        """The gradient with respect to one parameter, if it has one."""
        if p.grad is None:
            return None
        eta = self._decay(p)
        return p.grad + eta * p.detach() if eta else p.grad

    def parts(self, group: Group) -> dict[str, Tensor]:
        """The gradients of those of a layer's parameters that have one."""
        found = {key: self.of(p) for key, p in group.parameters.items()}
        return {key: part for key, part in found.items() if part is not None}

    def finite(self) -> Tensor:
        """Whether all of it is."""
        held = [p.grad for group in self.theta for p in group.parameters.values()]
        wide = torch.float32
        sums = [
            g.sum(dtype=torch.promote_types(g.dtype, wide)).double() for g in held if g is not None
        ]
        return torch.stack(sums).isfinite().all() if sums else torch.tensor(True)
