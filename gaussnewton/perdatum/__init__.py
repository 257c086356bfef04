"""One positive semi-definite matrix for each datum, kept in its cheapest form.

The paper's recursion (eq. gn:recursion)

.. math:: 𝒢_λ = B_λ W_{λ+1}^T 𝒢_{λ+1} W_{λ+1} B_λ

is applied to every datum. What it starts from, the Hessian of the loss at the outputs, is
often diagonal, the same for all data, or of low rank, and stays so for a while on its way
back. Each class here is one such form; all have the operations of :class:`PerDatum`.
"""

from gaussnewton.perdatum.base import PerDatum
from gaussnewton.perdatum.dense import Dense
from gaussnewton.perdatum.diagonal import Diagonal
from gaussnewton.perdatum.roots import Roots
from gaussnewton.perdatum.shared import Shared
from gaussnewton.perdatum.softmax import Softmax

__all__ = ["Dense", "Diagonal", "PerDatum", "Roots", "Shared", "Softmax"]
