"""What can be asked of a model and its curvature: the facts of the paper, as functions."""

from gaussnewton.diagnostics.alignment import Alignment, alignment
from gaussnewton.diagnostics.definiteness import BlockFacts, block_facts
from gaussnewton.diagnostics.fisher import fisher_distance
from gaussnewton.diagnostics.rank import RankFacts, gauss_newton_rank
from gaussnewton.diagnostics.recursion import recursion_distance
from gaussnewton.diagnostics.verification import Verification, verify

__all__ = [
    "Alignment",
    "BlockFacts",
    "RankFacts",
    "Verification",
    "alignment",
    "block_facts",
    "fisher_distance",
    "gauss_newton_rank",
    "recursion_distance",
    "verify",
]
