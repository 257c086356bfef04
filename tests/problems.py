"""The networks, losses and slow re-statements that the tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaussnewton as gn

Function = Callable[[Tensor], Tensor]

ELEMENTWISE: dict[str, Function] = {
    "nn.Tanh": nn.Tanh(),
    "torch.tanh": torch.tanh,
    "nn.Sigmoid": nn.Sigmoid(),
    "x.sigmoid()": lambda x: x.sigmoid(),
    "F.relu": F.relu,
    "x.relu()": lambda x: x.relu(),
    "in-place relu": lambda x: x.relu_(),
    "nn.LeakyReLU": nn.LeakyReLU(0.1),
    "in-place leaky relu": nn.LeakyReLU(0.2, inplace=True),
    "max(0.1x, x)": lambda x: torch.maximum(0.1 * x, x),
    "nn.GELU": nn.GELU(),
    "nn.SiLU": nn.SiLU(),
    "x * sigmoid(x)": lambda x: x * torch.sigmoid(x),
    "F.softplus": F.softplus,
    "nn.ELU": nn.ELU(),
    "nn.Hardtanh": nn.Hardtanh(),
    "sin(2x) + x": lambda x: torch.sin(2 * x) + x,
    "x³": lambda x: x**3,
    "identity": nn.Identity(),
    "scale": lambda x: 0.5 * x,
    "tanh of relu": lambda x: torch.tanh(F.relu(x) + 0.1),
    "there and back": lambda x: torch.tanh(x.unsqueeze(1).view(len(x), -1, 1)).flatten(1),
}

PIECEWISE_LINEAR = [
    "F.relu",
    "x.relu()",
    "in-place relu",
    "nn.LeakyReLU",
    "in-place leaky relu",
    "max(0.1x, x)",
    "nn.Hardtanh",
]


class Network(nn.Module):
    """Linear layers of the given sizes, with a function behind each but the last."""

    def __init__(
        self, sizes: Sequence[int], functions: Sequence[Function], biases: Sequence[bool]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=bias)
            for a, b, bias in zip(sizes[:-1], sizes[1:], biases, strict=True)
        )
        self.functions = list(functions)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < len(self.functions):
                x = self.functions[i](x)
        return x


def network(
    sizes: Sequence[int],
    function: str = "nn.Tanh",
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Network:
    """A network with the same function behind every layer but the last."""
    torch.manual_seed(seed)
    depth = len(sizes) - 1
    net = Network(sizes, [ELEMENTWISE[function]] * (depth - 1), [bias] * depth)
    return net.to(dtype)


@dataclass(frozen=True)
class LossCase:
    """A criterion for each reduction, and targets for outputs of a given shape."""

    make: Callable[[str], nn.Module]
    targets: Callable[[int, int], Any]
    outputs: int | None = None  # how many it wants; any number if None
    reductions: tuple[str, ...] = ("mean", "sum", "none")


def _classes(n: int, d: int) -> Tensor:
    return torch.randint(d, (n,))


def _some_ignored(n: int, d: int) -> Tensor:
    y = _classes(n, d)
    y[::3] = 1
    y[1::3] = 0  # so that some always count
    return y


def _weights(d: int) -> Tensor:
    return torch.linspace(0.5, 2.0, d, dtype=torch.float64)


LOSSES: dict[str, LossCase] = {
    "mse": LossCase(lambda r: nn.MSELoss(reduction=r), lambda n, d: torch.randn(n, d).double()),
    "cross-entropy": LossCase(lambda r: nn.CrossEntropyLoss(reduction=r), _classes),
    "cross-entropy, weights, ignored, smoothed": LossCase(
        lambda r: nn.CrossEntropyLoss(
            _weights(4), ignore_index=1, label_smoothing=0.2, reduction=r
        ),
        _some_ignored,
        outputs=4,
    ),
    "cross-entropy, probabilities": LossCase(
        lambda r: nn.CrossEntropyLoss(_weights(4), label_smoothing=0.1, reduction=r),
        lambda n, d: torch.rand(n, d).double().softmax(1),
        outputs=4,
    ),
    "bce": LossCase(
        lambda r: nn.BCEWithLogitsLoss(reduction=r), lambda n, d: torch.rand(n, d).double()
    ),
    "bce, weights": LossCase(
        lambda r: nn.BCEWithLogitsLoss(_weights(4), pos_weight=_weights(4).flip(0), reduction=r),
        lambda n, d: torch.rand(n, d).double().round(),
        outputs=4,
    ),
    "poisson": LossCase(
        lambda r: nn.PoissonNLLLoss(reduction=r),
        lambda n, d: torch.poisson(torch.full((n, d), 2.0)).double(),
    ),
    "gaussian, given variance": LossCase(
        lambda r: nn.GaussianNLLLoss(reduction=r),
        lambda n, d: (torch.randn(n, d).double(), 0.5 + torch.rand(n, d).double()),
    ),
    "mixture": LossCase(
        lambda r: gn.BinaryMixtureLoss(reduction=r),
        lambda n, d: torch.randint(2, (n,)),  # noqa: ARG005
        outputs=3,
        reductions=("mean", "sum"),
    ),
    "custom, elementwise": LossCase(
        lambda r: gn.Loss(lambda h, y: getattr((h - y).cosh().log().sum(1), r)(), reduction=r),
        lambda n, d: torch.randn(n, d).double(),
        reductions=("mean", "sum"),
    ),
    "custom, not convex": LossCase(
        lambda r: gn.Loss(
            lambda h, y: getattr(torch.sin(h.prod(1) - y.sum(1)) + h.square().sum(1), r)(),
            reduction=r,
        ),
        lambda n, d: torch.randn(n, d).double(),
        reductions=("mean", "sum"),
    ),
}


def relative(A: Tensor, B: Tensor) -> float:
    """‖A − B‖ / ‖B‖."""
    A, B = A.detach(), B.detach()
    return float((A - B).norm() / B.norm().clamp(min=1e-300))


def moment_by_hand(rows: Tensor, bias: bool) -> Tensor:
    """Q as a loop over data."""
    total: Any = 0
    for a in rows:
        a = torch.cat([a, torch.ones(1, dtype=a.dtype)]) if bias else a
        total = total + torch.outer(a, a)
    return total / len(rows)


def layer_inputs(net: Network, x: Tensor) -> dict[str, Tensor]:
    """What enters each layer, by the layer's name."""
    inputs, a = {}, x
    with torch.no_grad():
        for i, layer in enumerate(net.layers):
            inputs[f"layers.{i}"] = a
            a = layer(a)
            a = net.functions[i](a) if i < len(net.functions) else a
    return inputs


