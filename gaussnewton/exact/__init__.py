"""Slow and certain: curvature by autograd alone, for any module.

What the estimators compute fast is defined here. Curvature is that of the scalar the criterion
returns; vectors and matrices are over θ in the order of
:class:`gaussnewton.parameters.Theta`; a batch is a pair (inputs, targets).
"""

from gaussnewton.exact.conjugate_gradients import (
    ConjugateGradientsResult,
    Reason,
    conjugate_gradients,
)
from gaussnewton.exact.matrices import (
    fisher,
    fisher_blocks,
    gauss_newton,
    gauss_newton_blocks,
    hessian,
    hessian_blocks,
    split,
)
from gaussnewton.exact.output_fisher import output_fisher
from gaussnewton.exact.output_hessian import output_hessian
from gaussnewton.exact.preactivation import (
    input_moments,
    preactivation_gauss_newton,
    preactivation_hessian,
    recursive_gauss_newton,
)
from gaussnewton.exact.products import (
    fisher_product,
    gauss_newton_block_products,
    gauss_newton_product,
    hessian_product,
)

__all__ = [
    "ConjugateGradientsResult",
    "Reason",
    "conjugate_gradients",
    "fisher",
    "fisher_blocks",
    "fisher_product",
    "gauss_newton",
    "gauss_newton_block_products",
    "gauss_newton_blocks",
    "gauss_newton_product",
    "hessian",
    "hessian_blocks",
    "hessian_product",
    "input_moments",
    "output_fisher",
    "output_hessian",
    "preactivation_gauss_newton",
    "preactivation_hessian",
    "recursive_gauss_newton",
    "split",
]
