"""Turns: stored before said, answered once, resumed without loss or repetition, and ended whatever breaks."""

import asyncio
from typing import Any

import pytest

from engine_bridge.protocol.engine_request import ChatMessage
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable, InvalidRequest, NotSupported
from gateway.errors import GatewayError
from gateway.turns.live_turn import AnswerPiece
from gateway.turns.turns import KEEP_UNFOLLOWED_S

from .fake_node import PATIENCE_S
from .parts import NOW, Parts, passes, refused, until


async def stored(parts: Parts, session_id: str, owner: str = "ann") -> list[tuple[str, str, str]]:
    session = await parts.store.get_session(owner, session_id)
    return [(turn.id, turn.status, turn.answer) for turn in session.turns]


class BrokenEnds:
    """The store on a disk that is full whenever the end of a turn is to be written, `num_failures` times."""

    def __init__(self, parts: Parts, num_failures: int) -> None:
        self.num_failures, self.has_stored = num_failures, asyncio.Event()
        self._finish = parts.store.finish_turn
        parts.store.finish_turn = self  # type: ignore[method-assign, assignment]

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise GatewayError("overloaded", "The server's disk is full; nothing was stored.")
        turn = await self._finish(*args, **kwargs)
        self.has_stored.set()
        return turn


async def test_an_answer_that_was_cut_goes_on_and_keeps_what_it_had(parts: Parts) -> None:
    """Only the last one, only where there is something to go on from, and whatever then fails."""
    turn = await parts.answered("a", "one ", reason="length")
    done = await parts.ask("a", session_id=turn.session_id)
    assert done.is_over and len(parts.node.answers) == 1, "the same message again is no wish to go on"
    again = await parts.ask("a", session_id=turn.session_id, continues=True)
    answer = await parts.node.asked(1)
    assert answer.request.goes_on and answer.request.messages[-1] == ChatMessage("assistant", "one ")
    assert again.base_seq >= turn.seq and again.whole.text == "one ", "sockets get it from its beginning"
    assert await stored(parts, turn.session_id) == [("a", "running", "one ")]
    answer.say("two")
    answer.fail(RuntimeError("the engine is gone"))
    await until(lambda: again.is_over)
    assert await stored(parts, turn.session_id) == [("a", "done", "one two")]
    assert again.error is not None and again.error.code == "internal", "those who follow it are told"
    third = await parts.ask("a", session_id=turn.session_id, continues=True)
    assert (await parts.node.asked(2)).request.messages[-1] == ChatMessage("assistant", "one two")
    (await parts.node.asked(2)).finish("three")
    await until(lambda: third.is_over)
    assert await stored(parts, turn.session_id) == [("a", "done", "one twothree")]
    ended = await parts.answered("b", "whole", session_id=turn.session_id)
    assert (await parts.ask("b", session_id=turn.session_id, continues=True)).whole == ended.whole
    cut = await parts.answered("c", "cut", session_id=turn.session_id, reason="length")
    await parts.answered("d", "later", session_id=turn.session_id)
    error = await refused(parts.ask("c", session_id=turn.session_id, continues=True))
    assert (error.code, error.param, cut.is_over) == ("bad_request", "continues", True)


async def test_pieces_of_a_try_that_a_server_had_before_it_was_started_anew_are_none_of_the_next(
    parts: Parts,
) -> None:
    """A second window asks a failed message again; the first one comes back with what it saw."""
    turn = await parts.ask("a")
    first = await parts.node.asked()
    first.say("Once", " upon")
    first.fail(EngineUnavailable("The server went down."))
    await until(lambda: turn.is_over)
    anew = Parts(parts.store)
    again = await anew.ask("a", session_id=turn.session_id)
    (await anew.node.asked()).finish(*["Twice"] * 100)
    await until(lambda: again.is_over)
    assert not any(again.can_resume(seq) for seq in range(1, 1000)), (
        "an engine gives fewer than one a millisecond"
    )
    assert again.can_resume(again.seq) and again.base_seq == 1000 * NOW
    await anew.close()


