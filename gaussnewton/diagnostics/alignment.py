"""``gn.alignment``: how well approximate steps point along the exact ones (appendix F)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from tabulate import tabulate
from torch import Tensor, nn

from gaussnewton import exact
from gaussnewton.batch import Batch, batches_in
from gaussnewton.blocks import Inversion
from gaussnewton.errors import BatchError
from gaussnewton.estimate import curvature
from gaussnewton.estimators import Estimator
from gaussnewton.exact.batch import evaluate, loss
from gaussnewton.exact.differentiation import gradient
from gaussnewton.model_state import unchanged
from gaussnewton.parameters import Theta
from gaussnewton.returning import returning


@dataclass(frozen=True)
class Solve:
    """How far conjugate gradients got with one reference step.

    Attributes:
        iterations: How many were made.
        residual: ‖g − C δ‖ / ‖g‖, computed from δ anew and not by the recursion.
        converged: Whether the tolerance was reached. If not, the reference step is only as
            good as the residual says, and so is every cosine with it.
    """

    iterations: int
    residual: float
    converged: bool


@dataclass(frozen=True)
class Alignment:
    """What :func:`alignment` found; printing it shows the table.

    A step is called by its method, with a star where the inversion is factored, as in the
    paper: ``"kfra"``, ``"kfra*"``.

    Attributes:
        layers: The cosine of each layer's step with that of its exact Gauss-Newton block, as
            ``layers[layer][step]``.
        whole: The cosine of each whole step with that of the full Gauss-Newton matrix.
        block_diagonal: The cosine of the exact block-diagonal step with the full one: more
            than that cannot be asked of a block-diagonal method.
        layer_solves: How well each block's reference step was solved for.
        whole_solve: The same for the full matrix.
        damping: k = γ + η of the approximate steps.
        reference_damping: What was added to the exact matrices.
        data: The size of the batch.
    """

    layers: dict[str, dict[str, float]]
    whole: dict[str, float]
    block_diagonal: float
    layer_solves: dict[str, Solve]
    whole_solve: Solve
    damping: float
    reference_damping: float
    data: int

    @property
    def converged(self) -> bool:
        """Whether all reference steps were solved for to the tolerance."""
        return all(solve.converged for solve in (self.whole_solve, *self.layer_solves.values()))

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts, to save as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        steps = list(self.whole)
        parts = [
            *(
                (name or "(model)", self.layers[name], self.layer_solves[name])
                for name in self.layers
            ),
            ("whole, full GN", self.whole, self.whole_solve),
        ]
        body = [
            [
                name,
                *(f"{cosines[step]:.3f}" for step in steps),
                str(solve.iterations),
                f"{solve.residual:.0e}",
            ]
            for name, cosines, solve in parts
        ]
        table = tabulate(
            body,
            ["layer", *steps, "CG its", "residual"],
            tablefmt="simple",
            disable_numparse=True,
            colalign=("left", *["right"] * (len(steps) + 2)),
        )
        note = (
            f"Cosines of C̃⁻¹g with the exact Gauss-Newton step on {self.data} data: of each layer "
            "with that of its own\nblock, of all with that of the full matrix. A star marks the "
            f"factored inversion; k = {self.damping:.3g}.\nThe exact block-diagonal step itself "
            f"has cosine {self.block_diagonal:.3f} with the full one."
        )
        verdict = (
            "All reference steps converged."
            if self.converged
            else "NOT all reference steps converged: see the residuals, or allow more iterations."
        )
        return f"{table}\n{note}\n{verdict}"


def alignment(
    model: nn.Module,
    criterion: Any,
    data: Any,
    methods: str | Estimator | Sequence[str | Estimator] = ("kfra", "kfac", "kflr"),
    inversions: Inversion | Sequence[Inversion] = ("exact", "factored"),
    *,
    damping: float,
    outputs: Callable[[Any], Any] | None = None,
    reference_damping: float | None = None,
    weight_decay: float = 0.0,
    max_iterations: int = 250,
    tolerance: float = 1e-4,
    show: bool = False,
) -> Alignment:
    r"""Cosines of approximate steps :math:`\tilde C^{-1} g` with exact Gauss-Newton steps.

    Each layer's step is compared with :math:`(G_λ + k I)^{-1} g_λ`, the whole with
    :math:`(\bar G + k I)^{-1} g`, as in appendix F. Both are found by conjugate gradients on
    products with :math:`J^T \mathcal H_L J`, so that no matrix over θ is formed. They are not
    preconditioned: unfinished iterations would lean towards the preconditioner, and with
    Kronecker factors in that place the comparison would praise itself.

    Args:
        model: A network that :func:`~gaussnewton.curvature` can handle. It is left as it was.
        criterion: The loss, of which g is the gradient.
        data: One batch ``(inputs, targets)``; of an iterable of batches, the first is used.
        methods: Names of estimators, or estimators.
        inversions: "exact", "factored" or both (appendix B.1).
        damping: k = γ + η of the approximate steps. Above zero.
        outputs: From what the model returns to the tensor that the criterion looks at, as for
            :func:`~gaussnewton.curvature`.
        reference_damping: What is added to the exact matrices; by default the same.
        weight_decay: η of an L2 penalty, whose gradient ηθ is added to g. Its curvature must be
            contained in the damping.
        max_iterations: The most that each reference step may take. With too few for the
            tolerance the result says so, and gives the residuals.
        tolerance: Of the residual relative to ‖g‖.
        show: Print the table.

    Example:
        >>> import torch, gaussnewton as gn
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(),
        ...                             torch.nn.Linear(4, 3)).double()
        >>> batch = torch.randn(64, 5).double(), torch.randint(3, (64,))
        >>> result = gn.alignment(model, torch.nn.CrossEntropyLoss(), batch, damping=1e-3)
        >>> sorted(result.whole)
        ['kfac', 'kfac*', 'kflr', 'kflr*', 'kfra', 'kfra*']
        >>> result.converged, result.layers["2"]["kflr"] > 0.8
        (True, True)
    """
    if not damping > 0:
        raise ValueError(f"damping is {damping}; it must be above zero, the factors are singular")
    k = damping if reference_damping is None else reference_damping
    with returning(model, outputs):
        result = _alignment(
            model, criterion, _first(data), methods, inversions, damping, k, weight_decay,
            partial(_solve, most=max_iterations, tolerance=tolerance),
        )  # fmt: skip
    if show:
        print(result)
    return result


def _alignment(
    model: nn.Module,
    criterion: Any,
    batch: Batch,
    methods: str | Estimator | Sequence[str | Estimator],
    inversions: Inversion | Sequence[Inversion],
    damping: float,
    k: float,
    weight_decay: float,
    solve: Callable[[Callable[[Tensor], Tensor], Tensor], tuple[Tensor, Solve]],
) -> Alignment:
    g = _gradient(model, criterion, batch, weight_decay)
    slices = Theta(model).slices
    products = exact.gauss_newton_block_products(model, criterion, batch, damping=k)
    blocks = {name: solve(product, g[slices[name]]) for name, product in products.items()}
    del products  # their graphs are large
    full, whole_solve = solve(exact.gauss_newton_product(model, criterion, batch, damping=k), g)
    steps, count = _steps(model, criterion, batch, g, methods, inversions, damping)
    joined = torch.cat([blocks[name][0] for name in slices])
    return Alignment(
        layers={
            name: {step: _cosine(v[part], blocks[name][0]) for step, v in steps.items()}
            for name, part in slices.items()
        },
        whole={step: _cosine(v, full) for step, v in steps.items()},
        block_diagonal=_cosine(joined, full),
        layer_solves={name: blocks[name][1] for name in slices},
        whole_solve=whole_solve,
        damping=float(damping),
        reference_damping=float(k),
        data=count,
    )


def _first(data: Any) -> Batch:
    batch = next(iter(batches_in(data)), None)
    if batch is None:
        raise BatchError("the data hold no batch at all: the iterable ended at once.")
    return batch


def _gradient(
    model: nn.Module, criterion: Any, batch: Batch, weight_decay: float
) -> Float[Tensor, " p"]:
    with unchanged(model):
        seen = evaluate(model, criterion, batch)
        value = loss(criterion, seen.outputs, seen.targets)
        g = gradient(value, list(seen.theta)).detach()
    theta = Theta(model)
    own = theta.vector({key: p.detach() for group in theta for key, p in group.parameters.items()})
    return g + weight_decay * own


def _solve(
    product: Callable[[Tensor], Tensor], b: Float[Tensor, " p"], most: int, tolerance: float
) -> tuple[Float[Tensor, " p"], Solve]:
    found = exact.conjugate_gradients(product, b, max_iterations=most, tolerance=tolerance)
    # The recursion's own residual drifts from the true one by rounding, and looks too good.
    residual = (b - product(found.solution)).norm() / b.norm().clamp(min=_tiny(b))
    done = found.reason is exact.Reason.CONVERGED and float(residual) <= 10 * tolerance
    return found.solution, Solve(found.iterations, float(residual), done)


def _steps(
    model: nn.Module,
    criterion: Any,
    batch: Batch,
    g: Float[Tensor, " p"],
    methods: str | Estimator | Sequence[str | Estimator],
    inversions: Inversion | Sequence[Inversion],
    damping: float,
) -> tuple[Mapping[str, Float[Tensor, " p"]], int]:
    """The approximate steps by name, and how many data there were."""
    methods = [methods] if isinstance(methods, (str, Estimator)) else list(methods)
    chosen = [inversions] if isinstance(inversions, str) else list(inversions)
    if not methods or not chosen:
        raise ValueError("give at least one method and one inversion")
    steps: dict[str, Tensor] = {}
    count = 0
    for method in methods:
        estimate = curvature(model, criterion, batch, method=method, progress=False)
        count = estimate.data
        title = method if isinstance(method, str) else repr(method)
        for inversion in chosen:
            star = "*" if inversion == "factored" else ""
            steps[f"{title}{star}"] = estimate.solve(g, damping, inversion)
    return steps, count


def _cosine(a: Float[Tensor, " p"], b: Float[Tensor, " p"]) -> float:
    """In float64; NaN if either vector is zero."""
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))


def _tiny(like: Tensor) -> float:
    return float(torch.finfo(like.dtype).tiny)
