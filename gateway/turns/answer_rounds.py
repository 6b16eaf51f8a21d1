"""A chat turn's answer, in as many rounds as its tools take: the model calls some, the next round reads what came of it.

What a tool says is text from anywhere: it goes to the model as a tool's message and to the person as text, and nothing here acts on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from engine_bridge.protocol.engine_request import CalledTool, EngineRequest
from engine_bridge.protocol.node import Delta, Node, followed_by
from gateway.access.auth import tenant_of
from gateway.advisories.advisories import Advisories, AdvisoryRequest
from gateway.errors import GatewayError
from gateway.recognition.recognition import LIKELY_BACK
from gateway.recognition.tool_pauses import ToolPauses
from gateway.sessions import (
    SessionSettings,
    SessionStore,
    SettingsPatch,
    TurnCall,
    answer_messages,
    clean_text,
)
from gateway.sessions.records import BETWEEN_ROUNDS, CallState
from gateway.tools.catalog import NO_TOOLS, Offer, ServerTool
from gateway.tools.results import arguments_of
from gateway.tools.toolbox import Toolbox
from gateway.turns.live_turn import AnswerPiece, LiveTurn
from gateway.turns.protocol import Permission

# Without an answer for so long, a tool is not used. Source: docs/protocol.md, "Tools". Chosen: a person who looks away comes back.
ASK_S = 120.0
# Of one round; more are not made. Chosen: models that call so many at once go round in circles.
MAX_CALLS = 16
# Of the tools that a conversation uses without asking, as `SettingsPatch` bounds them.
MAX_ALLOWED = 64

# How long an announcement of a tool's return holds at least, in seconds. Chosen: the node needs some to act on it.
MIN_PAUSE_S = 1.0

NO_JSON = "The arguments of this call are no JSON object, so the tool was not called."
NO_SERVER = "There is no tool of this name here."
REFUSED = "The person did not allow this tool to be used."
NOT_ANSWERED = "The person was asked whether this tool may be used, and did not answer in time."
STOPPED = "The answer was stopped before this tool had answered."
TOO_MANY = f"An answer may call {MAX_CALLS} tools at once; this call was one too many."


class AnswerRounds:
    """Answers turns.

    Args:
        node: answers each round.
        store: keeps which tools a conversation uses without asking.
        toolbox: calls tools.
        advisories: are told that the conversation comes back when its tools have answered.
        now: wall clock in seconds.
    """

    def __init__(
        self,
        node: Node,
        store: SessionStore,
        toolbox: Toolbox,
        advisories: Advisories,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._node, self._store, self._toolbox, self._now = node, store, toolbox, now
        self._advisories = advisories
        self._pauses = ToolPauses()

    async def answer(self, live: LiveTurn, request: EngineRequest, settings: SessionSettings) -> None:
        """Answer a turn; `live` has all of it afterwards, how it ended in `final`.

        Args:
            live: the turn.
            request: the conversation up to the question, and how it is to be answered.
            settings: of the conversation.

        Raises:
            BridgeError: what the node raises.
            GatewayError: what the store raises.
        """
        asked = request.messages
        offer = await self._offer(live, settings)
        request = replace(request, tools=offer.offered, turn="begins" if offer.tools else "")
        allowed = list(settings.allowed_tools or ())
        num_rounds = 0
        while True:
            whole = live.whole
            request = replace(request, messages=(*asked, *answer_messages(whole.text, whole.calls)))
            await self._generate(live, request)
            final = live.final
            if final is None or not final.calls:
                return
            num_rounds += 1
            may_call = num_rounds <= self._toolbox.limits.max_rounds
            if not live.earlier:
                live.advisory = self._advisories.take_outcome(live.owner, live.session_id)
            await self._make(live, final.calls, offer, allowed, may_call=may_call)
            if live.is_stopped.is_set():
                live.final = replace(final, finish_reason="stopped")
            if live.is_stopped.is_set() or not may_call:
                return
            self._came_back(live, final)
            live.earlier.append(final)
            ids = _seen(live, final)
            request = replace(
                request, turn="continues", goes_on=False, prompt_token_ids=None, history_token_ids=ids
            )

    async def _offer(self, live: LiveTurn, settings: SessionSettings) -> Offer:
        """Return the tools of the conversation's servers; tells the person which are missing."""
        if not settings.tools:
            return NO_TOOLS
        offer = await live.unless_stopped(self._toolbox.offer(settings.tools, self._node)) or NO_TOOLS
        known = {call.id for call in live.whole.calls}
        for server, sentence in offer.missing.items():
            if (name := f"missing {server}") not in known:
                absent = TurnCall(
                    id=name, server=server, tool="", name="", arguments="", round=0, at=0, state="missing"
                )
                live.add(AnswerPiece("", calls=(replace(absent, result=sentence),)))
        return offer

    async def _generate(self, live: LiveTurn, request: EngineRequest) -> None:
        """Answer one round. A stop that comes before the node knows of the request ends the turn here."""
        live.generated.clear()
        if live.is_stopped.is_set():
            live.final = Delta("", finish_reason="stopped")
            return
        whole = live.whole
        text_gap = BETWEEN_ROUNDS if whole.text and live.earlier else ""
        reasoning_gap = BETWEEN_ROUNDS if whole.reasoning and live.earlier else ""
        async with contextlib.aclosing(self._node.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                live.final = delta
                live.generated.extend(delta.token_ids)
                if not delta.text and not delta.reasoning:
                    continue
                piece = AnswerPiece(delta.text, delta.reasoning)
                if delta.text:
                    piece, text_gap = piece._replace(text=text_gap + delta.text), ""
                if delta.reasoning:
                    piece, reasoning_gap = piece._replace(reasoning=reasoning_gap + delta.reasoning), ""
                live.add(piece)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def _make(
        self,
        live: LiveTurn,
        calls: Sequence[CalledTool],
        offer: Offer,
        allowed: list[str],
        *,
        may_call: bool,
    ) -> None:
        """Make the calls of a round, one after another. allowed: keys of tools that are used without asking, to which answers of the person add."""
        found = [self._new(live, call, offer.tools.get(call.name)) for call in calls]
        made = _with_own_ids(found, live.whole.calls)
        for number, (call, asked) in enumerate(zip(made, calls, strict=True)):
            tool = offer.tools.get(asked.name)
            arguments = arguments_of(asked.arguments)
            if live.is_stopped.is_set():
                self._end(live, call, "stopped", STOPPED)
            elif tool is None:
                self._end(live, call, "failed", NO_SERVER)
            elif arguments is None:
                self._end(live, call, "failed", NO_JSON)
            elif not may_call or number >= MAX_CALLS:
                self._end(live, call, "failed", self._too_often if not may_call else TOO_MANY)
            elif tool.key in allowed or await self._may(live, call, tool, allowed):
                await self._call(live, call, tool, arguments)

    @property
    def _too_often(self) -> str:
        return f"An answer may call tools {self._toolbox.limits.max_rounds} times and go on, so this call was not made."

    @staticmethod
    def _new(live: LiveTurn, call: CalledTool, tool: ServerTool | None) -> TurnCall:
        whole = live.whole
        made = [each.round for each in whole.calls if each.state != "missing"]
        return TurnCall(
            id=clean_text(call.id)[:100] or "call",
            server=tool.server if tool is not None else "",
            tool=tool.tool if tool is not None else clean_text(call.name)[:200],
            name=clean_text(call.name)[:200],
            # Chat templates and vLLM read the arguments of earlier calls as JSON.
            arguments=clean_text(call.arguments) if arguments_of(call.arguments) is not None else "{}",
            round=max(made, default=-1) + 1,
            at=len(whole.text),
            state="running",
        )

    async def _may(self, live: LiveTurn, call: TurnCall, tool: ServerTool, allowed: list[str]) -> bool:
        """Ask the person whether a tool may be used. Where it may not, the call has ended."""
        question = live.questions[call.id] = asyncio.get_running_loop().create_future()
        live.add(AnswerPiece("", calls=(replace(call, state="asking"),)))
        answer: Permission | None = "never"
        why_not = REFUSED
        try:
            async with asyncio.timeout(ASK_S):
                answer = await live.unless_stopped(_answer_to(question))
        except TimeoutError:
            why_not = NOT_ANSWERED
        finally:
            del live.questions[call.id]
        if answer is None or answer == "never":
            is_stopped = answer is None
            self._toolbox.count(tool.server, "stopped" if is_stopped else "refused")
            self._end(live, call, "stopped" if is_stopped else "refused", STOPPED if is_stopped else why_not)
            return False
        if answer == "always" and len(allowed) < MAX_ALLOWED:
            allowed.append(tool.key)
            changes = SettingsPatch(allowed_tools=list(allowed))
            # The answer of a conversation that was deleted meanwhile goes on to its end.
            with contextlib.suppress(GatewayError):
                await self._store.patch(live.owner, live.session_id, settings=changes, now=self._now())
        return True

    async def _call(
        self, live: LiveTurn, call: TurnCall, tool: ServerTool, arguments: Mapping[str, Any]
    ) -> None:
        live.add(AnswerPiece("", calls=(call,)))
        if live.called_s is None:
            live.called_s = time.monotonic()
            self._announce(live)
        calling = self._toolbox.call(tool, arguments, self._node.max_model_len)
        result = await live.unless_stopped(calling)
        if result is None:
            self._end(live, call, "stopped", STOPPED)
        else:
            self._end(live, call, "failed" if result.is_error else "done", clean_text(result.text))

    # -- the pause ---------------------------------------------------------------------------------------------------

    def _announce(self, live: LiveTurn) -> None:
        """Announce that the conversation, with its answer so far, comes back when tools have answered, by how long they took before."""
        final = live.final
        assert final is not None
        back = self._pauses.expected(tenant_of(live.owner), {call.name for call in final.calls})
        latest_s = min(max(back.latest_s, MIN_PAUSE_S), len(final.calls) * self._toolbox.limits.call_s)
        wanted = AdvisoryRequest(
            session_id=live.session_id,
            model=live.question.adapter,
            expected_arrival_s=min(back.earliest_s, latest_s),
            ttl_s=latest_s,
        )
        # Advice that is refused changes no answer.
        with contextlib.suppress(GatewayError):
            self._advisories.submit(
                live.owner,
                wanted,
                "tool_pause",
                client=f"tools {live.owner}",
                probability=LIKELY_BACK,
                token_ids=_seen(live, final),
            )

    def _came_back(self, live: LiveTurn, final: Delta) -> None:
        """Note how long the tools of a round took."""
        if live.called_s is None:
            return
        pause_s, live.called_s = time.monotonic() - live.called_s, None
        self._pauses.note(tenant_of(live.owner), {call.name for call in final.calls}, pause_s)
        self._advisories.came_back(live.owner, live.session_id)

    @staticmethod
    def _end(live: LiveTurn, call: TurnCall, state: CallState, result: str) -> None:
        live.add(AnswerPiece("", calls=(replace(call, state=state, result=result),)))


async def _answer_to(question: asyncio.Future[Permission]) -> Permission:
    return await question


def _with_own_ids(calls: Sequence[TurnCall], earlier: Sequence[TurnCall]) -> list[TurnCall]:
    """Return calls under ids that no other call of the turn has: some models count theirs anew in each round."""
    taken, found = {call.id for call in earlier}, []
    for call in calls:
        name, number = call.id, 2
        while name in taken:
            name, number = f"{call.id}_{number}", number + 1
        taken.add(name)
        found.append(replace(call, id=name))
    return found


def _seen(live: LiveTurn, final: Delta) -> bytes:
    """Return the ids that the engine has read and made in this round, packed; b"" where they are not known."""
    return followed_by(final.prompt.token_ids, live.generated) if final.prompt is not None else b""
