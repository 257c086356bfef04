"""Parameters that are used other than by calling the layer that owns them.

A hook sees a layer's call. It does not see ``F.linear(x, self.table.weight)``, ``x + self.offset``
or what an attention or recurrent layer does inside. While a tape records, every torch function is
seen too, and those that use a parameter in a way that is understood are noted as calls. What
is not understood is found later, in the graph (:mod:`gaussnewton.network`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gaussnewton.attention import attention
from gaussnewton.layers.rule import LayerRule, MatrixRule, SmallRule
from gaussnewton.parameters import Group, Theta
from gaussnewton.precision import widened
from gaussnewton.recurrent import CELLS, RECURRENT, one_step, unrolled

# By name: the same operation is a function of torch, a method, and an operator with two orders.
ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "true_divide", "maximum", "minimum", "pow"}
PRODUCTS = {"matmul", "mm"}
TRANSPOSES = {Tensor.t, torch.t, *(getattr(getattr(Tensor, p), "__get__") for p in ("T", "mT"))}  # noqa: B009
EXPANSIONS = {"expand", "expand_as", "broadcast_to", "repeat"}


@dataclass(frozen=True)
class Product:
    """A parameter that multiplies data, as ``F.linear`` has it.

    Attributes:
        columns: the columns of the group's matrix that are used: those of the inputs, a 1 for a
            bias, a 0 for a bias of the group that this use leaves out.
        outputs: how many there are at each position.
    """

    columns: tuple[str, ...]
    outputs: int


class ProductRule(MatrixRule):
    """y = W a: the matrix of a :class:`Product`."""

    def positions(self, module: Product, input: Tensor) -> Float[Tensor, "n r groups columns"]:
        a = widened(input)
        one = a[..., :1]
        make = {"input": a, "one": torch.ones_like(one), "zero": torch.zeros_like(one)}
        whole = torch.cat([make[part] for part in module.columns], dim=-1)
        return whole.reshape(a.shape[0], -1, 1, whole.shape[-1])

    def gradients(
        self, module: Product, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r groups out"]:
        return rows.reshape(*rows.shape[:2], -1, 1, module.outputs)


class TransposedProductRule(ProductRule):
    """y = Wᵀ a, as in ``a @ W``."""

    transposed = True


@dataclass(frozen=True)
class Bare:
    """A parameter, or a function of it alone, that meets the data one by one.

    Attributes:
        source: what is broadcast over the data, with its graph.
        parameter: the parameter behind it.
        certain: whether what it meets depends on other layers, and so on the data.
    """

    source: Tensor
    parameter: nn.Parameter
    certain: bool


class BareRule(SmallRule):
    """The gradient of each datum is that of the datum's own copy."""

    def parameter_rows(
        self,
        module: Bare,
        input: Tensor,  # noqa: ARG002
        rows: Float[Tensor, "k n *out"],
    ) -> Float[Tensor, "k n size"]:
        shape = module.source.shape
        padded = (1,) * (rows.ndim - 1 - len(shape)) + tuple(shape)
        for i in range(2, rows.ndim):  # the copies inside of one datum
            if padded[i - 1] == 1 and rows.shape[i] > 1:
                rows = rows.sum(i, keepdim=True)
        at_source = rows.reshape(-1, *shape)
        if module.source is not module.parameter:
            (at_source,) = torch.autograd.grad(
                [module.source],
                [module.parameter],
                [at_source.to(module.source.dtype)],
                retain_graph=True,
                is_grads_batched=True,
            )
        return widened(at_source).reshape(*rows.shape[:2], -1)


@dataclass(frozen=True)
class Use:
    """One use of the parameters of a group.

    Attributes:
        group: the name of the group.
        module: what stands for a layer.
        rule: what it means to curvature.
        input: the data that meet the parameter; for a bare one, what is copied for them.
        output: where gradients are to be caught.
        part: which of several matrices, one below the other, if the group is that.
    """

    group: str
    module: Any
    rule: LayerRule
    input: Tensor
    output: Tensor
    part: int | None = None


