"""kfac-jax on a problem of the race: a process of its own, asked and answering in JSON lines.

It runs in the environment ``benchmarks/.venv-jax``, which has JAX but not torch, and is started by
``jax_contender.py``. Layers, parameters, data and the order of batches come from there, so that
they are the same as those of all other contenders. Requests, one a line on standard input:

    {"do": "open", …}                 the problem; everything is compiled
    {"do": "begin", …}                parameters, damping and seed of a run; answered with the loss
    {"do": "epoch", "order": FILE}    the order of the data in the next epoch
    {"do": "advance", "seconds": s}   updates until that many seconds of them have passed
    {"do": "evaluate"}                the loss of the best of the parameters and their running means
    {"do": "close"}

The settings of kfac-jax are those of its own MNIST autoencoder example, but for the initial
damping, which the race searches.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

Request = dict[str, Any]

BURN_IN = 5
"""Estimates of the curvature before the first update, as in kfac-jax's example."""


def limit(threads: int) -> None:
    """XLA makes as many threads as the process has cores: give it so many."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, mine[:threads])


def network(layers: list[Request]) -> Any:
    """The function (parameters, inputs) ↦ outputs of a list of layers."""
    import jax
    import jax.numpy as jnp

    def apply(parameters: Any, x: Any) -> Any:
        here = iter(parameters)
        for layer in layers:
            kind = layer["kind"]
            if kind == "Linear":
                weight, bias = next(here)
                x = x @ weight + bias
            elif kind == "Conv2d":
                weight, bias = next(here)
                dimensions = ("NHWC", "HWIO", "NHWC")
                x = jax.lax.conv_general_dilated(
                    x, weight, (1, 1), "VALID", dimension_numbers=dimensions
                )
                x = x + bias
            elif kind == "MaxPool2d":
                n, h, w, c = x.shape  # windows do not overlap: XLA's own pooling is slow on CPUs
                size = layer["size"]
                x = x.reshape(n, h // size, size, w // size, size, c).max((2, 4))
            elif kind == "Flatten":  # in the order of torch: channels first
                x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
            else:
                x = {"Tanh": jnp.tanh, "ReLU": jax.nn.relu}[kind](x)
        return x

    return apply


def objective(loss: str, outputs: Any, targets: Any) -> Any:
    """The objective of a batch, summed over outputs, mean over data; kfac-jax is told of it."""
    import jax
    import jax.numpy as jnp
    import kfac_jax

    if loss == "BCEWithLogitsLoss":
        kfac_jax.register_multi_bernoulli_predictive_distribution(outputs, targets)
        losses = jax.nn.softplus(outputs) - outputs * targets
        return losses.sum(-1).mean()
    if loss == "MSELoss":
        kfac_jax.register_squared_error_loss(outputs, targets)
        return jnp.square(outputs - targets).sum(-1).mean()
    if loss == "CrossEntropyLoss":
        kfac_jax.register_softmax_cross_entropy_loss(outputs, targets)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(outputs), targets[:, None], 1)
        return -chosen.mean()
    raise ValueError(f"kfac-jax is not told how to handle {loss}")


class Child:
    """A network in training."""

    def __init__(self, asked: Request) -> None:
        import jax
        import kfac_jax
        import numpy as np

        self.np, self.jax = np, jax
        self.x = np.load(asked["x"], mmap_mode="r")
        self.y = None if asked["y"] is None else np.load(asked["y"])
        sample = np.load(asked["sample"])
        self.sample, self.few = self._data(sample), self._data(sample[: asked["chosen"]])
        self.batch, self.memories = asked["batch"], asked["memories"]
        apply = network(asked["layers"])

        def value(parameters: Any, batch: Any) -> Any:
            inputs, targets = batch
            return objective(asked["loss"], apply(parameters, inputs), targets)

        def penalised(parameters: Any, batch: Any) -> Any:
            squares = (jax.numpy.vdot(p, p) for p in jax.tree_util.tree_leaves(parameters))
            return value(parameters, batch) + 0.5 * asked["l2"] * sum(squares)

        self.value = jax.jit(value)
        self.lerp = jax.jit(
            lambda mean, new, share: jax.tree_util.tree_map(
                lambda a, b: a + share * (b - a), mean, new
            )
        )
        self.optimizer = kfac_jax.Optimizer(
            jax.value_and_grad(penalised),
            l2_reg=asked["l2"],
            use_adaptive_learning_rate=True,
            use_adaptive_momentum=True,
            use_adaptive_damping=True,
            initial_damping=1.0,  # in its place comes that of each run: see _update
            min_damping=1e-5,
            max_damping=1000.0,
            damping_adaptation_interval=5,
            damping_adaptation_decay=0.95,
            inverse_update_period=5,
            num_burnin_steps=BURN_IN,
            curvature_ema=0.95,
        )

    def begin(self, asked: Request) -> None:
        """A new run: nothing of an earlier one is left but what was compiled."""
        with self.np.load(asked["parameters"]) as kept:
            given = [self.jax.numpy.array(kept[str(i)]) for i in range(len(kept.files))]
        self.parameters = list(zip(given[::2], given[1::2], strict=True))
        self.means: list[Any] = []
        self.state: Any = None
        self.seed, self.damping = asked["seed"], asked["damping"]
        self.key = self.jax.random.PRNGKey(self.seed)
        self.updates, self.seconds = 0, 0.0
        self.order, self.next_order, self.position = None, None, 0

    def warm_up(self, asked: Request, updates: int) -> None:
        """Let JAX compile everything, on batches that do not count."""
        self.begin(asked)
        generator = self.np.random.default_rng(0)
        for _ in range(updates):
            self._update(generator.choice(len(self.x), self.batch, replace=False))
            self._average()
        self.evaluate()

    def _data(self, rows: Any) -> Any:
        inputs = self.jax.device_put(self.np.asarray(self.x[self.np.sort(rows)]))
        if self.y is None:
            return inputs, inputs
        return inputs, self.jax.device_put(self.y[self.np.sort(rows)])  # sorted: one pass of memory

    def _update(self, rows: Any) -> float:
        """One update, and its seconds: the making of the batch is not counted."""
        from clock import Lap  # beside this file, not in a package here

        jax = self.jax
        # Its first step estimates curvature on batches of its own before it takes its first.
        draw = self.np.random.default_rng(self.seed).choice
        count = BURN_IN if self.state is None else 0
        burnt = [draw(len(self.x), self.batch, replace=False) for _ in range(count)]
        batches = jax.block_until_ready([self._data(each) for each in [*burnt, rows]])
        self.key, *keys = jax.random.split(self.key, 3)
        jax.block_until_ready(self.key)
        lap = Lap()
        if self.state is None:
            self.state = self.optimizer.init(self.parameters, keys[0], batches[-1])
            self.state.damping = jax.numpy.full_like(self.state.damping, self.damping)
        self.parameters, self.state, _ = self.optimizer.step(
            self.parameters,
            self.state,
            keys[1],
            data_iterator=iter(batches),
            global_step_int=self.updates,
        )[:3]
        jax.block_until_ready((self.parameters, self.state))
        self.updates += 1
        return lap.seconds()

    def _average(self) -> None:
        """θ̂ ← β_t θ̂ + (1 − β_t) θ for each memory, β_t = min(β, 1 − 1/t)."""
        if not self.means:
            self.means = [self.parameters for _ in self.memories]
        shares = [max(1 - memory, 1 / self.updates) for memory in self.memories]
        self.means = [
            self.lerp(mean, self.parameters, share)
            for mean, share in zip(self.means, shares, strict=True)
        ]
        self.jax.block_until_ready(self.means)

    def add_epoch(self, path: str) -> None:
        """The order of an epoch, used when the one before it is used up."""
        order = self.np.load(path)
        if self.order is None:
            self.order = order
        else:
            self.next_order = order

    def _rows(self) -> Any:
        """The data of the next batch, as ``Batches`` of gaussnewton has them; None if unknown."""
        if self.order is None:
            return None
        if self.position + self.batch > len(self.order):
            if self.next_order is None:
                return None
            self.order, self.next_order, self.position = self.next_order, None, 0
        self.position += self.batch
        return self.order[self.position - self.batch : self.position]

    def advance(self, seconds: float) -> bool:
        """Updates until that many seconds have passed; whether it stopped for want of an epoch."""
        end = self.seconds + seconds
        while self.seconds < end:
            rows = self._rows()
            if rows is None:
                return True
            self.seconds += self._update(rows)
            self._average()
        return False

    def evaluate(self) -> tuple[float, str]:
        """The loss of the sample, of the parameters that do best on its first few data."""
        named = dict(zip(map(str, self.memories), self.means, strict=False))
        candidates = {"present": self.parameters, **named}
        losses = {name: float(self.value(p, self.few)) for name, p in candidates.items()}
        known = {name: loss for name, loss in losses.items() if loss == loss}
        best = min(known, key=lambda name: known[name]) if known else "present"
        return float(self.value(candidates[best], self.sample)), best


def answer(child: Child, asked: Request) -> Request:
    """What a request comes to."""
    wants = False
    if asked["do"] == "begin":
        child.begin(asked)
    elif asked["do"] == "epoch":
        child.add_epoch(asked["order"])
    elif asked["do"] == "advance":
        wants = child.advance(asked["seconds"])
    known = {"updates": child.updates, "seconds": child.seconds, "wants_epoch": wants}
    if asked["do"] in ("begin", "evaluate"):
        known["loss"], known["of"] = child.evaluate()
    return known


def main() -> None:
    """Answer until told to close. Whatever else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from resident import stay_resident  # beside this file too

    stay_resident()
    child: Child | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "close":
            return
        if child is None:
            limit(asked["threads"])
            child = Child(asked)
            child.warm_up(asked, asked["warm_up"])
            import jax
            import kfac_jax

            versions = {"jax": jax.__version__, "kfac-jax": kfac_jax.__version__}
            reply: Request = {"versions": versions}
        else:
            reply = answer(child, asked)
        out.write(json.dumps(reply) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
