"""``nn.MultiheadAttention`` with its projections taken out, so that each can be seen."""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

_ARGUMENTS = inspect.signature(F.multi_head_attention_forward)


@runtime_checkable
class Linear(Protocol):
    """Takes the part of ``F.linear``, and sees what goes through."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear``."""

    def linear_part(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, part: int, parts: int
    ) -> Tensor:
        """The same with one of several matrices that are one below the other."""

    def shifted(self, input: Tensor, bias: Tensor, part: int, parts: int) -> Tensor:
        """The input plus one of several parts of a bias."""


def attention(args: tuple[Any, ...], kwargs: dict[str, Any], seen: Linear) -> Any:
    """``F.multi_head_attention_forward``, its four projections going through ``seen``.

    What lies between them, with masks, dropout and all options, is left to torch: it is called
    with identities for its projections, which change no number.
    """
    given = _ARGUMENTS.bind(*args, **kwargs)
    given.apply_defaults()
    own = given.arguments
    projected = _projected(own, seen)
    identity = torch.eye(
        own["embed_dim_to_check"], dtype=projected[0].dtype, device=projected[0].device
    )
    out_weight, out_bias = own["out_proj_weight"], own["out_proj_bias"]
    own |= dict(zip(("query", "key", "value"), projected, strict=True))
    own |= {
        "use_separate_proj_weight": True,
        "q_proj_weight": identity,
        "k_proj_weight": identity,
        "v_proj_weight": identity,
        "in_proj_weight": None,
        "in_proj_bias": None,
        "out_proj_weight": identity,
        "out_proj_bias": None,
    }
    mixed, weights = F.multi_head_attention_forward(*given.args, **given.kwargs)
    return _data_first(mixed, lambda x: seen.linear(x, out_weight, out_bias)), weights


def _projected(own: dict[str, Any], seen: Linear) -> list[Tensor]:
    """Query, key and value, projected."""
    bias, result = own["in_proj_bias"], []
    for part, name in enumerate(("query", "key", "value")):
        weight = own[f"{name[0]}_proj_weight"] if own["use_separate_proj_weight"] else None

        def project(x: Tensor, part: int = part, weight: Tensor | None = weight) -> Tensor:
            if weight is None:
                return seen.linear_part(x, own["in_proj_weight"], bias, part, 3)
            y = seen.linear(x, weight)
            return y if bias is None else seen.shifted(y, bias, part, 3)

        result.append(_data_first(own[name], project))
    return result


def _data_first(x: Tensor, function: Any) -> Tensor:
    """A function of tensors [data, positions, width], of one that has positions first."""
    if x.ndim == 2:
        return function(x.unsqueeze(0)).squeeze(0)
    return function(x.transpose(0, 1)).transpose(0, 1)
