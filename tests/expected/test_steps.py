"""Each step beside the Jacobian written out, on matrices of the form that layouts assume."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.autograd.graph import get_gradient_edge

from gaussnewton.estimators.expected.convolution import ConvolutionStep
from gaussnewton.estimators.expected.elementwise import ElementwiseStep
from gaussnewton.estimators.expected.frontier import Step
from gaussnewton.estimators.expected.general import GeneralStep
from gaussnewton.estimators.expected.homogeneous import from_sums, sum_all, sum_same
from gaussnewton.estimators.expected.layers import EntryNormStep
from gaussnewton.estimators.expected.layout import Layout, through_view
from gaussnewton.estimators.expected.moving import MovingStep
from gaussnewton.estimators.expected.region import Place, Region
from tests.problems import relative

PLACE: Place = (None, 0)


def parts(width: int) -> Tensor:
    """D and B, both positive definite."""
    R = torch.randn(2, width, width).double()
    return R.mT @ R


def written_out(M: Tensor, u: Layout, v: Layout) -> Tensor:
    """δ_pq D + B over the flattened data of two tensors."""
    P, Q = u.positions, v.positions
    eye = torch.eye(P).double() if P == Q else torch.zeros(P, Q).double()
    full = torch.einsum("pq,ab->paqb", eye, M[0]) + M[1][None, :, None]
    result = torch.zeros(full.shape[0] * full.shape[1], full.shape[2] * full.shape[3]).double()
    rows, columns = u.numbers.reshape(-1), v.numbers.reshape(-1)
    result[rows[:, None], columns] = full.reshape(result.shape)
    return result


def sums(matrix: Tensor, u: Layout, v: Layout) -> tuple[Tensor, Tensor]:
    """Σ_p M[u_p, v_p] and Σ_pq M[u_p, v_q], by loops."""
    same = torch.zeros(u.width, v.width).double()
    all = same.clone()
    for p, rows in enumerate(u.numbers):
        for q, columns in enumerate(v.numbers):
            block = matrix[rows][:, columns]
            all += block
            if p == q and u.positions == v.positions:
                same += block
    return same, all


def near(found: Tensor, expected: Tensor) -> bool:
    """But for rounding; some sums vanish."""
    return float((found - expected).norm()) < 1e-10 * float(expected.norm()) + 1e-13


def check(step: Step, J: list[Tensor], layout: Layout, layouts: list[Layout]) -> None:
    """Second moments and crosses, J being ``[n, y, x]`` of each input."""
    M = parts(layout.width)
    if layout.positions == 1:
        M[1] = 0
    full = written_out(M, layout, layout)
    found = step.second(M)
    for i, left in enumerate(layouts):
        for j in range(i, len(layouts)):
            right = layouts[j]
            exact = torch.einsum("nya,yz,nzb->ab", J[i], full, J[j]) / len(J[i])
            same, all = sums(exact, left, right)
            counts = (left.positions, right.positions)
            assert near(sum_all(found[i, j], counts), all), (i, j)
            if counts[0] == counts[1]:
                assert near(sum_same(found[i, j], counts[0]), same), (i, j)
    for shape in (layout.shape, layouts[0].shape, (3,)):
        other = Layout.whole(shape) if len(shape) == 1 else Layout(shape, layout.channels)
        cross = torch.randn(2, layout.width, other.width).double()
        if layout.positions != other.positions:
            cross[0] = 0
        elif layout.positions == 1:
            cross[1] = 0
        full = written_out(cross, layout, other)
        for own, own_J, got in zip(layouts, J, step.cross(cross, other.positions), strict=True):
            same, all = sums(own_J.mean(0).T @ full, own, other)
            counts = (own.positions, other.positions)
            assert near(sum_all(got, counts), all)
            if counts[0] == counts[1] and step_knows_home(step, layout, own):
                assert near(sum_same(got, counts[0]), same)


def step_knows_home(step: Step, layout: Layout, own: Layout) -> bool:
    """Of a convolution that keeps the number of positions but not their shape it is not known."""
    return not isinstance(step, ConvolutionStep) or layout.spatial == own.spatial


def datum_jacobians(f: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """``[n, y, x]`` for each input, one datum at a time."""
    rows = []
    for datum in zip(*inputs, strict=True):
        found = jacobian(f, tuple(x.unsqueeze(0) for x in datum))
        rows.append([J.reshape(-1, x.numel()) for J, x in zip(found, datum, strict=True)])
    return [torch.stack(each) for each in zip(*rows, strict=True)]


def region_of(f: Callable[..., Tensor], inputs: list[Tensor]) -> Region:
    """The nodes of a function, by a walk of the test's own."""
    # Behind something, so that an input is not a leaf.
    xs = [x.clone().requires_grad_() * 1.0 for x in inputs]
    places = [(get_gradient_edge(x).node, 0) for x in xs]
    edge = get_gradient_edge(f(*xs))
    nodes: list = []

    def visit(node) -> None:
        if node in nodes:
            return
        for following in node.next_functions:
            if following[0] is not None and following not in places:
                visit(following[0])
        nodes.append(node)

    visit(edge.node)
    region = Region((edge.node, edge.output_nr), places, nodes[::-1])
    region.alive = xs  # type: ignore[attr-defined]
    return region


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(2, 3, 1),
        nn.Conv2d(2, 3, 2, stride=2),
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(1, 2), groups=2),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(2, 3, 3, stride=3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 3, 3, padding="same", bias=False),
        nn.Conv2d(2, 3, 3, padding=2, padding_mode="replicate"),
        nn.Conv2d(2, 3, 5, padding=2, stride=2),
    ],
    ids=str,
)
def test_convolutions(module: nn.Conv2d) -> None:
    torch.manual_seed(0)
    module = module.double()
    x = torch.randn(1, 2, 6, 5).double()
    y = module(x)
    own, layout = Layout(tuple(x.shape[1:]), (0,)), Layout(tuple(y.shape[1:]), (0,))
    J = datum_jacobians(module, [x])
    check(ConvolutionStep(PLACE, module, layout, own), J, layout, [own])


