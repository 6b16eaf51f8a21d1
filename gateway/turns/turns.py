"""Turns of the chat socket, from an accepted message to an answer on disk, independent of who is listening.

A turn belongs to no socket: sockets follow it, leave it and come back. Its text is held once, as the pieces the engine gave, and every
follower keeps only how many of them it has sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from msgspec import UnsetType, structs, to_builtins
from opentelemetry.trace import StatusCode

from engine_bridge.predict.hints import read_conversation
from engine_bridge.protocol.engine_request import ANONYMOUS, ChatMessage, EngineRequest, Sampling
from engine_bridge.protocol.errors import (
    BridgeError,
)
from engine_bridge.protocol.node import Delta, Node, followed_by, seen_pictures, unpack_token_ids
from engine_bridge.tracing import NO_TRACES, Traces, traceparent_of
from gateway.access.auth import tenant_of
from gateway.access.budgets import RequestBudgets
from gateway.advisories.advisories import Advisories
from gateway.advisories.drafts import Drafts
from gateway.errors import GatewayError, as_gateway_error
from gateway.metrics.metrics import Metrics
from gateway.nodes.adapter_names import known_adapter
from gateway.people.usage import Usage, spent_by_turn
from gateway.sessions import (
    BeginResult,
    FinishResult,
    SessionStore,
    Turn,
    TurnStatus,
    clean_text,
    messages_of,
    question_of,
)
from gateway.tools.toolbox import Toolbox
from gateway.turns.answer_rounds import AnswerRounds
from gateway.turns.failures import from_bridge, unavailable
from gateway.turns.live_turn import AnswerPiece, Follower, LiveTurn
from gateway.turns.protocol import Allow, Message

log = logging.getLogger(__name__)

KEEP_FINISHED_S = 120.0  # docs/protocol.md, rule 4
KEEP_UNFOLLOWED_S = 30.0  # docs/protocol.md, rule 4
# Chosen: how long to wait between tries to store the end of an answer on a disk that is full or locked.
STORE_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Turns:
    """Starts turns, keeps the live ones and ends them.

    Args:
        node: answers.
        store: keeps the sessions.
        metrics: counts turns.
        drafts: is told when a session has a turn.
        advisories: gives the outcome of a session's advisory.
        now: wall clock in seconds, for times that are stored.
        prompt_chars: returns the length of the longest prompt that is accepted, in characters.
        keeps_questions: whether a user's own length predictor reads the question.
        home_of: returns the node that has the KV of a tenant's session, "" where that is not known.
        traces: where the span of each turn goes.
        toolbox: the MCP servers whose tools answers may use; None: there are none.
    """

    def __init__(
        self,
        node: Node,
        store: SessionStore,
        metrics: Metrics,
        drafts: Drafts,
        advisories: Advisories,
        now: Callable[[], float] = time.time,
        prompt_chars: Callable[[], int] = lambda: sys.maxsize,
        keeps_questions: bool = False,
        home_of: Callable[[str, str], str] = lambda tenant, session_id: "",
        traces: Traces = NO_TRACES,
        toolbox: Toolbox | None = None,
    ) -> None:
        self._node = node
        self._store = store
        self._metrics = metrics
        self._drafts = drafts
        self._advisories = advisories
        self._now = now
        self._prompt_chars = prompt_chars
        self._keeps_questions = keeps_questions
        self._home_of = home_of
        self._traces = traces
        self.toolbox = toolbox or Toolbox({}, metrics)
        self._rounds = AnswerRounds(node, store, self.toolbox, advisories, now)
        self.budgets: RequestBudgets | None = None
        """Counts turns among the requests of their owner; None: there is no bound."""
        self.usage: Usage | None = None
        """Counts what turns use, and refuses turns to people who have used all tokens of the day; None: nothing is counted."""
        self.on_first_answer: Callable[[str, str, str | None, list[ChatMessage]], None] | None = None
        """Called for each conversation that was answered for the first time, with its owner, id, title and messages."""
        self._live: dict[tuple[str, str], LiveTurn] = {}
        self._asking: dict[tuple[str, str], asyncio.Task[LiveTurn]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._repairs: set[asyncio.Task[None]] = set()  # not waited for when the server goes down

    # -- for sockets -------------------------------------------------------------------------------------------------

    async def ask(self, owner: str, message: Message, request: EngineRequest = ANONYMOUS) -> LiveTurn:
        """Store a message and start its turn, or find the turn that it repeats.

        A caller that is cancelled does not end this: a stored turn that does not run would keep its session busy.

        Args:
            owner: the owner of the session.
            message: the message.
            request: its weight, priority and trace; the tenant, the session and the texts are added here.

        Raises:
            GatewayError: nothing was stored then.
        """
        key = (owner, message.id)
        # One after the other: a socket that comes back repeats its message while the first is still being stored.
        while (earlier := self._asking.get(key)) is not None:
            await asyncio.wait({earlier})
        asking = self._asking[key] = asyncio.create_task(self._ask(owner, message, request))
        asking.add_done_callback(lambda _: self._asking.pop(key, None))
        return await asyncio.shield(asking)

    def find(self, owner: str, turn_id: str) -> LiveTurn | None:
        """Return the live turn of this id; None if there is none."""
        return self._live.get((owner, turn_id))

    async def stop(self, owner: str, turn_id: str) -> bool:
        """End a turn that runs; its answer so far is kept. Returns False if it does not run."""
        live = self._live.get((owner, turn_id))
        if live is None or live.is_over:
            return False
        live.is_stopped.set()
        await self._node.cancel(live.request_id)
        return True

    def allow(self, owner: str, word: Allow) -> None:
        """Take what a person says to a tool. A call that is not asked about any more, because another page has answered, stays as it is."""
        live = self._live.get((owner, word.id))
        question = live.questions.get(word.call) if live is not None else None
        if question is not None and not question.done():
            question.set_result(word.answer)

    async def stop_session(self, owner: str, session_id: str) -> None:
        """End the turn that runs in a session (it is being deleted)."""
        for live in list(self._live.values()):
            if live.owner == owner and live.session_id == session_id:
                await self.stop(owner, live.id)

    async def stop_owner(self, owner: str) -> None:
        """End all turns of an owner (the key was withdrawn), also turns that are just being stored."""
        if asking := [task for (asker, _), task in self._asking.items() if asker == owner]:
            await asyncio.wait(asking)
        for live in list(self._live.values()):
            if live.owner == owner:
                await self.stop(owner, live.id)

    def is_busy(self, owner: str) -> bool:
        """Return whether a turn of this owner is being stored or runs."""
        is_asking = any(asker == owner for asker, _ in self._asking)
        return is_asking or any(live.owner == owner and not live.is_over for live in self._live.values())

    def follow(self, live: LiveTurn, follower: Follower) -> None:
        """Wake a socket whenever the turn has more to send."""
        live.followers.add(follower)
        if live.unfollowed is not None:
            live.unfollowed.cancel()
            live.unfollowed = None

    def unfollow(self, live: LiveTurn, follower: Follower) -> None:
        """Note that a socket left. A turn without followers is stopped after KEEP_UNFOLLOWED_S."""
        live.followers.discard(follower)
        self._watch_unfollowed(live)

    def _watch_unfollowed(self, live: LiveTurn) -> None:
        if not live.followers and not live.is_over and live.unfollowed is None:
            loop = asyncio.get_running_loop()
            live.unfollowed = loop.call_later(KEEP_UNFOLLOWED_S, self._stop_unfollowed, live)

    async def drain(self, timeout_s: float) -> None:
        """Wait for the running turns; after `timeout_s` stop them. All are stored when this returns."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for live in list(self._live.values()):
            await self.stop(live.owner, live.id)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)
        for repair in self._repairs:
            repair.cancel()

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _ask(self, owner: str, message: Message, request: EngineRequest) -> LiveTurn:
        earlier = self._live.get((owner, message.id))
        if (
            earlier is not None
            and message.session_id not in (None, earlier.session_id)
            and not earlier.is_over
        ):
            raise GatewayError("conflict", "This id is under way in another session.", param="id")
        # A failed turn is asked again; any other is followed where it stands, so that sockets that resume it find its pieces.
        if earlier is not None and earlier.error is None and message.session_id in (None, earlier.session_id):
            if not earlier.question.is_of(clean_text(message.content), message.pictures):
                raise GatewayError("conflict", "This id is already used for another message.", param="id")
            if not (message.continues and earlier.is_over):
                return earlier
        self._check_ready()
        # Before it is stored: what no model can read need not be kept.
        if len(message.content) > self._prompt_chars():
            raise GatewayError(
                "prompt_too_long",
                f"This message has {len(message.content):,} characters, which is more than the tokens that the model "
                f"reads can hold; at most {self._prompt_chars():,} are taken (max_prompt_chars). Shorten it.",
                param="content",
            )
        self._check_pictures(len(message.pictures))
        adapter = self.known_adapter(message.adapter)
        # Before anything is stored, so that a refused turn leaves nothing behind.
        with contextlib.ExitStack() as place:
            if self.usage is not None:
                self.usage.check(owner)
            if self.budgets is not None:
                self.budgets.ask(owner)
                place.enter_context(self.budgets.enter(owner))
            return await self._start(owner, message, adapter, earlier, request, place)

    def _check_pictures(self, num_pictures: int) -> None:
        most = self._node.max_images
        if num_pictures and not most:
            raise GatewayError(
                "bad_request", "This server's model reads no pictures. Send text only.", param="pictures"
            )
        if num_pictures > most:
            raise GatewayError(
                "bad_request",
                f"Pictures in this message: {num_pictures}; this server reads at most {most} at a time (max_images).",
                param="pictures",
            )

    async def _start(
        self,
        owner: str,
        message: Message,
        adapter: str | None | UnsetType,
        earlier: LiveTurn | None,
        request: EngineRequest,
        place: contextlib.ExitStack,
    ) -> LiveTurn:
        """Store a message and run its turn, which takes the `place` along; or find that it was answered before."""
        begun, session_id = await self._begin(owner, message, adapter)
        if begun.turn.status == "running" and not begun.is_new:
            raise GatewayError(
                "overloaded", "The end of this answer could not be stored yet. Try again in a moment."
            )
        self._drafts.stop(owner, session_id)
        live = LiveTurn(owner, session_id, begun.turn, begun.title)
        self._live[owner, message.id] = live
        if begun.outcome != "new":
            live.base_seq = earlier.seq if earlier is not None else self._unseen_seq()
        known = AnswerPiece(begun.turn.answer, begun.turn.reasoning, tuple(begun.turn.calls))
        live.pieces = [known] if any(known) else []
        if begun.is_new:
            running = place.pop_all()
            self._spawn(self._run(live, begun, message.sampling, request)).add_done_callback(
                lambda _: running.close()
            )
            self._watch_unfollowed(live)
        else:
            live.done = _done_fields(live, begun.turn)
            self._forget_later(live)
        return live

    def _unseen_seq(self) -> int:
        """Return a `seq` above any that a forgotten try at a turn can have had, also before the server was started anew.

        It is the milliseconds since the epoch: an engine gives fewer than one piece a millisecond, and all pieces of an earlier answer came before
        now.
        """
        return int(self._now() * 1000)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _begin(
        self, owner: str, message: Message, adapter: str | None | UnsetType
    ) -> tuple[BeginResult, str]:
        session_id: str | None = message.session_id or await self._store.find_turn(owner, message.id)
        is_made = session_id is None
        if session_id is None:
            session_id = (await self._store.create_session(owner, now=self._now())).id
        try:
            begun = await self._store.begin_turn(
                owner,
                session_id,
                message.id,
                message.content,
                adapter=adapter,
                after=message.after,
                pictures=message.pictures,
                continues=message.continues,
                now=self._now(),
            )
        except GatewayError:
            if is_made:
                await self._store.delete(owner, session_id, self._now())
            raise
        return begun, session_id

    def known_adapter(self, adapter: str | None | UnsetType) -> str | None | UnsetType:
        """See `gateway.nodes.adapter_names.known_adapter`."""
        return known_adapter(self._node, adapter)

    def _check_ready(self) -> None:
        progress = self._node.progress
        if progress.state != "ready":
            raise unavailable(progress.state, progress.stage)

    async def _run(
        self, live: LiveTurn, begun: BeginResult, sampling: Sampling, request: EngineRequest
    ) -> None:
        error: GatewayError | None = None
        messages: tuple[ChatMessage, ...] = ()
        named = {"gen_ai.request.model": begun.turn.adapter or "", "overture.request_id": live.request_id}
        tracing = self._traces.request("chat turn", request.traceparent, named, request.accepted_s)
        with self._metrics.turn_running(), tracing as span:
            try:
                request = structs.replace(request, traceparent=traceparent_of(span))
                turns = [*begun.history, begun.turn]
                turns, pictures = await self._store.pictures.latest(live.owner, turns, self._node.max_images)
                before = messages_of(
                    turns[:-1], begun.settings, pictures, keeps_calls=self._node.can_use_tools
                )
                messages = (*before, question_of(turns[-1], pictures))
                request = structs.replace(request, goes_on=begun.outcome == "continued")
                request = _request(
                    live, begun, messages, sampling, request, keeps_question=self._keeps_questions
                )
                await self._rounds.answer(live, request, begun.settings)
            except BridgeError as failure:
                error = from_bridge(failure)
            except GatewayError as failure:
                error = failure
            except Exception:
                log.exception("%s failed", live.request_id)
                error = GatewayError("internal", "Something went wrong on the server. Its log says what.")
            await self._finish(live, live.final, error)
            if live.error is not None:
                span.set_status(StatusCode.ERROR, live.error.code)
        if (
            live.done is not None
            and not begun.history
            and begun.outcome != "continued"
            and self.on_first_answer is not None
        ):
            answered = [*messages, ChatMessage("assistant", live.whole.text)]
            self.on_first_answer(live.owner, live.session_id, live.title, answered)

    async def _finish(self, live: LiveTurn, final: Delta | None, error: GatewayError | None) -> None:
        """Store how the turn ended, then tell: never the other way round."""
        if self.usage is not None:
            for earlier in live.earlier:
                if earlier is not final:
                    self.usage.add(live.owner, spent_by_turn(earlier, "", 0)._replace(num_requests=0))
            self.usage.add(live.owner, spent_by_turn(final, live.question.content, len(live.generated)))
        how = _how_ended(live, final, error)
        try:
            token_ids = _token_ids(live, final) if final and not error else b""
            home = self._home_of(tenant_of(live.owner), live.session_id)
            stored = await self._store_end(live, how, token_ids=token_ids, home=home)
        except Exception as failure:
            # Whatever it is, the turn ends for those who follow it, and its session takes another one once this is stored.
            if not isinstance(failure, GatewayError):
                log.exception("the end of %s could not be stored", live.request_id)
            stored, error = None, as_gateway_error(failure)
            self._repairs.add(repair := asyncio.create_task(self._store_failure(live)))
            repair.add_done_callback(self._repairs.discard)
        if error is None and stored is None:
            error = GatewayError("not_found", "The session was deleted while this answer was written.")
        if error is not None or stored is None:
            live.error = error
        else:
            live.title = stored.title
            live.done = _done_fields(live, stored.turn)
            outcome = self._advisories.take_outcome(live.owner, live.session_id)
            live.done["advisory"] = live.advisory if live.has_called else outcome
        self._drafts.renew(live.owner, live.session_id)
        self._metrics.turn_ended(live.error.code if live.error else how.status, final)
        live.wake_followers()
        self._forget_later(live)

    async def _store_end(
        self, live: LiveTurn, how: _Ended, token_ids: bytes = b"", home: str = ""
    ) -> FinishResult | None:
        whole = live.whole
        return await self._store.finish_turn(
            *(live.owner, live.session_id, live.id),
            **how._asdict(),
            answer=whole.text,
            reasoning=whole.reasoning,
            calls=whole.calls,
            token_ids=token_ids,
            home=home,
            now=self._now(),
        )

    async def _store_failure(self, live: LiveTurn) -> None:
        """Mark as failed a turn whose end could not be stored; until that succeeds its session takes no other."""
        how = _how_ended(live, None, GatewayError("storage_failed", ""))
        for wait_s in itertools.chain(STORE_AGAIN_S, itertools.repeat(STORE_AGAIN_S[-1])):
            await asyncio.sleep(wait_s)
            try:
                await self._store_end(live, how)
            except GatewayError as failure:
                if failure.code == "draining":  # the store is closed; the next start marks the turn
                    return
            except Exception:
                log.exception("%s could not be marked as failed; it is tried again", live.request_id)
            else:
                self._drafts.renew(live.owner, live.session_id)
                return

    def _forget_later(self, live: LiveTurn) -> None:
        def forget() -> None:
            """Forget the turn, unless another one has its id by now."""
            if self._live.get((live.owner, live.id)) is live:
                del self._live[live.owner, live.id]

        asyncio.get_running_loop().call_later(KEEP_FINISHED_S, forget)

    def _stop_unfollowed(self, live: LiveTurn) -> None:
        live.unfollowed = None
        if not live.followers and not live.is_over:
            self._spawn(self.stop(live.owner, live.id))