def kfra_by_hand(net: Network, criterion: nn.Module, x: Tensor, y: Any) -> dict[str, Tensor]:
    """Section 3.5 as it stands, with a loop over data and derivatives one number at a time."""
    preactivations, a = [], x
    with torch.no_grad():
        for i, layer in enumerate(net.layers):
            h = layer(a)
            preactivations.append(h.clone())
            a = net.functions[i](h.clone()) if i < len(net.functions) else h
    G = gn.exact.output_hessian(criterion, a, y).sum(0)
    result = {f"layers.{len(net.layers) - 1}": G}
    for i in range(len(net.layers) - 2, -1, -1):
        W = net.layers[i + 1].weight.detach()
        total = torch.zeros(W.shape[1], W.shape[1], dtype=W.dtype)
        for h in preactivations[i]:
            slopes = [_derivative(net.functions[i], number) for number in h]
            B = torch.diag(torch.stack(slopes))
            total += B @ W.T @ G @ W @ B
        G = total / len(x)
        result[f"layers.{i}"] = G
    return result


def _derivative(function: Function, number: Tensor) -> Tensor:
    h = number.clone().reshape(1, 1).requires_grad_()
    (slope,) = torch.autograd.grad(function(h * 1.0).sum(), h)
    return slope.squeeze()


def fit(
    optimizer: gn.GaussNewton | gn.HessianFree, x: Tensor, y: Tensor, updates: int
) -> list[float]:
    """Train on one batch, as a user would; returns the losses before the updates."""
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = optimizer.criterion(optimizer.model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