async def test_an_answer_that_went_on_has_the_figures_of_both_parts(parts: Parts) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 2, "left_out_messages": 6}
    end = {"answer": "one ", "finish_reason": "length", "usage": usage}
    await parts.store.record_turn("ann", "s", "a", "Hello!", makes_session=True, now=0.0, **end)
    turn = await parts.ask("a", session_id="s", continues=True)
    (await parts.node.asked(0)).finish("two")
    await until(lambda: turn.is_over)
    (stored_turn,) = (await parts.store.get_session("ann", "s")).turns
    assert stored_turn.usage == usage | {"completion_tokens": 5, "cached_tokens": 0}


async def test_a_message_is_on_disk_before_it_is_accepted_and_its_answer_before_done(parts: Parts) -> None:
    class Broken:
        def wake(self, turn: Any) -> None:
            raise RuntimeError("a socket whose loop is closed keeps no other from the answer")

    turn = await parts.ask("a")
    assert await stored(parts, turn.session_id) == [("a", "running", "")]
    parts.turns.follow(turn, Broken())
    listener = parts.follow(turn)
    (await parts.node.asked()).finish("Good ", "day.")
    await listener.over()
    assert await stored(parts, turn.session_id) == [("a", "done", "Good day.")]
    assert listener.text == "Good day." and turn.error is None
    assert turn.done is not None and turn.done["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("state", "fields", "code", "is_retryable"),
    [
        ("starting", {}, "starting", True),
        ("rebuilding", {}, "engine_failed", True),
        ("draining", {}, "draining", True),
        ("closed", {}, "draining", True),
        ("failed", {}, "engine_failed", False),
        ("ready", {"adapter": "nobody"}, "unknown_model", False),
        ("ready", {"session_id": "nowhere"}, "not_found", False),
        ("ready", {"after": "no such turn"}, "not_found", False),
    ],
)
async def test_a_message_that_is_refused_leaves_no_session_behind(
    parts: Parts, state: Any, fields: dict[str, Any], code: str, is_retryable: bool
) -> None:
    parts.node.state = state
    error = await refused(parts.ask("a", **fields))
    assert (error.code, error.retryable) == (code, is_retryable)
    assert (await parts.store.list_sessions("ann"))[0] == []
    assert not parts.node.answers and parts.turns.find("ann", "a") is None


async def test_asking_goes_on_when_the_one_who_asked_is_gone(parts: Parts) -> None:
    asking = asyncio.ensure_future(parts.ask("a"))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    answer = await parts.node.asked()
    turn = parts.turns.find("ann", "a")
    assert turn is not None
    answer.finish("Yes.")
    await parts.follow(turn).over()
    assert await stored(parts, turn.session_id) == [("a", "done", "Yes.")]


@pytest.mark.virtual_time
async def test_a_turn_that_nobody_follows_for_half_a_minute_is_stopped_and_kept(parts: Parts) -> None:
    turn = await parts.ask("a")
    answer = await parts.node.asked()
    listener = parts.follow(turn)
    answer.say("Once upon")
    await listener.has("Once upon")
    parts.turns.unfollow(turn, listener)
    await passes(KEEP_UNFOLLOWED_S - 1)
    assert not answer.is_cancelled
    await passes(2)
    assert answer.is_cancelled
    await parts.follow(turn).over()
    assert await stored(parts, turn.session_id) == [("a", "stopped", "Once upon")]


async def test_reasoning_is_kept_beside_the_answer_and_no_later_turn_reads_it(parts: Parts) -> None:
    turn = await parts.ask("a", "What is two and two?")
    answer = await parts.node.asked()
    answer.think("Let me", " see.")
    answer.finish("It is", " four.")
    await parts.follow(turn).over()
    (known,) = (await parts.store.get_session("ann", turn.session_id)).turns
    assert (known.answer, known.reasoning) == ("It is four.", "Let me see.")
    assert turn.after(1) == AnswerPiece("It is four.", " see."), (
        "who has seen the first piece goes on from there"
    )
    await parts.ask("b", "And three?", session_id=turn.session_id)
    said = [message.content for message in (await parts.node.asked(1)).request.messages]
    assert said == ["What is two and two?", "It is four.", "And three?"]