def _request(
    live: LiveTurn,
    begun: BeginResult,
    messages: tuple[ChatMessage, ...],
    sampling: Sampling,
    request: EngineRequest,
    *,
    keeps_question: bool,
) -> EngineRequest:
    asked = read_conversation([(message.role, message.content) for message in messages])
    # The text of an answer says less than its tokens: a blank at its end, half a character. Of pictures the ids alone say nothing.
    ids = begun.answer_token_ids
    return structs.replace(
        request,
        request_id=live.request_id,
        prompt_token_ids=unpack_token_ids(ids) if ids and not seen_pictures(ids) else None,
        tenant=tenant_of(live.owner),
        session_id=live.session_id,
        adapter=begun.turn.adapter or "",
        asked=asked if keeps_question else asked.numbers(),
        messages=messages,
        sampling=begun.settings.sampling(sampling),
        history_token_ids=begun.history_token_ids,
    )


def _token_ids(live: LiveTurn, final: Delta) -> bytes:
    """Return all ids up to the end of a turn, packed; b"" if it was stopped before it had a prompt."""
    return followed_by(final.prompt.token_ids, live.generated) if final.prompt else b""


def _done_fields(live: LiveTurn, turn: Turn) -> dict[str, Any]:
    return {
        "session_id": live.session_id,
        "finish_reason": turn.finish_reason or turn.status,
        "usage": turn.usage,
        "timings": turn.timings,
        "title": live.title,
    }


