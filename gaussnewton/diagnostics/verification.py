"""``gn.verify``: the blocks of an estimator beside the exact ones, on the user's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from tabulate import tabulate
from torch import Tensor, nn

from gaussnewton import exact
from gaussnewton.batch import Batch, batches_in, call_criterion, call_model
from gaussnewton.blocks import Block, Curvature, EigenBlock, KroneckerBlock, TiledBlock
from gaussnewton.chain import Chain
from gaussnewton.errors import BatchError, UnsupportedGraphError, UnsupportedLossError
from gaussnewton.estimate import curvature
from gaussnewton.estimators import Estimator, estimator_of
from gaussnewton.losses import Loss
from gaussnewton.model_state import unchanged
from gaussnewton.parameters import Theta
from gaussnewton.passage import Passage, passage_of
from gaussnewton.returning import returning
from gaussnewton.tape import Tape
from gaussnewton.tiles import tiled

_PROBES = 8


@dataclass(frozen=True)
class Row:
    """One layer under one method.

    Attributes:
        layer: its qualified name.
        method: the estimator.
        shape: of the layer's matrix ``[W | b]``.
        Q_error: ‖Q − exact‖ / ‖exact‖; must be rounding for every method.
        G_error: the same of G; rounding for KFLR, an approximation for KFRA and KFAC.
        block_error: ‖C − exact‖ / ‖exact‖ of the whole block, against the exact
            Gauss-Newton block, or Hessian block for "hessian".
        cosine: of the two blocks as vectors.
        verdict: "exact", "approximate", "sampled", or "WRONG" where something that the
            method promises to be exact is not.
    """

    layer: str
    method: str
    shape: tuple[int, int]
    Q_error: float | None
    G_error: float | None
    block_error: float
    cosine: float
    verdict: str

    @property
    def ok(self) -> bool:
        """Whether all that this method promises to be exact is."""
        return self.verdict != "WRONG"


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found; printing it shows the table."""

    rows: list[Row]
    data: int
    given: int
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether everything that should be exact is."""
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        headers = [
            "layer",
            "method",
            "[W | b]",
            "Q error",
            "G error",
            "block error",
            "cosine",
            "verdict",
        ]
        body = [
            [
                row.layer or "(model)",
                row.method,
                f"{row.shape[0]} x {row.shape[1]}",
                _number(row.Q_error),
                _number(row.G_error),
                _number(row.block_error),
                f"{row.cosine:.3f}",
                row.verdict,
            ]
            for row in self.rows
        ]
        table = tabulate(
            body,
            headers,
            tablefmt="simple",
            disable_numparse=True,
            colalign=("left", "left", "right", "right", "right", "right", "right", "left"),
        )
        of = "" if self.data == self.given else f" of the batch's {self.given}"
        note = (
            f"Relative errors against autograd on {self.data} data{of}. Held to "
            f"{self.tolerance:.0e}: Q always, G for\nkflr, the nested expectation for kfra, the "
            "block for hessian. The verdict is on G; the block error is what\n"
            "E[Q ⊗ 𝒢] ≈ E[Q] ⊗ E[𝒢] leaves out."
        )
        return f"{table}\n{note}\n{'All as promised.' if self.ok else 'NOT as promised.'}"


def verify(
    model: nn.Module,
    criterion: Any,
    batch: Any,
    methods: str | Estimator | Sequence[str | Estimator] | None = None,
    *,
    outputs: Callable[[Any], Any] | None = None,
    data: int = 32,
    tolerance: float | None = None,
    show: bool = True,
) -> Verification:
    """Compare each block on your own model with the exact one, and print a table.

    Args:
        model: the model, in float32 or float64; it is left as it was.
        criterion: the loss.
        batch: ``(inputs, targets)``; of an iterable of batches, the first is used.
        methods: names of estimators, or estimators; by default KFLR, KFRA and, where the
            loss has a model distribution, KFAC.
        outputs: from what the model returns to the tensor that the criterion looks at, as for
            :func:`~gaussnewton.curvature`.
        data: how many data of the batch to use at the most: the exact side is slow.
        tolerance: the relative error that counts as exact; by default 1e-10 in float64 and
            1e-4 in float32.
        show: print the table.

    Returns:
        The numbers, with ``ok`` if all that should be exact is.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(),
        ...                             torch.nn.Linear(4, 3))
        >>> batch = torch.randn(16, 5), torch.randint(3, (16,))
        >>> report = gn.verify(model, torch.nn.CrossEntropyLoss(), batch, show=False)
        >>> report.ok
        True
    """
    whole = next(iter(batches_in(batch)), None)
    if whole is None:
        raise BatchError("the data hold no batch at all: the iterable ended at once.")
    used, given = _first(whole, data, criterion)
    with returning(model, outputs):
        estimates = _estimates(model, criterion, used, methods)
        truth = _Truth(model, criterion, used)
        if tolerance is None:
            tolerance = 1e-10 if truth.dtype == torch.float64 else 1e-4
        rows = [
            truth.compare(layer, name, estimator, estimate[layer], tolerance)
            for layer in truth.theta.groups
            for name, (estimator, estimate) in estimates.items()
        ]
    count = next(iter(estimates.values()))[1].data
    result = Verification(rows, count, given, tolerance)
    if show:
        print(result)
    return result


def _estimates(
    model: nn.Module,
    criterion: Any,
    batch: Batch,
    methods: str | Estimator | Sequence[str | Estimator] | None,
) -> dict[str, tuple[Estimator, Curvature]]:
    if isinstance(methods, (str, Estimator)):
        methods = [methods]
    result: dict[str, tuple[Estimator, Curvature]] = {}
    for method in methods or ("kflr", "kfra", "kfac"):
        estimator = estimator_of(method)
        try:
            estimate = curvature(model, criterion, batch, method=estimator, progress=False)
        except (UnsupportedLossError, UnsupportedGraphError):
            if methods is None and result:  # KFRA, of a network with layers that it does not know
                continue
            raise
        result[method if isinstance(method, str) else repr(method)] = (estimator, estimate)
    return result


class _Truth:
    """The exact side of the table, each part computed when first asked for."""

    def __init__(self, model: nn.Module, criterion: Any, batch: Batch) -> None:
        self.theta = Theta(model)
        like = next(model.parameters())
        self.dtype = like.dtype
        if torch.finfo(self.dtype).bits < 32:
            raise ValueError(
                f"the model is in {self.dtype}, too coarse to tell right from wrong. Verify a "
                "wider copy: gn.verify(copy.deepcopy(model).float(), …)."
            )
        self.Q = exact.input_moments(model, batch)
        self.G = exact.preactivation_gauss_newton(model, criterion, batch)
        self._arguments = (model, criterion, batch)
        self._products: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(0)
        self._probes = {
            g.name: torch.randn(_PROBES, g.rows, g.columns, generator=generator).to(like)
            for g in self.theta
        }

    @cached_property
    def recursion(self) -> dict[str, Tensor]:
        return exact.recursive_gauss_newton(*self._arguments)

    @cached_property
    def passage(self) -> Passage:
        model, criterion, batch = self._arguments
        module = criterion if isinstance(criterion, nn.Module) else Loss(criterion)
        with unchanged(model, module), Tape(model, module) as tape:
            call_criterion(module, call_model(model, batch), batch)
        return passage_of(tape.record)

    @property
    def is_chain(self) -> bool:
        return isinstance(self.passage, Chain)

    def has_factors(self, layer: str) -> bool:
        """Whether the exact Q and G are the block's: its parameters are used by one call only."""
        if layer not in self.G or isinstance(self.passage, Chain):
            return layer in self.G
        calls = self.passage.calls[layer]
        return len(calls) == 1 and calls[0].module is self._arguments[0].get_submodule(layer)

    def compare(
        self, layer: str, method: str, estimator: Estimator, block: Block, tolerance: float
    ) -> Row:
        Q_error: float | None = None
        G_error: float | None = None
        if isinstance(block, (KroneckerBlock, EigenBlock)) and self.has_factors(layer):
            Q_error = _relative(block.Q, self.Q[layer])
            G_error = _relative(block.G, self.G[layer])
        elif isinstance(block, TiledBlock) and self.has_factors(layer):  # of the tiles alone
            Q_error = _relative(block.Q, tiled(self.Q[layer], block.Q.shape[1]))
            G_error = _relative(block.G, tiled(self.G[layer], block.G.shape[1]))
        kind = "hessian" if estimator.promise == "block" else "gauss_newton"
        error, cosine = self._block_error(layer, block, kind)
        promised = [Q_error, *self._promised(layer, estimator, block, G_error, error)]
        ok = all(value <= tolerance for value in promised if value is not None)
        return Row(
            layer,
            method,
            (block.rows, block.columns),
            Q_error,
            G_error,
            error,
            cosine,
            _verdict(ok, estimator, error if G_error is None else G_error, tolerance),
        )

    def _promised(
        self, layer: str, estimator: Estimator, block: Block, G: float | None, whole: float
    ) -> list[float | None]:
        """The errors that must be rounding, besides that of Q."""
        if estimator.promise == "recursion" and isinstance(block, KroneckerBlock):
            if not self.is_chain:  # what it is defined to be is known of chains only
                return []
            return [_relative(block.G, self.recursion[layer])]
        if estimator.promise == "G":
            return [G]
        return [whole] if estimator.promise == "block" else []

    def _block_error(self, layer: str, block: Block, kind: str) -> tuple[float, float]:
        """Error and cosine in the Frobenius norm, estimated by random vectors.

        For v of independent standard entries, E[(Av)ᵀ(Bv)] is the inner product of A and
        B, and layers are often too large for anything but products.
        """
        product = self._product(kind)
        mine, theirs = [], []
        for V in self._probes[layer]:
            padded = {
                g.name: V if g.name == layer else V.new_zeros(g.rows, g.columns) for g in self.theta
            }
            theirs.append(self.theta.matrices(product(self.theta.join(padded)))[layer])
            mine.append((block @ V).to(V.dtype))
        A, B = torch.stack(mine), torch.stack(theirs)
        cosine = (A * B).sum() / (A.norm() * B.norm()).clamp(min=torch.finfo(A.dtype).tiny)
        return _relative(A, B), float(cosine)

    def _product(self, kind: str) -> Any:
        if kind not in self._products:
            self._products[kind] = getattr(exact, f"{kind}_product")(*self._arguments)
        return self._products[kind]


