"""What can be set about the optimiser, grouped by what it does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Precision = Literal["auto", "float32", "float64"]


def _check_counts(settings: object, *names: str) -> None:
    """Refuse fewer than one update between two looks, or between two of anything else."""
    for name in names:
        value = getattr(settings, name)
        if not value >= 1:
            raise ValueError(
                f"{type(settings).__name__}({name}={value}) is a number of updates and at least 1, "
                "which is at every update."
            )


def _check_memories(settings: object, *names: str) -> None:
    """Refuse weights of the past that no running mean can have."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value < 1:
            raise ValueError(
                f"{type(settings).__name__}({name}={value}) is the weight of the past in a running "
                "mean: 0, which forgets all of it, or more, and less than 1."
            )


@dataclass(frozen=True)
class Damping:
    """How τ and γ start and move (appendix B.3).

    Attributes:
        tau: τ at the start; None finds it on the first batch. Give a number to repeat a
            known run.
        gamma: "tied" keeps γ = τ; "search" takes the best of {ω γ, γ, γ/ω} every
            ``gamma_interval`` updates, as in the paper.
        tau_interval: T_τ, updates between two looks at ρ at first. Each costs a forward pass.
        growth: later there are so many updates between two of them for each update so far, three
            times ``tau_interval`` at most: 0.1 is 10 at update 100. 0 keeps to ``tau_interval``.
        gamma_interval: T_γ.
        decay: ω_τ is this to the power of T_τ, and ω_γ to the power of T_γ.
        lower_above: τ falls where ρ is above this; with ``anneal`` only where that can do any good.
        raise_below: τ rises where ρ is below this. The paper has 0.75 for both.
        anneal: raise τ also where the averaged parameters do better on fresh batches than the
            present ones, and go back to them if they do far better; lower it only where they lag
            behind, batches are alike or damping is what makes steps short. Noisy steps get
            shorter where they save more than a fortieth of the loss, and longer again where less.
            Where steps are carried on, averages hardly lag, and τ is lowered where the loss still
            falls from them towards the present parameters, the faster the steeper it does.
            Without it, small batches are fitted ever more closely one by one. It costs a forward
            pass at each look at ρ.
        bounds: the least and greatest τ and γ, as multiples of the first τ.
    """

    tau: float | None = None
    gamma: Literal["tied", "search"] = "tied"
    tau_interval: int = 5
    growth: float = 0.1
    gamma_interval: int = 20
    decay: float = 0.95
    lower_above: float = 0.75
    raise_below: float = 0.25
    anneal: bool = True
    bounds: tuple[float, float] = (1e-10, 1e10)

    def __post_init__(self) -> None:
        _check_counts(self, "tau_interval", "gamma_interval")

    def interval(self, t: int) -> int:
        """T_τ at update t."""
        return max(self.tau_interval, min(int(self.growth * t), 3 * self.tau_interval))


