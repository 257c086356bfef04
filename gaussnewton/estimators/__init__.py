"""Estimators of curvature: each turns a record into one block a layer.

A new estimator is one file with a subclass of :class:`Estimator`, and one line below.
"""

from gaussnewton.estimators.base import Estimator
from gaussnewton.estimators.choice import choose
from gaussnewton.estimators.hessian import BlockHessian
from gaussnewton.estimators.kfac import KFAC
from gaussnewton.estimators.kflr import KFLR
from gaussnewton.estimators.kfra import KFRA

ESTIMATORS: dict[str, type[Estimator]] = {
    "kflr": KFLR,
    "kfra": KFRA,
    "kfac": KFAC,
    "hessian": BlockHessian,
}


def estimator_of(method: str | Estimator) -> Estimator:
    """The estimator of a name, or the estimator itself."""
    if isinstance(method, Estimator):
        return method
    if method not in ESTIMATORS:
        names = ", ".join(repr(name) for name in ESTIMATORS)
        raise ValueError(
            f"there is no method {method!r}; choose one of {names}, or give an estimator such as "
            "gn.KFAC(samples=10)."
        )
    return ESTIMATORS[method]()


__all__ = [
    "ESTIMATORS",
    "KFAC",
    "KFLR",
    "KFRA",
    "BlockHessian",
    "Estimator",
    "choose",
    "estimator_of",
]
