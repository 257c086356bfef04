from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from gaussnewton import exact
from gaussnewton.errors import FactorisationError
from gaussnewton.exact import Reason, conjugate_gradients

from .cases import CLASSES, F64, N, mlp, random


def problem(size=30, condition=1e3):
    """A positive definite matrix that is badly scaled along its axes."""
    scale = torch.logspace(0, math.log10(condition) / 2, size, dtype=F64)
    root = random(size, size, seed=1) / size
    A = scale[:, None] * (torch.eye(size, dtype=F64) + root @ root.T) * scale
    return A, random(size, seed=2)


def test_solves_as_a_direct_solver_does():
    A, b = problem()
    result = conjugate_gradients(lambda v: A @ v, b)
    x = torch.linalg.solve(A, b)
    assert_close(result.solution, x, rtol=1e-7, atol=1e-9)
    assert result.reason is Reason.CONVERGED
    assert result.residual_norm <= 1e-10 * b.norm()
    assert result.residual_norm == pytest.approx((b - A @ result.solution).norm().item(), abs=1e-9)
    assert result.quadratic == pytest.approx((-0.5 * b @ x).item())


def test_solves_with_a_damped_gauss_newton_matrix():
    model, batch = mlp(), (random(N, 3), CLASSES)
    product = exact.gauss_newton_product(model, nn.CrossEntropyLoss(), batch, damping=0.1)
    G = exact.gauss_newton(model, nn.CrossEntropyLoss(), batch)
    b = random(len(G))
    expected = torch.linalg.solve(G + 0.1 * torch.eye(len(G), dtype=F64), b)
    result = conjugate_gradients(product, b)
    assert_close(result.solution, expected)
    assert result.iterations <= 2 * N + 2  # the rank of G bounds them


def test_a_preconditioner_takes_fewer_iterations_to_the_same_point():
    A, b = problem()
    plain = conjugate_gradients(lambda v: A @ v, b)
    helped = conjugate_gradients(lambda v: A @ v, b, preconditioner=lambda r: r / A.diagonal())
    assert_close(helped.solution, plain.solution, rtol=1e-7, atol=1e-9)
    assert helped.iterations < plain.iterations / 2
    perfect = torch.linalg.inv(A)
    assert (
        conjugate_gradients(lambda v: A @ v, b, preconditioner=lambda r: perfect @ r).iterations
        <= 2
    )


def test_begins_where_it_is_told():
    A, b = problem()
    x = torch.linalg.solve(A, b)
    near = conjugate_gradients(lambda v: A @ v, b, x0=x + 1e-12, tolerance=1e-6)
    assert near.iterations == 0
    x0 = random(30, seed=5)
    before = x0.clone()
    far = conjugate_gradients(lambda v: A @ v, b, x0=x0)
    assert_close(far.solution, x, rtol=1e-6, atol=1e-8)
    assert torch.equal(x0, before)


def test_quadratic_value_and_residual_of_an_unfinished_solution():
    A, b = problem()
    result = conjugate_gradients(lambda v: A @ v, b, x0=random(30, seed=5), max_iterations=3)
    x = result.solution
    assert result.reason is Reason.MAX_ITERATIONS
    assert result.iterations == 3
    assert result.quadratic == pytest.approx((0.5 * x @ A @ x - b @ x).item())
    assert result.residual_norm == pytest.approx((b - A @ x).norm().item())


def test_no_iterations_allowed():
    A, b = problem()
    result = conjugate_gradients(lambda v: A @ v, b, max_iterations=0)
    assert result.reason is Reason.MAX_ITERATIONS
    assert not result.solution.any()


def quadratic_by_iteration(A, b):
    """The values of φ along textbook conjugate gradients."""
    x, r = torch.zeros_like(b), b.clone()
    p = r
    while True:
        yield (0.5 * x @ A @ x - b @ x).item()
        step = r @ r / (p @ A @ p)
        x, new = x + step * p, r - step * (A @ p)
        p, r = new + new @ new / (r @ r) * p, new