def _relative(A: Float[Tensor, ...], B: Float[Tensor, ...]) -> float:
    scale = B.norm().clamp(min=torch.finfo(B.dtype).tiny)
    return float((A.to(B.dtype) - B).norm() / scale)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _verdict(ok: bool, estimator: Estimator, error: float, tolerance: float) -> str:
    if not ok:
        return "WRONG"
    if error <= tolerance:
        return "exact"
    return "sampled" if estimator.promise == "sampled" else "approximate"


def _first(batch: Batch, count: int, criterion: Any) -> tuple[Batch, int]:
    """The first data of a batch, and how many there were."""
    sizes: list[int] = []

    def measure(part: Any) -> None:
        if isinstance(part, Tensor) and part.ndim:
            sizes.append(part.shape[0])
        elif isinstance(part, (tuple, dict)):
            for p in part.values() if isinstance(part, dict) else part:
                measure(p)

    def cut(part: Any) -> Any:
        if isinstance(part, Tensor) and part.ndim:
            return part[:count]
        if isinstance(part, dict):
            return {key: cut(value) for key, value in part.items()}
        return tuple(cut(value) for value in part) if isinstance(part, tuple) else part

    measure(batch)
    given = max(sizes, default=0)
    weights = criterion.buffers() if isinstance(criterion, nn.Module) else ()
    if any(w.ndim and w.shape[0] == given for w in weights):
        return batch, given  # the criterion has a weight for each datum
    return cut(batch), given
