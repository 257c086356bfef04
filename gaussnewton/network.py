"""Any graph of layers: residual, branching, with shared weights; by autograd's own backward.

A :class:`~gaussnewton.chain.Chain` knows what lies between its layers and sends whole matrices
back. Here nothing is known of what lies between: vectors at the outputs go back through the
autograd graph, to the outputs of every call of every layer at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gaussnewton.again import Again, Outline, Repeat
from gaussnewton.apart import keeps_apart
from gaussnewton.chain import check_criterion
from gaussnewton.errors import UnsupportedGraphError
from gaussnewton.layers.rule import MatrixRule, SmallRule
from gaussnewton.parameters import Group
from gaussnewton.precision import widened
from gaussnewton.tape import LayerCall, Record
from gaussnewton.uses import Bare

NEAR = 16 * 2**20
"""Bytes that a processor has near at hand."""

WORKSPACE = 64 * 2**20
"""Bytes that tangents on their way through a network may take, about."""


class Network:
    """The calls of trained layers that the outputs depend on.

    Args:
        record: the forward pass.
        objection: why it is not a chain.
        again: runs the pass once more. Only J v and Jᵀ r need it.

    Attributes:
        record: the forward pass.
        calls: of each group of parameters, in the order in which they were made; none for one
            that had no part in this pass, whose curvature is zero.
        loose: groups that are used in other ways than by calls that are understood.
        data: how many data there are. Each may have several rows of outputs, as where a language
            model's outputs are flattened for the criterion.
        objection: why it is not a chain.
    """

    def __init__(
        self,
        record: Record,
        objection: Exception,
        again: Again | None = None,
    ) -> None:
        check_criterion(record)
        self.record, self.objection, self.again = record, objection, again
        reached, leaves = self._reached()
        self.loose = {
            group.name
            for group in record.theta
            if any(id(p) in leaves for p in group.parameters.values())
        }
        self.calls: dict[str, list[LayerCall]] = {name: [] for name in record.theta.groups}
        for call in record.calls:
            if call.name in self.calls and call.output_edge.node in reached:
                self.calls[call.name].append(call)
        self.data = self._count_data()
        self._second: set[int] = set()  # calls that have the data in their second dimension
        for name, calls in self.calls.items():
            self.calls[name] = [self._data_first(call) for call in calls]
        counts = (self.data, record.data)
        self._let_loose(
            {
                name
                for name, calls in self.calls.items()
                if not _understood(record.theta[name], calls, counts)
            }
        )
        doubtful = {call.name for call in self._all if _is_doubtful(call, self.data)}
        if doubtful:
            self._let_loose({call.name for call in self._mixed() if call.name in doubtful})

    def gradients(
        self, rows: Float[Tensor, "k n d"]
    ) -> Iterator[tuple[LayerCall, Float[Tensor, "k n *out"]]]:
        """What k vectors at the outputs of each datum become at the outputs of each call."""
        for call, found in zip(self._all, self._pull(rows), strict=True):
            if found is not None:
                yield call, widened(found)

    def by_datum(self, roots: Float[Tensor, "rows k d"]) -> Float[Tensor, "n m e"]:
        """Vectors at rows of the outputs, as vectors at all rows of a datum, zero at the others."""
        each = self.record.data // self.data
        if each == 1:
            return roots
        grouped = roots.unflatten(0, (self.data, each))
        apart = torch.zeros(
            *grouped.shape[:3], each, roots.shape[2], dtype=roots.dtype, device=roots.device
        )
        for i in range(each):
            apart[:, i, :, i] = grouped[:, i]
        return apart.flatten(3).flatten(1, 2)

    def parameter_gradients(
        self, rows: Float[Tensor, "k n d"], names: Sequence[str], together: bool
    ) -> Iterator[tuple[str, Float[Tensor, "m size"]]]:
        """What vectors at the outputs pull on some groups of parameters, vec column by column.

        Args:
            rows: the vectors.
            names: of the groups.
            together: for all data at once, which is cheap; else datum by datum, which takes a
                backward pass for each.
        """
        outputs, theta = self.record.outputs, self.record.theta
        named = {key: p for name in names for key, p in theta[name].parameters.items()}
        v = rows.to(outputs.dtype)
        if not together:
            v = torch.diag_embed(v.movedim(1, 2), dim1=1, dim2=2)  # k, n, n, d
            v = v.flatten(0, 1)
        found = self._batched_gradients(list(named.values()), v.reshape(-1, *outputs.shape))
        by_key = {key: g for key, g in zip(named, found, strict=True) if g is not None}
        for name in names:
            group = theta[name]
            parts = [
                by_key.get(key, p.new_zeros(len(v), p.numel()))
                for key, p in group.parameters.items()
            ]
            joined = torch.cat([part.reshape(len(v), group.rows, -1) for part in parts], dim=2)
            yield name, widened(joined.mT.flatten(1))

    def rows_at_once(self, workspace: int) -> int:
        """Of how many vectors the gradients at all calls fit, at least of one.

        On a CPU no more than stay near the cache: of larger ones each piece is memory that the
        system has to hand out anew, and nine vectors in one batch took 1.5 times as long as one
        after another.
        """
        outputs = self.record.outputs
        entries = sum(call.shape.numel() for call in self._all)
        # Each is there as it comes, and sorted by positions.
        each = 2 * entries * max(4, outputs.element_size())
        most = min(workspace, NEAR) if outputs.device.type == "cpu" else workspace
        return max(1, most // max(1, each))

    @property
    def trained(self) -> list[str]:
        """The names of the trained layers."""
        return list(self.calls)

    @property
    def repeat(self) -> Repeat:
        """The pass, to be run once more for products with its Jacobian."""
        assert self.again is not None  # set by whoever wants products
        theta, apart = self.record.theta, self.mixing is None
        return Repeat(self.again, Outline(theta, self.record.data, self.entries, apart))

    @property
    def entries(self) -> int:
        """How many numbers the recorded calls return, for each row of the outputs."""
        return sum(call.shape.numel() for call in self.record.calls) // self.record.data

    def refuse_mixed(self, method: str) -> None:
        """Raise where the data of the batch are mixed."""
        if self.mixing is not None:
            raise UnsupportedGraphError(
                f"what lies between layer '{self.mixing}' and the outputs mixes the data of a "
                "batch, as batch normalisation in training mode does. The curvature of one datum "
                f"is not defined there, which {method} needs: use 'kfac', whose draws for "
                "different data are independent, or call model.eval() first."
            )

    def _pull(self, rows: Float[Tensor, "k n d"]) -> Sequence[Tensor | None]:
        outputs = self.record.outputs
        if not self._all:  # every parameter is a loose one
            return []
        v = rows.to(outputs.dtype).reshape(-1, *outputs.shape)
        found = self._batched_gradients([call.output_edge for call in self._all], v)
        return [
            each.transpose(1, 2) if each is not None and id(call) in self._second else each
            for call, each in zip(self._all, found, strict=True)
        ]

    def _data_first(self, call: LayerCall) -> LayerCall:
        """A call on [positions, data, width], as recurrent networks have it, with data first."""
        by_width = isinstance(call.module, (nn.Linear, nn.LayerNorm, nn.RMSNorm))
        if not by_width or call.input.ndim != 3 or self.data not in call.shape[1:2]:
            return call
        normalised = getattr(call.module, "normalized_shape", ())
        if call.shape[0] in (self.data, self.record.data) or len(normalised) > 1:
            return call
        turned = call.input.transpose(0, 1)
        shape = torch.Size((call.shape[1], call.shape[0], call.shape[2]))
        result = replace(call, input=turned, shape=shape)
        self._second.add(id(result))
        return result

    def _batched_gradients(self, starts: Sequence[Any], v: Tensor) -> Sequence[Tensor | None]:
        """Gradients of the outputs at some places of the graph, for several vectors at once."""
        ends = [get_gradient_edge(self.record.outputs)]
        if not starts:  # all parameters are loose
            return []
        if len(v) == 1:  # a batch of one only costs the batching
            found = torch.autograd.grad(ends, starts, [v[0]], retain_graph=True, allow_unused=True)
            return [None if each is None else each.unsqueeze(0) for each in found]
        try:
            return torch.autograd.grad(
                ends, starts, [v], retain_graph=True, is_grads_batched=True, allow_unused=True
            )
        except RuntimeError:  # a backward that cannot be batched, e.g. one that branches
            one_by_one = [
                torch.autograd.grad(ends, starts, [row], retain_graph=True, allow_unused=True)
                for row in v
            ]
            return [
                None
                if each[0] is None
                else torch.stack([part for part in each if part is not None])
                for each in zip(*one_by_one, strict=True)
            ]

    def _count_data(self) -> int:
        rows = self.record.data
        counts = {
            call.shape[0]
            for calls in self.calls.values()
            for call in calls
            if call.shape[0] == 1 or call.shape[1:2] != (rows,)  # else its first are positions
        }
        least = min(counts, default=rows)
        flattened = 0 < least < rows and all(count % least == 0 for count in {rows, *counts})
        return least if flattened else rows

    def _reached(self) -> tuple[set[Any], set[int]]:
        """What the outputs depend on: calls, by their nodes, and other leaves, by identity."""
        by_node = {call.output_edge.node: call for call in self.record.calls}
        reached: set[Any] = set()
        between: dict[Any, None] = {}
        frontier = [get_gradient_edge(self.record.outputs).node]
        while frontier:
            node = frontier.pop()
            if node in reached or node in between:
                continue
            call = by_node.get(node)
            if call is None:
                between[node] = None
                frontier.extend(following for following, _ in node.next_functions if following)
            else:  # what lies inside of a layer is the layer's own business
                reached.add(node)
                frontier.extend([call.input_edge.node] if call.input_edge else [])
        leaves = {id(v) for node in between if (v := getattr(node, "variable", None)) is not None}
        matrices = all(
            isinstance(call.rule, MatrixRule) and call.input.shape[0] == self.record.data
            for node, call in by_node.items()
            if node in reached
        )
        self._apart = matrices and keeps_apart(between, self.record.data)
        return reached, leaves

    @cached_property
    def mixing(self) -> str | None:
        """A layer behind which the data of a batch are mixed, as by batch normalisation.

        Where the graph does not show that it is not so, it is found by a backward pass, and so not
        before somebody wants to know: rows of zeros must stay rows of zeros on their way back,
        whatever the others hold.
        """
        return None if self._apart else next((call.name for call in self._mixed()), None)

    def _mixed(self) -> Iterator[LayerCall]:
        """The calls whose rows are not the data's own."""
        n, outputs = self.data, self.record.outputs
        kept = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5
        if n < 2 or not self._all:
            return
        kept[0], kept[1] = True, False
        kept = kept.to(outputs.device)
        by_row = kept.repeat_interleave(self.record.data // n)
        rows = torch.ones_like(outputs.flatten(1)) * by_row[:, None]
        for call, found in zip(self._all, self._pull(rows.unsqueeze(0)), strict=True):
            mask = {n: kept, self.record.data: by_row}.get(call.shape[0])
            if found is not None and mask is not None and bool(found[0][~mask].any()):
                yield call

    def _let_loose(self, names: set[str]) -> None:
        self.loose |= names
        for name in self.loose:
            self.calls[name] = []
        self._all = [call for calls in self.calls.values() for call in calls]


def _is_doubtful(call: LayerCall, data: int) -> bool:
    """Whether as many rows as there are data may be something else: positions, or a table.

    Blocks of few parameters sum over the rows of a datum, so for them it matters.
    """
    if isinstance(call.module, Bare) and not call.module.certain:
        return True
    return isinstance(call.rule, SmallRule) and call.shape[:2] == (data, data)


def _understood(group: Group, calls: list[LayerCall], counts: tuple[int, int]) -> bool:
    """Whether all calls of a group together have a block of one of the known kinds."""
    if any(isinstance(call.rule, SmallRule) for call in calls):
        own_rows = all(call.shape[0] in counts for call in calls)
        return own_rows and all(isinstance(call.rule, SmallRule) for call in calls)
    if len({call.part is None for call in calls}) > 1:
        return False
    several = len({family(call) for call in calls}) > 1
    grouped = any(getattr(call.module, "groups", 1) > 1 for call in calls)
    # The rows of a transposed use are the columns of the others, of which the bias is one.
    transposed = any(isinstance(call.rule, MatrixRule) and call.rule.transposed for call in calls)
    return not (several and (grouped or (transposed and len(group.parameters) > 1)))


def family(call: LayerCall) -> tuple[type, int | None]:
    """Calls of one family add up to one Kronecker product."""
    return type(call.rule), call.part
