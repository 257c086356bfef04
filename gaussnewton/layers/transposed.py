"""``nn.ConvTranspose1d``, ``nn.ConvTranspose2d`` and ``nn.ConvTranspose3d``."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.layers.convolution import patches
from gaussnewton.layers.rule import MatrixRule, SmallRule, register_layer
from gaussnewton.precision import widened

Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
KINDS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class TransposedConvolutionRule(MatrixRule):
    """A matrix ``[in, out · kernel]`` whose transpose makes a patch of outputs of each input pixel.

    Gradients go back by the convolution with the same weight, so the gradients of a pixel's patch
    are what that convolution sees of the outputs.
    """

    transposed: ClassVar[bool] = True

    def fits(self, module: Transposed) -> bool:
        own = module._parameters
        return set(own) <= {"weight", "bias"} and own.get("weight") is not None

    def positions(self, module: Transposed, input: Tensor) -> Float[Tensor, "n r groups columns"]:
        x = widened(_batched(module, input))
        pixels = x.reshape(x.shape[0], module.groups, x.shape[1] // module.groups, -1)
        return pixels.permute(0, 3, 1, 2)

    def gradients(
        self, module: Transposed, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r groups out"]:
        seen = patches(module, rows.flatten(0, 1))
        return seen.unflatten(0, rows.shape[:2])


class OutputBiasRule(SmallRule):
    """A bias that is added at every output pixel, and is no column of the weight."""

    def parameter_rows(
        self,
        module: Transposed,  # noqa: ARG002
        input: Tensor,  # noqa: ARG002
        rows: Float[Tensor, "k n *out"],
    ) -> Float[Tensor, "k n size"]:
        return rows.flatten(3).sum(3)


for kind in KINDS:
    register_layer(kind, "weight")(TransposedConvolutionRule)
    register_layer(kind, "bias")(OutputBiasRule)


def _batched(module: Transposed, input: Tensor) -> Tensor:
    """One image alone has no dimension for data."""
    return input if input.ndim == len(module.kernel_size) + 2 else input.unsqueeze(0)
