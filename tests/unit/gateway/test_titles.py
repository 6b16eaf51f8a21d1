"""Conversations that the model names, once nothing else wants the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine_bridge.protocol.node import SchedulingStats
from gateway.sessions import SessionStore
from gateway.settings.config import Config
from gateway.settings.priorities import MAX_PRIORITY
from gateway.turns.titles import MAX_TOKENS, QUESTION, Titles, title_of

from .parts import Parts, passes, settled

SAID = "Where is Dalvek?"


def stats(num_running: int, num_waiting: int = 0) -> SchedulingStats:
    figures: dict[str, Any] = {"num_by_reason": {}, "lanes": None, "counts": {}, "seconds": {}}
    return SchedulingStats(
        policy="bounded", num_running=num_running, num_waiting=num_waiting, length_errors=None, **figures
    )


class Named(Parts):
    """The parts of a gateway with titles by the model."""

    def __init__(self, store: SessionStore) -> None:
        super().__init__(store)
        self.told: list[str] = []
        self.titles = Titles(
            self.node, store, lambda owner, session_id: self.told.append(session_id), is_on=True
        )
        self.turns.on_first_answer = self.titles.first_answer

    async def title(self, session_id: str) -> str | None:
        return (await self.store.get_session("ann", session_id)).title

    async def becomes(self, session_id: str, title: str) -> None:
        async with asyncio.timeout(10):
            while await self.title(session_id) != title or session_id not in self.told:
                await asyncio.sleep(0)


@pytest.fixture
async def named(store: SessionStore) -> Any:
    parts = Named(store)
    yield parts
    await parts.titles.close()
    await parts.close()


async def test_the_first_answer_is_followed_by_a_question_for_the_title(named: Named) -> None:
    turn = await named.answered("a", "In the north.", content=SAID)
    assert await named.title(turn.session_id) == SAID
    asked = await named.node.asked(1)
    assert [message.content for message in asked.request.messages] == [SAID, "In the north.", QUESTION]
    assert asked.request.sampling.max_tokens == MAX_TOKENS <= 12
    assert asked.request.context.priority == MAX_PRIORITY and asked.request.context.session_id == ""
    asked.finish('"The city', ' of Dalvek"\nIt is ')
    await named.becomes(turn.session_id, "The city of Dalvek")
    assert named.told == [turn.session_id], "told once"
    await named.answered("b", "Yes.", content="Is it far?", session_id=turn.session_id)
    await settled()
    assert len(named.node.answers) == 3, "later answers ask for no title"


async def test_it_waits_for_an_idle_engine_and_gives_way_to_whatever_comes(named: Named) -> None:
    named.node.scheduling = stats(0, num_waiting=1)
    turn = await named.answered("a", "In the north.", content=SAID)
    await passes(30.0)
    assert len(named.node.answers) == 1, "something waits"
    named.node.scheduling = stats(0)
    await passes(1.0)
    first = await named.node.asked(1)
    first.say("The")
    await settled()
    named.node.scheduling = stats(2)
    first.say(" city")
    await settled()
    assert first.is_closed and await named.title(turn.session_id) == SAID
    await passes(30.0)
    assert len(named.node.answers) == 2
    named.node.scheduling = stats(0)
    await passes(1.0)
    (await named.node.asked(2)).finish("The city")
    await named.becomes(turn.session_id, "The city")


async def test_what_a_person_has_named_keeps_its_name(named: Named) -> None:
    turn = await named.answered("a", "In the north.", content=SAID)
    asked = await named.node.asked(1)
    await named.store.patch("ann", turn.session_id, title="Mine", now=2.0)
    asked.finish("Not yours")
    await settled(200)
    assert await named.title(turn.session_id) == "Mine" and not named.told
    session = await named.store.create_session("ann", title="Named before", now=1.0)
    await named.answered("b", "In the north.", content=SAID, session_id=session.id)
    await settled()
    assert len(named.node.answers) == 3, "it is not even asked for"


@pytest.mark.parametrize("ending", ["nothing", "failure"])
async def test_without_a_usable_title_the_first_words_stay(named: Named, ending: str) -> None:
    turn = await named.answered("a", "In the north.", content=SAID)
    asked = await named.node.asked(1)
    if ending == "nothing":
        asked.finish(" \n ** \n")
    else:
        asked.fail(RuntimeError("boom"))
    await settled(200)
    assert await named.title(turn.session_id) == SAID and len(named.node.answers) == 2


@pytest.mark.parametrize(
    ("answer", "is_cut", "title"),
    [
        ("The city of Dalvek", False, "The city of Dalvek"),
        ('\n\n  "The **city**"  \nand more', False, "The city"),
        ("**Title: The city.**", False, "The city"),
        ("# The city of Dal", True, "The city of"),
        ("The city\nand how to", True, "The city"),
        ("Dal", True, None),
        ("", True, None),
        (" \n--\n", False, None),
        ("x" * 500, False, "x" * 59 + "…"),
        ("word " * 100, False, ("word " * 12).strip() + "…"),
        ("What is C++?", False, "What is C++?"),
    ],
)
def test_a_title_is_one_short_line_of_the_answer(answer: str, is_cut: bool, title: str | None) -> None:
    assert title_of(answer, is_cut=is_cut) == title


def test_the_demo_model_is_too_small_to_name_conversations(tmp_path: Path) -> None:
    assert Config(data_dir=tmp_path).titles == "first-words"
    assert Config(data_dir=tmp_path, titles="model").titles == "model"
    assert Config(data_dir=tmp_path, model="owner/name").titles == "model"
