"""``nn.Linear``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.gram import bordered_gram, gram
from gaussnewton.layers.rule import ChainRule, register_layer
from gaussnewton.perdatum import PerDatum
from gaussnewton.precision import widened
from gaussnewton.tiles import tile_size, tiled_gram, tiled_product, times


@register_layer(nn.Linear)
class LinearRule(ChainRule):
    """h = W a (eq. nn), a bias being the last column of W and a 1 below a."""

    def fits(self, module: nn.Linear) -> bool:
        # Pruning and old-style normalisations compute the weight from other parameters.
        own = module._parameters
        return set(own) <= {"weight", "bias"} and own.get("weight") is not None

    def objection(self, input: Tensor) -> str | None:
        if input.ndim == 2:
            return None
        return f"was called on inputs of shape {tuple(input.shape)}, not on one row a datum"

    def positions(self, module: nn.Linear, input: Tensor) -> Float[Tensor, "n r groups columns"]:
        flat = input.reshape(-1, input.shape[-1])
        return self.rows(module, flat).reshape(input.shape[0], -1, 1, self._columns(module))

    def gradients(
        self, module: nn.Linear, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r groups out"]:
        return rows.reshape(*rows.shape[:2], -1, 1, module.out_features)

    @staticmethod
    def _columns(module: nn.Linear) -> int:
        weight = module.in_features if module.weight.requires_grad else 0
        return weight + int(_trains_bias(module))

    def rows(self, module: nn.Linear, input: Tensor) -> Float[Tensor, "n columns"]:
        parts = []
        if module.weight.requires_grad:
            parts.append(widened(input))
        if _trains_bias(module):
            parts.append(torch.ones_like(widened(input[:, :1])))
        return torch.cat(parts, dim=1)

    def input_moment(
        self, module: nn.Linear, input: Tensor, largest: int | None = None
    ) -> Float[Tensor, "columns b"]:
        return self._moment(module, input, 1 / len(input), largest)

    def second_moment(
        self, module: nn.Linear, input: Tensor, largest: int | None = None
    ) -> tuple[Float[Tensor, "groups columns b"], int]:
        rows = input.reshape(-1, input.shape[-1])
        return self._moment(module, rows, 1.0, largest).unsqueeze(0), len(rows)

    def moment_entries(self, module: nn.Linear, input: Tensor) -> int:  # noqa: ARG002
        narrow = torch.finfo(input.dtype).bits < 32
        return input[:1].numel() if narrow or not input.is_contiguous() else 0

    def _moment(
        self, module: nn.Linear, input: Float[Tensor, "n d"], scale: float, largest: int | None
    ) -> Float[Tensor, "columns b"]:
        if not module.weight.requires_grad:
            return widened(input).new_full((1, 1), len(input) * scale)
        columns = self._columns(module)
        if tile_size(columns, largest) < columns:
            return tiled_gram(self.rows(module, input), largest, scale)
        return (bordered_gram if _trains_bias(module) else gram)(input, scale)

    def pull(self, module: nn.Linear, matrices: PerDatum) -> PerDatum:
        return matrices.pull(widened(module.weight.detach()))

    def pull_expected(
        self, module: nn.Linear, G: Float[Tensor, "out b"], largest: int | None = None
    ) -> Float[Tensor, "in c"]:
        W = widened(module.weight.detach())
        return tiled_product(W, times(G, W), largest)

    def pull_rows(self, module: nn.Linear, rows: Tensor) -> Tensor:
        return rows @ widened(module.weight.detach())

    def push(
        self, module: nn.Linear, direction: Float[Tensor, "k rows columns"], input: Tensor
    ) -> Float[Tensor, "k n rows"]:
        a, k, rows = widened(input), direction.shape[0], direction.shape[1]
        if not module.weight.requires_grad:
            return direction.mT.repeat(1, a.shape[0], 1)
        V = direction[:, :, : a.shape[1]].flatten(0, 1)
        moved = (
            torch.addmm(direction[:, :, -1].flatten(), a, V.T) if _trains_bias(module) else a @ V.T
        )
        return moved.unflatten(1, (k, rows)).transpose(0, 1)

    def push_rows(
        self,
        module: nn.Linear,
        rows: Float[Tensor, "k n d"],
        beside: Float[Tensor, "k n e"] | None = None,
    ) -> Float[Tensor, "k n e"]:
        W = widened(module.weight.detach())
        if beside is None:
            return rows @ W.T
        flat = beside.reshape(-1, W.shape[0])
        return flat.addmm_(rows.flatten(0, 1), W.T).view(beside.shape)


def _trains_bias(module: nn.Linear) -> bool:
    return module.bias is not None and module.bias.requires_grad
