"""Hooks that do no harm: they hold nothing alive, and copies of a module leave them behind."""

from __future__ import annotations

import weakref
from typing import Any

import torch
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
        traced: whether ``torch.compile`` may look into it. Where it may not, the compiled code
            of the module is interrupted for the hook.
    """

    def __init__(
        self, owner: Any, module: nn.Module, method: str, *extra: Any, traced: bool = True
    ) -> None:
        self.owner, self.module = weakref.ref(owner), weakref.ref(module)
        self.method, self.extra = method, extra
        self._run = self._call if traced else torch.compiler.disable(self._call)

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        self._run(module, *arguments)

    def _call(self, module: nn.Module, *arguments: Any) -> None:
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
