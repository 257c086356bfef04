"""``nn.PReLU``."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.layers.rule import SmallRule, register_layer
from gaussnewton.precision import widened


@register_layer(nn.PReLU)
class PReLURule(SmallRule):
    """y = max(x, 0) + a min(x, 0), with one slope a, or one for each channel."""

    def parameter_rows(
        self, module: nn.PReLU, input: Tensor, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n size"]:
        felt = rows * widened(input).clamp(max=0)
        if module.num_parameters == 1:
            return felt.flatten(2).sum(2, keepdim=True)
        return felt.flatten(3).sum(3) if felt.ndim > 3 else felt
