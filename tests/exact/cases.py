"""Small models, batches and criteria, and their curvature by another road (torch.func)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from gaussnewton.parameters import Theta

F64 = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def mlp(sizes=(3, 4, 2), *, bias=True, activation=nn.Tanh, last=None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(a, b, bias=bias))
        if i < len(sizes) - 2:
            layers.append(activation())
    model = nn.Sequential(*layers, *([last] if last else [])).to(F64)
    return filled(model)


def filled(model: nn.Module) -> nn.Module:
    """Parameters that depend neither on the global random state nor on the order of tests."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(0.7 * random(*p.shape, seed=100 + i))
    return model


class Mixture(nn.Module):
    """The mixture of two binary classifiers of section 5.2 of the paper."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def probability(self, outputs: Tensor, y: Tensor) -> Tensor:
        gate, first, second = outputs.unbind(1)
        sign = 2 * y - 1
        return (
            gate.sigmoid() * (sign * first).sigmoid()
            + (-gate).sigmoid() * (sign * second).sigmoid()
        )

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        values = -self.probability(outputs, y).log()
        return values.mean() if self.reduction == "mean" else values.sum()

    def support(self, outputs: Tensor):
        for value in (0.0, 1.0):
            y = torch.full_like(outputs[:, 0], value)
            yield y, self.probability(outputs, y)


N = 5
CLASSES = torch.tensor([0, 1, 1, 0, 1])
BITS = (random(N, 2, seed=3) > 0).to(F64)
REAL = random(N, 2, seed=4)
COUNTS = torch.tensor([[0.0, 3], [1, 2], [5, 0], [2, 2], [1, 7]], dtype=F64)
WEIGHTS = torch.tensor([0.5, 2.0], dtype=F64)

# Criteria whose outputs are natural parameters: their Fisher is their Gauss-Newton matrix.
NATURAL = {
    "mse_mean": (nn.MSELoss(), REAL),
    "mse_sum": (nn.MSELoss(reduction="sum"), REAL),
    "mse_none": (nn.MSELoss(reduction="none"), REAL),
    "ce": (nn.CrossEntropyLoss(), CLASSES),
    "ce_sum": (nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "ce_weight": (nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES),
    "ce_ignore": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=0), CLASSES),
    "ce_smooth": (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3, ignore_index=7),
        CLASSES.where(CLASSES > 0, 7).where(torch.arange(N) > 0, 0),
    ),
    "ce_soft": (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        random(N, 2, seed=9).softmax(1),
    ),
    "bce": (nn.BCEWithLogitsLoss(), BITS),
    "bce_weight": (
        nn.BCEWithLogitsLoss(
            weight=random(N, 1, seed=8).abs(), pos_weight=torch.tensor([3.0, 0.5], dtype=F64)
        ),
        BITS,
    ),
    "poisson": (nn.PoissonNLLLoss(), COUNTS),
    "poisson_sum": (nn.PoissonNLLLoss(reduction="sum", full=True), COUNTS),
    "gaussian": (nn.GaussianNLLLoss(), (REAL, random(N, 2, seed=5).abs() + 0.1)),
    "gaussian_row": (nn.GaussianNLLLoss(), (REAL, random(N, seed=5).abs() + 0.1)),
}


def flat(model: nn.Module) -> Tensor:
    theta = Theta(model)
    return theta.vector(dict(model.named_parameters())).detach()


def outputs_by_theta(model: nn.Module, x: Tensor):
    """The map θ ↦ outputs, without autograd's graph."""
    theta = Theta(model)
    return lambda v: functional_call(model, theta.tensors(v), (x,))


def call(criterion, outputs, targets) -> Tensor:
    targets = targets if isinstance(targets, tuple) else (targets,)
    return criterion(outputs, *targets).sum()


def reference_hessian(model, criterion, batch) -> Tensor:
    x, y = batch
    f = outputs_by_theta(model, x)
    return jacrev(jacrev(lambda v: call(criterion, f(v), y)))(flat(model))


def reference_output_hessian(criterion, outputs: Tensor, targets) -> Tensor:
    """The own blocks of the full second derivative by all outputs of the batch."""
    n = len(outputs)
    full = jacrev(jacrev(lambda o: call(criterion, o, targets)))(outputs.detach())
    full = full.reshape(n, outputs[0].numel(), n, outputs[0].numel())
    return torch.stack([full[i, :, i] for i in range(n)])


def reference_jacobian(model, x) -> Tensor:
    """[N, D, P]"""
    jacobian = jacrev(outputs_by_theta(model, x))(flat(model))
    return jacobian.reshape(len(jacobian), -1, jacobian.shape[-1])


def reference_gauss_newton(model, criterion, batch) -> Tensor:
    x, y = batch
    with torch.no_grad():
        middle = reference_output_hessian(criterion, model(x), y)
    jacobian = reference_jacobian(model, x)
    return torch.einsum("nip,nij,njq->pq", jacobian, middle, jacobian)
