"""Predictions are counted before what they foretell is known, and an emulated device varies by what it is given."""

from __future__ import annotations

import pytest

from bench.emulated import predictors
from bench.emulated.adaptivellm import ARMS, Point, Setting, serve
from bench.emulated.core.clock import Clock
from bench.emulated.core.links import DeviceNoise, NoisyLink, Replay
from bench.predicting import Seen, error_of, note_steps
from engine_bridge.policy.costs.costs import StepTable

# A machine that is slow for a while, then fast for a while.
RATIOS = ([1.1] * 5 + [0.9] * 5) * 3


def noise_of(ratios: list[float]) -> DeviceNoise:
    return DeviceNoise(*(Replay(ratios, seed) for seed in range(3)))


def test_a_prediction_is_written_down_before_the_table_learns() -> None:
    seen: Seen = []
    table = StepTable.of(lambda points: [0.01 * (p + d) for p, d, _ in points], [0, 10], [0, 10], [0, 10])
    before = table.step_s(5, 5, 5)
    note_steps(table, seen, lambda: [7.0])
    table.observe(5, 5, 5, 2 * before)
    table.observe(0, 0, 5, 1.0)
    assert seen == [[before, 2 * before, 7.0, 5, 5, 5]]
    assert table.step_s(5, 5, 5) > before


def test_errors_are_relative_to_what_came() -> None:
    found = error_of([[2.0, 1.0]] * 50 + [[1.0, 1.0]] * 150)
    assert (found["mean"], found["median"], found["num"]) == (0.25, 0.0, 200)


def test_a_noisy_link_says_what_its_copies_took() -> None:
    clock = Clock()
    ended: list[float] = []
    link = NoisyLink(clock, 1000.0, 0.0, Replay([2.0], 0), copies_each=4)
    link.transfer(100, ended.append)
    clock.run()
    link.transfer(100, ended.append, is_set_up=True)
    clock.run()
    assert ended == pytest.approx([0.2, 0.4])
    assert (link.copied.num_bytes, link.copied.num_copies) == (200, 8)
    assert link.copied.seconds == pytest.approx(0.4)


@pytest.mark.parametrize("ratios", [[1.0], RATIOS])
def test_on_the_emulated_device_steps_and_copies_are_foretold_but_for_their_noise(
    ratios: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictors, "noise_of", lambda seed: noise_of(ratios))
    predictors.profile.cache_clear()
    found = serve(Point(ARMS["adaptive"], Setting(num_requests=120), is_foretold=True, seed=1))
    predictors.profile.cache_clear()
    assert isinstance(found, dict)
    errors, floor = (
        {what: found[f"{what}_{name}"] for what in ("step", "swap")} for name in predictors.ERRORS
    )
    if ratios == [1.0]:
        assert max(errors.values()) < 0.1 and not any(floor.values())
    else:
        assert floor["step"] == pytest.approx(0.1, abs=0.01)
        assert all(errors[what] < 1.05 * floor[what] for what in floor)
