"""Updates that ``gn.GaussNewton`` needs, with its defaults, to reach what AdamW reaches.

Three networks that are no chains of linear layers: a convolutional one, a residual one with batch
normalisation in training mode, and a character transformer. AdamW is given the best of five
constant rates, by its mean over the seeds. It is judged with its parameters, and a second time,
with a rate chosen for that, by the better of two running means of them, which is more than it comes
with. ``gn.GaussNewton`` has nothing set, and is judged with the averaged parameters that it keeps.
MNIST and ``tinyshakespeare.txt`` are read from a folder that ``--data`` names::

    .venv/bin/python benchmarks/networks.py --data FOLDER

Losses are of a fixed sample of training data, and of held-out data. Every run is written to the
JSON lines file beside the table when it ends, and is not run again; a run that was interrupted is.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.experiments.data import mnist

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
MEMORIES = (0.9, 0.98)
"""Of AdamW's running means of the parameters."""
WHICH = ("own", "averaged")
"""Parameters that are judged."""
CONTEXT = 64


@dataclass(frozen=True)
class Data:
    """What is trained on, the sample of it that is judged, and what is held out."""

    train: tuple[Tensor, Tensor]
    judged: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A network, data, and how long AdamW trains; the other has half of it."""

    model: Callable[[], nn.Module]
    data: Callable[[Path], Data]
    batch: int
    updates: int


def digits(folder: Path, side: int = 28) -> Data:
    """MNIST's images as squares, perhaps smaller ones; the last 10,000 are held out."""
    x, y = mnist(folder)
    x = x.reshape(-1, 1, 28, 28)
    if side != 28:
        x = F.adaptive_avg_pool2d(x, side)
    return Data(
        (x[:-10_000], y[:-10_000]), (x[:5000], y[:5000]), (x[-10_000:-5000], y[-10_000:-5000])
    )


def small_digits(folder: Path) -> Data:
    return digits(folder, side=14)


