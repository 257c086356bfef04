"""Who races, and the grid that each is searched over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from gaussnewton.experiments.search import DECAYS, RATES

Setting = dict[str, Any]
"""What was chosen for a contender; nothing for one that needs nothing."""

OURS = "default"
"""Whose seconds all others are compared with."""

HALVED = 0.25
DAMPINGS = (0.01, 0.03, 0.1, 1.0, 10.0, 150.0)
"""150 is that of kfac-jax's own example."""

MEMORIES = (0.9, 0.95, 0.99)
"""Of the running means of a peer's parameters: θ̂ ← β_t θ̂ + (1 − β_t) θ, β_t = min(β, 1 − 1/t)."""


@dataclass(frozen=True)
class Entry:
    """A contender.

    Attributes:
        title: for people.
        style: of its line in the figure.
        kind: "ours", "first-order" (it knows of gradients only) or "curvature".
        needs: the package without which it cannot run.
        about: what is not in the grid.
        rates: learning rates.
        decays: the rate is halved again and again, each time this share of the budget has passed.
        dampings: initial ones.
    """

    title: str
    style: str
    kind: str
    needs: str = "torch"
    about: str = ""
    rates: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    dampings: tuple[float, ...] = ()

    def grid(self) -> list[Setting]:
        """All settings, in a fixed order."""
        if self.rates:
            return [{"rate": r, "decay": d} for r, d in product(self.rates, self.decays)]
        return [{"damping": d} for d in self.dampings] or [{}]

    def limited(self, powers: Sequence[int] = (), decays: Sequence[float] = ()) -> Entry:
        """With only those rates that are 2 to such a power, and only such decays, if any are given.

        Who has none of the decays keeps its own.

        >>> RUNNERS["adam"].limited((-9,), (1.0,)).grid()
        [{'rate': 0.001953125, 'decay': 1.0}]
        >>> RUNNERS["muon-halved"].limited((-9,), (1.0,)).grid()
        [{'rate': 0.001953125, 'decay': 0.25}]
        """
        rates = tuple(rate for rate in self.rates if not powers or math.log2(rate) in powers)
        return replace(
            self, rates=rates, decays=tuple(d for d in self.decays if d in decays) or self.decays
        )

    def grid_text(self) -> str:
        """The grid in words."""
        if self.rates:
            rates = f"{len(self.rates)} rates from {text(self.rates[-1])} to {text(self.rates[0])}"
            shares = ", ".join(text(decay) for decay in self.decays if decay < 1)
            never = "not halved" if 1.0 in self.decays else ""
            halved = f"halved every {shares} of the budget" if shares else ""
            return ", ".join(part for part in (rates, " or ".join(filter(None, (never, halved)))))
        return f"initial damping {', '.join(map(text, self.dampings))}" if self.dampings else "none"


def text(value: float) -> str:
    """A number as people write it: powers of two as such.

    >>> text(2.0**-7), text(0.25), text(150.0)
    ('2^-7', '0.25', '150')
    """
    power = next((n for n in range(4, 20) if value == 2.0**-n), None)
    return f"{value:g}" if power is None or value == 0.0625 else f"2^-{power}"


def setting_text(setting: Setting) -> str:
    """A setting in words.

    >>> setting_text({"rate": 2.0**-9, "decay": 0.5})
    'rate 2^-9, halved every 0.5'
    """
    if "rate" in setting:
        halved = "" if setting["decay"] >= 1 else f", halved every {text(setting['decay'])}"
        return f"rate {text(setting['rate'])}{halved}"
    return f"damping {text(setting['damping'])}" if "damping" in setting else "default"


PAPERS_GRID: dict[str, Any] = {"rates": RATES, "decays": DECAYS}
SMALLER_GRID: dict[str, Any] = {"rates": RATES, "decays": (1.0, HALVED)}
MUON = (
    "weight matrices of linear layers; AdamW with the same rate for all else, "
    'adjust_lr_fn="match_rms_adamw", no weight decay; its iterations in its own bfloat16 or in '
    "float32, whichever is faster on this processor"
)

RUNNERS: dict[str, Entry] = {
    "default": Entry("gn.GaussNewton", "gaussnewton", "ours", about="nothing set"),
    "paper": Entry("gn.PAPER", "kfra", "ours", about="the paper's KFRA"),
    "adam": Entry("Adam", "adam", "first-order", **PAPERS_GRID),
    "nadamw": Entry(
        "NAdamW", "adam dashed", "first-order", about="no weight decay", **PAPERS_GRID
    ),
    "nesterov": Entry("Nesterov", "nesterov", "first-order", about="momentum 0.9", **PAPERS_GRID),
    "muon": Entry("Muon", "momentum", "first-order", about=MUON, rates=RATES, decays=(1.0,)),
    "muon-halved": Entry(
        "Muon, rate halved", "momentum dashed", "first-order", rates=RATES, decays=(HALVED,),
        about="as Muon; by itself, because a short search cannot tell what is best in a long race",
    ),
    "soap": Entry(
        "SOAP", "kflr", "first-order", "pytorch_optimizer", rates=RATES, decays=(1.0,),
        about="eigenbases every 10 updates, no weight decay",
    ),
    "soap-halved": Entry(
        "SOAP, rate halved", "kflr dashed", "first-order", "pytorch_optimizer", rates=RATES,
        decays=(HALVED,), about="as SOAP; by itself for the same reason",
    ),
    "shampoo": Entry(
        "Shampoo", "sgd", "first-order", "pytorch_optimizer", **SMALLER_GRID,
        about="ScalableShampoo, roots every 20 updates, the size of RMSProp's steps, betas "
        "0.9 and 0.99, momentum as a mean",
    ),
    "kfac-jax": Entry(
        "kfac-jax", "kfac", "curvature", "kfac_jax", dampings=DAMPINGS,
        about="adaptive rate, momentum and damping, as in its MNIST autoencoder example",
    ),
}  # fmt: skip