@pytest.mark.virtual_time
async def test_a_drain_waits_for_answers_and_stops_what_does_not_end(parts: Parts) -> None:
    quick, endless = await parts.ask("a"), await parts.ask("b")
    (await parts.node.asked(0)).finish("Yes.")
    (await parts.node.asked(1)).say("For ever")
    draining = asyncio.ensure_future(parts.turns.drain(60.0))
    await parts.follow(quick).over()
    assert not draining.done() and not endless.is_over
    await passes(61)
    await draining
    assert await stored(parts, quick.session_id) == [("a", "done", "Yes.")]
    assert await stored(parts, endless.session_id) == [("b", "stopped", "For ever")]


@pytest.mark.parametrize(
    ("error", "code", "is_retryable"),
    [
        (EngineUnavailable("The engine is being rebuilt."), "engine_failed", True),
        (EngineUnavailable("Going down.", code="draining"), "draining", True),
        (InvalidRequest("Too long.", code="prompt_too_long"), "prompt_too_long", False),
        (InvalidRequest("A code nobody knows.", code="made_up"), "bad_request", False),
        (NotSupported("Not here."), "bad_request", False),
        (BridgeError("Something else."), "bad_request", False),
        (ZeroDivisionError("a bug"), "internal", False),
    ],
)
async def test_an_engine_that_fails_in_the_middle_ends_the_turn_and_keeps_its_words(
    parts: Parts, error: Exception, code: str, is_retryable: bool
) -> None:
    turn = await parts.ask("a")
    answer = await parts.node.asked()
    answer.say("Once", " upon")
    answer.fail(error)
    listener = parts.follow(turn)
    await listener.over()
    assert turn.error is not None and (turn.error.code, turn.error.retryable) == (code, is_retryable)
    assert listener.text == "Once upon"
    assert await stored(parts, turn.session_id) == [("a", "failed", "Once upon")]
    assert "bug" not in turn.error.message
    assert parts.count("overture_turns_total", outcome=code) == 1
    assert parts.count("overture_turns_running") == 0


@pytest.mark.virtual_time
async def test_an_end_that_cannot_be_stored_is_an_error_and_mended_later(parts: Parts) -> None:
    turn = await parts.ask("a")
    disk = BrokenEnds(parts, num_failures=3)
    (await parts.node.asked()).finish("Yes.")
    await parts.follow(turn).over()
    assert turn.done is None and turn.error is not None and turn.error.code == "overloaded"
    assert await stored(parts, turn.session_id) == [("a", "running", "")]
    assert (await refused(parts.ask("b", session_id=turn.session_id))).code == "busy"
    assert (await refused(parts.ask("a"))).code == "overloaded", "until it is mended it cannot be asked again"
    await until(disk.has_stored.is_set, 1.0)
    assert await stored(parts, turn.session_id) == [("a", "failed", "Yes.")]
    await parts.answered("a", "Yes, again.")
    assert await stored(parts, turn.session_id) == [("a", "done", "Yes, again.")]
    disk.num_failures = 1_000_000
    await parts.answered("b", session_id=turn.session_id)
    async with asyncio.timeout(PATIENCE_S):
        await parts.turns.drain(1.0)  # which does not wait for a disk that stays full


async def test_a_question_that_fails_ends_its_turn(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(conversation: Any) -> Any:
        raise RecursionError("too deep")

    monkeypatch.setattr("gateway.turns.turns.read_conversation", fails)
    turn = await parts.follow(await parts.ask("a")).over()
    assert turn.error is not None and turn.error.code == "internal"
    assert await stored(parts, turn.session_id) == [("a", "failed", "")]