def test_convolutions_of_other_dimensions() -> None:
    for module, size in ((nn.Conv1d(2, 3, 3, stride=2), (7,)), (nn.Conv3d(2, 2, 2), (3, 2, 3))):
        torch.manual_seed(0)
        module, x = module.double(), torch.randn(1, 2, *size).double()
        y = module(x)
        own, layout = Layout(tuple(x.shape[1:]), (0,)), Layout(tuple(y.shape[1:]), (0,))
        J = datum_jacobians(module, [x])
        check(ConvolutionStep(PLACE, module, layout, own), J, layout, [own])


@pytest.mark.parametrize("shape", [(3, 4, 2), (5,), (6, 3)])
def test_products_entry_by_entry(shape: tuple[int, ...]) -> None:
    """Only the sums are compared, as the slopes of single positions differ; D and B do not mix."""
    torch.manual_seed(0)
    layout = Layout(shape, (0,)) if len(shape) != 2 else Layout(shape, (1,))
    if len(shape) == 1:
        layout = Layout.whole(shape)
    one = torch.randn(4, layout.width).double()
    two = torch.randn(4, layout.width).double()
    # The same slope at all positions: homogeneity is then exact.
    slopes = [s.unsqueeze(1).expand(-1, layout.positions, -1) for s in (one, two)]
    J = [layout.scatter(s).flatten(1).diag_embed() for s in slopes]
    check(ElementwiseStep([PLACE, (None, 1)], slopes), J, layout, [layout, layout])


def test_slopes_that_differ_between_positions() -> None:
    """Averaged over positions: exact where M has the same D and B at all of them."""
    torch.manual_seed(0)
    layout = Layout((3, 5), (0,))
    s = torch.randn(6, 5, 3).double()
    M = parts(3)
    full = written_out(M, layout, layout)
    J = layout.scatter(s).flatten(1).diag_embed()
    same, all = sums((J.mT @ full @ J).mean(0), layout, layout)
    found = ElementwiseStep([PLACE], [s]).second(M)[0, 0]
    assert relative(sum_same(found, 5), same) < 1e-12
    assert relative(sum_all(found, (5, 5)), all) < 1e-12


MOVES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], tuple[int, ...]]] = {
    "flatten": (lambda x: x.flatten(1), [(3, 2, 4)], (0,)),
    "to a sequence": (lambda x: x.view(len(x), 3, 8), [(3, 2, 4)], (0,)),
    "transpose": (lambda x: x.transpose(1, 2), [(3, 8)], (1,)),
    "slice of positions": (lambda x: x[:, :, 1::2], [(3, 4)], (0,)),
    "slice of channels": (lambda x: x[:, :2], [(3, 4)], (0,)),
    "cat of channels": (lambda x, y: torch.cat([x, y], 1), [(3, 4), (2, 4)], (0,)),
    "cat of positions": (lambda x, y: torch.cat([x, y], 2), [(3, 4), (3, 1)], (0,)),
    "first of a sequence": (lambda x: x.select(2, 0), [(3, 4)], (0,)),
    "pad": (lambda x: F.pad(x, (1, 2)), [(3, 4)], (0,)),
    "channels become positions": (lambda x: x.view(len(x), 2, 6), [(4, 3)], (0,)),
    "positions become channels": (lambda x: x.view(len(x), 4, 3), [(2, 6)], (0,)),
    "turn": (lambda x: x.flip(2), [(3, 4)], (0,)),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(name: str) -> None:
    torch.manual_seed(0)
    f, shapes, channels = MOVES[name]
    xs = [torch.randn(2, *shape).double() for shape in shapes]
    layouts = [Layout(shape, (0,)) for shape in shapes]
    shape = tuple(f(*xs).shape[1:])
    layout = Layout.whole(shape) if len(shape) == 1 else Layout(shape, channels)
    region = region_of(f, xs)
    assert len(region.nodes) == 1
    jacobians = datum_jacobians(f, [x[:1] for x in xs])
    check(MovingStep(region, layout, layouts), jacobians, layout, layouts)


def pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


GENERAL: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], list[int]]] = {
    "softmax over channels": (lambda x: x.softmax(1), [(3, 4)], [4]),
    "softmax over positions": (lambda x: x.softmax(2), [(3, 4)], [1] * 4),
    "gate of one position": (lambda x, g: x * g, [(3, 4), (3, 1)], [1] * 4),
    "attention": (
        lambda q, k, v: v @ torch.softmax(k.transpose(1, 2) @ q, 1),
        [(3, 4), (3, 5), (3, 5)],
        [1] * 4,
    ),
}


