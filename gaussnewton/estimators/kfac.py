"""Kronecker-factored approximate curvature, by sampling (appendix C)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks import Block
from gaussnewton.chain import Chain
from gaussnewton.estimators.base import Estimator, Exactness, check_largest
from gaussnewton.estimators.corrected import chain_blocks
from gaussnewton.estimators.eigenvalues import Eigenvalues, check_eigenvalues
from gaussnewton.estimators.shared import shared_blocks
from gaussnewton.estimators.sharing import Sharings, check_sharing
from gaussnewton.network import Network
from gaussnewton.perdatum import Roots
from gaussnewton.precision import check_precision, widened
from gaussnewton.tape import Record


class KFAC(Estimator):
    """E[Q] ⊗ E[𝓕] with the Fisher 𝓕 from sampled targets (eq. fisher:aprox).

    The scores of S targets drawn from the model distribution go back through the network
    in place of KFLR's exact columns, so that the expectation over draws is KFLR's G
    wherever the Fisher and Gauss-Newton matrices are the same.

    Where the data of a batch are mixed, as by batch normalisation in training mode, what a datum's
    layer does is felt by the losses of all, and since their targets are drawn independently the
    expectation is the datum's own block of the batch's Gauss-Newton matrix.

    Args:
        samples: S, draws for each datum.
        seed: of the estimator's own generator, which goes on from call to call and
            touches no other random state. The name "kfac" makes a new estimator at each
            call, with the same draws: to average over steps, keep one ``gn.KFAC()``.
        workspace: as in :class:`~gaussnewton.KFLR`.
        sharing: as there.
        eigenvalues: as there, with the same draws as the factors.
        largest: as there.
        precision: as there.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, criterion = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
        >>> batch = torch.randn(8, 4), torch.randint(3, (8,))
        >>> first = gn.curvature(model, criterion, batch, method=gn.KFAC(samples=2, seed=1))
        >>> again = gn.curvature(model, criterion, batch, method=gn.KFAC(samples=2, seed=1))
        >>> torch.equal(first[""].G, again[""].G)
        True
    """

    promise: ClassVar[Exactness] = "sampled"

    def __init__(
        self,
        samples: int = 1,
        seed: int = 0,
        workspace: int = 64 * 2**20,
        sharing: Sharings = "expand",
        eigenvalues: Eigenvalues = "factored",
        largest: int | None = None,
        precision: torch.dtype = torch.float32,
    ) -> None:
        if samples < 1:
            raise ValueError(f"KFAC needs at least one sample for each datum, not {samples}")
        self.samples, self.seed, self.workspace = samples, seed, workspace
        check_eigenvalues(eigenvalues)
        check_sharing(sharing)
        self.sharing: Sharings = sharing
        self.eigenvalues: Eigenvalues = eigenvalues
        check_largest(largest)
        self.largest = largest
        check_precision(precision)
        self.precision = precision
        self._generator: torch.Generator | None = None

    def __repr__(self) -> str:
        return (
            f"KFAC(samples={self.samples}, seed={self.seed}, workspace={self.workspace}, "
            f"sharing={self.sharing!r}, eigenvalues={self.eigenvalues!r}, largest={self.largest}, "
            f"precision={self.precision})"
        )

    def generator(self, device: torch.device) -> torch.Generator:
        """The estimator's own source of randomness."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device=device).manual_seed(self.seed)
        return self._generator

    def random_state(self) -> Tensor | None:
        """Where the draws have got to; None before the first."""
        return None if self._generator is None else self._generator.get_state()

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        """Go on drawing from there."""
        self.generator(device).set_state(state.cpu())

    def estimate(self, chain: Chain) -> Mapping[str, Block]:
        start = Roots(self._scores(chain.record))
        return chain_blocks(chain, start, self.workspace, self.eigenvalues, self.largest)

    def estimate_network(self, network: Network) -> dict[str, Block]:
        scores = self._scores(network.record)
        return shared_blocks(
            network,
            scores,
            self.sharing,
            self.workspace,
            self.eigenvalues,
            independent=True,
            largest=self.largest,
        )

    def _scores(self, record: Record) -> Float[Tensor, "n s d"]:
        outputs, targets = record.wide
        generator = self.generator(outputs.device)
        return widened(record.geometry.sample(outputs, targets, self.samples, generator))
