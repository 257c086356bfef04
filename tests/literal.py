"""The paper's algorithm as it stands: slow, with loops over data, and no code of the package's
estimators or optimiser."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gaussnewton import exact
from gaussnewton.parameters import Theta
from tests.problems import Network, kfra_by_hand, layer_inputs, moment_by_hand


class LiteralPaper:
    """KFRA with factored inversion, appendix B, for a :class:`Network` in float64."""

    def __init__(self, net: Network, criterion: nn.Module, tau: float, eta: float) -> None:
        self.net, self.criterion, self.eta = net, criterion, eta
        self.tau = self.gamma = tau
        self.t = 0
        self.Q: dict[str, Tensor] = {}
        self.G: dict[str, Tensor] = {}
        self.alpha = 0.0
        self.average: dict[str, Tensor] = {}

    def step(self, x: Tensor, y: Any) -> None:
        self.t += 1
        theta = Theta(self.net)
        before = self.objective(x, y)
        gradients = torch.autograd.grad(self.criterion(self.net(x), y), list(self.net.parameters()))
        named = dict(zip(dict(self.net.named_parameters()), gradients, strict=True))
        g = theta.vector(named) + self.eta * theta.vector(dict(self.net.named_parameters()))
        g = g.detach()
        self.update_factors(x, y)
        full = exact.gauss_newton(self.net, self.criterion, (x, y))
        candidates = [self.gamma]
        if self.t % 20 == 0:
            omega = 0.95**20
            candidates = [omega * self.gamma, self.gamma, self.gamma / omega]
        best = None
        for gamma in candidates:
            delta = self.direction(theta, g, gamma)
            curvature = delta @ full @ delta + (self.tau + self.eta) * (delta @ delta)
            alpha = -(delta @ g) / curvature
            model = alpha * (delta @ g) + 0.5 * alpha**2 * curvature
            if best is None or model < best[0]:
                best = (model, gamma, alpha, delta)
        assert best is not None
        model, self.gamma, self.alpha, delta = best
        with torch.no_grad():
            for key, part in theta.tensors(self.alpha * delta).items():
                dict(self.net.named_parameters())[key].add_(part)
        if self.t % 5 == 0:
            rho = (self.objective(x, y) - before) / model
            omega = 0.95**5
            self.tau = self.tau * omega if rho > 0.75 else self.tau / omega
        beta = min(0.95, 1 - 1 / self.t)
        for key, p in self.net.named_parameters():
            old = self.average.get(key, torch.zeros_like(p))
            self.average[key] = beta * old + (1 - beta) * p.detach()

    def objective(self, x: Tensor, y: Any) -> float:
        with torch.no_grad():
            penalty = sum(float(p.detach().square().sum()) for p in self.net.parameters())
            return float(self.criterion(self.net(x), y).detach()) + 0.5 * self.eta * penalty

    def update_factors(self, x: Tensor, y: Any) -> None:
        fresh_G = kfra_by_hand(self.net, self.criterion, x, y)
        for i, (name, a) in enumerate(layer_inputs(self.net, x).items()):
            Q = moment_by_hand(a, self.net.layers[i].bias is not None)
            decay = min(0.9, 1 - 1 / self.t)
            self.Q[name] = decay * self.Q.get(name, torch.zeros_like(Q)) + (1 - decay) * Q
            G = fresh_G[name]
            self.G[name] = decay * self.G.get(name, torch.zeros_like(G)) + (1 - decay) * G

    def direction(self, theta: Theta, g: Tensor, gamma: float) -> Tensor:
        parts = {}
        k = (gamma + self.eta) ** 0.5
        for name, V in theta.matrices(g).items():
            Q, G = self.Q[name], self.G[name]
            omega = ((Q.trace() * len(G)) / (G.trace() * len(Q))).sqrt()
            left = torch.linalg.inv(G + k / omega * torch.eye(len(G), dtype=G.dtype))
            right = torch.linalg.inv(Q + omega * k * torch.eye(len(Q), dtype=Q.dtype))
            parts[name] = -left @ V @ right
        return theta.join(parts)
