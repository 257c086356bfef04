"""Turns, who goes on after the common time, and what is kept."""

import math

import pytest
from race.contender import rate_at
from race.defaults import KEY, fingerprint
from race.running import Budgets, Runs
from race.store import Store
from race.turns import Track, race, take_turns


class Clockwork:
    """Loses a share of its loss each second; an update takes a tenth of one."""

    def __init__(self, factor, floor=0.0, log=None, name=""):
        self.factor, self.floor, self.log, self.name = factor, floor, log, name
        self.updates, self.seconds, self.failure, self.versions = 0, 0.0, "", {}

    def advance(self, seconds):
        end = self.seconds + seconds
        while self.seconds < end:
            self.updates += 1
            self.seconds = self.updates / 10
        if self.log is not None:
            self.log.append((self.name, self.seconds))

    def evaluate(self):
        return max(self.floor, 100.0 * self.factor**self.seconds), "present"

    def close(self):
        pass


def tracks_of(**contenders):
    found = [Track(name.replace("_", "-"), {}, each) for name, each in contenders.items()]
    for track in found:
        track.judge()
    return {track.runner: track for track in found}


def test_contenders_are_never_further_apart_than_a_turn():
    log = []
    tracks = tracks_of(
        default=Clockwork(0.9, log=log, name="a"), adam=Clockwork(0.9, log=log, name="b")
    )
    take_turns(list(tracks.values()), 20.0, 2.0, lambda _: True, seed=0)
    now = {"a": 0.0, "b": 0.0}
    for name, seconds in log:
        now[name] = seconds
        assert abs(now["a"] - now["b"]) <= 2.0 + 0.1 + 1e-9
    assert {name for name, _ in log[::2]} == {"a", "b"}  # the order changes


def test_all_have_the_same_time_and_are_judged_at_its_end():
    tracks = tracks_of(default=Clockwork(0.8), adam=Clockwork(0.9), soap=Clockwork(0.95))
    race(list(tracks.values()), (), 10.0, None, 2.0)
    for track in tracks.values():
        assert track.marks[-1][1] == pytest.approx(10.0, abs=0.11)
    assert [track.leader for track in tracks.values()] == [False, True, False]


def test_with_targets_the_best_peer_and_ours_go_on_until_they_are_there():
    tracks = tracks_of(
        default=Clockwork(0.8), adam=Clockwork(0.95), soap=Clockwork(0.97), kfac_jax=Clockwork(0.9)
    )
    race(list(tracks.values()), (50.0, 20.0), 10.0, 60.0, 2.0)
    assert tracks["soap"].seconds == pytest.approx(10.0, abs=0.11)
    for name in ("adam", "kfac-jax"):
        assert tracks[name].least <= 20.0
        assert tracks[name].seconds < 60.0
    assert tracks["default"].seconds == pytest.approx(10.0, abs=0.11)


def test_who_has_used_several_times_our_seconds_may_be_given_up():
    tracks = tracks_of(default=Clockwork(0.8), adam=Clockwork(0.99), kfac_jax=Clockwork(0.95))
    race(list(tracks.values()), (50.0, 20.0), 5.0, 200.0, 2.0, give_up=6.0)
    ours = math.log(20 / 100) / math.log(0.8)  # 7.2 s
    assert 20.0 < tracks["adam"].least < 75.0
    assert 6 * ours <= tracks["adam"].seconds <= 6 * ours + 2.1 + 0.1
    assert tracks["kfac-jax"].least <= 20.0  # 31 s: less than six times as long


@pytest.mark.parametrize("targets", [(), (50.0, 1.0)])
def test_the_best_few_peers_may_go_on(targets):
    tracks = tracks_of(
        default=Clockwork(0.9),
        adam=Clockwork(0.96, floor=60.0),  # ahead at first, and then stuck
        muon=Clockwork(0.97),
        soap=Clockwork(0.98),
    )
    race(list(tracks.values()), targets, 5.0, 50.0, 2.0, leaders=2)
    ends = {name: track.seconds for name, track in tracks.items()}
    assert ends["adam"] == ends["muon"] == pytest.approx(50.0, abs=0.11)
    assert ends["soap"] == pytest.approx(5.0, abs=0.11)
    assert [track.leader for track in tracks.values()] == [False, True, True, False]
    if not targets:  # the loss to reach is that of the better one
        assert tracks["default"].least <= tracks["muon"].loss
        assert ends["default"] < 25.0


def test_who_has_reached_the_last_target_may_stop():
    tracks = tracks_of(default=Clockwork(0.5), adam=Clockwork(0.95))
    race(list(tracks.values()), (50.0,), 30.0, None, 2.0, stop=True)
    assert tracks["default"].least <= 50.0
    assert tracks["default"].seconds < 5.0


