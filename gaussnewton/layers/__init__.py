"""What a layer type means to curvature: one file a family.

A rule says which vectors a layer's matrix multiplies, and at which positions; that of a layer in
a chain also how a matrix at its outputs is carried to its inputs. :func:`rule_for` finds the rule
of a module.
"""

from gaussnewton.layers.activation import PReLURule
from gaussnewton.layers.convolution import ConvolutionRule
from gaussnewton.layers.embedding import EmbeddingBagRule, EmbeddingRule
from gaussnewton.layers.linear import LinearRule
from gaussnewton.layers.normalisation import NormalisationRule
from gaussnewton.layers.rule import (
    ChainRule,
    LayerRule,
    MatrixRule,
    SmallRule,
    TableRule,
    register_layer,
    rule_for,
)
from gaussnewton.layers.transposed import OutputBiasRule, TransposedConvolutionRule

__all__ = [
    "ChainRule",
    "ConvolutionRule",
    "EmbeddingBagRule",
    "EmbeddingRule",
    "LayerRule",
    "LinearRule",
    "MatrixRule",
    "NormalisationRule",
    "OutputBiasRule",
    "PReLURule",
    "SmallRule",
    "TableRule",
    "TransposedConvolutionRule",
    "register_layer",
    "rule_for",
]
