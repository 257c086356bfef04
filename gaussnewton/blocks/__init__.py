"""What an estimator returns for a layer: a matrix that can be multiplied, damped, inverted."""

from gaussnewton.blocks.base import Block, Inverse, Inversion
from gaussnewton.blocks.bounded import bounded
from gaussnewton.blocks.curvature import Curvature
from gaussnewton.blocks.dense import DenseBlock
from gaussnewton.blocks.diagonal import DiagonalBlock
from gaussnewton.blocks.eigen import EigenBlock
from gaussnewton.blocks.grouped import GroupedBlock
from gaussnewton.blocks.joining import ZeroBlock
from gaussnewton.blocks.kronecker import KroneckerBlock
from gaussnewton.blocks.scaled import ScaledBlock
from gaussnewton.blocks.tiled import TiledBlock, of_factors

__all__ = [
    "Block",
    "Curvature",
    "DenseBlock",
    "DiagonalBlock",
    "EigenBlock",
    "GroupedBlock",
    "Inverse",
    "Inversion",
    "KroneckerBlock",
    "ScaledBlock",
    "TiledBlock",
    "ZeroBlock",
    "bounded",
    "of_factors",
]
