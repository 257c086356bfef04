"""``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` written out, so that each product can be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor

from gaussnewton.attention import Linear

State = tuple[Tensor, ...]
"""What a cell carries from step to step: h, and in an LSTM c."""

Cell = Callable[[Tensor, State, Callable[[Tensor], Tensor]], State]
"""The next state, from the part of the inputs, the state, and the product of h with its weight."""


def lstm_cell(from_input: Tensor, state: State, from_h: Callable[[Tensor], Tensor]) -> State:
    """c = f c + i g, h = o tanh(c)."""
    h, c = state
    i, f, g, o = (from_input + from_h(h)).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(from_input: Tensor, state: State, from_h: Callable[[Tensor], Tensor]) -> State:
    """h = (1 − z) n + z h with n = tanh(W x + r (U h))."""
    (h,) = state
    x_r, x_z, x_n = from_input.chunk(3, dim=-1)
    h_r, h_z, h_n = from_h(h).chunk(3, dim=-1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    z = (x_z + h_z).sigmoid()
    return ((1 - z) * n + z * h,)


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(from_input: Tensor, state: State, from_h: Callable[[Tensor], Tensor]) -> State:
        return (activation(from_input + from_h(state[0])),)

    return cell


RECURRENT: dict[Any, Cell] = {
    _VF.lstm: lstm_cell,
    _VF.gru: gru_cell,
    _VF.rnn_tanh: _rnn_cell(torch.tanh),
    _VF.rnn_relu: _rnn_cell(torch.relu),
}

CELLS: dict[Any, Cell] = {
    _VF.lstm_cell: lstm_cell,
    _VF.gru_cell: gru_cell,
    _VF.rnn_tanh_cell: _rnn_cell(torch.tanh),
    _VF.rnn_relu_cell: _rnn_cell(torch.relu),
}


def one_step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Linear) -> Any:
    """What ``nn.LSTMCell`` and its like return, by products that go through ``seen``."""
    if kwargs:
        return func(*args, **kwargs)
    input, start, w_ih, w_hh, b_ih, b_hh = args
    state = tuple(start) if isinstance(start, (tuple, list)) else (start,)
    from_input = seen.linear(input, w_ih, b_ih)
    result = CELLS[func](from_input, state, lambda h: seen.linear(h, w_hh, b_hh))
    return result if isinstance(start, (tuple, list)) else result[0]


def unrolled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Linear) -> Any:
    """What the fused function returns, by products that go through ``seen``.

    Packed sequences are left to the fused function.
    """
    if kwargs or isinstance(args[2], Tensor):  # packed: the sizes of batches come second
        return func(*args, **kwargs)
    input, start, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    x = input if batch_first else input.transpose(0, 1)
    carried = tuple(start) if isinstance(start, (tuple, list)) else (start,)
    directions = 2 if bidirectional else 1
    per_cell = len(weights) // (layers * directions)
    ends: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = weights[index * per_cell : (index + 1) * per_cell]
            state = tuple(part[index] for part in carried)
            run = _run(RECURRENT[func], x, state, own, has_biases, direction == 1, seen)
            outputs.append(run[0])
            ends.append(run[1])
        x = torch.cat(outputs, dim=-1)
        if dropout and train and layer < layers - 1:
            # Steps first, as in the fused function, so that the same numbers are drawn.
            x = F.dropout(x.transpose(0, 1).contiguous(), dropout).transpose(0, 1)
    last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x if batch_first else x.transpose(0, 1), *last)


def _run(
    cell: Cell,
    x: Tensor,
    state: State,
    weights: list[Tensor],
    has_biases: bool,
    backwards: bool,
    seen: Linear,
) -> tuple[Tensor, State]:
    """One layer in one direction: its outputs at all steps, and its last state."""
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:4] if has_biases else (None, None)
    projection = weights[-1] if len(weights) in (3, 5) else None
    from_input = seen.linear(x, w_ih, b_ih)
    steps = list(from_input.unbind(1))
    outputs = []
    for step in reversed(steps) if backwards else steps:
        state = cell(step, state, lambda h: seen.linear(h, w_hh, b_hh))
        if projection is not None:
            state = (seen.linear(state[0], projection), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs, dim=1), state
