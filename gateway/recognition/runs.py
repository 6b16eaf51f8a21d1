"""Agents' runs: sessions that have called tools, and what their prompts' KV did meanwhile. Pure, and bounded for any number of sessions.

A run's prompts are mostly what it has said before. Each of their tokens `stayed` on the device since the turn before, was `restored` from another
place, was `recomputed` though an earlier turn had computed it, or is `new`. What an earlier turn had is told by length: a prompt of the same session
begins with the last one and its answer, unless it is shorter than the last one or is known to be another history.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from engine_bridge.protocol.node import CallFigures, KvSources
from gateway.access.shares import Shares

# Sessions with tools that are kept of one owner, and of all: some 5 MB. Chosen: a day's work of a team of agents.
MAX_RUNS_OF_ONE, MAX_RUNS = 256, 8192
# Runs that are shown, and the characters of their names. Chosen: what a page shows at a glance.
MAX_SHOWN, MAX_SHOWN_CHARS = 24, 64


class PromptTokens(Struct, frozen=True):
    """Tokens of prompts by what became of their KV; together the prompts."""

    stayed: int = 0
    restored: int = 0
    recomputed: int = 0
    new: int = 0

    def __add__(self, other: PromptTokens) -> PromptTokens:
        """Return the tokens of both."""
        return PromptTokens(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


def prompt_tokens(kv: KvSources, num_known: int) -> PromptTokens:
    """Return what became of a prompt's KV. num_known: tokens at its beginning that an earlier turn has computed."""
    restored = kv.host + kv.disk + kv.peer
    twice = min(max(num_known - kv.device - restored, 0), kv.recomputed)
    return PromptTokens(kv.device, restored, twice, kv.recomputed - twice)


class AgentRun(Struct, frozen=True, kw_only=True):
    """One run as its owner sees it.

    Attributes:
        session_id: its session's name, cut if it is long.
        caller: that of the session whose task it works at, "" for none.
        state: whether it is being answered (`asks`), waits for its tools (`tools`), or neither (`rests`).
        num_pauses: pauses after which it came back with the results of its tools; pause_s: their sum.
        quiet_s: since its last call began or ended.
    """

    session_id: str
    caller: str
    model: str | None
    state: Literal["asks", "tools", "rests"]
    num_turns: int
    num_pauses: int
    pause_s: float
    tokens: PromptTokens
    age_s: float
    quiet_s: float


@dataclass(slots=True)
class _Kept:
    """The known facts of a session whose calls offer tools. num_known: tokens of its last prompt and answer."""

    session_id: str
    model: str | None
    began_s: float
    last_s: float
    caller: str = ""
    num_active: int = 0
    num_turns: int = 0
    num_pauses: int = 0
    pause_s: float = 0.0
    has_called: bool = False
    is_away: bool = False
    num_known: int = 0
    num_last_prompt: int = 0
    tokens: PromptTokens = field(default_factory=PromptTokens)


class AgentRuns:
    """The runs of all owners, each owner's oldest forgotten first."""

    def __init__(self) -> None:
        self._owners: dict[str, OrderedDict[str, _Kept]] = {}
        self._shares: Shares[tuple[str, str]] = Shares(MAX_RUNS_OF_ONE, MAX_RUNS)

    def asked(
        self,
        owner: str,
        session_id: str,
        now: float,
        *,
        model: str | None = None,
        caller: str = "",
        offers_tools: bool,
        pause_s: float | None = None,
        is_rewritten: bool = False,
    ) -> None:
        """Note a call of a session; `answered` follows. A session is kept from its first call with tools on.

        Args:
            owner: of the session.
            session_id: its name.
            now: monotonic seconds.
            model: the adapter that the call names.
            caller: the session that this one works for; "" for none, or where it was said before.
            offers_tools: whether the call may call tools, or brings their results.
            pause_s: how long its tools took, of a call that brings their results.
            is_rewritten: whether its history is another one than that of the call before.
        """
        own = (
            self._owners.setdefault(owner, OrderedDict())
            if offers_tools
            else self._owners.get(owner, OrderedDict())
        )
        kept = own.get(session_id)
        if kept is None:
            if not offers_tools:
                return
            kept = own[session_id] = _Kept(session_id, model, now, now)
            if (loser := self._shares.put((owner, session_id), owner)) is not None:
                self._drop(*loser)
        own.move_to_end(session_id)
        self._shares.touch((owner, session_id))
        kept.num_active += 1
        kept.num_turns += 1
        kept.model, kept.last_s, kept.is_away = model, now, False
        kept.caller = caller or kept.caller
        if pause_s is not None:
            kept.num_pauses += 1
            kept.pause_s += pause_s
        if is_rewritten:
            kept.num_known = 0

    def answered(
        self, owner: str, session_id: str, now: float, figures: CallFigures | None, *, calls_tools: bool
    ) -> PromptTokens:
        """Note a call's end; figures: None where it was not answered. Return what became of its prompt's KV, nothing for a session without tools."""
        kept = self._owners.get(owner, OrderedDict()).get(session_id)
        if kept is None:
            return PromptTokens()
        kept.num_active = max(kept.num_active - 1, 0)
        kept.last_s, kept.is_away = now, calls_tools
        kept.has_called |= calls_tools
        if figures is None:
            return PromptTokens()
        kv = figures.kv
        num_prompt = kv.device + kv.host + kv.disk + kv.peer + kv.recomputed
        num_known = min(kept.num_known, num_prompt) if num_prompt >= kept.num_last_prompt else 0
        tokens = prompt_tokens(kv, num_known)
        kept.tokens += tokens
        kept.num_last_prompt, kept.num_known = num_prompt, num_prompt + figures.num_answer_tokens
        return tokens if kept.has_called else PromptTokens()

    def of(self, owner: str, now: float) -> list[AgentRun]:
        """Return an owner's last runs that have called tools, the newest first."""
        called = (
            kept for kept in reversed(self._owners.get(owner, OrderedDict()).values()) if kept.has_called
        )
        return [_shown(kept, now) for kept, _ in zip(called, range(MAX_SHOWN), strict=False)]

    def _drop(self, owner: str, session_id: str) -> None:
        own = self._owners[owner]
        del own[session_id]
        if not own:
            del self._owners[owner]


def _shown(kept: _Kept, now: float) -> AgentRun:
    name, caller = (
        each if len(each) <= MAX_SHOWN_CHARS else f"{each[: MAX_SHOWN_CHARS - 1]}…"
        for each in (kept.session_id, kept.caller)
    )
    return AgentRun(
        session_id=name,
        caller=caller,
        model=kept.model,
        state="asks" if kept.num_active else "tools" if kept.is_away else "rests",
        num_turns=kept.num_turns,
        num_pauses=kept.num_pauses,
        pause_s=round(kept.pause_s, 3),
        tokens=kept.tokens,
        age_s=round(now - kept.began_s, 1),
        quiet_s=round(now - kept.last_s, 1),
    )
