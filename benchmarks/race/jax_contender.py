"""kfac-jax as a contender: the other end of ``jax_child.py``'s pipe."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from race.contender import CHOSEN_ON
from race.settings import MEMORIES, Setting
from race.tasks import Data, Task

PYTHON = Path(__file__).parent.parent / ".venv-jax" / "bin" / "python"
CHILD = Path(__file__).parent / "jax_child.py"
WARM_UP = 12
"""Updates after which every kind of update has been compiled: each period is five."""
L2 = 1e-5
"""As in kfac-jax's example; the loss that is judged is without it."""


def available() -> bool:
    """Whether its environment was made (``benchmarks/setup-race.sh``)."""
    return PYTHON.exists()


def layers_of(model: nn.Sequential) -> list[dict[str, Any]]:
    """The layers in plain words."""
    found: list[dict[str, Any]] = []
    for module in model:
        layer: dict[str, Any] = {"kind": type(module).__name__}
        if isinstance(module, nn.MaxPool2d):
            layer["size"] = module.kernel_size
        found.append(layer)
    return found


def parameters_of(model: nn.Sequential) -> dict[str, np.ndarray]:
    """Weights and biases in order, as JAX has them: input first, channels last."""
    found: list[Tensor] = []
    for module in model:
        if isinstance(module, nn.Linear):
            found += [module.weight.T, module.bias]
        elif isinstance(module, nn.Conv2d):
            found += [module.weight.permute(2, 3, 1, 0), module.bias]
    return {str(i): p.detach().contiguous().numpy() for i, p in enumerate(found)}


def orders(count: int, seed: int) -> Iterator[Tensor]:
    """The order of the data in each epoch, as ``gaussnewton.experiments.data.Batches`` has it."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randperm(count, generator=generator)


class Child:
    """A process with JAX, and the data of a task in files for it; one contender at a time.

    It serves all runs of a task, since compiling takes longer than many a run.
    """

    def __init__(self, task: Task, data: Data) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="race-")
        self.folder, self.task, self.count = Path(self._folder.name), task, len(data.x)
        x = data.x.permute(0, 2, 3, 1).contiguous() if data.x.ndim == 4 else data.x
        np.save(self.folder / "x.npy", x.numpy())
        np.save(self.folder / "sample.npy", data.sample.numpy())
        if data.y is not None:
            np.save(self.folder / "y.npy", data.y.to(torch.int32).numpy())
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        environment.pop("PYTHONPATH", None)
        self._log = (self.folder / "child.log").open("w+")
        self._process = subprocess.Popen(
            [str(PYTHON), str(CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True, env=environment,
        )  # fmt: skip
        opening = self._opening(data.y is not None) | self.beginning({"damping": 1.0}, 0)
        self.versions: dict[str, str] = self.ask(opening | {"do": "open"})["versions"]

    def _opening(self, labelled: bool) -> dict[str, Any]:
        return {
            "layers": layers_of(self.task.network(0)),
            "loss": type(self.task.criterion()).__name__,
            "batch": self.task.batch,
            "x": str(self.folder / "x.npy"),
            "y": str(self.folder / "y.npy") if labelled else None,
            "sample": str(self.folder / "sample.npy"),
            "chosen": CHOSEN_ON,
            "memories": MEMORIES,
            "l2": L2,
            "threads": torch.get_num_threads(),
            "warm_up": WARM_UP,
        }

    def beginning(self, setting: Setting, seed: int) -> dict[str, Any]:
        """The request that begins a run."""
        path = self.folder / "parameters.npz"
        np.savez(path, **parameters_of(self.task.network(seed)))
        damping = setting["damping"]
        return {"do": "begin", "parameters": str(path), "damping": damping, "seed": seed}

    def give_epoch(self, order: Tensor) -> None:
        """The order of the data in the next epoch."""
        path = self.folder / "order.npy"
        np.save(path, order.numpy())
        self.ask({"do": "epoch", "order": str(path)})

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        """A request, and its answer.

        Raises:
            RuntimeError: if the process has died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"kfac-jax stopped: {self._log.read()[-2000:]}")
        return json.loads(line)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and delete the files."""
        if self.alive and self._process.stdin is not None:
            self._process.stdin.write('{"do": "close"}\n')
            self._process.stdin.close()
        self._process.wait(timeout=30)
        self._log.close()
        self._folder.cleanup()


class JaxContender:
    """A run of kfac-jax, with the same parameters, data and batches as all others.

    Raises:
        RuntimeError: if JAX has another loss than torch before the first update.
    """

    def __init__(self, child: Child, setting: Setting, seed: int, loss: float) -> None:
        self.updates, self.seconds, self.failure = 0, 0.0, ""
        self.versions = child.versions
        self._child, self._orders = child, orders(child.count, seed)
        here = child.ask(child.beginning(setting, seed))["loss"]
        if abs(here - loss) > 1e-4 * abs(loss):
            raise RuntimeError(f"JAX has the loss {here} where torch has {loss}")
        child.give_epoch(next(self._orders))

    def advance(self, seconds: float) -> None:
        end = self.seconds + seconds
        try:
            while self.seconds < end:
                answer = self._child.ask({"do": "advance", "seconds": end - self.seconds})
                self.updates, self.seconds = answer["updates"], answer["seconds"]
                if answer["wants_epoch"]:
                    self._child.give_epoch(next(self._orders))
        except RuntimeError as error:
            self.failure = str(error).strip().splitlines()[-1]

    def evaluate(self) -> tuple[float, str]:
        if self.failure:
            return float("nan"), "present"
        answer = self._child.ask({"do": "evaluate"})
        return answer["loss"], answer["of"]

    def close(self) -> None:
        """The child serves the next run."""