def characters(folder: Path) -> Data:
    """Windows of Shakespeare, and the same one character later; the last tenth is held out."""
    text = (folder / "tinyshakespeare.txt").read_text()
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([index[character] for character in text])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    held_out = windows[len(windows) * 9 // 10 :: CONTEXT][:512]
    train = windows[: len(windows) * 9 // 10 - CONTEXT]
    spread = train[:: len(train) // 512][:512]
    return Data(*((part[:, :-1], part[:, 1:]) for part in (train, spread, held_out)))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions beside a shortcut, each normalised over the batch."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(wider) for _ in range(2))
        same = channels == wider and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class TransformerBlock(nn.Module):
    """Attention to earlier characters, then a perceptron, each on a normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.norms[0](x)
        q, k, v = (
            part(a).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Logits of the next character at every place, as ``nn.CrossEntropyLoss`` wants them."""

    def __init__(self, characters: int = 65, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device).expand_as(codes)
        x = self.blocks(self.characters(codes) + self.places(places))
        return self.head(self.norm(x)).transpose(1, 2)


PROBLEMS = {
    "convolutional": Problem(convolutional, digits, 128, 400),
    "residual": Problem(residual, small_digits, 128, 400),
    "transformer": Problem(Transformer, characters, 32, 600),
}


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """The mean loss in evaluation mode, by parts that fit the cache."""
    model.eval()
    parts = zip(*(part.split(250) for part in data), strict=True)
    losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in parts]
    model.train()
    return float(torch.stack(losses).sum()) / data[1].numel()


class Means:
    """Running means of AdamW's parameters, of which the best is judged."""

    def __init__(self) -> None:
        self.kept: dict[float, dict[str, Tensor]] = {}

    def update(self, model: nn.Module, t: int) -> None:
        for memory in MEMORIES:
            for name, p in model.named_parameters():
                mean = self.kept.setdefault(memory, {}).setdefault(name, p.detach().clone())
                mean.lerp_(p.detach(), max(1 - memory, 1 / t))


def judge(model: nn.Module, candidates: list[dict[str, Tensor]], data: Data) -> tuple[float, float]:
    """The loss of the sample and of held-out data, of whichever parameters do best on the first."""
    found = []
    for parameters in candidates:
        judged = copy.deepcopy(model)
        judged.load_state_dict(parameters, strict=False)
        found.append((evaluate(judged, data.judged), judged))
    loss, best = min(found, key=lambda pair: pair[0])
    return loss, evaluate(best, data.held_out)


def run(
    problem: Problem, rate: float | None, seed: int, updates: int, marks: int, data: Data
) -> dict[str, Any]:
    """Train once: AdamW at some rate, or GaussNewton; losses along the way, seconds of updates."""
    torch.manual_seed(seed)
    model, criterion = problem.model(), nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer = (
        gn.GaussNewton(model, criterion)
        if rate is None
        else torch.optim.AdamW(model.parameters(), rate)
    )
    order, means = torch.Generator().manual_seed(seed), Means()
    x, y = data.train
    found: dict[str, Any] = {which: [] for which in WHICH}
    seconds = 0.0
    for t in range(1, updates + 1):
        part = torch.randint(len(x), (problem.batch,), generator=order)
        started = time.perf_counter()
        optimizer.zero_grad()
        criterion(model(x[part]), y[part]).backward()
        optimizer.step()
        seconds += time.perf_counter() - started
        if rate is not None:
            means.update(model, t)
        if t % max(1, updates // marks) == 0 or t == updates:
            kept = (
                [optimizer.averaged_parameters()]
                if isinstance(optimizer, gn.GaussNewton)
                else list(means.kept.values())
            )
            for which, candidates in (
                ("own", [dict(model.named_parameters())]),
                ("averaged", kept),
            ):
                found[which].append((t, seconds, *judge(model, candidates, data)))
    return found | {"seconds": seconds, "threads": torch.get_num_threads()}


def mean_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """A run whose numbers are the means of those of several, look by look."""
    means = {}
    for which in WHICH:
        looks = zip(*(line[which] for line in lines), strict=True)
        means[which] = [
            [sum(part) / len(part) for part in zip(*look, strict=True)] for look in looks
        ]
    return lines[0] | means | {"seed": None}


def best_rate(lines: list[dict[str, Any]], which: str) -> list[dict[str, Any]]:
    """AdamW's runs at the rate with the least loss at the end, in the mean over seeds."""
    rates = {line["rate"] for line in lines}
    runs = [[line for line in lines if line["rate"] == rate] for rate in sorted(rates)]
    return min(runs, key=lambda same: mean_of(same)[which][-1][2])


def needed(line: dict[str, Any], loss: float) -> int | None:
    """Updates until the loss of a run's averaged parameters is no greater than some loss."""
    return next((round(t) for t, _, train, _ in line["averaged"] if train <= loss), None)


def rows_of(name: str, budget: int, lines: list[dict[str, Any]]) -> list[list[str]]:
    """AdamW at its best rate and the run that had half of its updates: in the mean, and by seed."""
    ours = [line for line in lines if line["rate"] is None and line["updates"] == budget // 2]
    ours.sort(key=lambda line: line["seed"])
    if not ours:
        return []
    seeds = [line["seed"] for line in ours]
    adam = [
        line
        for line in lines
        if line["rate"] is not None and line["updates"] == budget and line["seed"] in seeds
    ]
    best = {which: best_rate(adam, which) for which in WHICH}
    cases = [(mean_of(ours), {which: mean_of(runs) for which, runs in best.items()})]
    for line in ours if len(ours) > 1 else []:
        same = {
            which: next(run for run in runs if run["seed"] == line["seed"])
            for which, runs in best.items()
        }
        cases.append((line, same))
    rows = []
    for line, others in cases:
        many = f"mean of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
        title = many if line["seed"] is None else f"seed {line['seed']}"
        rows.append([name, title, "GaussNewton", *_cells(line, "averaged"), ""])
        for which, other in others.items():
            reached = needed(line, other[which][-1][2])
            text = f"{reached} ({budget / reached:.1f} times fewer)" if reached else "not reached"
            method = f"AdamW {other['rate']:g}" + ("" if which == "own" else ", averaged")
            rows.append(["", "", method, *_cells(other, which), text])
    return rows


def _cells(line: dict[str, Any], which: str) -> list[str]:
    t, seconds, train, held_out = line[which][-1]
    each = f"{seconds / t:.3f} ({line['threads']})"
    return [f"{t:.0f}", f"{train:.4f}", f"{held_out:.4f}", each]


def write(lines: list[dict[str, Any]], output: Path) -> None:
    """The table."""
    rows = []
    for name in PROBLEMS:
        mine = [line for line in lines if line["problem"] == name]
        for budget in sorted({line["updates"] for line in mine if line["rate"] is not None}):
            rows += rows_of(name, budget, mine)
    header = [
        "network",
        "",
        "method",
        "updates",
        "training loss",
        "held-out loss",
        "s an update (threads)",
    ]
    text = (
        "# Updates to reach the loss of AdamW\n\nWritten by `benchmarks/networks.py`, whose "
        "docstring says how it measures: `python benchmarks/networks.py --data FOLDER`, with the "
        f"table's `--seeds` and `--threads`; torch {torch.__version__}. Both start from the same "
        "parameters and see the same batches. The last column is the first look, of 20, at which "
        "GaussNewton's training loss is no greater than this last one of AdamW. All losses along "
        "the way are in the JSON lines beside it.\n\n"
        + tabulate(
            rows, [*header, "GaussNewton's updates to it"], tablefmt="github", disable_numparse=True
        )
        + "\n"
    )
    output.write_text(text)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="MNIST's files, Shakespeare's")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--updates", type=int, help="of AdamW, in place of each problem's own")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of both")
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "networks.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    kept = options.output.with_suffix(".jsonl")
    for name in options.problems:
        problem = PROBLEMS[name]
        data, budget = problem.data(options.data), options.updates or problem.updates
        asked = [(rate, seed, budget) for seed in options.seeds for rate in RATES]
        asked += [(None, seed, budget // 2) for seed in options.seeds]
        for rate, seed, updates in asked:
            key = {"problem": name, "rate": rate, "seed": seed, "updates": updates}
            if any(key.items() <= line.items() for line in read(kept)):
                continue
            marks = 20 if rate is None else 5
            line = key | run(problem, rate, seed, updates, marks, data)
            with kept.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(key, line["own"][-1], line["averaged"][-1], flush=True)
            write(read(kept), options.output)
    write(read(kept), options.output)


if __name__ == "__main__":
    main()
