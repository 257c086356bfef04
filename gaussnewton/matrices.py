"""Vectors over all layers, as one matrix ``[W | b]`` for each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Matrices = dict[str, Tensor]
"""For each layer, something shaped like its matrix ``[W | b]``."""


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """aᵀ b, over the layers that both have."""
    return torch.stack([dot(a[name], b[name]) for name in b if name in a]).sum()


def dot(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b of two tensors, as a number in float64.

    In float32 its error is some 1e-7 of ‖a‖ ‖b‖, because it is summed up in parts; copies in
    float64 would take longer than all else that is done with a direction but multiplying it.
    """
    return torch.dot(a.reshape(-1), b.reshape(-1)).double()
