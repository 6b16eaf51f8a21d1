"""Conversations go on while nodes die, drain and restart: each question is asked until it is answered, and what the store holds is read back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.live.cluster.servers import Server
from overture_client.chat import ChatClient
from overture_client.chat_frames import Accepted, ChatError, Done

NUM_CHATS, ANSWER_TOKENS = 12, 48
# A question that failed in a way that says "ask again" is asked again so many times, so far apart. Chosen: a node is away for some 40 s.
MOST_TRIES, AGAIN_S = 60, 1.0
RECOVERY_TIMEOUT_S = 180.0


@dataclass
class Ledger:
    """What was asked, and what came of it. failed: errors that no further try could mend; errors: all, by code."""

    answered: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class Chats:
    """So many conversations side by side, each asking its next question when it has an answer, until `stop`."""

    def __init__(self, client: ChatClient, name: str, ledger: Ledger) -> None:
        self._client, self._name, self._ledger = client, name, ledger
        self._is_over = False
        self._sessions: dict[int, str] = {}
        self._tasks = [asyncio.create_task(self._go_on(number)) for number in range(NUM_CHATS)]

    async def stop(self) -> None:
        """Each conversation ends with the answer that it waits for."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _go_on(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            await self._ask_until_answered(number, f"{self._name}-{number}-{turn}")
            turn += 1

    async def _ask_until_answered(self, number: int, turn_id: str) -> None:
        for _ in range(MOST_TRIES):
            try:
                await self._ask(number, turn_id)
                return
            except ChatError as error:
                self._ledger.errors[error.code] += 1
                if not error.retryable:
                    self._ledger.failed.append(f"{turn_id}: {error.code}: {error.message}")
                    return
                await asyncio.sleep(AGAIN_S)
        self._ledger.failed.append(f"{turn_id}: asked {MOST_TRIES} times")

    async def _ask(self, number: int, turn_id: str) -> None:
        sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        content = f"{turn_id} asks what comes next, and what after that."
        async for event in self._client.ask(
            content, session_id=self._sessions.get(number), sampling=sampling, turn_id=turn_id
        ):
            if isinstance(event, Accepted):
                self._sessions[number] = event.session_id
            if isinstance(event, Done):
                self._sessions[number] = self._ledger.sessions[turn_id] = event.session_id
                self._ledger.answered[turn_id] = event.finish_reason or ""


async def under_load(
    http: aiohttp.ClientSession,
    server: Server,
    name: str,
    act: Callable[[], Awaitable[None]],
    *,
    before_s: float = 3.0,
) -> dict[str, Any]:
    """Conversations before, while and after `act`. What was answered is read back from the store.

    lost: turns that were answered and are not stored as such, or were never answered. twice: turns that are stored more than once. failed: errors
    that their client saw and could not mend by asking again. errors: all, by code.
    """
    ledger = Ledger()
    async with ChatClient(server.url) as client:
        chats = Chats(client, name, ledger)
        await asyncio.sleep(before_s)
        await act()
        await asyncio.sleep(before_s)
        await chats.stop()
    stored: Counter[str] = Counter()
    for session_id in set(ledger.sessions.values()):
        async with http.get(f"{server.url}/api/sessions/{session_id}") as reply:
            turns = (await reply.json())["turns"]
            stored.update(turn["id"] for turn in turns if turn["status"] == "done")
    return {
        "answered": len(ledger.answered),
        "lost": sum(stored[turn_id] == 0 for turn_id in ledger.answered) + len(ledger.failed),
        "twice": sum(count > 1 for count in stored.values()),
        "failed": ledger.failed,
        "errors": dict(ledger.errors),
    }


async def kill(http: aiohttp.ClientSession, server: Server) -> dict[str, Any]:
    """kill -9 of one node's process under load. kill_recovered_s: until all nodes are ready again."""
    took_s = float("inf")

    async def act() -> None:
        nonlocal took_s
        began_s = time.monotonic()
        server.engine_processes()[0].kill()
        took_s = await until_all_ready(http, server, began_s)

    found = await under_load(http, server, "kill", act)
    return {
        "kill_lost_turns": found["lost"],
        "kill_answers_twice": found["twice"],
        "kill_recovered_s": round(took_s, 1),
        "kill": found,
    }


async def until_all_ready(http: aiohttp.ClientSession, server: Server, since_s: float) -> float:
    """Seconds since then until no node is away. Raises RuntimeError."""
    was_away = False
    while time.monotonic() - since_s < RECOVERY_TIMEOUT_S:
        num_ready = sum(node["state"] == "ready" for node in await server.nodes(http))
        was_away = was_away or num_ready < server.num_nodes
        if was_away and num_ready == server.num_nodes:
            return time.monotonic() - since_s
        await asyncio.sleep(0.1)
    raise RuntimeError(f"not all nodes are ready {RECOVERY_TIMEOUT_S:.0f} s after one was killed")


async def drain(http: aiohttp.ClientSession, server: Server) -> dict[str, Any]:
    """One node is drained under load and comes back. No client may see an error, not even one that says "ask again"."""
    (first, *_) = [node["id"] for node in await server.nodes(http)]

    async def act() -> None:
        await server.drain(first)
        await asyncio.sleep(2.0)
        await server.reopen(first)

    found = await under_load(http, server, "drain", act)
    return {"drain_failed": sum(found["errors"].values()) + found["lost"], "drain": found}


async def rolling_restart(http: aiohttp.ClientSession, server: Server) -> dict[str, Any]:
    """All nodes are restarted under load, one after the other."""
    names = [node["id"] for node in await server.nodes(http)]

    async def act() -> None:
        await server.restart(*names)

    found = await under_load(http, server, "rolling", act)
    return {"rolling_restart_failed": sum(found["errors"].values()) + found["lost"], "rolling_restart": found}
