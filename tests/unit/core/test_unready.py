"""Requests that cannot start yet, and the cost of asking for them."""

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.core.scheduling.unready import Unready


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 29)),
    st.integers(0, 30),
)
def test_ready_requests_come_in_their_order_and_each_group_is_asked_once(
    waits_for: list[int], ready: set[int], left: set[int], most: int
) -> None:
    unready, asked = Unready(), []
    for at, adapter in enumerate(waits_for):
        unready.add(str(at), adapter)
    for at in left:
        unready.remove(str(at))
    known = [at for at in range(len(waits_for)) if at not in left]

    def is_ready(name: str) -> bool:
        asked.append(waits_for[int(name)])
        return waits_for[int(name)] in ready

    found = [int(name) for name in unready.take_ready(is_ready, most)]
    for adapter in ready:
        own = [at for at in known if waits_for[at] == adapter]
        own_found = [at for at in found if waits_for[at] == adapter]
        assert own_found == own[: len(own_found)]
    assert len(found) == min(most, sum(waits_for[at] in ready for at in known))
    assert all(asked.count(adapter) <= 1 for adapter in range(4) if adapter not in ready)
    assert len(unready) == len(known) - len(found)
    assert all((str(at) in unready) is (at not in found) for at in known)
