"""Orders of starting beside vLLM's own queue: what is compared, and the two scenes."""

from pathlib import Path

import pytest

from bench.emulated.order import (
    TRACES,
    Setting,
    changes,
    play,
    shared_prefix_running,
    starved_wait_s,
    summary,
)

NOWHERE = Path("nowhere")


@pytest.mark.parametrize("trace", TRACES)
def test_a_load_is_a_share_of_the_capacity_and_the_same_requests_come_at_each(trace: str) -> None:
    low = Setting(trace, True, seed=1, num=200, folder=NOWHERE, load=0.5, capacity_per_s=4.0).requests
    high = Setting(trace, True, seed=1, num=200, folder=NOWHERE, load=1.0, capacity_per_s=4.0).requests
    assert low[-1].at_s == pytest.approx(200 / 2.0) and high[-1].at_s == pytest.approx(200 / 4.0)
    assert [each.num_prompt_tokens for each in low] == [each.num_prompt_tokens for each in high]
    assert {each.adapter_id for each in low} == {each.adapter_id for each in high} != {None}


def test_without_overtaking_every_request_has_the_times_of_vllms_own_queue() -> None:
    setting = Setting("heavy tail", False, seed=1, num=60, folder=NOWHERE)
    stock, own = play("vllm", setting), play("bounded 0", setting)
    assert [(job.first_token_s, job.ended_s) for job in own] == [
        (job.first_token_s, job.ended_s) for job in stock
    ]


def test_changes_are_means_over_seeds_of_each_figure_and_of_the_worst_class_that_all_seeds_have() -> None:
    stock = {"ttft_p50": 1.0, "ttft_p99": 2.0, "latency_p50": 1.0, "latency_p99": 1.0}
    stock |= {"class short": 1.0, "class long": 4.0, "class_p99 long": 8.0}
    half = stock | {"ttft_p99": 1.0, "class short": 0.5, "class long": 5.0}
    double = stock | {"ttft_p99": 8.0, "class short": 0.5, "class long": 5.0, "class rank 8": 99.0}
    found = changes([(half, stock), (double, stock | {"class rank 8": 1.0})])
    assert found["ttft_p99"] == pytest.approx(2**0.5 - 1, abs=1e-4), "half and four times"
    assert (found["ttft_p99_least"], found["ttft_p99_most"]) == (-0.5, 3.0)
    assert (found["worst_class"], found["worst_class_p99"], found["ttft_p50"]) == (0.25, 0.0, 0.0)


def test_a_summary_has_the_worst_p99_and_the_median_of_the_load_that_is_asked_for() -> None:
    def row(load: float, p50: float, p99: float) -> dict[str, object]:
        same = {"latency_p99": 0.0, "worst_class": 0.1, "worst_class_p99": 0.3}
        return {"load": load, "mlq": {"ttft_p50": p50, "ttft_p99": p99, **same}}

    found = summary(
        "mlq", [row(0.5, 0.0, 0.2), row(1.2, -0.5, -0.1), row(1.2, -0.3, 0.0), row(1.2, 0.0, 0.0)]
    )
    assert found["p99_vs_vllm_worst"] == 1.2
    assert found["p50_change_at_1_2"] == -0.3


@pytest.mark.parametrize("policy", ["bounded", "mlq"])
def test_the_scenes_come_to_their_aims(policy: str) -> None:
    assert starved_wait_s(policy) <= 2.0
    assert shared_prefix_running(policy) == 50
