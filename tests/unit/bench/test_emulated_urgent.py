"""Others make way for urgent requests on an emulated node; nothing changes where nobody is urgent."""

from bench.emulated.urgent import REPORTED_PER_S, TPOT_S, Point, _top, play

NUM = 30


def test_where_nobody_is_urgent_everything_happens_when_it_did() -> None:
    never, paused = (play(Point("mlq", 40.0, 1, tpot_s, NUM, 0.0)) for tpot_s in (0.0, TPOT_S))
    assert paused.times == never.times and paused.counts == never.counts


def test_what_is_told_of_one_load_is_the_median_over_seeds() -> None:
    never = {
        "urgent": [[90, 1, 1], [80, 1, 1], [10, 1, 1]],
        "others": [[1, 100, 10], [1, 100, 20], [1, 50, 10]],
    }
    paused = {
        "urgent": [[20, 1, 1], [30, 1, 1], [24, 1, 1]],
        "others": [[1, 200, 11], [1, 300, 20], [1, 50, 15]],
    }
    assert _top({"pausing": {f"mlq {REPORTED_PER_S:g}/s": {"never": never, "paused": paused}}}) == {
        "urgent_tpot_p99_ms": 24,
        "urgent_tpot_p99_ms_never": 80,
        "others_ttft_p99_change": 1.0,
        "others_e2e_change": 0.1,
    }
