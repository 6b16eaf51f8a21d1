"""Computing ahead: after a pause, the newest words, a few at a time, and not a moment longer than they are wanted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest
from engine_bridge.protocol.request_context import RequestContext
from gateway.advisories.drafts import MAX_ACTIVE, MAX_ACTIVE_OF_ONE, PAUSE_S, whole_words
from gateway.sessions import SessionStore

from .fake_node import FakeNode
from .parts import Parts, passes, settled


def texts(node: FakeNode) -> list[str]:
    return [request.messages[-1].content for request in node.prefills]


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


async def test_a_draft_is_computed_after_a_pause_and_not_before(parts: Parts) -> None:
    parts.drafts.update("ann", "s", "shout", "What is the capital of ")
    await settled()
    await parts.store.list_sessions("ann")
    await passes(PAUSE_S / 2)
    assert not parts.node.prefills
    await paused(parts)
    (request,) = parts.node.prefills
    assert texts(parts.node) == ["What is the capital of"]
    assert request.context == RequestContext(tenant="ann", session_id="s", adapter="shout")


async def test_only_the_newest_words_are_computed(parts: Parts) -> None:
    for text in ("What ", "What is ", "What is the "):
        parts.drafts.update("ann", "s", None, text)
        await passes(PAUSE_S / 3)
    await paused(parts)
    assert texts(parts.node) == ["What is the"]


async def test_words_typed_while_the_node_computes_come_next(parts: Parts) -> None:
    parts.node.gate.clear()
    parts.drafts.update("ann", "s", None, "What ")
    await paused(parts)
    parts.drafts.update("ann", "s", None, "What is ")
    parts.drafts.update("ann", "s", None, "What is the ")
    parts.node.gate.set()
    await paused(parts)
    assert texts(parts.node) == ["What", "What is the"]
    assert parts.count("overture_computed_ahead_tokens_total", what="draft") == 32


async def test_the_same_words_are_computed_once(parts: Parts) -> None:
    for typed in ("What is ", "What is th", "What is the"):
        parts.drafts.update("ann", "s", None, typed)
        await paused(parts)
    assert texts(parts.node) == ["What is"]


async def test_a_draft_follows_the_sessions_history(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes.")
    parts.drafts.update("ann", turn.session_id, None, "And what is ")
    await paused(parts)
    (request,) = parts.node.prefills
    assert [m.content for m in request.messages] == ["Hello!", "Yes.", "And what is"]
    assert request.history_token_ids


@pytest.mark.parametrize("is_stopped", [False, True], ids=["answered", "stopped"])
async def test_what_is_typed_while_an_answer_is_written_is_computed_behind_that_answer(
    parts: Parts, is_stopped: bool
) -> None:
    turn = await parts.answered("a", "Yes.")
    parts.node.prefills.clear()
    second = await parts.ask("b", "Why?", session_id=turn.session_id)
    answer = await parts.node.asked(1)
    answer.say("Because")
    listener = parts.follow(second)
    await listener.has("Because")
    for text in ("And what ", "And what is "):
        parts.drafts.update("ann", turn.session_id, None, text)
        await paused(parts)
    assert not parts.node.prefills, "what comes behind an unfinished answer is not known"
    if is_stopped:
        await parts.turns.stop("ann", "b")
    else:
        answer.finish(" it is.")
    await listener.over()
    await paused(parts)
    (request,) = parts.node.prefills
    said = "Because" if is_stopped else "Because it is."
    assert [m.content for m in request.messages] == ["Hello!", "Yes.", "Why?", said, "And what is"]


async def test_what_is_typed_beside_an_edited_question_is_computed_behind_its_new_answer(
    parts: Parts,
) -> None:
    turn = await parts.answered("a", "Yes.")
    await parts.answered("b", "No.", content="Why?", session_id=turn.session_id)
    edited = await parts.ask("c", "Why not?", session_id=turn.session_id, after="a")
    answer = await parts.node.asked(2)
    parts.drafts.update("ann", turn.session_id, None, "And what ")
    await paused(parts)
    answer.finish("So.")
    await parts.follow(edited).over()
    await paused(parts)
    (request,) = parts.node.prefills
    assert [m.content for m in request.messages] == ["Hello!", "Yes.", "Why not?", "So.", "And what"]


async def test_an_answer_that_fails_leaves_the_draft_behind_what_is_shown(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes.")
    failing = await parts.ask("b", "Why?", session_id=turn.session_id)
    answer = await parts.node.asked(1)
    parts.drafts.update("ann", turn.session_id, None, "And what ")
    await paused(parts)
    answer.fail(EngineUnavailable("It is being rebuilt."))
    await parts.follow(failing).over()
    await paused(parts)
    (request,) = parts.node.prefills
    assert [m.content for m in request.messages] == ["Hello!", "Yes.", "And what"]


async def test_a_turn_that_comes_over_an_api_renews_the_draft_that_is_being_computed(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes.")
    parts.node.gate.clear()
    parts.drafts.update("ann", turn.session_id, None, "And what ")
    await paused(parts)
    await parts.store.record_turn(
        "ann", turn.session_id, "b", "Why?", answer="So.", status="done", now=2e9, makes_session=True
    )
    parts.drafts.renew("ann", turn.session_id)
    parts.drafts.renew("ann", "never heard of")
    await paused(parts)
    assert parts.node.cancelled_prefills == 1
    assert [m.content for m in parts.node.prefills[-1].messages] == [
        "Hello!",
        "Yes.",
        "Why?",
        "So.",
        "And what",
    ]


async def test_a_history_that_is_to_be_computed_waits_for_the_answer_and_tells_when_all_is_there(
    parts: Parts,
) -> None:
    turn = await parts.answered("a", "Yes.")
    second = await parts.ask("b", "Why?", session_id=turn.session_id)
    answer = await parts.node.asked(1)
    done = asyncio.Event()
    parts.drafts.warm_history("ann", turn.session_id, "shout", done.set)
    await paused(parts)
    assert not parts.node.prefills and not done.is_set()
    answer.finish("So.")
    await parts.follow(second).over()
    async with asyncio.timeout(10):
        await done.wait()
    (request,) = parts.node.prefills
    assert [m.content for m in request.messages] == ["Hello!", "Yes.", "Why?", "So.", ""]


async def test_another_adapter_begins_anew(parts: Parts) -> None:
    parts.node.gate.clear()
    parts.drafts.update("ann", "s", None, "What ")
    await paused(parts)
    parts.drafts.update("ann", "s", "shout", "What ")
    await paused(parts)
    assert [request.context.adapter for request in parts.node.prefills] == ["", "shout"]
    assert parts.node.cancelled_prefills == 1


async def test_the_question_ends_its_draft(parts: Parts) -> None:
    turn = await parts.answered("a", "Yes.")
    parts.node.gate.clear()
    parts.drafts.update("ann", turn.session_id, None, "And what ")
    await paused(parts)
    await parts.ask("b", "And what now?", session_id=turn.session_id)
    await parts.node.until(lambda: parts.node.cancelled_prefills == 1)


async def test_a_draft_that_is_stopped_in_its_pause_is_never_computed(parts: Parts) -> None:
    parts.drafts.update("ann", "s", None, "What ")
    parts.drafts.stop("ann", "s")
    parts.drafts.stop("ann", "never heard of")
    await paused(parts)
    assert not parts.node.prefills


async def test_a_key_has_a_few_drafts_and_the_oldest_makes_room(parts: Parts) -> None:
    parts.node.gate.clear()
    for number in range(MAX_ACTIVE_OF_ONE + 1):
        parts.drafts.update("ann", f"s{number}", None, f"draft {number} ")
        await paused(parts)
    assert len(parts.node.prefills) == MAX_ACTIVE_OF_ONE + 1
    assert parts.node.cancelled_prefills == 1
    parts.drafts.stop("ann", "s0")
    await settled()
    assert parts.node.cancelled_prefills == 1, "it was the oldest that had gone"


async def test_all_keys_together_have_a_bound_as_well(parts: Parts) -> None:
    parts.node.gate.clear()
    for number in range(MAX_ACTIVE + 1):
        parts.drafts.update(f"owner-{number}", "s", None, "draft of mine ")
    await paused(parts)
    assert len(parts.node.prefills) == MAX_ACTIVE
    assert {request.context.tenant for request in parts.node.prefills} == {
        f"owner-{number}" for number in range(1, MAX_ACTIVE + 1)
    }


async def test_without_the_operators_leave_drafts_are_not_read_and_histories_are_computed(
    store: SessionStore, tmp_path: Path
) -> None:
    parts = Parts(store, accepts_drafts=False)
    turn = await parts.answered("a", "Yes.")
    parts.drafts.update("ann", turn.session_id, None, "And what ")
    await paused(parts)
    assert not parts.node.prefills
    done = asyncio.Event()
    parts.drafts.warm_history("ann", turn.session_id, "shout", done.set)
    async with asyncio.timeout(10):
        await done.wait()
    assert [m.content for m in parts.node.prefills[0].messages] == ["Hello!", "Yes.", ""]
    await parts.close()


async def test_a_history_that_is_not_there_is_nothing_to_compute_and_nobody_is_told(parts: Parts) -> None:
    told: list[None] = []
    parts.drafts.warm_history("ann", "nowhere", None, lambda: told.append(None))
    await paused(parts)
    assert not parts.node.prefills and not told


async def test_a_history_is_not_computed_beside_a_draft(parts: Parts) -> None:
    parts.drafts.update("ann", "s", None, "What ")
    parts.drafts.warm_history("ann", "s", None, lambda: None)
    await paused(parts)
    assert texts(parts.node) == ["What"]


@pytest.mark.parametrize(
    "error", [EngineUnavailable("It is being rebuilt."), InvalidRequest("Too long.", code="prompt_too_long")]
)
async def test_what_the_node_refuses_ends_the_draft_and_the_next_word_begins_a_new_one(
    parts: Parts, error: EngineUnavailable | InvalidRequest
) -> None:
    parts.node.prefill_error = error
    parts.drafts.update("ann", "s", None, "What ")
    await paused(parts)
    assert texts(parts.node) == ["What"]
    parts.node.prefill_error = None
    parts.drafts.update("ann", "s", None, "What is ")
    await paused(parts)
    assert texts(parts.node) == ["What", "What is"]


async def test_a_draft_that_nobody_goes_on_with_is_let_go(parts: Parts) -> None:
    parts.drafts.update("ann", "s", None, "What ")
    await paused(parts)
    await passes(61)
    parts.drafts.warm_history("ann", "s", None, lambda: None)  # finds no draft in its way
    assert parts.drafts._work[("ann", "s")].text is None


async def test_closing_ends_all_of_it(parts: Parts) -> None:
    parts.node.gate.clear()
    for number in range(3):
        parts.drafts.update("ann", f"s{number}", None, "What ")
    await paused(parts)
    await parts.drafts.close()
    assert parts.node.cancelled_prefills == 3
