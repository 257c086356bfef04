"""What can go wrong, by name.

Every error of the package is a :class:`GaussNewtonError`, and also the built-in error
that a reader would expect, so that ``except ValueError`` keeps working.
"""

from __future__ import annotations


class GaussNewtonError(Exception):
    """Base of all errors that this package raises on purpose."""


class UnsupportedLayerError(GaussNewtonError, NotImplementedError):
    """A layer with trainable parameters has no curvature rule."""


class UnsupportedGraphError(GaussNewtonError, NotImplementedError):
    """The way the layers are connected is not one the estimator can follow."""


class UnsupportedLossError(GaussNewtonError, NotImplementedError):
    """The criterion lacks what the estimator needs from it."""


class NoTrainableParametersError(GaussNewtonError, ValueError):
    """The model has nothing to take curvature of."""


class BatchError(GaussNewtonError, ValueError):
    """The batch is empty, or its outputs and targets do not fit each other."""


class NonFiniteError(GaussNewtonError, ValueError):
    """A NaN or an infinity reached the curvature."""


class RecordError(GaussNewtonError, RuntimeError):
    """The tape does not hold what was asked of it."""


class FactorisationError(GaussNewtonError, ArithmeticError):
    """A matrix that should be positive definite is not."""


class MemoryLimitError(GaussNewtonError, MemoryError):
    """The request would need more memory than the limit allows."""


class MissingExtraError(GaussNewtonError, ImportError):
    """A package that only an extra of this one brings is not installed."""


class DataError(GaussNewtonError, ValueError):
    """A data set is unknown, or a file of it is damaged or not the one expected."""


class MissingDataError(DataError, FileNotFoundError):
    """A folder lacks files of a data set."""


class DownloadError(DataError, ConnectionError):
    """No mirror gave a file as it should be."""


class ExperimentError(GaussNewtonError, ValueError):
    """An experiment was asked for that there is not, or that does not fit its folder."""


class BusyError(ExperimentError, BlockingIOError):
    """Another process is at work in the folder of a run."""
