"""Networks as people have them, small, with a batch and a criterion each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaussnewton as gn


class LeNet(nn.Module):
    """Convolutions with groups and dilation, pooling, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2),
            nn.LeakyReLU(inplace=True),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(24, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class ResNet(nn.Module):
    """A stem and two residual blocks, one with a stride, with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.a, self.b = _residual(4, 4, 1), _residual(4, 6, 2)
        self.shortcut = nn.Conv2d(4, 6, 1, stride=2, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.a(x))
        x = F.relu(self.shortcut(x) + self.b(x))
        return self.head(x.mean((2, 3)))


def _residual(channels: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
    )


class UNet(nn.Module):
    """Down, up by transposed convolutions, and across by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.down(x))
        h = h + torch.tanh(self.middle(h))
        return self.last(torch.cat([self.up(h), x], dim=1))


class Transformer(nn.Module):
    """A language model whose head is its table, with learned positions; returns a dict."""

    def __init__(self, words: int = 7, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.position = nn.Parameter(0.1 * torch.randn(1, 6, width))
        layer = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        h = self.table(x) + self.position[:, : x.shape[1]]
        return {"logits": self.head(self.body(h, mask=mask, is_causal=True))}


class Recurrent(nn.Module):
    """A table, two layers of LSTM in both directions, and the mean over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layers = nn.LSTM(4, 5, num_layers=2, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.table(x).transpose(0, 1))[0].mean(0))


class VAE(nn.Module):
    """Returns a reconstruction, means and log-variances."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean = nn.Linear(8, 6), nn.Linear(6, 2)
        self.spread, self.decoder = nn.Linear(6, 2), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.encoder(x))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decoder(z), mean, spread


def elbo(x_hat: Tensor, mean: Tensor, spread: Tensor, x: Tensor) -> Tensor:
    fit = F.binary_cross_entropy_with_logits(x_hat, x, reduction="none").sum(1)
    divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1)
    return (fit + divergence).mean()


class Siamese(nn.Module):
    """One network for two inputs, compared."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.head((self.body(x) - self.body(other)).square())


class Dense(nn.Module):
    """A DenseNet block: each layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(1, c), nn.ReLU(), nn.Conv1d(c, 2, 3, padding=1))
            for c in (2, 4, 6)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], dim=1)
        return self.head(x.mean(2))


class Experts(nn.Module):
    """A mixture of experts: each row goes to the best one, and the last is never the best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(6, 3)
        nn.init.constant_(self.gate.bias[3:], -100.0)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(1)
        best, which = shares.max(1)
        h = x.new_zeros(len(x), 6)
        for i, expert in enumerate(self.experts):
            mine = which == i
            if mine.any():
                h = h.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return self.head(h * best[:, None])


class ReturnsLoss(nn.Module):
    """In the style of Hugging Face: labels go in, and the loss comes out with the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Transformer()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.transformer(x)["logits"]
        loss = None
        if labels is not None:
            shifted = logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(shifted, labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@dataclass(frozen=True)
class Case:
    """A model with what it is trained on.

    Attributes:
        model: makes it.
        criterion: called on what ``outputs`` takes of the model's return value; None if the model
            returns its loss.
        inputs: arguments of the model.
        targets: further arguments of the criterion.
        outputs: see above.
    """

    model: Callable[[], nn.Module]
    criterion: nn.Module | None
    inputs: tuple[Any, ...]
    targets: tuple[Any, ...]
    outputs: Callable[[Any], Any] | None = None

    def loss(self, model: nn.Module) -> Tensor:
        returned = model(*self.inputs)
        if self.criterion is None:
            return returned["loss"]
        seen = returned if self.outputs is None else self.outputs(returned)
        return self.criterion(*(seen if isinstance(seen, tuple) else (seen,)), *self.targets)


def flat_logits(returned: dict[str, Tensor]) -> Tensor:
    """As in most loops that train language models."""
    return returned["logits"].view(-1, 7)


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    images, classes = torch.randn(12, 1, 8, 8).double(), torch.randint(3, (12,))
    words, next_words = torch.randint(7, (6, 5)), torch.randint(7, (6, 5))
    rows = torch.randn(12, 5).double()
    bits = torch.rand(12, 8).round().double()
    cross = nn.CrossEntropyLoss()
    return {
        "LeNet": Case(LeNet, cross, (images,), (classes,)),
        "ResNet": Case(ResNet, cross, (images,), (classes,)),
        "U-Net": Case(UNet, nn.MSELoss(), (images,), (images.roll(1, 2),)),
        "transformer": Case(Transformer, cross, (words,), (next_words.view(-1),), flat_logits),
        "LSTM": Case(Recurrent, cross, (words,), (classes[:6],)),
        "VAE": Case(VAE, gn.Loss(elbo, outputs=3), (bits,), (bits,)),
        "siamese": Case(
            Siamese, nn.BCEWithLogitsLoss(), (rows, rows.flip(0)), ((rows[:, :1] > 0).double(),)
        ),
        "DenseNet": Case(Dense, cross, (images[:, 0, :2],), (classes,)),
        "experts": Case(Experts, cross, (rows,), (classes,)),
        "returns its loss": Case(ReturnsLoss, None, (words, words), ()),
    }
