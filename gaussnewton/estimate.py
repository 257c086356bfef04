"""``gn.curvature``: the curvature of a model at a batch, or over many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from gaussnewton.batch import Batch, batches_in, call_criterion, call_model
from gaussnewton.blocks import Block
from gaussnewton.blocks.curvature import Curvature
from gaussnewton.compiled import eagerly, original
from gaussnewton.errors import BatchError, UnsupportedLossError
from gaussnewton.estimators import Estimator, estimator_of
from gaussnewton.losses import Loss
from gaussnewton.losses.inside import LossWatch
from gaussnewton.model_state import unchanged
from gaussnewton.passage import passage_of, refuse_loose
from gaussnewton.tape import Record, Tape

_SECONDS_BEFORE_BAR = 2


def curvature(
    model: nn.Module,
    criterion: Any,
    data: Any,
    method: str | Estimator = "kflr",
    *,
    outputs: Callable[[Any], Any] | None = None,
    strict: bool = False,
    progress: bool = True,
) -> Curvature:
    """The block-diagonal curvature of the scalar that the criterion returns.

    The model is left as it was: mode, gradients, buffers, hooks, and the global random
    state.

    Args:
        model: any network whose functions treat each datum by itself. What block each of its
            parameters gets is in :func:`~gaussnewton.explain`.
        criterion: a loss module, or a plain function of outputs and targets, which is
            wrapped as :class:`~gaussnewton.Loss`; None for a model that returns its loss, the
            targets being among its inputs: the loss function that it calls is found inside.
        data: one batch, a tuple ``(inputs, targets)``; or an iterable of batches such as a
            ``DataLoader``. Inputs may be a tensor, a tuple of arguments, or a dict of
            keyword arguments. Several batches give the curvature of their losses together:
            the sum for reduction "sum", else the mean over data.
        method: "kflr", "kfra", "kfac" or "hessian"; or an estimator with settings, such as
            ``gn.KFAC(samples=10)``. The name "kfac" draws the same samples at each call.
        outputs: from what the model returns to what the criterion looks at, if that is not the
            same, as ``lambda returned: returned["logits"]``.
        strict: raise where a parameter is used in a way that only a diagonal is known of.
        progress: show a bar where an iterable takes more than two seconds.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(),
        ...                             torch.nn.Linear(3, 2))
        >>> x, y = torch.randn(16, 4), torch.randint(2, (16,))
        >>> c = gn.curvature(model, torch.nn.CrossEntropyLoss(), (x, y), method="kfra")
        >>> c
        Curvature(2 blocks, 23 parameters, 16 data)
        >>> c["0"].Q.shape, c["0"].G.shape
        (torch.Size([5, 5]), torch.Size([3, 3]))
    """
    estimator, (criterion, plain) = estimator_of(method), _checked(model, criterion)
    result: Curvature | None = None
    watched = [part for part in (model, criterion) if part is not None]
    with eagerly(model), unchanged(*watched):
        for batch in _shown(batches_in(data), data, progress):
            if result is not None and plain:
                raise UnsupportedLossError(
                    "over several batches it matters whether a plain function sums or averages "
                    "over data: wrap it, criterion = gn.Loss(fn, reduction='mean') or 'sum'."
                )
            record = _record(original(model), criterion, batch, outputs)
            passage = passage_of(record)
            if strict:
                refuse_loose(passage)
            new = _curvature(record, estimator(record, passage))
            result = new if result is None else result.merge(new)
    if result is None:
        raise BatchError("the data hold no batch at all: the iterable ended at once.")
    return result


def _checked(model: Any, criterion: Any) -> tuple[nn.Module | None, bool]:
    """The criterion as a module, if there is one, and whether it was a plain function."""
    for what, value in (("model", model), ("criterion", criterion)):
        if isinstance(value, type):
            raise TypeError(f"the {what} is the class {value.__name__}; give an instance of it.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is {type(model).__name__}, not a torch.nn.Module.")
    if criterion is None or isinstance(criterion, nn.Module):
        return criterion, False
    if not callable(criterion):
        raise TypeError(f"the criterion is {type(criterion).__name__}, which cannot be called.")
    return Loss(criterion), True


def _record(
    model: nn.Module,
    criterion: nn.Module | None,
    batch: Batch,
    outputs_of: Callable[[Any], Any] | None,
) -> Record:
    if criterion is None:
        return _record_inner(model, batch)
    with Tape(model, criterion) as tape:
        returned = call_model(model, batch)
        call_criterion(criterion, returned if outputs_of is None else outputs_of(returned), batch)
    return tape.record


def _curvature(record: Record, blocks: Mapping[str, Block]) -> Curvature:
    geometry, outputs = record.geometry, record.outputs.detach()
    return Curvature(
        blocks,
        record.theta,
        data=record.data,
        weight=geometry.weight(outputs, record.targets) if geometry.averages else None,
    )


def _record_inner(model: nn.Module, batch: Batch) -> Record:
    """The record of a model that calls its loss by itself; a first pass finds out which."""
    with LossWatch() as watch:
        call_model(model, batch)
    inner = watch.only(model)
    with Tape(model, inner.criterion) as tape:
        with LossWatch() as watch:
            call_model(model, batch)
        inner.criterion(*watch.only(model).arguments)
    return tape.record


def _shown(batches: Iterable[Batch], data: Any, progress: bool) -> Iterator[Batch]:
    yield from tqdm(
        batches,
        total=_length(data),
        desc="curvature",
        unit="batch",
        delay=_SECONDS_BEFORE_BAR,
        disable=not progress or isinstance(batches, list),  # a list is the one batch given
    )


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # a loader of an iterable dataset has __len__ but no length
        return None