def test_martens_rule_stops_at_the_first_iteration_it_holds():
    A, b = problem(size=200, condition=1e5)
    values = []
    for i, value in enumerate(quadratic_by_iteration(A, b)):
        values.append(value)
        k = max(10, math.ceil(0.1 * i))
        if i > k and value < 0 and (value - values[i - k]) / value < k * 5e-4:
            break
    assert k > 10  # the window had begun to grow
    for stopping in ("martens", "both"):
        result = conjugate_gradients(lambda v: A @ v, b, stopping=stopping)
        assert result.reason is Reason.PROGRESS
        # The literal loop rounds in another order, on some processors by an iteration or two.
        assert abs(result.iterations - i) <= 2
    full = conjugate_gradients(lambda v: A @ v, b, max_iterations=5000)
    assert full.reason is Reason.CONVERGED
    assert full.iterations > i


def test_both_stops_by_the_residual_when_that_comes_first():
    A, b = problem(size=8, condition=2)
    result = conjugate_gradients(lambda v: A @ v, b, stopping="both")
    assert result.reason is Reason.CONVERGED
    assert result.iterations <= 10


def test_exact_solution_ends_the_iterations_under_any_rule():
    b = random(4)
    result = conjugate_gradients(lambda v: v, b, stopping="martens")
    assert (result.reason, result.iterations) == (Reason.CONVERGED, 1)
    assert_close(result.solution, b)


def test_negative_curvature_is_reported_with_the_point_before_it():
    A = torch.diag(torch.tensor([2.0, 1.0, -0.5], dtype=F64))
    result = conjugate_gradients(lambda v: A @ v, torch.tensor([1.0, 1.0, 0.1], dtype=F64))
    assert result.reason is Reason.NEGATIVE_CURVATURE
    assert result.iterations >= 1
    assert result.solution.isfinite().all()
    at_once = conjugate_gradients(lambda v: -v, torch.ones(3, dtype=F64))
    assert (at_once.reason, at_once.iterations) == (Reason.NEGATIVE_CURVATURE, 0)
    assert not at_once.solution.any()


def test_not_a_number_is_reported_with_the_point_before_it():
    calls = []

    def product(v):
        calls.append(v)
        return v * torch.tensor([1.0, 2.0, 3.0]) if len(calls) < 3 else v * torch.nan

    result = conjugate_gradients(product, torch.ones(3))
    assert (result.reason, result.iterations) == (Reason.NON_FINITE, 2)
    assert result.solution.isfinite().all()
    assert math.isfinite(result.quadratic)
    assert conjugate_gradients(lambda v: v, torch.tensor([1.0, math.inf])).reason is (
        Reason.NON_FINITE
    )


@pytest.mark.parametrize("x0", [None, torch.ones(3)])
def test_zero_right_hand_side(x0):
    result = conjugate_gradients(lambda v: 2 * v, torch.zeros(3), x0=x0, stopping="both")
    assert (result.reason, result.iterations) == (Reason.CONVERGED, 0)
    assert not result.solution.any()
    assert result.quadratic == 0


def test_iterates_are_kept_at_geometric_iterations():
    A, b = problem(condition=1e5)
    result = conjugate_gradients(lambda v: A @ v, b, max_iterations=21, keep_iterates=True)
    assert [i for i, _ in result.iterates] == [1, 2, 3, 4, 5, 7, 9, 11, 14, 18, 21]
    for i, x in result.iterates[::4]:
        assert_close(x, conjugate_gradients(lambda v: A @ v, b, max_iterations=i).solution)
    assert result.iterates[-1][1] is result.solution
    assert conjugate_gradients(lambda v: A @ v, b).iterates == ()


def test_bad_arguments_are_refused():
    with pytest.raises(FactorisationError, match="preconditioner"):
        conjugate_gradients(lambda v: v, torch.ones(3), preconditioner=lambda r: -r)
    with pytest.raises((ValueError, TypeError), match="stopping"):
        conjugate_gradients(lambda v: v, torch.ones(3), stopping="soon")
