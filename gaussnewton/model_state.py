"""A model that is looked at is not to be changed."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def unchanged(*models: nn.Module) -> Iterator[None]:
    """Run a block with gradients on, and leave the models and the random state as they were.

    The modes, the buffers, the ``.grad`` and ``requires_grad`` fields of the parameters and the
    global random states (of torch, Python and NumPy) are those from before the block once it
    ends, also when it raises. Buffers are exchanged for copies
    rather than written back: a recorded graph may hold the very tensor that the forward pass
    saw, and writing to it would invalidate the graph.

    Attention is computed by its plain formula inside the block, because its fused kernels
    cannot be differentiated twice.
    """
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
    modes = {module: module.training for module in modules}
    buffers = {module: dict(module._buffers) for module in modules}
    gradients = {p: (p.grad, p.requires_grad) for p in parameters}
    python_random = random.getstate()
    numpy_random = _numpy_random()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.random.fork_rng(devices=_cuda_devices(parameters)),
            torch.backends.cudnn.flags(enabled=False),
            sdpa_kernel(SDPBackend.MATH),
        ):
            _put(buffers, copies={})
            for parameter in parameters:
                parameter.grad = None  # what is accumulated inside goes elsewhere
            yield
    finally:
        random.setstate(python_random)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        _put(buffers)
        for module, training in modes.items():
            module.training = training
        for parameter, (gradient, requires_grad) in gradients.items():
            parameter.grad = gradient
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)


def _put(
    buffers: dict[nn.Module, dict[str, Tensor | None]],
    copies: dict[int, Tensor] | None = None,
) -> None:
    """Give each module its buffers, or, with a place to keep ``copies``, copies of them.

    Two modules that share a buffer share its copy.
    """
    for module, own in buffers.items():
        for name in [name for name in module._buffers if name not in own]:
            del module._buffers[name]
        for name, buffer in own.items():
            if buffer is not None and copies is not None:
                buffer = copies.setdefault(id(buffer), buffer.detach().clone())
            module._buffers[name] = buffer


def _numpy_random() -> Any:
    """NumPy's global generator, if the program uses NumPy at all."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def _cuda_devices(parameters: list[nn.Parameter]) -> list[torch.device]:
    """The CUDA devices whose random state a forward pass may advance."""
    return sorted({p.device for p in parameters if p.is_cuda}, key=str)