class ParameterUses(TorchFunctionMode):
    """Notes uses of parameters outside of layers' calls.

    Args:
        theta: the parameters to look for.
        note: takes each :class:`Use`.

    Attributes:
        depth: how many layers that speak for themselves are being called now.
    """

    def __init__(self, theta: Theta, note: Callable[[Use], None]) -> None:
        super().__init__()
        self._note, self.depth = note, 0
        self._owner = {id(p): (group, p) for group in theta for p in group.parameters.values()}
        # Tensors made of one parameter alone; held, so that their identity stays theirs.
        self._made: dict[int, tuple[Tensor, nn.Parameter]] = {}
        self._transposed: dict[int, tuple[Tensor, nn.Parameter]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        ours = [part for part in _tensors((args, kwargs)) if self._is_ours(part)]
        if self.depth or not ours or not torch.is_grad_enabled() or _is_checkpointed():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        if func is F.linear:
            return self.linear(*args, **kwargs)
        if name in PRODUCTS and len(args) == 2 and not kwargs and args[1] is ours[0]:
            return self._product(func, *args)
        if func in RECURRENT:
            return unrolled(func, args, kwargs, self)
        if func in CELLS:
            return one_step(func, args, kwargs, self)
        if func is F.multi_head_attention_forward:
            return attention(args, kwargs, self)
        if name in ELEMENTWISE and len(args) == 2 and len(ours) == 1:
            return func(*self._copied(args, ours[0]), **kwargs)
        result = func(*args, **kwargs)
        if len(_tensors((args, kwargs))) == 1 and isinstance(result, Tensor):
            self._note_made(func, name, result, ours[0])
        return result

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear``, noted where all that is trained in it is understood."""
        output = F.linear(input, weight, bias)
        group, owner = self._group(weight), self._group(bias)
        strange_bias = bias is not None and bias.requires_grad and owner is None
        if input.ndim < 2 or strange_bias:  # no dimension for data; a function of parameters
            return output
        if group is not None:
            self._note_product(input, output, group, bias)
        elif id(weight) in self._transposed:
            if not self._note_transposed(input, output, self._transposed[id(weight)][1]):
                return output
        elif weight.requires_grad:
            return output
        if owner is not None and owner is not group:
            columns = tuple("one" if p is bias else "zero" for p in owner.parameters.values())
            module = Product(columns, output.shape[-1])
            self._note(Use(owner.name, module, ProductRule(), input, output))
        return output

    def linear_part(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, part: int, parts: int
    ) -> Tensor:
        """``F.linear`` with one of several matrices that are one below the other."""
        W, b = weight.chunk(parts)[part], None if bias is None else bias.chunk(parts)[part]
        output = F.linear(input, W, b)
        group = self._group(weight)
        if group is not None:
            self._note_product(input, output, group, bias, part)
        return output

    def shifted(self, input: Tensor, bias: Tensor, part: int, parts: int) -> Tensor:
        """The input plus one of several parts of a bias."""
        output = input + bias.chunk(parts)[part]
        group = self._group(bias)
        if group is not None and len(group.parameters) == 1:
            module = Product(("one",), output.shape[-1])
            self._note(Use(group.name, module, ProductRule(), input, output, part))
        return output

    def _product(self, func: Any, input: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = func(input, weight)
        if input.ndim >= 2 and weight.ndim == 2:
            if id(weight) in self._transposed:  # x @ W.T
                p = self._transposed[id(weight)][1]
                self._note_product(input, output, self._owner[id(p)][0], None)
            elif id(weight) in self._owner:
                self._note_transposed(input, output, weight)
        return output

    def _note_product(
        self,
        input: Tensor,
        output: Tensor,
        group: Group,
        bias: Tensor | None,
        part: int | None = None,
    ) -> None:
        kinds = {True: "one", False: "zero"}
        columns = tuple(
            "input" if p.ndim > 1 else kinds[p is bias] for p in group.parameters.values()
        )
        module = Product(columns, output.shape[-1])
        self._note(Use(group.name, module, ProductRule(), input, output, part))

    def _note_transposed(self, input: Tensor, output: Tensor, weight: Tensor) -> bool:
        group = self._owner[id(weight)][0]
        if len(group.parameters) > 1:  # the rows of the weight are not those of the bias
            return False
        module = Product(("input",), output.shape[-1])
        self._note(Use(group.name, module, TransposedProductRule(), input, output))
        return True

    def _copied(self, args: tuple[Any, ...], mine: Tensor) -> tuple[Any, ...]:
        """The arguments, with a copy of the parameter for each datum of the other one."""
        other = args[1] if args[0] is mine else args[0]
        missing = other.ndim - mine.ndim if isinstance(other, Tensor) else -1
        p = self._parameter(mine)
        if missing < 0 or (missing == 0 and (mine.ndim == 0 or mine.shape[0] != 1)) or p is None:
            return args
        copies = mine.reshape((1,) * missing + tuple(mine.shape)).expand(
            other.shape[0], *(-1,) * (other.ndim - 1)
        )
        self._note_bare(copies, mine, p, other.requires_grad)
        return tuple(copies if part is mine else part for part in args)

    def _note_made(self, func: Any, name: str, result: Tensor, mine: Tensor) -> None:
        """Of a function of one tensor of ours and of no other."""
        p = self._parameter(mine)
        if p is None or not result.requires_grad:
            return
        if func in TRANSPOSES and mine is p and p.ndim == 2:
            self._transposed[id(result)] = (result, p)
        elif name in EXPANSIONS and _copies_for_data(result, mine):
            self._note_bare(result, mine, p, certain=False)
        else:
            self._made[id(result)] = (result, p)

    def _note_bare(self, copies: Tensor, source: Tensor, p: nn.Parameter, certain: bool) -> None:
        group = self._owner[id(p)][0]
        if len(group.parameters) == 1:
            self._note(Use(group.name, Bare(source, p, certain), BareRule(), source, copies))

    def _group(self, tensor: Tensor | None) -> Group | None:
        return self._owner[id(tensor)][0] if id(tensor) in self._owner else None

    def _parameter(self, tensor: Tensor) -> nn.Parameter | None:
        if id(tensor) in self._owner:
            return self._owner[id(tensor)][1]
        return self._made[id(tensor)][1] if id(tensor) in self._made else None

    def _is_ours(self, tensor: Tensor) -> bool:
        return any(id(tensor) in known for known in (self._owner, self._made, self._transposed))


def _is_checkpointed() -> bool:
    """Whether ``torch.utils.checkpoint`` will run this once more, and wants the same operations."""
    hooks_now = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    hooks = hooks_now(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _tensors(values: Any) -> list[Tensor]:
    """All tensors in arguments, one or two levels deep."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _copies_for_data(result: Tensor, source: Tensor) -> bool:
    """Whether an expansion made only copies along a new first dimension, or along one of 1."""
    missing = result.ndim - source.ndim
    padded = (1,) * missing + tuple(source.shape)
    return padded[0] == 1 and result.shape[1:] == torch.Size(padded[1:])
