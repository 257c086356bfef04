from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.losses import geometry_of
from gaussnewton.proposal import Gram, Proposal, calibrated, own_scales, plain
from tests.problems import fit

SHAPES = {"first": (3, 4), "second": (2, 4), "third": (1, 3)}
SHIFT = {"first": 0.3, "second": 0.3, "third": torch.rand(1, 3).double() + 0.1}


class Dense:
    """A full Gauss-Newton matrix, and what is needed of it."""

    def __init__(self) -> None:
        self.sizes = [math.prod(shape) for shape in SHAPES.values()]
        A = torch.randn(sum(self.sizes), 30).double()
        self.matrix = A @ A.T / 30

    def vector(self, matrices: dict[str, Tensor]) -> Tensor:
        zero = {name: torch.zeros(*shape).double() for name, shape in SHAPES.items()}
        return torch.cat([part.flatten() for part in (zero | matrices).values()])

    def gram(self, layers: dict | None, others: dict | None) -> Tensor:
        spans = [] if layers is None else [{name: layers[name]} for name in SHAPES]
        if others is not None:
            count = len(next(iter(others.values())))
            spans += [{name: V[k] for name, V in others.items()} for k in range(count)]
        V = torch.stack([self.vector(span) for span in spans])
        return V @ self.matrix @ V.T

    def shifted(self) -> Tensor:
        """The matrix with τ + η on its diagonal."""
        amounts = [
            (torch.zeros(*shape).double() + SHIFT[name]).flatten() for name, shape in SHAPES.items()
        ]
        return self.matrix + torch.cat(amounts).diag()


def matrices() -> dict[str, Tensor]:
    return {name: torch.randn(*shape).double() for name, shape in SHAPES.items()}