@dataclass(frozen=True)
class StepSize:
    """How far to go along the direction (appendix B.2, and beyond it).

    Attributes:
        smooth: β of the running mean of gradients that the direction is made of, after the first
            few updates. The slope along it is still that of the present batch, so that the step is
            not fitted to the noise that it is made of. 0 takes the present gradient alone, which
            is a little better for full batches.
        momentum: solve for the step size and a multiple of the last update together, on the
            quadratic model of the full Gauss-Newton matrix. It takes a second J·v in each update,
            and with ``smooth`` it gains little.
        calibrate: scale each layer's direction by a running geometric mean of its own exact
            step size first. One scalar cannot mend a block-diagonal step.
        layers: so many layers at most are calibrated in a network that is no chain. There each
            of them needs a product with the Jacobian of its own, while a chain has them all in one
            pass; with more layers the direction is scaled as a whole.
            It is looked at where curvature is fresh; in between there is one scale for all.
        memory: of that running mean, by update.
        favour: layers that gain more by themselves go further than others, by this power of what
            they gain. All layers move at once, and much of what they gain is the same.
        most: the greatest multiple of the calibrated direction, and of the last update. Only
            small batches ask for more, and it is their noise that does.
        share: how much of the quadratic model's step is taken where batches are noisy: the model
            is that of one batch, and its minimum fits that batch's noise too. Where the averaged
            parameters lag far behind, or batches are all alike, all of it is (with
            ``Damping.anneal``); four fifths in the first ``Refresh.early`` updates. From the
            hundredth on down to a tenth of it where the averaged parameters save more than a
            fortieth of the loss (``diagnostics["boldness"]``).
        carry: from the hundredth update on a step goes on by up to this share of what the averaged
            parameters have just moved by (``diagnostics["carried"]``): what many steps have in
            common goes further, and noise no more than the averages let through
            (:mod:`gaussnewton.carrying`). Steps themselves get shorter, and averages reach back
            less far. Nothing is carried where a batch's whole step would take most of its loss, as
            that of a small batch would, beside ``momentum``, without ``Damping.anneal``, or in half
            precision; less where ``lr`` is less than 1. 0 never does. Whoever puts other weights
            into the model on the way should make a new optimiser: what is carried is read off
            where the parameters and their averages are.
        promise: no step is taken that promises to take away more than this share of a batch's loss,
            where the loss is known never to be below zero, as a cross-entropy or a squared error:
            such a step is made shorter. It would be fitted to that batch; and where outputs are
            sure of something wrong, a cross-entropy has hardly any curvature, and its quadratic
            model promises many times more than there is. ``math.inf`` for no such limit.
        ask: the most updates between two looks at the quadratic model's curvature along the
            direction, each of which takes a product with the Jacobian. In between it is taken to
            be as many times what the blocks have there as it was at the last looks. There is one
            too after a change of γ, where ρ is looked at, and where a step would promise far more
            than others did of late; in a chain of layers at every update where batches differ
            much. 1 looks always, as do ``momentum``, a search for γ and learning rates that differ.
        growth: there are so many updates between two looks for each update so far: 0.1 is 2 from
            update 20 on.
        part: the share of a batch on which the quadratic model's curvature is evaluated. Where it
            promises far more than steps did of late, the whole batch is asked.
        least: so many data of a batch are used in any case, if it has them.
    """

    smooth: float = 0.7
    momentum: bool = False
    calibrate: bool = True
    layers: int = 8
    memory: float = 0.9
    favour: float = 0.25
    most: float = 1.0
    share: float = 0.4
    carry: float = 0.7
    promise: float = 0.7
    ask: int = 5
    growth: float = 0.1
    part: float = 0.25
    least: int = 250

    def __post_init__(self) -> None:
        _check_counts(self, "ask")
        _check_memories(self, "smooth", "memory")
        if not 0 <= self.carry < 1:
            raise ValueError(f"StepSize(carry={self.carry}) is a share: 0 or more, less than 1.")
        if not self.promise > 0:
            raise ValueError(f"StepSize(promise={self.promise}) is a share of a loss, above 0.")

    def interval(self, t: int) -> int:
        """Updates between two looks at the curvature along the direction, at update t."""
        return max(1, min(int(self.growth * t), self.ask))