class _Ended(NamedTuple):
    status: TurnStatus
    finish_reason: str | None
    usage: dict[str, Any] | None
    timings: dict[str, Any] | None


def _how_ended(live: LiveTurn, final: Delta | None, error: GatewayError | None) -> _Ended:
    """Return how a turn is stored that ended so. An answer that could not go on stays one that was cut, and may go on another time."""
    before = live.question
    if error is not None and before.can_go_on:
        return _Ended(before.status, before.finish_reason, before.usage, before.timings)
    timings = to_builtins(final.timings) if final and final.timings else None
    reason = final.finish_reason if final else None
    if error is not None:
        return _Ended("failed", error.code, _usage(live, final), timings)
    return _Ended("stopped" if reason == "stopped" else "done", reason, _usage(live, final), timings)


def _usage(live: LiveTurn, final: Delta | None) -> dict[str, Any] | None:
    """Return the token counts of a turn; one whose answer went on has those of both parts."""
    if final is None or final.usage is None:
        return None
    found: dict[str, Any] = to_builtins(final.usage)
    if live.question.answer and (before := live.question.usage):
        num_tokens = found["completion_tokens"] + before["completion_tokens"]
        found = before | {"completion_tokens": num_tokens, "cached_tokens": found["cached_tokens"]}
    return found
