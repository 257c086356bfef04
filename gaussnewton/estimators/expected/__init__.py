"""Expected Gauss-Newton matrices in any graph of layers: KFRA beyond chains.

Operations are taken in the reverse order of execution. The *frontier* holds the expected
Gauss-Newton matrix over the tensors that have been reached; each operation y = φ(x₁ … x_k)
replaces y by its inputs, with its expected Jacobian and the second moment of it.
"""

from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.recursion import Expected, expected_matrices

__all__ = ["Expected", "Layout", "expected_matrices"]
