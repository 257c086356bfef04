"""Output geometry: what a criterion means to curvature.

A criterion enters the curvature only through the Hessian of the scalar it returns at the
outputs of each datum, 𝓗_L, and through draws from its model distribution. One file a
loss; :func:`geometry_of` finds the right one.
"""

from gaussnewton.losses.binary import BernoulliGeometry
from gaussnewton.losses.categorical import CrossEntropyGeometry, NLLGeometry
from gaussnewton.losses.custom import CustomGeometry, Loss
from gaussnewton.losses.gaussian import GaussianNLLGeometry
from gaussnewton.losses.geometry import Geometry
from gaussnewton.losses.mixture import BinaryMixtureLoss
from gaussnewton.losses.poisson import PoissonGeometry
from gaussnewton.losses.registry import geometry_of, register_loss
from gaussnewton.losses.squared import SquaredErrorGeometry

__all__ = [
    "BernoulliGeometry",
    "BinaryMixtureLoss",
    "CrossEntropyGeometry",
    "CustomGeometry",
    "GaussianNLLGeometry",
    "Geometry",
    "Loss",
    "NLLGeometry",
    "PoissonGeometry",
    "SquaredErrorGeometry",
    "geometry_of",
    "register_loss",
]
