"""Who cannot start yet, and that it costs little to ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.core.scheduling.unready import Unready
from engine_bridge.driver.scheduling.requests import waits_for


def request(name: str, adapter: int | None = None, has_grammar: bool = False) -> Any:
    return SimpleNamespace(
        request_id=name,
        lora_request=None if adapter is None else SimpleNamespace(lora_int_id=adapter),
        structured_output_request=object() if has_grammar else None,
    )


class Line:
    """Requests that are not ready, and what the engine knows of them."""

    def __init__(self) -> None:
        self.unready = Unready()
        self.requests: dict[str, Any] = {}

    def add(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.unready.add(request.request_id, waits_for(request))


class Asked:
    """Says who is ready, and counts how often it was asked."""

    def __init__(self, line: Line, adapters: set[int | None], grammars: set[str]) -> None:
        self.requests = line.requests
        self.adapters, self.grammars, self.num_asked = adapters, grammars, 0

    def __call__(self, request_id: str) -> bool:
        self.num_asked += 1
        request = self.requests[request_id]
        adapter = None if request.lora_request is None else request.lora_request.lora_int_id
        has_grammar = request.structured_output_request is None or request.request_id in self.grammars
        return has_grammar and adapter in self.adapters


def test_it_asks_once_for_each_adapter_however_many_wait_for_it() -> None:
    line = Line()
    unready = line.unready
    for at in range(1000):
        line.add(request(str(at), adapter=at % 4))
    asked = Asked(line, set(), set())
    assert unready.take_ready(asked, 100) == []
    assert asked.num_asked == 4
    assert len(unready) == 1000


def test_no_more_come_than_may_and_in_their_order() -> None:
    line = Line()
    unready = line.unready
    for name in "abcde":
        line.add(request(name, adapter=1))
    asked = Asked(line, {1}, set())
    assert unready.take_ready(asked, 3) == ["a", "b", "c"]
    assert ("c" in unready, "d" in unready) == (False, True)
    assert unready.take_ready(asked, 3) == ["d", "e"]
    assert len(unready) == 0


def test_a_grammar_keeps_back_only_its_own_request() -> None:
    line = Line()
    unready = line.unready
    line.add(request("slow", adapter=1, has_grammar=True))
    line.add(request("plain", adapter=1))
    line.add(request("quick", adapter=1, has_grammar=True))
    assert unready.take_ready(Asked(line, {1}, {"quick"}), 10) == ["plain", "quick"]
    assert "slow" in unready


requests = st.lists(st.tuples(st.none() | st.integers(0, 3), st.booleans()), max_size=30)


@given(
    requests, st.sets(st.none() | st.integers(0, 3)), st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29))
)
def test_whoever_is_ready_comes_and_nobody_else(
    fields: list[tuple[int | None, bool]], adapters: set[int | None], grammars: set[int], left: set[int]
) -> None:
    line = Line()
    unready, asked = line.unready, Asked(line, adapters, {str(at) for at in grammars})
    known = {str(at): request(str(at), adapter, grammar) for at, (adapter, grammar) in enumerate(fields)}
    for each in known.values():
        line.add(each)
    for at in left:
        unready.remove(str(at))
        known.pop(str(at), None)
    assert len(unready) == len(known)
    ready = {name for name in known if asked(name)}
    assert set(unready.take_ready(asked, 100)) == ready
    assert len(unready) == len(known) - len(ready)
    assert not any(name in unready for name in ready)
