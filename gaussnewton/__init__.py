"""Practical Gauss-Newton optimisation and curvature for PyTorch.

import gaussnewton as gn

curvature = gn.curvature(model, criterion, (x, y), method="kflr")
gn.verify(model, criterion, (x, y))
"""

from gaussnewton import diagnostics, errors, exact, layers, losses
from gaussnewton.blocks import (
    Block,
    Curvature,
    DenseBlock,
    DiagonalBlock,
    EigenBlock,
    GroupedBlock,
    KroneckerBlock,
    ScaledBlock,
    TiledBlock,
    ZeroBlock,
)
from gaussnewton.diagnostics import alignment, verify
from gaussnewton.estimate import curvature
from gaussnewton.estimators import KFAC, KFLR, KFRA, BlockHessian, Estimator
from gaussnewton.explaining import explain
from gaussnewton.hessian_free import HessianFree
from gaussnewton.losses import BinaryMixtureLoss, Loss
from gaussnewton.optimizer import GaussNewton
from gaussnewton.parameters import Theta
from gaussnewton.settings import PAPER, Damping, Guard, Refresh, StepSize
from gaussnewton.tape import Tape

__version__ = "0.1.0"

__all__ = [
    "KFAC",
    "KFLR",
    "KFRA",
    "PAPER",
    "BinaryMixtureLoss",
    "Block",
    "BlockHessian",
    "Curvature",
    "Damping",
    "DenseBlock",
    "DiagonalBlock",
    "EigenBlock",
    "Estimator",
    "GaussNewton",
    "GroupedBlock",
    "Guard",
    "HessianFree",
    "KroneckerBlock",
    "Loss",
    "Refresh",
    "ScaledBlock",
    "StepSize",
    "Tape",
    "Theta",
    "TiledBlock",
    "ZeroBlock",
    "alignment",
    "curvature",
    "diagnostics",
    "errors",
    "exact",
    "explain",
    "layers",
    "losses",
    "verify",
]