def copies(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """A step is written over its direction."""
    return {name: part.clone() for name, part in parts.items()}


def downhill(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """Directions that lower the loss, some more than others."""
    return {name: -(0.5 + torch.rand_like(g)) * g for name, g in gradient.items()}


@pytest.mark.parametrize("favour", [0.0, 0.5])
@pytest.mark.parametrize("momentum", [False, True])
def test_calibrated_step_is_the_one_written_out(favour: float, momentum: bool) -> None:
    dense, gradient = Dense(), matrices()
    direction = downhill(gradient)
    previous = matrices() if momentum else None
    asked = {}

    def blend(name: str, own: Tensor) -> Tensor:
        asked[name] = float(own)
        return own

    proposal = calibrated(
        gradient, copies(direction), previous, [dense.gram], SHIFT, list(SHAPES), blend, 1e9, 0.7,
        favour,
    )  # fmt: skip
    C, g = dense.shifted(), dense.vector(gradient)
    lengths, gains = {}, {}
    for name in SHAPES:
        d = dense.vector({name: direction[name]})
        lengths[name] = float(-(g @ d) / (d @ C @ d))
        gains[name] = float((g @ d) ** 2 / (d @ C @ d))
    mean = sum(gains.values()) / 3
    for name in SHAPES:
        lengths[name] *= (gains[name] / mean) ** favour
        assert asked[name] == pytest.approx(math.log(lengths[name]))
    spans = [dense.vector({name: lengths[name] * d for name, d in direction.items()})]
    if previous is not None:
        spans.append(dense.vector(previous))
    S = torch.stack(spans, dim=1)
    c = -0.7 * torch.linalg.solve(S.T @ C @ S, S.T @ g)
    torch.testing.assert_close(dense.vector(proposal.update), S @ c)
    step = dense.vector(proposal.update)
    torch.testing.assert_close(proposal.predicted(), g @ step + 0.5 * step @ C @ step)


def test_known_scales_give_the_same_step() -> None:
    dense, gradient, previous = Dense(), matrices(), matrices()
    direction = downhill(gradient)
    kept = {
        name: torch.tensor(s).double() for name, s in zip(SHAPES, (0.1, -0.4, 0.7), strict=True)
    }
    looked = calibrated(
        gradient, copies(direction), previous, [dense.gram], SHIFT, list(SHAPES),
        lambda name, _: kept[name], 1.0, 0.8, 0.5,
    )  # fmt: skip
    scaled = {name: d * kept[name].exp() for name, d in direction.items()}
    other = plain(gradient, scaled, previous, [dense.gram], SHIFT, share=0.8, most=1.0)
    torch.testing.assert_close(dense.vector(other.update), dense.vector(looked.update))
    torch.testing.assert_close(other.predicted(), looked.predicted())


def test_a_layer_without_gradient_does_not_spoil_the_others() -> None:
    M, b = torch.tensor([2.0, 1.0, 4.0]).double(), torch.tensor([-1.0, 0.0, -2.0]).double()
    own = own_scales(M, b, 0.5)
    assert own.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_part_of_the_batch_that_promises_too_much_is_not_believed(by_layer: bool) -> None:
    dense, gradient = Dense(), matrices()
    direction, asked = downhill(gradient), []

    def part(layers: dict | None, others: dict | None) -> Tensor:
        """It has hardly any curvature, as where an odd datum is outside of it."""
        asked.append("part")
        return dense.gram(layers, others) * 1e-6

    def whole(layers: dict | None, others: dict | None) -> Tensor:
        asked.append("whole")
        return dense.gram(layers, others)

    both = [part, whole]

    def proposed(looks: list[Gram], believed: float) -> Proposal:
        start = copies(direction)
        if not by_layer:
            return plain(gradient, start, None, looks, SHIFT, believed=believed)
        return calibrated(
            gradient, start, None, looks, SHIFT, list(SHAPES), lambda _, own: own, 1e9, 1.0, 0.0,
            believed,
        )  # fmt: skip

    careless = proposed(both, math.inf)
    assert asked == ["part"]
    promise = -float(careless.predicted())
    assert torch.equal(
        dense.vector(proposed(both, 1.01 * promise).update), dense.vector(careless.update)
    )
    assert asked == ["part"] * 2
    careful = proposed(both, 0.99 * promise)
    assert asked[2:] == ["part", "whole"]
    expected = proposed([dense.gram], math.inf)
    torch.testing.assert_close(dense.vector(careful.update), dense.vector(expected.update))
    assert (careless.gram, careful.gram) == (part, whole)


def test_no_step_promises_more_than_there_is_of_a_loss() -> None:
    """Outputs that are sure of something wrong have a slope and hardly any curvature."""
    promises = {}
    for share in (0.7, math.inf):
        torch.manual_seed(0)
        net = nn.Linear(4, 3).double()
        x, y = torch.randn(50, 4).double(), torch.randint(3, (50,))
        with torch.no_grad():
            net.weight.mul_(30)
        settings = {"damping": gn.Damping(tau=1e-9), "curvature": "kfra"}
        optimizer = gn.GaussNewton(
            net,
            nn.CrossEntropyLoss(),
            step_size=gn.StepSize(most=1e9, calibrate=False, promise=share),
            **settings,
        )
        loss = fit(optimizer, x, y, 1)[0]
        promises[share] = -optimizer.diagnostics["predicted"] / loss
    assert promises[math.inf] > 2
    assert 0.7 <= promises[0.7] <= 1.4
    with pytest.raises(ValueError, match="promise=0"):
        gn.StepSize(promise=0.0)


@pytest.mark.parametrize(
    ("criterion", "targets", "nonnegative"),
    [
        (nn.CrossEntropyLoss(), torch.randint(3, (8,)), True),
        (nn.BCEWithLogitsLoss(), torch.rand(8, 3), True),
        (nn.MSELoss(), torch.randn(8, 3), True),
        (nn.PoissonNLLLoss(), torch.full((8, 3), 5.0), False),
        (gn.Loss(lambda h, y: (h * y).sum()), torch.ones(8, 3), False),
    ],
)
def test_which_losses_are_never_below_zero(
    criterion: nn.Module, targets: Tensor, nonnegative: bool
) -> None:
    geometry = geometry_of(criterion)
    assert geometry.nonnegative == nonnegative
    outputs = [10 * torch.randn(8, 3) for _ in range(50)] + [torch.full((8, 3), 1.6)]
    least = min(float(criterion(h, targets)) for h in outputs)
    assert (least >= 0) == nonnegative