def test_without_targets_a_follower_goes_on_exactly_until_the_peers_last_loss():
    tracks = tracks_of(
        default=Clockwork(0.97), kfac_jax=Clockwork(0.9, floor=40.0), adam=Clockwork(0.96)
    )
    race(list(tracks.values()), (), 5.0, 50.0, 2.0)
    last = tracks["adam"].loss
    assert tracks["adam"].seconds == pytest.approx(50.0, abs=0.11)
    # 0.97^t falls as far as 0.96^50 only later: it used all of its time, and not more.
    assert tracks["default"].seconds == pytest.approx(50.0, abs=0.11)
    assert tracks["default"].least > last
    quick = tracks_of(default=Clockwork(0.9), adam=Clockwork(0.96))
    race(list(quick.values()), (), 5.0, 50.0, 2.0)
    assert quick["default"].least <= quick["adam"].loss
    assert quick["default"].seconds < 25.0


def test_a_lost_contender_takes_no_more_turns():
    tracks = tracks_of(adam=Clockwork(4.0), default=Clockwork(0.9))
    race(list(tracks.values()), (), 30.0, None, 2.0)
    assert tracks["adam"].seconds < 5.0
    assert not tracks["adam"].leader


def test_rates_are_halved_by_shares_of_the_budget():
    assert rate_at({"rate": 1.0, "decay": 0.0625}, 0.999) == 0.5**15
    assert rate_at({"rate": 1.0, "decay": 1.0}, 1.5) == 1.0


# What is kept, and not done again


class Counted(Runs):
    """A problem whose contenders are clockwork, counted."""

    def __init__(self):
        self.name, self.made, self.said = "mnist", [], []
        from race.tasks import TASKS

        self.task, self.say = TASKS["mnist"], self.said.append

    def contender(self, runner, setting, seed, horizon):  # noqa: ARG002
        self.made.append((runner, seed))
        made = Clockwork(0.9 if runner == "default" else setting["rate"])
        made.versions = {KEY: fingerprint()} if runner == "default" else {}
        return made

    def first_loss(self, seed):  # noqa: ARG002
        return 100.0


BUDGETS = Budgets(1.0, 4.0, 4.0, 1.0, False, 1)


def test_a_finished_race_is_not_run_again_and_a_changed_one_is(tmp_path):
    path = tmp_path / "race.jsonl"
    settings = {"default": {}, "adam": {"rate": 0.95, "decay": 1.0}}
    runs = Counted()
    runs.race(settings, 0, BUDGETS, Store(path))
    assert runs.made == [("default", 0), ("adam", 0)]
    runs.race(settings, 0, BUDGETS, Store(path))
    assert len(runs.made) == 2
    runs.race(settings, 1, BUDGETS, Store(path))
    assert len(runs.made) == 4
    changed = settings | {"adam": {"rate": 0.97, "decay": 1.0}}
    runs.race(changed, 0, BUDGETS, Store(path))
    assert runs.made[4:] == [("default", 0), ("adam", 0)]  # as a whole
    kept = Store(path).runs("mnist")
    assert kept["adam"][0]["setting"]["rate"] == 0.97  # the last one counts
    assert kept["adam"][1]["setting"]["rate"] == 0.95


@pytest.mark.parametrize(
    ("module", "constant"), [("share", "TOLERATED"), ("damping", "FIRST_MULTIPLES")]
)
def test_a_race_with_earlier_defaults_of_ours_is_run_again(tmp_path, monkeypatch, module, constant):
    path = tmp_path / "race.jsonl"
    runs, settings = Counted(), {"default": {}, "adam": {"rate": 0.95, "decay": 1.0}}
    runs.race(settings, 0, BUDGETS, Store(path))
    monkeypatch.setattr(f"gaussnewton.{module}.{constant}", (0.5,))
    runs.race({"adam": settings["adam"]}, 0, BUDGETS, Store(path))
    assert len(runs.made) == 2  # nothing of ours is in it
    runs.race(settings, 0, BUDGETS, Store(path))
    assert runs.made[2:] == [("default", 0), ("adam", 0)]


def test_a_search_goes_on_where_it_was_interrupted(tmp_path):
    path = tmp_path / "race.jsonl"
    first = Counted()
    trial = first.trial("adam", BUDGETS, Store(path))
    losses = [trial({"rate": rate, "decay": 1.0}, 1.0) for rate in (0.9, 0.8)]
    with path.open("a") as file:
        file.write('{"kind": "search", "prob')  # cut off
    second = Counted()
    store = Store(path)
    again = second.trial("adam", BUDGETS, store)
    assert [again({"rate": rate, "decay": 1.0}, 1.0) for rate in (0.9, 0.8)] == losses
    assert second.made == []
    again({"rate": 0.7, "decay": 1.0}, 1.0)
    again({"rate": 0.9, "decay": 1.0}, 4.0)
    assert len(second.made) == 2
    assert len(Store(path).lines) == 4  # what came after the cut line is not lost with it
