"""What a step would cost for transformers of 100 million and of 7 billion parameters.

Nothing is run: the models are built on torch's device "meta", which has shapes and no numbers.
Forward and backward passes are counted by ``torch.utils.flop_counter`` on them, blocks are those
that ``gn.explain`` foresees, and their products, inverses and bytes are counted by
``gaussnewton.counting``, which the tests compare with what torch counts of the code at work::

    .venv/bin/python benchmarks/plan.py

writes the tables into ``docs/scaling.md`` and prints them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import gaussnewton as gn
from gaussnewton.counting import Count, count
from gaussnewton.foreseen import foreseen_blocks

MARKS = ("<!-- plan: begin -->", "<!-- plan: end -->")
DIRECTIONS = 1
"""J·v of an update in a network of many layers: that of the direction."""


class Block(nn.Module):
    """Attention and a gated perceptron, each behind a norm and beside an identity."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a = self.before(x)
        q, k, v = (
            f(a).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        weights = (q @ k.mT).softmax(3)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        a = self.between(x)
        return x + self.down(F.silu(self.gate(a)) * self.up(a))


class Transformer(nn.Module):
    """A decoder with its own head; rotations of q and k are left out, as they have no products."""

    def __init__(self, layers: int, width: int, inner: int, heads: int, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, inner, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.table(x))))


@dataclass(frozen=True)
class Model:
    """A transformer, and how it is trained."""

    make: Callable[[], Transformer]
    length: int
    sequences: int
    workers: int

    @property
    def tokens(self) -> int:
        return self.length * self.sequences


MODELS = {
    "100 million": Model(lambda: Transformer(12, 640, 1728, 10, 32_000), 1024, 512, 8),
    "7 billion": Model(lambda: Transformer(32, 4096, 11_008, 32, 32_000), 2048, 2048, 256),
}


@dataclass(frozen=True)
class Setting:
    """What is set of the optimiser.

    Attributes:
        interval: updates between two estimates, each with its inverses.
        share: of a batch's tokens, for curvature.
        part: of a batch's tokens, for the quadratic model.
        ask: updates between two looks at its curvature, a J·v each.
        looks: updates between two looks at ρ and at the averaged parameters, a forward pass each.
        largest: the limit on factors.
    """

    interval: int
    share: float
    part: float
    ask: int
    looks: int
    largest: int | None


SETTINGS = {
    "at first": Setting(5, 1.0, 0.25, 1, 5, 4096),
    "defaults": Setting(50, 1.0, 0.25, 5, 15, 4096),
    "defaults, no limit": Setting(50, 1.0, 0.25, 5, 15, None),
    "lean": Setting(20, 1 / 16, 1 / 16, 5, 20, 1024),
}


@dataclass(frozen=True)
class Passes:
    """Operations of one sequence's forward, of its backward to activations, and of both in full."""

    forward: int
    activations: int
    whole: int


def passes_of(model: Transformer, length: int) -> Passes:
    """Counted on a batch without numbers."""
    words = torch.zeros(1, length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as forward:
        outputs = model(words)
    with FlopCounterMode(display=False) as backward:
        outputs.sum().backward()
    weights = [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)]
    f, b = forward.get_total_flops(), backward.get_total_flops()
    return Passes(f, b - 2 * length * sum(weights), f + b)


@dataclass(frozen=True)
class Plan:
    """Of one model with one setting."""

    model: Model
    setting: Setting
    parameters: int
    passes: Passes
    blocks: Count

    def operations(self) -> dict[str, float]:
        """Of an average update, all workers together."""
        n, s = self.model.sequences, self.setting
        again = n * s.share * (self.passes.forward + self.passes.activations)
        return {
            "forward + backward": n * self.passes.whole,
            "curvature: the passes": again / s.interval,
            "curvature: Q and G": self.blocks.moments / s.interval,
            "inverses": self.blocks.inversion / s.interval,
            "direction": self.blocks.solve,
            "looks at ρ": 2 * n * self.passes.forward / s.looks,
            "J·v": n * s.part * (1 + 2 * DIRECTIONS) * self.passes.forward / s.ask,
        }

    def bytes(self) -> dict[str, float]:
        """Held, all workers together, each number once."""
        P = self.parameters
        return {
            "weights and gradients, bf16": 4 * P,
            "weights, fp32": 4 * P,
            "averaged and last weights, mean gradient": 12 * P,
            "factors": self.blocks.bytes,
            "inverses": self.blocks.bytes,
        }

    def communication(self) -> dict[str, float]:
        """Bytes that each worker sends in an average update."""
        P, others = self.parameters, (self.model.workers - 1) / self.model.workers
        return {
            "gradients to their owners, bf16": 2 * P * others,
            "directions to all, bf16": 2 * P * others,
            "factors to their owners, fp32": self.blocks.bytes * others / self.setting.interval,
        }


def adamw(plan: Plan) -> tuple[float, float, float]:
    """Operations, bytes and communication of AdamW, in the same way."""
    P, model = plan.parameters, plan.model
    flop = model.sequences * plan.passes.whole + 15 * P
    return flop, (4 + 4 + 8) * P, 4 * P * (model.workers - 1) / model.workers


def plan_of(model: Model, setting: Setting) -> Plan:
    with torch.device("meta"):
        network = model.make()
    theta = gn.Theta(network)
    foreseen = foreseen_blocks(network, theta, largest=setting.largest)
    total = Count()
    for part in foreseen.values():
        total = total + count(part.block, round(model.tokens * setting.share))
    parameters = sum(p.numel() for p in network.parameters())
    return Plan(model, setting, parameters, passes_of(network, model.length), total)


def amount(number: float, unit: str) -> str:
    """With a prefix."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def section(name: str, model: Model) -> str:
    """The three tables of a model."""
    plans = {title: plan_of(model, setting) for title, setting in SETTINGS.items()}
    first = next(iter(plans.values()))
    flop, held, sent = adamw(first)
    head = (
        f"### {name}\n\n{first.parameters / 1e6:,.0f} million parameters, {model.sequences} "
        f"sequences of {model.length} tokens a batch, {model.workers} workers."
    )
    tables = [head]
    for what, unit, reference, of in (
        ("operations of a step", "FLOP", flop, Plan.operations),
        ("bytes held, all workers together", "B", held, Plan.bytes),
        ("bytes a worker sends in a step", "B", sent, Plan.communication),
    ):
        parts = {title: of(plan) for title, plan in plans.items()}
        rows = [
            [line, "", *(amount(found[line], unit) for found in parts.values())]
            for line in next(iter(parts.values()))
        ]
        totals = [sum(found.values()) for found in parts.values()]
        rows.append(["all", amount(reference, unit), *(amount(t, unit) for t in totals)])
        rows.append(["times AdamW", "1", *(f"{t / reference:.2f}" for t in totals)])
        align = ["left", *["right"] * (len(parts) + 1)]
        tables.append(
            tabulate(
                rows,
                [what, "AdamW", *parts],
                "github",
                colalign=align,
                disable_numparse=True,
            )
        )
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/scaling.md"))
    output = parser.parse_args().output
    text = "\n\n".join(section(name, model) for name, model in MODELS.items())
    print(text)
    page = output.read_text(encoding="utf-8")
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    page = f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}"
    output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
