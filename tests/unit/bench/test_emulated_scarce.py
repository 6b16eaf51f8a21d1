"""Of people who type where the device has no room for all of them: who has room finds all of their KV, and a run repeats exactly."""

from bench.emulated.scarce import Outcome, Point, _top, serve

SPAN_S = 110.0


def hits_of(outcome: Outcome) -> int:
    return sum(asked.missing_blocks == 0 for asked in outcome.asked)


def test_announced_they_find_their_kv_where_it_has_room_and_others_do_not() -> None:
    advised, timed = (serve(Point(arm, 1, SPAN_S)) for arm in ("advised", "timed"))
    num_asked = len(advised.asked)
    num_without_room = sum(asked.earlier_blocks > advised.room_blocks for asked in advised.asked)
    assert num_asked > 10 and 0 < num_without_room < num_asked / 2
    # Some are pushed out by a long conversation that comes late, and come back when it has ended.
    assert num_asked - num_without_room - 2 <= hits_of(advised) <= num_asked - num_without_room / 2
    assert hits_of(advised) < hits_of(timed) >= 0.9 * num_asked
    assert serve(Point("advised", 1, SPAN_S)) == advised


def test_what_stands_beside_the_parts_is_their_figures_alone() -> None:
    assert _top({"typing": {"hit_share": 0.7, "bound_hit_share": 0.9, "arms": {}, "figures": []}}) == {
        "hit_share": 0.7,
        "bound_hit_share": 0.9,
    }
    assert _top({}) == {}