@dataclass(frozen=True)
class Refresh:
    """How often curvature is estimated and inverted, and what is averaged how (section 5, B.4).

    Attributes:
        curvature: updates between two estimates. 1 is freshest, and costs most.
        growth: later there are so many updates between two of them for each update so far: 0.05 is
            20 of them at update 400; ten times ``curvature`` at most. Curvature changes more
            slowly as training goes on. 0 keeps to ``curvature``.
        inverse: the most updates between two inversions; every new estimate is inverted. Where
            curvature has not changed, and damping by a factor of 1.5 at most, nothing is.
        early: so many updates at the start have fresh curvature each: it changes fastest there.
        decay: the weight of the past in the running averages of Q and G, to the power of the
            updates between two estimates in units of ``curvature``. 0 takes the latest only.
        longest: that weight is up to this where one batch says little: where it has few data for
            the width of the layers, or where batches differ much in their curvature, as far as
            looks tell that are not at every update (``StepSize.ask``). None is the fourth root
            of ``decay``.
        average: β of the averaged parameters (appendix B.4). Nearer to 1 they are smoother, and
            lag more behind. The paper has 0.95.
        last: later they are the mean over about this share of all updates so far. 0 keeps to
            ``average``.
        precision: of curvature. "auto" estimates and inverts it in float32, or the model's own
            dtype if that is wider, and from where damping has become too small for that on, in
            float64, if the device has it (``diagnostics["wide"]``): directions of little curvature
            are the rounding's otherwise, and they may be what is left to be learnt. Inverses are
            applied in the narrowest precision that is enough for them, bfloat16 included where
            that is much faster. "float32" and "float64" do all of it in these, or in the model's
            own dtype if that is wider. What is measured of steps is in the model's dtype
            in any case.
    """

    curvature: int = 5
    growth: float = 0.05
    inverse: int = 5
    early: int = 10
    decay: float = 0.8
    longest: float | None = None
    average: float = 0.9
    last: float = 0.1
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        _check_counts(self, "curvature", "inverse")
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"Refresh(precision={self.precision!r}) is 'auto', 'float32' or 'float64'."
            )
        _check_memories(self, "decay", "average", *(["longest"] if self.longest else []))

    def interval(self, t: int) -> int:
        """Updates between two estimates at update t."""
        if t <= self.early:
            return 1
        return max(self.curvature, min(int(self.growth * t), 10 * self.curvature))

    def memory(self, t: int, wanted: float = 0.0) -> float:
        """The weight of earlier estimates at update t: they age with updates.

        Where estimates are more frequent than ``curvature`` says, they age with estimates, and
        they do where a batch by itself says little: a running mean with memory β has the data of
        (1 + β) / (1 − β) batches.

        Args:
            t: the number of the update.
            wanted: how many batches there are data enough in.
        """
        aged = self.decay ** max(self.interval(t) / self.curvature, 1.0)
        enough = (wanted - 1) / (wanted + 1)
        most = self.decay**0.25 if self.longest is None else self.longest
        return max(aged, min(enough, most))

    def many_solves(self, t: int) -> bool:
        """Whether inverses made at update t serve so often that writing them out pays off.

        That takes three and a half times what each solve then saves over triangular factors.
        """
        return self.interval(t + 1) > 3


@dataclass(frozen=True)
class Guard:
    """What to do when something goes wrong.

    Attributes:
        refuse: take back a step that raised the loss by more than ``tolerance`` times what
            the quadratic model promised to lower it, and raise τ, or carry nothing on for a
            while if that was to blame. This is looked at where ρ is, and, with
            ``fresh_tolerance``, at the next batch if its loss is that much higher than the last
            one's, or not finite.
        tolerance: see above.
        fresh_tolerance: the same for a batch that the step was not made for, where some rise
            is only noise.
        patience: so many steps in a row may be skipped for a loss or gradient that is not
            finite, before an error is raised.
    """

    refuse: bool = True
    tolerance: float = 1.0
    fresh_tolerance: float = 5.0
    patience: int = 10


KINDS = {"damping": Damping, "step_size": StepSize, "refresh": Refresh, "guard": Guard}


def check_kinds(**given: object) -> None:
    """Refuse what is no group of settings, such as a number for damping."""
    for name, value in given.items():
        kind = KINDS[name]
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a gn.{kind.__name__}(…), not {type(value).__name__}")


PAPER: dict[str, Any] = {
    "curvature": "kfra",
    "damping": Damping(
        gamma="search", growth=0.0, lower_above=0.75, raise_below=0.75, anneal=False
    ),
    "step_size": StepSize(
        momentum=False,
        calibrate=False,
        smooth=0.0,
        share=1.0,
        carry=0.0,
        promise=math.inf,
        ask=1,
        part=1.0,
    ),
    "refresh": Refresh(
        curvature=1,
        growth=0.0,
        inverse=1,
        decay=0.9,
        longest=0.0,
        average=0.95,
        last=0.0,
        precision="float32",
    ),
    "guard": Guard(refuse=False),
    "largest": None,
}
"""The paper's own configuration: ``gn.GaussNewton(model, criterion, **gn.PAPER)``. The paper
does not say where τ and γ start; they are found on the first batch."""
