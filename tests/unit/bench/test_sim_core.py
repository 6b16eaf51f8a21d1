"""Virtual time, shared links, costs of steps, traffic: the simulator's parts, against sums made by hand."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from bench.measures import quantile
from bench.sim.core.calibration import (
    A10,
    A10_CONTEXT_TOKENS,
    A10_ON_DEMAND,
    A40,
    A40_ADAPTER_SHARE,
    A40_LOADING_SHARE,
    A100,
    A800,
    COLD_SHARES,
    LARGEST_RANK,
    LLAMA2_7B_QKV,
    MEDIUM_PROMPT_TOKENS,
    on_demand_load_s,
)
from bench.sim.core.clock import Clock
from bench.sim.core.guesses import CLASS_ENDS, Classes
from bench.sim.core.hardware import AssistingHost
from bench.sim.core.links import SharedLink
from bench.sim.core.models import LLAMA3_8B, LLAMA_7B, LLAMA_13B, LLAMA_30B, MISTRAL_7B
from bench.sim.core.requests import Arrival
from bench.sim.core.steps import KERNELS, Chunk, StepCost
from bench.sim.core.traffic import (
    ALPACA_ANSWER,
    ALPACA_MOST_TOKENS,
    ALPACA_PROMPT,
    ANSWER_QUANTILES,
    PROMPT_QUANTILES,
    Fresh,
    Lengths,
    Pool,
    alpaca,
    functions,
    generated,
    poisson,
    power_law,
)
from tests.unit.bench.test_lean_node import TINY
from tests.unit.bench.test_lean_node import gpu as unit_gpu

# -- time --------------------------------------------------------------------------------------------------------------


def test_events_happen_in_order_of_time_then_of_asking() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, lambda now: seen.append(("late", now)))
    clock.at(1.0, lambda now: seen.append(("first", now)))
    clock.at(1.0, lambda now: seen.append(("second", now)))
    clock.at(1.5, lambda now: seen.append(("cancelled", now))).cancel()
    clock.run()
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_the_clock_stops_where_it_is_told_and_never_goes_back() -> None:
    clock, seen = Clock(), []
    clock.at(1.0, lambda now: seen.append(now))
    clock.at(3.0, lambda now: seen.append(now))
    clock.run(until_s=2.0)
    assert (seen, clock.now) == ([1.0], 2.0)
    with pytest.raises(ValueError):
        clock.at(1.9, lambda now: None)


# -- links -------------------------------------------------------------------------------------------------------------


def transfers(link: SharedLink, clock: Clock, *asked: tuple[float, int]) -> list[float]:
    """When each of these (at, bytes) ends."""
    ends = [0.0] * len(asked)

    def begin(place: int) -> None:
        link.transfer(asked[place][1], lambda now: ends.__setitem__(place, now))

    for place, (at_s, _) in enumerate(asked):
        clock.at(at_s, lambda now, place=place: begin(place))
    clock.run()
    return ends


def test_a_transfer_alone_has_the_whole_link() -> None:
    clock = Clock()
    assert transfers(SharedLink(clock, 100.0), clock, (1.0, 200)) == [3.0]


def test_two_transfers_share_the_bandwidth() -> None:
    clock = Clock()
    link = SharedLink(clock, 100.0)
    # Both at 50 bytes/s until the second has its 100 at 3 s; the first has 100 + 100 then, and its last 100 take 1 s more.
    assert transfers(link, clock, (0.0, 300), (1.0, 100)) == pytest.approx([4.0, 3.0])
    assert link.bytes_moved == 400
    assert link.busy_s == pytest.approx(4.0)


def test_setting_up_takes_no_bandwidth() -> None:
    clock = Clock()
    link = SharedLink(clock, 100.0, setup_s=0.5)
    assert transfers(link, clock, (0.0, 100), (1.0, 100)) == pytest.approx([1.5, 2.5])
    assert link.alone_s(100) == 1.5


def test_many_transfers_move_all_their_bytes_at_the_links_rate() -> None:
    rng, clock = random.Random(1), Clock()
    link = SharedLink(clock, 1000.0)
    asked = [(rng.uniform(0, 5), rng.randrange(1, 2000)) for _ in range(200)]
    ends = transfers(link, clock, *asked)
    assert link.bytes_moved == sum(size for _, size in asked)
    assert link.num_transfers == 0
    assert max(ends) >= sum(size for _, size in asked) / 1000
    assert all(end >= at + size / 1000 - 1e-9 for end, (at, size) in zip(ends, asked, strict=True)), (
        "faster than alone"
    )


# -- models and steps --------------------------------------------------------------------------------------------------


def test_models_have_the_parameters_that_they_are_named_for() -> None:
    for model, billions in (
        (LLAMA_7B, pytest.approx(6.74, abs=0.01)),
        (LLAMA_13B, pytest.approx(13.0, abs=0.05)),
        (LLAMA_30B, pytest.approx(32.5, abs=0.1)),
        (MISTRAL_7B, pytest.approx(7.24, abs=0.01)),
        (LLAMA3_8B, pytest.approx(8.03, abs=0.01)),
    ):
        assert model.weight_bytes / model.dtype_bytes / 1e9 == billions


def test_kv_and_adapters_have_the_sizes_of_their_shapes() -> None:
    assert LLAMA_7B.kv_bytes_per_token == 512 * 1024
    assert MISTRAL_7B.kv_bytes_per_token == 2 * 32 * 1024 * 2
    assert LLAMA_7B.lora_bytes(64) == 128 << 20


def test_a_step_takes_the_longer_of_computing_and_reading_and_the_overhead() -> None:
    gpu = replace(A40, flops=1e12, memory_bytes_per_s=1e12, flops_share=1.0, memory_share=1.0, step_s=0.25)
    cost, model = StepCost(gpu, LLAMA_7B), LLAMA_7B
    prompt = cost.step_s((Chunk(100, 0, 0, True),))
    compute = 200 * model.layer_weights + 2 * model.head_weights + 4 * 32 * 4096 * 100 * 50
    assert prompt == pytest.approx(compute / 1e12 + 0.25)
    decode = StepCost(replace(gpu, flops=1e15), LLAMA_7B).step_s((), 2, 1000)
    assert decode == pytest.approx((model.read_bytes + 1000 * model.kv_bytes_per_token) / 1e12 + 0.25)


def test_chunks_of_a_prompt_cost_its_attention_once() -> None:
    cost = StepCost(replace(A40, memory_bytes_per_s=1e18, step_s=0.0), LLAMA_7B)
    whole = cost.step_s((Chunk(1000, 0, 64, True),))
    parts = cost.step_s((Chunk(400, 0, 64, False),)) + cost.step_s((Chunk(600, 400, 64, True),))
    assert parts == pytest.approx(whole)


@pytest.mark.parametrize(("num_decodes", "context"), [(1, 100), (40, 40_000), (4000, 400_000)])
def test_a_run_of_decode_steps_takes_what_its_steps_take(num_decodes: int, context: int) -> None:
    cost = StepCost(A40, LLAMA_7B)
    run = cost.decoding(num_decodes, context, 30 * num_decodes)
    single = [cost.step_s((), num_decodes, context + n * num_decodes, 30 * num_decodes) for n in range(300)]
    for num in (1, 2, 7, 300):
        assert run.total_s(num) == pytest.approx(sum(single[:num]))


def test_a_run_in_which_reading_overtakes_computing_is_summed_right() -> None:
    gpu = replace(A40, memory_bytes_per_s=A40.memory_bytes_per_s * 4)
    cost = StepCost(gpu, LLAMA_7B)
    run = cost.decoding(300, 300, 0)
    first, last = cost.step_s((), 300, 300), cost.step_s((), 300, 300 + 1999 * 300)
    assert run.compute_s > run.memory_s and last > first, "the case is none"
    total = sum(cost.step_s((), 300, 300 + n * 300) for n in range(2000))
    assert run.total_s(2000) == pytest.approx(total)


def test_what_comes_in_a_run_meets_the_end_of_a_step() -> None:
    run = StepCost(A40, LLAMA_7B).decoding(8, 4000, 64)
    for seconds in (0.0, 0.01, run.total_s(3), run.total_s(3) + 1e-6, run.total_s(49)):
        num = run.steps_until(seconds, 50)
        assert run.total_s(num) >= seconds
        assert num == 1 or run.total_s(num - 1) < seconds


# -- calibration -------------------------------------------------------------------------------------------------------


def test_the_a40_meets_the_low_load_figures_that_it_is_calibrated_with() -> None:
    cost = StepCost(A40, LLAMA_7B)
    assert cost.step_s((), 1, MEDIUM_PROMPT_TOKENS) == pytest.approx(0.030)
    load_s = LLAMA_7B.lora_bytes(LARGEST_RANK) / A40.achieved_link_bytes_per_s
    with_adapter_s = cost.prefill_s(MEDIUM_PROMPT_TOKENS, LARGEST_RANK)
    ttft_s = load_s + with_adapter_s
    assert load_s / ttft_s == pytest.approx(A40_LOADING_SHARE)
    assert (with_adapter_s - cost.prefill_s(MEDIUM_PROMPT_TOKENS)) / ttft_s == pytest.approx(
        A40_ADAPTER_SHARE
    )


def test_the_a10_meets_a_figure_that_it_was_not_calibrated_with() -> None:
    """CaraServe §2.3: 16 requests of rank 64 decode in 35.9 ms."""
    ours = StepCost(A10, LLAMA2_7B_QKV).step_s((), 16, 16 * A10_CONTEXT_TOKENS, 16 * 64)
    assert ours == pytest.approx(0.0359, rel=0.02)


@pytest.mark.parametrize(("num", "rank", "milliseconds"), [(24, 32, 34.8), (16, 64, 35.8)])
def test_the_a10_meets_the_figures_of_the_other_kernel(num: int, rank: int, milliseconds: float) -> None:
    """CaraServe §2.3, BGMV."""
    cost = StepCost(A10, LLAMA2_7B_QKV, KERNELS["bgmv"])
    ours = cost.step_s((), num, num * A10_CONTEXT_TOKENS, cost.kernel({rank: num}))
    assert ours == pytest.approx(milliseconds / 1000, rel=0.02)


def test_loads_on_demand_are_the_same_at_all_loads_of_the_figure_that_they_are_taken_from() -> None:
    loads = [on_demand_load_s(A10, per_s, share) for per_s, share in COLD_SHARES]
    assert max(loads) < 1.1 * min(loads)
    rank_64_bytes = LLAMA2_7B_QKV.lora_bytes(64)
    assert rank_64_bytes == 96 << 20, "CaraServe §2.3: about 100 MiB"
    assert rank_64_bytes / A10_ON_DEMAND.achieved_link_bytes_per_s == pytest.approx(loads[0])


def test_no_device_does_more_than_its_data_sheet_says() -> None:
    for gpu in (A10, A40, A100, A800):
        assert 0 < gpu.flops_share <= 1 and 0 < gpu.memory_share <= 1
        assert 0 < gpu.link_share <= 1 and 0 < gpu.lora_share <= gpu.flops_share
        assert gpu.step_s > 0


# An adapter's part of ten tokens takes it three seconds, and calling it half a second.
SLOW_HOST = AssistingHost("slow", 2 * 128 * 8 * 10 / 3, 4, 1.0, 10, 0.5)


def test_more_tokens_than_a_core_takes_have_more_cores_until_there_are_none() -> None:
    cost = StepCost(unit_gpu(1000), TINY, assistant=SLOW_HOST)
    for num_tokens, seconds in ((5, 1.5), (10, 3.0), (20, 3.0), (40, 3.0), (80, 6.0)):
        assert cost.step_s((Chunk(num_tokens, 0, 8, True, True),)) == pytest.approx(1 + seconds + 0.5)


def test_a_host_that_is_as_quick_as_the_same_matrices_costs_its_call_alone() -> None:
    cost = StepCost(replace(unit_gpu(1000), flops=1e6), TINY, assistant=SLOW_HOST)
    plain, helped = (cost.step_s((Chunk(10, 0, 8 * assists, True, assists),)) for assists in (False, True))
    hidden_s = (plain - 1.0) * TINY.adapted_share
    assert 0 < hidden_s < 3
    assert helped - plain == pytest.approx(3 - hidden_s + 0.5)
    quick = StepCost(cost.gpu, TINY, assistant=replace(SLOW_HOST, core_flops=1e30))
    assert quick.step_s((Chunk(10, 0, 8, True, True),)) == pytest.approx(plain + 0.5)


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_generated_lengths_have_the_published_quantiles() -> None:
    pairs = generated(random.Random(5), 40_000).pairs
    for place, quantiles in ((0, PROMPT_QUANTILES), (1, ANSWER_QUANTILES)):
        values = [float(pair[place]) for pair in pairs]
        for share, tokens in quantiles[1:-3]:
            assert quantile(values, share) == pytest.approx(tokens, rel=0.1), f"{share:.0%}"
        assert quantiles[0][1] <= min(values) and max(values) <= quantiles[-1][1]
    # The trace's own figures, as its readers give them: medians, 99th percentiles, means.
    for place, (half, most) in enumerate(((1020, 4142), (129, 601))):
        values = [float(pair[place]) for pair in pairs]
        assert quantile(values, 0.5) == pytest.approx(half, rel=0.1)
        assert quantile(values, 0.99) == pytest.approx(most, rel=0.1)
    assert statistics.fmean(pair[0] for pair in pairs) == pytest.approx(1155, rel=0.12)
    assert statistics.fmean(pair[1] for pair in pairs) == pytest.approx(211, rel=0.12)


def test_alpacas_lengths_have_their_published_means() -> None:
    pairs = alpaca().pairs
    assert statistics.fmean(prompt for prompt, _ in pairs) == pytest.approx(ALPACA_PROMPT[0], rel=0.03)
    assert statistics.fmean(answer for _, answer in pairs) == pytest.approx(ALPACA_ANSWER[0], rel=0.03)
    assert min(map(min, pairs)) >= 1 and max(map(max, pairs)) <= ALPACA_MOST_TOKENS
    assert alpaca(100, seed=1).pairs != alpaca(100, seed=2).pairs


def test_functions_are_asked_for_as_azures_are() -> None:
    per_day = sorted(functions(40_000, random.Random(1)).weights)
    assert quantile(per_day, 0.45) == pytest.approx(24, rel=0.1)
    often = [rate for rate in per_day if rate >= 1440]
    assert len(often) / 40_000 == pytest.approx(0.186, abs=0.01)
    # Published beside the quantiles, and not used for them.
    assert sum(often) / sum(per_day) == pytest.approx(0.996, abs=0.003)


def test_dealers_deal_what_they_say() -> None:
    rng = random.Random(3)
    assert Fresh().dealt(5, rng) == [0, 1, 2, 3, 4]
    counts = Counter(power_law(50, 1.0).dealt(100_000, rng))
    assert counts[0] / counts[4] == pytest.approx(5, rel=0.1)


def test_lengths_are_cut_to_what_the_model_takes() -> None:
    cut = Lengths("", ((5000, 1500), (100, 50), (2000, 100))).fitted(2048)
    assert cut.pairs == ((1024, 1024), (100, 50), (1948, 100))


def test_the_same_seed_brings_the_same_requests_at_any_load() -> None:
    lengths, pool = generated(random.Random(1), 500), Pool()
    slow, fast = (poisson(lengths, pool, per_s, 100.0, 3) for per_s in (2.0, 8.0))
    assert poisson(lengths, pool, 2.0, 100.0, 3) == slow
    assert poisson(lengths, pool, 2.0, 100.0, 4) != slow
    for a, b in zip(slow, fast, strict=False):
        assert a.at_s == pytest.approx(4 * b.at_s)
        assert (a.num_prompt_tokens, a.num_answer_tokens, a.adapter_id) == (
            b.num_prompt_tokens,
            b.num_answer_tokens,
            b.adapter_id,
        )
    assert len(fast) == 800


def test_small_ranks_are_asked_for_most_and_adapters_of_a_rank_alike() -> None:
    pool = Pool()
    dealt = pool.dealt(100_000, random.Random(2))
    by_rank = [sum(pool.rank_of[a] == rank for a in dealt) for rank in pool.ranks]
    for place, num in enumerate(by_rank):
        assert num == pytest.approx(by_rank[0] / (1 + place), rel=0.05)
    of_rank_8 = [dealt.count(a) for a in range(20)]
    assert max(of_rank_8) < 1.1 * min(of_rank_8)


def arrivals(lengths: list[int]) -> list[Arrival]:
    return [Arrival(str(at), 0.0, 10, length) for at, length in enumerate(lengths)]


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.6, 0.0])
def test_a_predictor_names_the_right_class_as_often_as_it_says(accuracy: float) -> None:
    rng = random.Random(7)
    lengths = [rng.randrange(1, 1000) for _ in range(4000)]
    ordered = sorted(lengths)
    ends = [ordered[int(share * len(ordered)) - 1] for share in CLASS_ENDS]
    classes = Classes(lengths, accuracy, seed=1)

    def class_of(length: int) -> int:
        return sum(length > end for end in ends)

    right = [
        class_of(classes.guess(arrival).p50) == class_of(arrival.num_answer_tokens)
        for arrival in arrivals(lengths)
    ]
    assert statistics.fmean(right) == pytest.approx(accuracy, abs=0.03)


def test_a_request_gets_the_same_guess_however_often_it_is_asked_for() -> None:
    classes = Classes(range(1, 500), 0.5, seed=1)
    assert [classes.guess(a) for a in arrivals([7, 70, 400])] == [
        classes.guess(a) for a in arrivals([7, 70, 400])
    ]
