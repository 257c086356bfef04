"""``gn.verify``: the blocks of an estimator beside the exact ones, on the user's own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from tabulate import tabulate
from torch import Tensor, nn

from gaussnewton import exact
from gaussnewton.batch import Batch, batches_in
from gaussnewton.blocks import Block, KroneckerBlock
from gaussnewton.estimate import curvature
from gaussnewton.estimators import Estimator
from gaussnewton.parameters import Theta

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
        ok: whether all that this method promises to be exact is.
    """

    layer: str
    method: str
    shape: tuple[int, int]
    Q_error: float | None
    G_error: float | None
    block_error: float
    cosine: float
    ok: bool


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
                _verdict(row),
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
            f"Relative errors against autograd on {self.data} data{of}. Must be exact to "
            f"{self.tolerance:.0e}: Q always, G for\nkflr, the block for hessian. The block "
            "error is what E[Q ⊗ 𝒢] ≈ E[Q] ⊗ E[𝒢] leaves out; the verdict is on G."
        )
        return f"{table}\n{note}\n{'All as promised.' if self.ok else 'NOT as promised.'}"


def verify(
    model: nn.Module,
    criterion: Any,
    batch: Any,
    methods: Sequence[str | Estimator] = ("kflr", "kfra", "kfac"),
    *,
    data: int = 32,
    tolerance: float | None = None,
    show: bool = True,
) -> Verification:
    """Compare each block on your own model with the exact one, and print a table.

    Args:
        model: the model; it is left as it was.
        criterion: the loss.
        batch: ``(inputs, targets)``.
        methods: names of estimators, or estimators.
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
    (whole,) = batches_in(batch)
    used, given = _first(whole, data)
    truth = _Truth(model, criterion, used)
    if tolerance is None:
        tolerance = 1e-10 if truth.dtype == torch.float64 else 1e-4
    rows: list[Row] = []
    for method in methods:
        name = method if isinstance(method, str) else repr(method)
        estimate = curvature(model, criterion, used, method=method, progress=False)
        rows.extend(truth.compare(layer, name, estimate[layer], tolerance) for layer in estimate)
    layers = list(Theta(model).groups)
    rows.sort(key=lambda row: layers.index(row.layer))
    result = Verification(rows, min(data, given), given, tolerance)
    if show:
        print(result)
    return result


class _Truth:
    """The exact side of the table, each part computed when first asked for."""

    def __init__(self, model: nn.Module, criterion: Any, batch: Batch) -> None:
        self.theta = Theta(model)
        self.dtype = next(model.parameters()).dtype
        self.Q = exact.input_moments(model, batch)
        self.G = exact.preactivation_gauss_newton(model, criterion, batch)
        self._arguments = (model, criterion, batch)
        self._products: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(0)
        self._probes = {
            g.name: torch.randn(_PROBES, g.rows, g.columns, generator=generator, dtype=self.dtype)
            for g in self.theta
        }

    def compare(self, layer: str, method: str, block: Block, tolerance: float) -> Row:
        if isinstance(block, KroneckerBlock):
            Q_error = _relative(block.Q, self.Q[layer])
            G_error = _relative(block.G, self.G[layer])
            kind = "gauss_newton"
        else:
            Q_error, G_error, kind = None, None, "hessian"
        error, cosine = self._block_error(layer, block, kind)
        promised = [Q_error if Q_error is not None else error]
        if method.lower().startswith("kflr") and G_error is not None:
            promised.append(G_error)
        ok = all(value <= tolerance for value in promised)
        return Row(layer, method, (block.rows, block.columns), Q_error, G_error, error, cosine, ok)

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


def _verdict(row: Row) -> str:
    if not row.ok:
        return "WRONG"
    return "exact" if row.G_error is None or row.G_error < 1e-4 else "approximate"


def _first(batch: Batch, count: int) -> tuple[Batch, int]:
    """The first data of a batch, and how many there were."""
    given: list[int] = []

    def cut(part: Any) -> Any:
        if isinstance(part, Tensor) and part.ndim:
            given.append(part.shape[0])
            return part[:count]
        if isinstance(part, dict):
            return {key: cut(value) for key, value in part.items()}
        if isinstance(part, (tuple, list)):
            return tuple(cut(value) for value in part)
        return part

    used = (cut(batch[0]), cut(batch[1]))
    return used, max(given, default=0)
