"""``nn.Embedding``."""

from __future__ import annotations

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
        counts = torch.bincount(input.reshape(-1), minlength=module.num_embeddings)
        if module.padding_idx is not None:  # whose row gets no gradient
            counts[module.padding_idx] = 0
        weight = module.weight
        return counts.to(torch.promote_types(weight.dtype, torch.float32)) / input.numel()

    def gradients(
        self, module: nn.Embedding, input: Tensor, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r columns"]:
        flat = rows.reshape(*rows.shape[:2], -1, module.embedding_dim)
        if module.padding_idx is None:
            return flat
        used = (input != module.padding_idx).reshape(input.shape[0], -1, 1)
        return flat * used
