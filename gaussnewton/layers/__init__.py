"""What a layer type means to curvature: one file a family.

A rule says how a layer's recorded call becomes the factor Q, and how a matrix at the
layer's outputs is carried to its inputs. :func:`rule_for` finds the rule of a module.
"""

from gaussnewton.layers.linear import LinearRule
from gaussnewton.layers.rule import LayerRule, register_layer, rule_for

__all__ = ["LayerRule", "LinearRule", "register_layer", "rule_for"]
