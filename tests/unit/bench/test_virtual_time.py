"""Virtual time, shared links, devices and their steps, traffic: the parts that every bench plays with, against sums made by hand."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.emulated.core import calibration
from bench.emulated.core.arrivals import CLASS_ENDS, Arrival, Classes
from bench.emulated.core.calibration import A10, A10_ON_DEMAND, A40, A100, A800, LLAMA2_7B_QKV
from bench.emulated.core.clock import Clock
from bench.emulated.core.hardware import AssistingHost, Gpu
from bench.emulated.core.links import SharedLink
from bench.emulated.core.models import (
    LLAMA3_8B,
    LLAMA_7B,
    LLAMA_13B,
    LLAMA_30B,
    MISTRAL_7B,
    OPT_13B,
    OPT_30B,
    Model,
)
from bench.emulated.core.steps import KERNELS, Chunk, StepCost, bgmv
from bench.emulated.core.traffic import (
    Lengths,
    Pool,
    alpaca,
    functions,
    generated,
    poisson,
    power_law,
    weighted,
)
from bench.measures import quantile

TINY = Model("tiny", 1, 16, 16, 1, 1, 16, 10_000)
# A device on which every step takes a second, whatever is in it.
UNIT_GPU = Gpu("unit", 1e30, 1e30, 10**12, 1e30, link_share=1.0, lora_share=1.0, step_s=1.0)

# -- time and links ----------------------------------------------------------------------------------------------------


def test_events_happen_in_order_of_time_then_of_asking_until_the_clock_is_told_to_stop() -> None:
    clock, seen = Clock(), []
    for at_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second"), (3.0, "never")):
        clock.at(at_s, lambda now, name=name: seen.append((name, now)))
    clock.at(1.5, lambda now: seen.append(("cancelled", now))).cancel()
    clock.run(until_s=2.5)
    assert (seen, clock.now) == ([("first", 1.0), ("second", 1.0), ("late", 2.0)], 2.5)
    with pytest.raises(ValueError, match="has passed"):
        clock.at(2.4, lambda now: None)


def transfers(link: SharedLink, clock: Clock, asked: Sequence[tuple[float, int]]) -> list[float]:
    """When each of these (at, bytes) ends."""
    ends = [0.0] * len(asked)

    def begin(place: int) -> None:
        link.transfer(asked[place][1], lambda now: ends.__setitem__(place, now))

    for place, (at_s, _) in enumerate(asked):
        clock.at(at_s, lambda now, place=place: begin(place))
    clock.run()
    return ends


@pytest.mark.parametrize(
    ("setup_s", "asked", "ends"),
    [
        (0.0, [(1.0, 200)], [3.0]),
        # Both at 50 bytes/s until the second has its 100 at 3 s; the first has 100 + 100 then, and its last 100 take 1 s more.
        (0.0, [(0.0, 300), (1.0, 100)], [4.0, 3.0]),
        (0.5, [(0.0, 100), (1.0, 100)], [1.5, 2.5]),
    ],
    ids=["alone", "two share the bandwidth", "setting up takes no bandwidth"],
)
def test_a_link_is_shared(setup_s: float, asked: list[tuple[float, int]], ends: list[float]) -> None:
    clock = Clock()
    link = SharedLink(clock, 100.0, setup_s)
    assert transfers(link, clock, asked) == pytest.approx(ends)
    assert link.bytes_moved == sum(size for _, size in asked) and link.alone_s(100) == 1 + setup_s


# -- models and steps --------------------------------------------------------------------------------------------------


def test_models_have_the_sizes_of_their_names_and_shapes() -> None:
    sizes = {LLAMA_7B: 6.74, LLAMA_13B: 13.0, LLAMA_30B: 32.5, MISTRAL_7B: 7.24, LLAMA3_8B: 8.03}
    for model, billions in sizes.items():
        assert model.weight_bytes / model.dtype_bytes / 1e9 == pytest.approx(billions, rel=0.004)
    for model, billions in ((OPT_13B, 13), (OPT_30B, 30)):
        assert (model.layer_weights + model.head_weights) / 1e9 == pytest.approx(billions, rel=0.03)
    assert LLAMA_7B.kv_bytes_per_token == 512 * 1024 and MISTRAL_7B.kv_bytes_per_token == 2 * 32 * 1024 * 2
    assert LLAMA_7B.lora_bytes(64) == 128 << 20


def test_a_step_takes_the_longer_of_computing_and_reading_and_the_overhead() -> None:
    gpu = replace(A40, flops=1e12, memory_bytes_per_s=1e12, flops_share=1.0, memory_share=1.0, step_s=0.25)
    cost, model = StepCost(gpu, LLAMA_7B), LLAMA_7B
    compute = 200 * model.layer_weights + 2 * model.head_weights + 4 * 32 * 4096 * 100 * 50
    assert cost.step_s((Chunk(100, 0, 0, True),)) == pytest.approx(compute / 1e12 + 0.25)
    decode = StepCost(replace(gpu, flops=1e15), LLAMA_7B).step_s((), 2, 1000)
    assert decode == pytest.approx((model.read_bytes + 1000 * model.kv_bytes_per_token) / 1e12 + 0.25)
    assert bgmv({}) == bgmv({8: 0, 64: 0}) == 0 and bgmv({8: 2, 64: 0}) == 16, (
        "those that have left are not read"
    )


def test_chunks_of_a_prompt_cost_its_attention_once() -> None:
    cost = StepCost(replace(A40, memory_bytes_per_s=1e18, step_s=0.0), LLAMA_7B)
    whole = cost.step_s((Chunk(1000, 0, 64, True),))
    parts = cost.step_s((Chunk(400, 0, 64, False),)) + cost.step_s((Chunk(600, 400, 64, True),))
    assert parts == pytest.approx(whole)


# An adapter's part of ten tokens takes it three seconds, and calling it half a second.
SLOW_HOST = AssistingHost("slow", 2 * 128 * 8 * 10 / 3, 4, 1.0, 10, 0.5)


def test_a_hosts_help_takes_its_cores_and_hides_behind_the_same_matrices() -> None:
    cost = StepCost(UNIT_GPU, TINY, assistant=SLOW_HOST)
    for num_tokens, seconds in ((5, 1.5), (10, 3.0), (20, 3.0), (40, 3.0), (80, 6.0)):
        assert cost.step_s((Chunk(num_tokens, 0, 8, True, True),)) == pytest.approx(1 + seconds + 0.5)
    cost = StepCost(replace(UNIT_GPU, flops=1e6), TINY, assistant=SLOW_HOST)
    plain, helped = (cost.step_s((Chunk(10, 0, 8 * assists, True, assists),)) for assists in (False, True))
    hidden_s = (plain - 1.0) * TINY.adapted_share
    assert 0 < hidden_s < 3 and helped - plain == pytest.approx(3 - hidden_s + 0.5)
    quick = StepCost(cost.gpu, TINY, assistant=replace(SLOW_HOST, core_flops=1e30))
    assert quick.step_s((Chunk(10, 0, 8, True, True),)) == pytest.approx(plain + 0.5)


# -- calibration -------------------------------------------------------------------------------------------------------


def test_devices_meet_the_published_figures_that_they_are_calibrated_with_within_their_data_sheets() -> None:
    cost, tokens = StepCost(A40, LLAMA_7B), calibration.MEDIUM_PROMPT_TOKENS
    assert cost.step_s((), 1, tokens) == pytest.approx(0.030)
    load_s = LLAMA_7B.lora_bytes(calibration.LARGEST_RANK) / A40.achieved_link_bytes_per_s
    with_adapter_s = cost.prefill_s(tokens, calibration.LARGEST_RANK)
    shares = (load_s, with_adapter_s - cost.prefill_s(tokens))
    wanted = (calibration.A40_LOADING_SHARE, calibration.A40_ADAPTER_SHARE)
    assert [share / (load_s + with_adapter_s) for share in shares] == pytest.approx(wanted)
    cost = StepCost(A800, MISTRAL_7B)
    for num, per_s in calibration.A800_TOKENS_PER_S.items():
        assert num / cost.step_s((), num, num * calibration.A800_CONTEXT_TOKENS) == pytest.approx(per_s)
    assert A800.achieved_link_bytes_per_s == pytest.approx(25.13e9)
    for gpu in (A10, A40, A100, A800):
        assert 0 < gpu.link_share <= 1 and 0 < gpu.lora_share <= gpu.flops_share <= 1 and gpu.step_s > 0


@pytest.mark.parametrize(
    ("kernel", "num", "rank", "milliseconds"),
    [("mbgmv", 16, 64, 35.9), ("bgmv", 24, 32, 34.8), ("bgmv", 16, 64, 35.8)],
)
def test_the_a10_meets_figures_that_it_was_not_calibrated_with(
    kernel: str, num: int, rank: int, milliseconds: float
) -> None:
    """Source: CaraServe §2.3."""
    cost = StepCost(A10, LLAMA2_7B_QKV, KERNELS[kernel])
    ours = cost.step_s((), num, num * calibration.A10_CONTEXT_TOKENS, cost.kernel({rank: num}))
    assert ours == pytest.approx(milliseconds / 1000, rel=0.02)


def test_loads_on_demand_are_the_same_at_all_loads_of_the_figure_that_they_are_taken_from() -> None:
    loads = [calibration.on_demand_load_s(A10, per_s, share) for per_s, share in calibration.COLD_SHARES]
    assert max(loads) < 1.1 * min(loads)
    rank_64_bytes = LLAMA2_7B_QKV.lora_bytes(64)
    assert rank_64_bytes == 96 << 20, "CaraServe §2.3: about 100 MiB"
    assert rank_64_bytes / A10_ON_DEMAND.achieved_link_bytes_per_s == pytest.approx(loads[0])


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_lengths_have_the_published_means() -> None:
    for pairs, means in ((generated(random.Random(5)).pairs, (1155, 211)), (alpaca().pairs, (19.31, 58.45))):
        for lengths, mean in zip(zip(*pairs, strict=True), means, strict=True):
            assert statistics.fmean(lengths) == pytest.approx(mean, rel=0.12) and min(lengths) >= 1


def test_adapters_are_dealt_as_published() -> None:
    per_day = sorted(functions(40_000, random.Random(1)))
    assert quantile(per_day, 0.45) == pytest.approx(24, rel=0.1)
    often = [rate for rate in per_day if rate >= 1440]
    assert len(often) / 40_000 == pytest.approx(0.186, abs=0.01)
    assert sum(often) / sum(per_day) == pytest.approx(0.996, abs=0.003), (
        "published beside the quantiles, and not used"
    )
    rng = random.Random(3)
    counts = Counter(weighted(power_law(50))(100_000, rng))
    assert counts[0] / counts[4] == pytest.approx(5, rel=0.1)
    pool = Pool()
    counts = Counter(pool.dealt(100_000, rng))
    by_rank = [sum(num for a, num in counts.items() if pool.rank_of[a] == rank) for rank in pool.ranks]
    for place, num in enumerate(by_rank):
        assert num == pytest.approx(by_rank[0] / (1 + place), rel=0.05), "small ranks most"
    assert max(counts[a] for a in range(20)) < 1.12 * min(counts[a] for a in range(20)), (
        "adapters of a rank alike"
    )


def test_the_same_seed_brings_the_same_requests_at_any_load() -> None:
    lengths, pool = generated(random.Random(1), 500), Pool()
    slow, fast = (poisson(lengths, pool.dealt, per_s, 100.0, 3) for per_s in (2.0, 8.0))
    assert poisson(lengths, pool.dealt, 2.0, 100.0, 3) == slow != poisson(lengths, pool.dealt, 2.0, 100.0, 4)
    assert slow == [replace(b, at_s=a.at_s) for a, b in zip(slow, fast, strict=False)]
    assert [a.at_s for a in slow] == pytest.approx([4 * a.at_s for a in fast[: len(slow)]])
    assert len(fast) == 800 and fast[-1].at_s == pytest.approx(100, rel=0.2)
    cut = Lengths(((5000, 1500), (100, 50), (2000, 100))).fitted(2048)
    assert cut.pairs == ((1024, 1024), (100, 50), (1948, 100))


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.0])
def test_a_predictor_names_the_right_class_as_often_as_it_says_and_the_same_one_again(
    accuracy: float,
) -> None:
    rng = random.Random(7)
    lengths = [rng.randrange(1, 1000) for _ in range(4000)]
    ends = [sorted(lengths)[int(share * len(lengths)) - 1] for share in CLASS_ENDS]
    arrivals = [Arrival(str(at), 0.0, 10, length) for at, length in enumerate(lengths)]
    classes = Classes(lengths, accuracy, seed=1)
    guesses = [classes(arrival).p50 for arrival in arrivals]
    right = [
        sum(guess > end for end in ends) == sum(length > end for end in ends)
        for guess, length in zip(guesses, lengths, strict=True)
    ]
    assert statistics.fmean(right) == pytest.approx(accuracy, abs=0.03)
    assert guesses == [classes(arrival).p50 for arrival in arrivals]
