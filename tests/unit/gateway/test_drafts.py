"""Computing ahead after a pause in typing, and conversations that the model names once nothing else wants the engine."""

from typing import Any

import pytest

from engine_bridge.protocol.engine_request import EngineRequest
from gateway.advisories.drafts import PAUSE_S, whole_words
from gateway.sessions import SessionStore
from gateway.settings.priorities import MAX_PRIORITY
from gateway.turns.titles import MAX_TOKENS, QUESTION, Titles, title_of

from .parts import Parts, passes, settled, until


def said(request: EngineRequest) -> list[str]:
    return [message.content for message in request.messages]


async def paused(parts: Parts) -> None:
    """Nothing is typed for long enough; then the store is asked what the session holds, which answers one question after the other."""
    await settled()
    await passes(PAUSE_S + 0.01)
    await parts.store.list_sessions("ann")
    await settled()


@pytest.mark.parametrize(
    ("typed", "computed"),
    [("What is th", "What is"), ("What is ", "What is"), ("What", ""), ("", ""), ("a\nb c", "a\nb")],
)
def test_the_word_that_is_being_typed_is_left_out(typed: str, computed: str) -> None:
    assert whole_words(typed) == computed


@pytest.mark.virtual_time
async def test_a_draft_is_computed_after_a_pause_and_what_is_typed_meanwhile_comes_next(parts: Parts) -> None:
    parts.node.gate.clear()
    parts.drafts.update("ann", "s", "shout", "What ")
    await settled()
    await parts.store.list_sessions("ann")
    await passes(PAUSE_S / 2)
    assert not parts.node.prefills
    await paused(parts)
    parts.drafts.update("ann", "s", "shout", "What is ")
    parts.drafts.update("ann", "s", "shout", "What is the ")
    parts.node.gate.set()
    await paused(parts)
    assert [said(request) for request in parts.node.prefills] == [["What"], ["What is the"]]
    named = {(request.tenant, request.session_id, request.adapter) for request in parts.node.prefills}
    assert named == {("ann", "s", "shout")}
    assert parts.count("overture_computed_ahead_tokens_total", what="draft") == 32


@pytest.mark.virtual_time
async def test_a_history_to_be_computed_waits_for_the_answer_and_tells_its_end(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes.")
    second = await parts.ask("b", "Why?", session_id=turn.session_id)
    answer = await parts.node.asked(1)
    done: list[bool] = []
    parts.drafts.warm_history("ann", turn.session_id, "shout", lambda: done.append(True))
    await paused(parts)
    assert not parts.node.prefills and not done
    answer.finish("So.")
    await parts.follow(second).over()
    await until(lambda: done)
    (request,) = parts.node.prefills
    assert said(request) == ["Hello!", "Yes.", "Why?", "So.", ""]


SAID = "Where is Dalvek?"


class Named(Parts):
    """The parts of a gateway with titles by the model."""

    def __init__(self, store: SessionStore) -> None:
        super().__init__(store)
        self.told: list[str] = []
        self.titles = Titles(self.node, store, lambda owner, name: self.told.append(name), is_on=True)
        self.turns.on_first_answer = self.titles.first_answer

    async def title(self, session_id: str) -> str | None:
        return (await self.store.get_session("ann", session_id)).title


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
    assert said(asked.request) == [SAID, "In the north.", QUESTION]
    assert asked.request.sampling.max_tokens == MAX_TOKENS <= 12
    assert asked.request.priority == MAX_PRIORITY and asked.request.session_id == ""
    asked.finish('"The city', ' of Dalvek"\nIt is ')
    await until(lambda: named.told)
    assert await named.title(turn.session_id) == "The city of Dalvek"
    assert named.told == [turn.session_id], "told once"
    await named.answered("b", "Yes.", content="Is it far?", session_id=turn.session_id)
    await settled()
    assert len(named.node.answers) == 3, "later answers ask for no title"


async def test_without_a_usable_title_the_first_words_stay(named: Named) -> None:
    ends = (lambda asked: asked.finish(" \n ** \n"), lambda asked: asked.fail(RuntimeError("boom")))
    for number, end in enumerate(ends):
        turn = await named.answered(f"a{number}", "In the north.", content=SAID)
        end(await named.node.asked(2 * number + 1))
        await settled(200)
        assert await named.title(turn.session_id) == SAID and len(named.node.answers) == 2 * number + 2


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
