"""How the positions of a datum are taken, for all layers or for each by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from gaussnewton.parameters import Group

Sharing = Literal["expand", "reduce"]
"""What the positions of a datum are taken for.

"expand": data of their own, so that Q averages over data and positions and G sums over both.
Exact for a deep linear network whose loss adds up positions, as that of a language model does.

"reduce": parts of one vector: a is averaged over positions and its gradient summed. Exact for a
deep linear network that averages over positions before the loss, as an image classifier does.
"""

Sharings = Sharing | Mapping[str, Sharing]
"""One for all layers, or by the names of layers, of which the others have "expand"."""


def check_sharing(sharing: Sharings) -> None:
    """Refuse any other word."""
    words = [sharing] if isinstance(sharing, str) else list(sharing.values())
    for word in words:
        if word not in ("expand", "reduce"):
            raise ValueError(f"sharing is 'expand' or 'reduce', not {word!r}")


def check_names(sharing: Sharings, groups: Iterable[Group]) -> None:
    """Refuse names of layers that are not there, or are not trained."""
    if isinstance(sharing, str):
        return
    known = {name for group in groups for name in (group.name, group.module)}
    for name in sharing:
        if name not in known:
            raise ValueError(
                f"sharing is given for '{name}', but no trained layer has that name. The layers "
                f"are {', '.join(repr(name) for name in sorted(known))}."
            )


def sharing_of(sharing: Sharings, group: Group) -> Sharing:
    """That of one layer.

    Example:
        >>> import torch, gaussnewton as gn
        >>> from gaussnewton.estimators.sharing import sharing_of
        >>> first, second = gn.Theta(torch.nn.Sequential(torch.nn.Linear(2, 2),
        ...                                              torch.nn.Linear(2, 1)))
        >>> sharing_of({"0": "reduce"}, first), sharing_of({"0": "reduce"}, second)
        ('reduce', 'expand')
    """
    if isinstance(sharing, str):
        return sharing
    return sharing.get(group.name, sharing.get(group.module, "expand"))
