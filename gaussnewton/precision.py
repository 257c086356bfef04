"""In which precision curvature is computed: float32, or wider where that is asked for."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 where it is narrower, else as it is."""
    return tensor.float() if torch.finfo(tensor.dtype).bits < 32 else tensor
