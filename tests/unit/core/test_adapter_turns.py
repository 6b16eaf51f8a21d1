"""An adapter that has waited for room gets it: others start no further request until it runs."""

from engine_bridge.core.adapters.adapter_table import AdapterTable, Version
from engine_bridge.core.adapters.adapter_turns import LOOK_EVERY_S, PATIENCE_S, AdapterTurns

LATER = 100.0


def turns(*num_requests: int) -> tuple[AdapterTurns, AdapterTable]:
    """Adapters 1, 2 and so on, each in host memory with so many requests, the first of which came at the time of its id."""
    table = AdapterTable(num_slots=2)
    for adapter_id, num in enumerate(num_requests, 1):
        version = Version(adapter_id, 10, 1, last_used_s=0.0, host_bytes=10)
        version.requests = {f"{adapter_id}.{at}": float(adapter_id) for at in range(num)}
        table.add(version)
    return AdapterTurns(table, 2, 1000), table


def test_the_adapter_with_the_fewest_requests_makes_room_until_one_that_has_waited_runs() -> None:
    own, table = turns(5, 2, 1)
    assert own.held_back({1, 2}, 3.0 + PATIENCE_S / 2) == frozenset()
    assert own.held_back({1, 2}, 3.0 + PATIENCE_S) == own.last == {2}

    # It may become the busier one meanwhile.
    table[2].requests |= {f"more {at}": LATER for at in range(9)}
    assert own.held_back({1, 2}, LATER) == own.held_back({1}, LATER) == {2}
    # Now the one that made room waits itself.
    assert own.held_back({1, 3}, LATER) == {3}


def test_however_often_it_is_asked_all_adapters_are_looked_at_now_and_then_only() -> None:
    own, table = turns(5, 2, 1)
    looks: list[set[int]] = []

    def running() -> set[int]:
        looks.append({1, 2})
        return {1, 2}

    assert [own.holds_back(adapter_id, running, LATER) for adapter_id in (1, 2, 3)] == [False, True, False]
    table[3].requests.clear()
    assert own.holds_back(2, running, LATER + LOOK_EVERY_S / 2) and len(looks) == 1
    assert not own.holds_back(2, running, LATER + LOOK_EVERY_S) and len(looks) == 2
