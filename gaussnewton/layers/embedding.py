"""``nn.Embedding`` and ``nn.EmbeddingBag``."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.layers.rule import TableRule, register_layer


@register_layer(nn.Embedding)
class EmbeddingRule(TableRule):
    """A table, of which each position of a datum takes one row."""

    def fits(self, module: nn.Embedding) -> bool:
        # A table that renormalises itself, or counts words in its gradient, is another function.
        plain = module.max_norm is None and not module.scale_grad_by_freq
        return plain and set(module._parameters) == {"weight"}

    def uses(self, module: nn.Embedding, input: Tensor) -> Float[Tensor, " rows"]:
        return _shares(module, input)

    def gradients(
        self, module: nn.Embedding, input: Tensor, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r columns"]:
        flat = rows.reshape(*rows.shape[:2], -1, module.embedding_dim)
        if module.padding_idx is None:
            return flat
        used = (input != module.padding_idx).reshape(input.shape[0], -1, 1)
        return flat * used


@register_layer(nn.EmbeddingBag)
class EmbeddingBagRule(TableRule):
    """A table, of which the rows that a datum takes are summed or averaged.

    Bags of one length without weights; with offsets, weights or the maximum of the rows the
    parameter is treated like one that is used outside of any layer.
    """

    def fits(self, module: nn.EmbeddingBag) -> bool:
        plain = module.max_norm is None and not module.scale_grad_by_freq
        return plain and module.mode in ("sum", "mean") and set(module._parameters) == {"weight"}

    def accepts(
        self,
        module: nn.EmbeddingBag,  # noqa: ARG002
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        input, *others = [*args, *kwargs.values()]
        return isinstance(input, Tensor) and input.ndim == 2 and all(o is None for o in others)

    def uses(self, module: nn.EmbeddingBag, input: Tensor) -> Float[Tensor, " rows"]:
        return _shares(module, input)

    def gradients(
        self, module: nn.EmbeddingBag, input: Tensor, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r columns"]:
        used = torch.ones_like(input, dtype=rows.dtype)
        if module.padding_idx is not None:
            used = (input != module.padding_idx).to(rows.dtype)
        if module.mode == "mean":
            used = used / used.sum(1, keepdim=True).clamp(min=1)
        return rows.unsqueeze(2) * used.unsqueeze(2)


def _shares(module: nn.Embedding | nn.EmbeddingBag, input: Tensor) -> Float[Tensor, " rows"]:
    """How often each row is taken."""
    counts = torch.bincount(input.reshape(-1), minlength=module.num_embeddings)
    if module.padding_idx is not None:  # whose row gets no gradient
        counts[module.padding_idx] = 0
    return counts.to(torch.promote_types(module.weight.dtype, torch.float32)) / input.numel()
