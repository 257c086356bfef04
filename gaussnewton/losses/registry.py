"""Which geometry belongs to which criterion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gaussnewton.errors import UnsupportedLossError
from gaussnewton.losses.geometry import Geometry

_GEOMETRIES: dict[type[nn.Module], type[Geometry]] = {}


def register_loss(criterion: type[nn.Module]) -> Callable[[type[Geometry]], type[Geometry]]:
    """Class decorator: this geometry speaks for that criterion and its subclasses."""

    def add(geometry: type[Geometry]) -> type[Geometry]:
        _GEOMETRIES[criterion] = geometry
        return geometry

    return add


def geometry_of(criterion: Any) -> Geometry:
    """The geometry of a criterion, or an error that says how to get one.

    Example:
        >>> import torch
        >>> from gaussnewton.losses import geometry_of
        >>> geometry_of(torch.nn.MSELoss())
        SquaredErrorGeometry(MSELoss())
    """
    for base in type(criterion).__mro__:
        if base in _GEOMETRIES:
            if type(criterion).forward is base.forward:
                return _GEOMETRIES[base](criterion)
            break
    name = type(criterion).__name__ if isinstance(criterion, nn.Module) else repr(criterion)
    raise UnsupportedLossError(
        f"the criterion {name} has no output geometry of its own. Wrap it once, "
        "criterion = gn.Loss(fn), and its Hessian at the outputs is found by automatic "
        "differentiation; known without that: "
        + ", ".join(sorted(c.__name__ for c in _GEOMETRIES))
        + "."
    )
