"""``nn.Linear``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import UnsupportedGraphError
from gaussnewton.gram import gram, widened
from gaussnewton.layers.rule import LayerRule, register_layer
from gaussnewton.perdatum import PerDatum


@register_layer(nn.Linear)
class LinearRule(LayerRule):
    """h = W a (eq. nn), a bias being the last column of W and a 1 below a."""

    def check(self, name: str, input: Tensor) -> None:
        if input.ndim != 2:
            raise UnsupportedGraphError(
                f"layer '{name}' (Linear) was called on inputs of shape {tuple(input.shape)}. "
                "Weights shared over more dimensions than the batch are not supported: "
                "flatten the inputs to [n, features]."
            )

    def rows(self, module: nn.Linear, input: Tensor) -> Float[Tensor, "n columns"]:
        parts = []
        if module.weight.requires_grad:
            parts.append(widened(input))
        if _trains_bias(module):
            parts.append(torch.ones_like(widened(input[:, :1])))
        return torch.cat(parts, dim=1)

    def input_moment(self, module: nn.Linear, input: Tensor) -> Float[Tensor, "columns columns"]:
        a = widened(input)
        if not module.weight.requires_grad:
            return a.new_ones(1, 1)
        n, d = a.shape
        if not _trains_bias(module):
            return gram(a, 1 / n)
        # Bordering Q by the mean of a saves writing the inputs again with a 1 beside them.
        Q = a.new_empty(d + 1, d + 1)
        gram(a, 1 / n, out=Q[:-1, :-1])
        Q[-1, :-1] = Q[:-1, -1] = a.mean(0)
        Q[-1, -1] = 1
        return Q

    def pull(self, module: nn.Linear, matrices: PerDatum) -> PerDatum:
        return matrices.pull(widened(module.weight.detach()))

    def pull_expected(
        self, module: nn.Linear, G: Float[Tensor, "out out"]
    ) -> Float[Tensor, "columns columns"]:
        W = widened(module.weight.detach())
        return W.T @ (G @ W)

    def pull_rows(self, module: nn.Linear, rows: Tensor) -> Tensor:
        return rows @ widened(module.weight.detach())


def _trains_bias(module: nn.Linear) -> bool:
    return module.bias is not None and module.bias.requires_grad