@pytest.mark.parametrize("name", GENERAL)
def test_general_functions(name: str) -> None:
    torch.manual_seed(0)
    f, shapes, combs = GENERAL[name]
    xs = [torch.randn(5, *shape).double() for shape in shapes]
    layouts = [Layout(shape, (0,)) for shape in shapes]
    layout = Layout(tuple(f(*xs).shape[1:]), (0,))
    sets = list(torch.arange(layout.positions).split(combs))
    step = GeneralStep(region_of(f, xs), layout, layouts, sets)
    check(step, datum_jacobians(f, xs), layout, layouts)


def test_some_positions_speak_for_all() -> None:
    torch.manual_seed(0)
    xs = [torch.randn(5, 3, 1).double().expand(-1, -1, 6), torch.randn(5, 3, 1).double()]
    layout, layouts = Layout((3, 6), (0,)), [Layout((3, 6), (0,)), Layout((3, 1), (0,))]
    region = region_of(lambda x, g: x * g, xs)
    whole, part = (
        GeneralStep(region, layout, layouts, [torch.tensor([p]) for p in chosen])
        for chosen in (range(6), (1, 4))
    )
    M = parts(3)
    for key, expected in whole.second(M).items():
        assert near(part.second(M)[key], expected), key
    for found, expected in zip(part.cross(M, 6), whole.cross(M, 6), strict=True):
        assert near(found, expected)


@pytest.mark.parametrize("f", [pooled, lambda x: F.avg_pool2d(x, 2)])
def test_pooling(f: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, 6).double()
    own, layout = Layout((3, 4, 6), (0,)), Layout((3, 2, 3), (0,))
    step = GeneralStep(region_of(f, [x]), layout, [own], [torch.arange(6)], keeps_sums=True)
    check(step, datum_jacobians(f, [x]), layout, [own])


@pytest.mark.parametrize("constant", [False, True])
def test_a_mean_over_positions(constant: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4).double()
    own, layout = Layout((3, 4), (0,)), Layout.whole((3,))

    def f(x: Tensor) -> Tensor:
        return x.mean(2)

    step = GeneralStep(region_of(f, [x]), layout, [own], [torch.arange(1)], constant=constant)
    check(step, datum_jacobians(f, [x]), layout, [own])


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_normalising_over_all_entries(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = kind(shape, eps=0.1).double()
    nn.init.normal_(module.weight)
    x = torch.randn(5, *shape).double()
    layout = Layout.whole(shape)
    step = EntryNormStep(PLACE, module, x, layout)
    check(step, datum_jacobians(module, [x]), layout, [layout])


def test_normalising_each_position() -> None:
    """The same for data and positions; between positions the product of expectations."""
    torch.manual_seed(0)
    module = nn.LayerNorm(3).double()
    x = torch.randn(5, 4, 3).double()
    step = EntryNormStep(PLACE, module, x, Layout((4, 3), (1,)))
    J = datum_jacobians(module, [x.flatten(0, 1)])[0]
    D, B = M = parts(3)
    common = J.mean(0).T @ B @ J.mean(0)
    own = (J.mT @ (D + B) @ J).mean(0) - common
    assert relative(step.second(M)[0, 0], torch.stack([own, common])) < 1e-12


def test_sums_come_back() -> None:
    torch.manual_seed(0)
    same, all = torch.randn(2, 3, 4).double()
    found = from_sums(same, all, (5, 5))
    assert relative(sum_same(found, 5), same) < 1e-12
    assert relative(sum_all(found, (5, 5)), all) < 1e-12
    found = from_sums(None, all, (5, 2))
    assert not found[0].any()
    assert relative(sum_all(found, (5, 2)), all) < 1e-12


@pytest.mark.parametrize(
    ("shape", "channels", "after", "expected"),
    [
        ((3, 4, 5), (0,), (3, 20), (0,)),
        ((3, 4, 5), (0,), (60,), None),
        ((7, 8), (1,), (7, 2, 4), (1, 2)),
        ((7, 2, 4), (1, 2), (7, 8), (1,)),
        ((3, 1, 1), (0,), (3,), (0,)),
        ((1, 4, 5), (0,), (20,), ()),
        ((6, 2), (1,), (2, 3, 2), (2,)),
    ],
)
def test_channels_through_views(
    shape: tuple[int, ...],
    channels: tuple[int, ...],
    after: tuple[int, ...],
    expected: tuple[int, ...] | None,
) -> None:
    assert through_view(Layout(shape, channels), after) == expected
