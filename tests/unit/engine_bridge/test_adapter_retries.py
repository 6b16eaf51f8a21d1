"""When an adapter that could not be taken into service is tried again."""

from __future__ import annotations

import pytest

from engine_bridge.adapters.retries import FIRST_WAIT_S, LONGEST_WAIT_S, AdapterRefusal, Retries


def waits(code: str, num_tries: int) -> list[float | None]:
    """The seconds after each failed try until another one is due, to half a second; None: it never is."""
    retries, now, found = Retries(), 100.0, list[float | None]()
    for _ in range(num_tries):
        retries.failed("law", AdapterRefusal("why", code), now)
        later = (half / 2 for half in range(200))
        wait_s = next((wait_s for wait_s in later if retries.is_due("law", now + wait_s)), None)
        found.append(wait_s)
        now += wait_s or 0.0
    return found


def test_the_waits_of_a_fault_that_may_pass_grow_up_to_the_longest() -> None:
    expected = [min(FIRST_WAIT_S * 2**number, LONGEST_WAIT_S) for number in range(6)]
    assert waits("disk_full", 6) == expected and expected[-1] == LONGEST_WAIT_S
    assert waits("unreadable", 2) == expected[:2]
    assert waits("disk_full", 5000)[-1] == LONGEST_WAIT_S


@pytest.mark.parametrize("code", ["bad_config", "not_supported"])
def test_a_fault_of_the_files_is_never_tried_again(code: str) -> None:
    assert waits(code, 2) == [None, None]


def test_a_failure_is_told_when_its_reason_is_new_and_forgotten_when_it_is_mended() -> None:
    retries, full, busy = Retries(), AdapterRefusal("full", "disk_full"), AdapterRefusal("busy", "busy")
    assert retries.failed("law", full, 0.0) and not retries.failed("law", full, 2.0)
    assert retries.failed("law", busy, 9.0) and retries.failed("art", busy, 9.0)
    assert retries.due(8.0) == ["art", "law"], "a clock that was set back puts nothing off"
    assert retries.due(9.5) == [] and retries.due(30.0) == ["art", "law"]
    retries.forget("law")
    assert retries.names == {"art"} and list(retries.texts().values()) == [
        "busy It is tried again by itself."
    ]
