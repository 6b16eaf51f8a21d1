"""Learned advisories: when they are sent, and that what was learned outlives the process, whatever became of the file."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.advisories.advisories import AdvisoryRequest
from gateway.advisories.followers import AgentCall
from gateway.advisories.learned import Learned
from gateway.advisories.learned_file import NAME

from .parts import Parts


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def call(learned: Learned, clock: Clock, run: str, agent: str) -> None:
    """A request of an agent that takes a second, half a second after the one before it."""
    arrival = AgentCall("ann", run, agent, f"{run}:{agent}")
    learned.arrived(arrival)
    clock.now_s += 1.0
    learned.ended(arrival)
    clock.now_s += 0.5


def teach(learned: Learned, clock: Clock) -> None:
    for number in range(20):
        for agent in ("planner", "coder"):
            call(learned, clock, f"run{number}", agent)
        clock.now_s += 60.0


async def sessions_told(parts: Parts, number: int) -> list[str]:
    """Of the advisories that have reached the node, once there are so many."""
    await parts.node.told(number - 1)
    return [told.advisory.session_id for told in parts.node.advisories]


def made(parts: Parts, clock: Clock, file: Path | None = None, *, is_on: bool = True) -> Learned:
    return Learned(parts.node, parts.advisories, is_on=is_on, file=file, clock=clock)


async def test_who_follows_is_told_while_the_one_before_still_works(parts: Parts) -> None:
    clock = Clock()
    learned = made(parts, clock)
    teach(learned, clock)
    learned.arrived(AgentCall("ann", "last", "planner", "last:planner"))
    assert parts.advisories.expects("ann", "last:coder")
    assert not parts.advisories.expects("ann", "last:planner")
    assert not parts.advisories.expects("bob", "last:coder")


async def test_an_agent_is_expected_again_only_when_its_answer_is_whole(parts: Parts) -> None:
    """Or else the request that runs would be taken for the one that was foreseen."""
    learned = made(parts, Clock())
    arrival = AgentCall("ann", "run", "solver", "run:solver")
    learned.arrived(arrival)
    assert not parts.advisories.expects("ann", "run:solver")
    learned.ended(arrival)
    assert parts.advisories.expects("ann", "run:solver")
    told = (await parts.node.told()).advisory
    assert told.probability == pytest.approx(
        0.6
    )  # the guess's own, not what this key's advisories were worth


async def test_what_somebody_announced_is_left_as_it_is(parts: Parts) -> None:
    clock = Clock()
    learned = made(parts, clock)
    record = parts.advisories.submit(
        "ann", AdvisoryRequest(session_id="run:solver", expected_arrival_s=9.0), "rest"
    )
    call(learned, clock, "run", "solver")
    assert await sessions_told(parts, 1) == ["run:solver"]
    assert record.retracted is None and record.num_merged == 0


async def restarted(
    parts: Parts, file: Path, between: Callable[[], Awaitable[None]] | None = None
) -> Learned:
    """A second process's, after the first one has learned and saved."""
    clock = Clock()
    before = made(parts, clock, file)
    teach(before, clock)
    await before.save()
    if between is not None:
        await between()
    after = made(parts, Clock(), file)
    await after.load()
    return after


async def test_what_was_learned_is_known_after_a_restart(parts: Parts, tmp_path: Path) -> None:
    after = await restarted(parts, tmp_path / NAME)
    after.arrived(AgentCall("ann", "next", "planner", "next:planner"))
    assert parts.advisories.expects("ann", "next:coder")
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b'{"agents":1}\n{"name":', b'{"agents":99}\n'])
async def test_a_damaged_file_is_put_aside_and_learning_begins_anew(
    parts: Parts, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / NAME

    async def spoil() -> None:
        await asyncio.to_thread(file.write_bytes, damage)

    after = await restarted(parts, file, spoil)
    after.arrived(AgentCall("ann", "next", "planner", "next:planner"))
    assert not parts.advisories.expects("ann", "next:coder")
    assert "learning anew" in caplog.text
    assert not file.exists()
    assert file.with_name(f"{NAME}.damaged").read_bytes() == damage
    await after.save()
    again = made(parts, Clock(), file)
    await again.load()


async def test_where_nothing_was_learned_or_it_is_off_no_file_is_written(
    parts: Parts, tmp_path: Path
) -> None:
    clock = Clock()
    await made(parts, clock, tmp_path / NAME).save()
    switched_off = made(parts, clock, tmp_path / NAME, is_on=False)
    teach(switched_off, clock)
    await switched_off.save()
    assert not (tmp_path / NAME).exists()
    assert not parts.advisories.expects("ann", "run19:coder")


async def test_a_disk_that_fails_is_logged_and_tried_again(
    parts: Parts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file = tmp_path / "gone" / NAME
    learned = made(parts, clock, file)
    teach(learned, clock)
    await learned.save()
    assert "could not be stored" in caplog.text
    file.parent.mkdir()
    await learned.save()
    assert file.exists()
