r"""Corrected eigenvalues of Kronecker blocks (EKFAC, George et al. 2018).

A layer's exact block is the sum of vec(M) vec(M)ᵀ over data and vectors, with M = Σ_r g_r a_rᵀ
the gradient of the layer's matrix, summed over the positions r of the datum. Its diagonal in the
eigenvectors of Q and G is

.. math:: Λ_{ij} = \sum_n \sum_k (u_{G,i}^T M_{nk} u_{Q,j})^2.

Positions are summed before the square is taken, however Q and G took them: nothing but that is
the diagonal of the exact block, and it costs no more than the gradient of each datum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks import Block, EigenBlock, GroupedBlock, KroneckerBlock, TiledBlock
from gaussnewton.chain import Chain
from gaussnewton.estimators.base import check_finite_blocks, kronecker_blocks
from gaussnewton.estimators.eigenvalues import Eigenvalues
from gaussnewton.estimators.recursion import Carried, fits_at_once, recursion, summed
from gaussnewton.layers import MatrixRule
from gaussnewton.network import Network
from gaussnewton.perdatum import PerDatum
from gaussnewton.tape import LayerCall

Gradients = Sequence[tuple[LayerCall, Float[Tensor, "..."]]]
"""What k vectors at the outputs of each datum become at the outputs of each call: [k, n, *out]."""


def chain_blocks(
    chain: Chain,
    start: PerDatum,
    workspace: int,
    eigenvalues: Eigenvalues,
    largest: int | None = None,
) -> Mapping[str, Block]:
    """The blocks of a chain, from each datum's matrix at the outputs.

    The matrices go back once for Q ⊗ G; for corrected eigenvalues they are kept, or, where they
    do not fit the workspace, go back once more. Layers wider than a limit have tiles, and no
    corrected eigenvalues.
    """
    carried: Iterable[Carried] = recursion(chain, start, workspace)
    if eigenvalues == "factored":
        return kronecker_blocks(chain, summed(carried, largest), largest)
    keep = fits_at_once(chain, start, workspace)
    carried = list(carried) if keep else carried
    blocks = kronecker_blocks(chain, summed(carried, largest), largest)
    return _corrected_chain(blocks, carried if keep else recursion(chain, start, workspace))


def _corrected_chain(
    blocks: Mapping[str, KroneckerBlock | TiledBlock], carried: Iterable[Carried]
) -> dict[str, Block]:
    """One position a datum: (u_Gᵀ M u_Q)² is (u_Gᵀ g)² (u_Qᵀ a)²."""
    bases = _in_eigenvectors(blocks)
    values: dict[str, Tensor] = {}
    for link, part, matrices in carried:
        name = link.call.name
        if name not in bases:  # it is in tiles
            continue
        (basis,) = bases[name]
        a = link.rule.rows(link.call.module, link.call.unspoiled_input()[part])
        found = matrices.diagonal_in(basis.U_G).T @ (a @ basis.U_Q).square_()
        values[name] = values[name].add_(found) if name in values else found
    corrected = {name: found[0].with_values(values[name]) for name, found in bases.items()}
    return {name: corrected.get(name, block) for name, block in blocks.items()}


def corrected_network(
    network: Network, blocks: Mapping[str, Block], passes: Iterable[Gradients], workspace: int
) -> dict[str, Block]:
    """Kronecker blocks in their eigenvectors with corrected eigenvalues; others as they are.

    So are blocks of tied weights that are used in two ways, and of calls whose rows are not the
    data: the gradient of a datum is not a sum over positions of one matrix there.

    Args:
        network: the calls.
        blocks: of one batch.
        passes: the gradients that they were made of, some vectors at a time.
        workspace: about how many bytes the gradients of single data may take.
    """
    bases = _in_eigenvectors(
        {name: block for name, block in blocks.items() if _is_one_matrix(network, name)}
    )
    values = {name: [basis.values.zero_() for basis in found] for name, found in bases.items()}
    for gradients in passes:
        for name, total in values.items():
            own = [(call, rows) for call, rows in gradients if call.name == name]
            for part in dict.fromkeys(call.part for call, _ in own):
                chosen = slice(None) if part is None else slice(part, part + 1)
                _add_squares(
                    total[chosen],
                    bases[name][chosen],
                    [(call, rows) for call, rows in own if call.part == part],
                    workspace,
                )
    result = dict(blocks)
    for name, total in values.items():
        parts = [b.with_values(v) for b, v in zip(bases[name], total, strict=True)]
        grouped = isinstance(blocks[name], GroupedBlock)
        result[name] = GroupedBlock(tuple(parts)) if grouped else parts[0]
    return result


def _is_one_matrix(network: Network, name: str) -> bool:
    """Whether all calls multiply the rows of the data by the same matrix in the same way."""
    calls = network.calls[name]
    alike = {(type(call.rule), call.shape[0]) for call in calls}
    return (
        bool(calls)
        and alike == {(type(calls[0].rule), network.data)}
        and isinstance(calls[0].rule, MatrixRule)
    )


def _in_eigenvectors(blocks: Mapping[str, Block]) -> dict[str, list[EigenBlock]]:
    """Of each layer with Kronecker factors, for each of its groups."""
    check_finite_blocks(blocks)  # what is not finite has no eigenvectors
    result = {}
    for name, block in blocks.items():
        parts = block.parts if isinstance(block, GroupedBlock) else (block,)
        if all(isinstance(part, KroneckerBlock) for part in parts):
            result[name] = [EigenBlock.of(part.Q, part.G) for part in parts]  # type: ignore[attr-defined]
    return result


def _add_squares(
    totals: Sequence[Tensor], bases: Sequence[EigenBlock], own: Gradients, workspace: int
) -> None:
    """Add some vectors' part of Λ, a few data at a time; all calls are positions of one datum."""
    rules = [(call, _rule(call), rows) for call, rows in own]
    transposed = rules[0][1].transposed
    wanted = bases[0].rows if transposed else bases[0].columns
    a = _joined(
        [_fitted(rule.positions(c.module, c.unspoiled_input()), wanted) for c, rule, _ in rules], 1
    )
    g = _joined([rule.gradients(call.module, rows) for call, rule, rows in rules], 2)
    k, n, r, _, rows = g.shape
    each = k * rows * a.shape[3] if r > 1 else k * rows
    step = max(1, workspace // max(1, each * g.element_size()))
    for start in range(0, n, step):
        part = slice(start, start + step)
        for group, (total, basis) in enumerate(zip(totals, bases, strict=True)):
            U_G, U_Q = (basis.U_Q, basis.U_G) if transposed else (basis.U_G, basis.U_Q)
            found = squared_projections(g[:, part, :, group], a[part, :, group], U_G, U_Q)
            total += found.T if transposed else found


def _fitted(a: Tensor, columns: int) -> Tensor:
    """A tied weight leaves out the bias of the layer that owns both."""
    return F.pad(a, (0, columns - a.shape[3]))


def squared_projections(
    g: Float[Tensor, "k n r rows"],
    a: Float[Tensor, "n r columns"],
    U_G: Float[Tensor, "rows rows"],
    U_Q: Float[Tensor, "columns columns"],
) -> Float[Tensor, "rows columns"]:
    """Σ (U_Gᵀ M U_Q)² over vectors and data, with M = Σ_r g_r a_rᵀ."""
    k, _, r, rows = g.shape
    columns = a.shape[2]
    if r == 1:
        return (g @ U_G).square_().sum(0).squeeze(1).T @ (a @ U_Q).square_().squeeze(1)
    # Whichever takes fewer multiplications: the vectors into the basis, or their product.
    vectors_first = r * (k * rows**2 + columns**2) < k * rows * columns * (rows + columns)
    if vectors_first:
        g, a = g @ U_G, a @ U_Q
    by_datum = g.permute(1, 0, 3, 2).flatten(1, 2)  # n, k rows, r
    M = (by_datum @ a).unflatten(1, (k, rows))
    if not vectors_first:
        M = U_G.T @ (M @ U_Q)
    return M.square_().sum((0, 1))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _rule(call: LayerCall) -> MatrixRule:
    assert isinstance(call.rule, MatrixRule)
    return call.rule
