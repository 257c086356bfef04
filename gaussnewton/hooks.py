"""Hooks that do no harm: they hold nothing alive, and copies of a module leave them behind."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class Hook:
    """Calls a method of its owner, as long as the owner lives.

    A copied or unpickled module carries an inert hook: what happens to a copy is not the
    owner's business.

    Args:
        owner: held weakly.
        module: the module hooked, held weakly.
        method: the name of the owner's method.
        extra: arguments to put before those of the hook.
    """

    def __init__(self, owner: Any, module: nn.Module, method: str, *extra: Any) -> None:
        self.owner, self.module = weakref.ref(owner), weakref.ref(module)
        self.method, self.extra = method, extra

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        owner = self.owner()
        if owner is not None and module is self.module():
            getattr(owner, self.method)(*self.extra, module, *arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_hook, ()

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        return _inert_hook()


class InertHook:
    """A hook that does nothing."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


def _inert_hook() -> InertHook:
    return InertHook()
