"""Steps are as long as they may be, and prompts under way always get on."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.core.scheduling.pacer import Pacer
from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.policy.scheduling import pacing
from engine_bridge.policy.scheduling.pacing import StepPace, most_prefill_tokens, pace, table_from

# A step takes 20 ms, and 1 ms more for each token of a prompt.
LINEAR = table_from([(32, 0.052), (512, 0.532)], 0.02)


def test_prompts_get_their_time_where_decodes_take_long_but_no_more_than_an_slo_leaves() -> None:
    axes = (0, 4096), (0, 64), (0, 1)
    slow = StepTable.of(lambda points: [d * 0.05 + p * 1e-3 for p, d, _ in points], *axes)
    most, least = pacing.MIN_PREFILL_TIMES * 500, pacing.MIN_PREFILL_TOKENS
    for bound_s, num_tokens in ((math.inf, most), (0.8, 300), (0.1, least)):
        step = pace(slow, 0.2, 10, 0, [], 4096, bound_s=bound_s)
        assert step.prefill_tokens == pytest.approx(num_tokens, abs=1)


@given(st.floats(0.1, 2.5), st.integers(pacing.MIN_PREFILL_TOKENS, 4096))
def test_no_more_tokens_would_have_fitted(target_s: float, most_tokens: int) -> None:
    num = most_prefill_tokens(LINEAR, target_s, 4, 0, most_tokens)
    assert num == pacing.MIN_PREFILL_TOKENS or LINEAR.step_s(num, 4, 0) <= target_s
    assert num == most_tokens or LINEAR.step_s(num + 1, 4, 0) > target_s


def on_device(points: Sequence[tuple[int, int, int]]) -> list[float]:
    """Steps of a GPU: 20 ms for its memory, in which it computes 256 tokens, and 5 ms besides."""
    return [0.005 + max(0.02, 0.02 / 256 * (prefill + decodes)) for prefill, decodes, _ in points]


AXES = (0, 32, 64, 128, 256, 512, 1024, 2048), (0, 1, 8, 64), (0, 1 << 20)


def efficient(table: StepTable, num_decodes: int, most_tokens: int = 2048, last_tokens: int = 0) -> int:
    last_tokens = last_tokens or most_tokens
    return pacing.efficient_prefill_tokens(table, num_decodes, 1000, most_tokens, last_tokens)


def test_beside_decodes_a_step_computes_what_its_memory_leaves_time_for() -> None:
    table = StepTable.of(on_device, *AXES)
    assert efficient(table, 1) == efficient(table, 8) == 256
    assert efficient(table, 8, 200) == 200, "the engine's own bound"
    assert efficient(table, 8, last_tokens=512) == 256
    pacer = Pacer(table, 0.5, 2048)
    decoding, beginning = ("a", 900, 899), ("b", 5000, 0)
    for running, num_tokens in (
        ([beginning], 2048),
        ([decoding, beginning], 256),
        ([beginning], 2048),
        ([decoding], 256),
    ):
        assert pacer.look(running).prefill_tokens == num_tokens


def test_a_number_of_tokens_stays_until_another_does_clearly_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal steps differ, and each change to a larger one holds up the answers that are written."""
    table = StepTable.of(on_device, *AXES)
    least = max(
        pacing.LEAST_GAIN, 1.3
    )  # 256 tokens do a fifth more work in their time than 512, and half as much more than 2,048
    monkeypatch.setattr(pacing, "LEAST_GAIN", least)
    assert [efficient(table, 8, last_tokens=last) for last in (256, 512, 2048)] == [256, 512, 256]


def test_what_steps_took_without_decodes_does_not_count_beside_them() -> None:
    """Where decodes always run, no step corrects the time of a prompt alone."""
    old = StepTable.of(
        lambda points: [
            seconds / (1 if decodes else 3)
            for (_, decodes, _), seconds in zip(points, on_device(points), strict=True)
        ],
        *AXES,
    )
    assert efficient(old, 8) == 256


def test_prompts_keep_their_speed_where_each_step_costs_much() -> None:
    slow = StepTable.of(lambda points: [0.012 + seconds for seconds in on_device(points)], *AXES)
    token_s = slow.step_s(2048, 4, 1000) / 2048
    assert 256 * token_s < pacing.MIN_PREFILL_SPEED * slow.step_s(256, 4, 1000)
    assert efficient(slow, 4) == efficient(slow, 4, last_tokens=256) == 512


@given(st.integers(1, 64), st.integers(1, 4096))
def test_where_each_token_takes_its_time_the_largest_step_is_best(num_decodes: int, most_tokens: int) -> None:
    assert efficient(LINEAR, num_decodes, most_tokens) == most_tokens


@given(st.integers(0, 6000), st.lists(st.integers(2, 5000), min_size=1, max_size=6))
def test_prompts_under_way_share_their_part_evenly_and_use_all_of_it(
    num_tokens: int, under_way: list[int]
) -> None:
    step = StepPace(prefill_tokens=num_tokens, starting_tokens=0, under_way=tuple(under_way))
    taken, more = (
        sum(min(left, chunk + step.chunk_tokens(num_tokens)) for left in under_way) for chunk in (0, 1)
    )
    assert taken <= max(num_tokens, len(under_way))
    assert more > num_tokens or taken == sum(under_way)


@given(
    target_s=st.floats(0.01, 2),
    under_way=st.lists(st.integers(2, 5000), max_size=5),
    starting=st.integers(0, 5000),
)
def test_prompts_get_on_and_no_step_is_overfull(target_s: float, under_way: list[int], starting: int) -> None:
    step = pace(LINEAR, target_s, 4, 100, under_way, 2048)
    assert 0 <= step.starting_tokens <= step.prefill_tokens
    started = min(starting, step.starting_tokens)
    bounds = Pacer(LINEAR, target_s, 2048).bounds(step, len(under_way) + 4, started)
    assert bounds.num_tokens <= 2048
    if under_way:
        assert bounds.chunk_tokens is not None
        taken = sum(min(left, bounds.chunk_tokens) for left in under_way)
        assert len(under_way) <= taken and started + taken + 4 <= max(
            bounds.num_tokens, started + len(under_way) + 4
        )
    if under_way:
        kept = min(sum(under_way), int(step.prefill_tokens * pacing.UNDER_WAY_SHARE))
        assert step.prefill_tokens - step.starting_tokens >= kept
    else:
        assert step.starting_tokens == step.prefill_tokens
