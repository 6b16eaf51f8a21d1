"""Titles by the model: a conversation named after its first words gets a better name once the engine has nothing else to do.

The request for a title waits for an idle engine, has the lowest priority, and is given up as soon as another request comes, so it shares a step or
two with an answer at most. A name that a person gave stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from engine_bridge.protocol.engine_request import ChatMessage, EngineRequest, RequestId, Sampling
from engine_bridge.protocol.errors import BridgeError
from engine_bridge.protocol.node import Node
from gateway.access.auth import tenant_of
from gateway.errors import GatewayError
from gateway.sessions import SessionStore, title_from
from gateway.settings.priorities import MAX_PRIORITY

log = logging.getLogger(__name__)

QUESTION: Final = "Write a title of at most six words for this conversation. Answer with the title only."
MAX_TOKENS: Final = 12  # Chosen: six words.
LOOK_EVERY_S: Final = 0.5  # Chosen: how often to look whether the engine is idle.
PATIENCE_S: Final = 300.0  # Chosen: after that the first words stay.
MAX_WAITING: Final = 64  # Chosen: conversations that wait for their titles; more keep their first words.


def title_of(answer: str, *, is_cut: bool) -> str | None:
    """Return the title in a model's answer: its first line, without marks around it, cut as `title_from` cuts. None if there is none.

    Args:
        answer: the model's answer.
        is_cut: whether the answer ran out of tokens, so that its last word may be half of one.
    """
    lines = [line for line in answer.splitlines() if re.search(r"\w", line)]
    line = re.sub(r"[*`\"“”]", "", lines[0]) if lines else ""
    if is_cut and len(lines) == 1:
        line = line.rpartition(" ")[0]
    line = re.sub(r"^[\s#'-]*(title\s*:)?[\s']*", "", line, flags=re.IGNORECASE)
    return title_from(line.strip(" \t'.:,;-"))


class Titles:
    """Names conversations one after the other.

    Args:
        node: answers.
        store: keeps the titles.
        changed: called with the owner and the id of a session that has a new title.
        is_on: whether conversations are named at all.
    """

    def __init__(
        self, node: Node, store: SessionStore, changed: Callable[[str, str], None], *, is_on: bool
    ) -> None:
        self._node = node
        self._store = store
        self._changed = changed
        self._is_on = is_on
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def first_answer(
        self, owner: str, session_id: str, title: str | None, messages: Sequence[ChatMessage]
    ) -> None:
        """Note that a conversation was answered for the first time. Returns at once.

        Args:
            owner: its owner.
            session_id: its id.
            title: its present title.
            messages: all of its messages.
        """
        question = next((message.content for message in messages if message.role == "user"), "")
        if self._is_on and title and title == title_from(question) and len(self._tasks) < MAX_WAITING:
            task = asyncio.create_task(self._name(owner, session_id, title, tuple(messages)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up all requests for titles, and name nothing any more."""
        self._is_on = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _name(self, owner: str, session_id: str, title: str, messages: tuple[ChatMessage, ...]) -> None:
        try:
            # One at a time: another one would look like work, for which both give way.
            async with asyncio.timeout(PATIENCE_S), self._one:
                better = None
                while better is None:
                    while self._num_requests() > 0:  # noqa: ASYNC110 - there is no event for a change of the figures
                        await asyncio.sleep(LOOK_EVERY_S)
                    better = await self._ask(owner, messages)
                if better and await self._store.retitle(owner, session_id, title, better):
                    self._changed(owner, session_id)
        except TimeoutError:
            pass
        except (BridgeError, GatewayError) as error:
            log.info("a conversation keeps its first words as title: %s", type(error).__name__)
        except Exception:
            log.exception("a conversation could not be named")

    async def _ask(self, owner: str, messages: tuple[ChatMessage, ...]) -> str | None:
        """Return the model's title, "" if it wrote none, None if the request was given up for another one."""
        request = EngineRequest(
            request_id=RequestId(f"title-{uuid.uuid4().hex}"),
            tenant=tenant_of(owner),
            priority=MAX_PRIORITY,
            messages=(*messages, ChatMessage("user", QUESTION)),
            sampling=Sampling(temperature=0, max_tokens=MAX_TOKENS),
        )
        text, reason = "", None
        async with contextlib.aclosing(self._node.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                text, reason = text + delta.text, delta.finish_reason
                if reason is None and self._num_requests() > 1:
                    return None
        return title_of(text, is_cut=reason == "length") or ""

    def _num_requests(self) -> int:
        """Return how many requests run or wait, as far as the engine tells."""
        stats = self._node.figures().scheduling_stats
        return stats.num_running + stats.num_waiting if stats is not None else 0
