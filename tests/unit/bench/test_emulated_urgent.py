"""Others make way for urgent requests on an emulated node; nothing changes where nobody is urgent."""

from bench.emulated.urgent import TPOT_S, Point, play

NUM = 30


def test_where_nobody_is_urgent_everything_happens_when_it_did() -> None:
    never, paused = (play(Point("mlq", 40.0, 1, tpot_s, NUM, 0.0)) for tpot_s in (0.0, TPOT_S))
    assert paused.times == never.times and paused.counts == never.counts
