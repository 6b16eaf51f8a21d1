"""Computing ahead: the text typed so far, and a history under the adapter that was just picked.

A draft is prefilled as it grows, at the ends of words and after a pause, in the engine's idle time (`Node.prefill`). Enter then pays for the
tail only. A draft is never stored and never logged: it lives in this process while it is typed, its KV on the device until that is needed.
Source: spec E1, E11.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import uuid
from collections.abc import Callable

from engine_bridge.protocol.engine_request import ChatMessage, EngineRequest, RequestId
from engine_bridge.protocol.errors import BridgeError
from engine_bridge.protocol.node import Node
from gateway.access.auth import tenant_of
from gateway.access.shares import Shares
from gateway.errors import GatewayError
from gateway.metrics.metrics import Metrics
from gateway.sessions import NextPrompt, SessionStore, messages_of
from gateway.tools.catalog import NO_TOOLS
from gateway.tools.toolbox import Toolbox

log = logging.getLogger(__name__)

# Chosen: longer than between two keys of a slow typist, shorter than a thought.
PAUSE_S = 0.35
# Computed ahead at a time, in all and for one client: a key, or where no keys are asked for a page. Chosen.
MAX_ACTIVE, MAX_ACTIVE_OF_ONE = 32, 4

Key = tuple[str, str]


class _Work:
    """The work for one session: the newest text, which is computed when the text before it is done."""

    def __init__(
        self,
        client: str,
        adapter: str | None,
        text: str | None,
        pause_s: float,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self.client = client
        self.adapter = adapter
        self.text = text
        self.pause_s = pause_s
        self.then = then
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Drafts:
    """Keeps at most one piece of work for each session.

    Args:
        toolbox: the MCP servers whose tools prompts may offer; None: there are none.
        accepts_drafts: the operator's leave; without it texts are dropped unread, and only histories are computed.
        max_chars: of a draft; a longer one could not be asked as a question, so it is dropped unread as well.
    """

    def __init__(
        self,
        node: Node,
        store: SessionStore,
        metrics: Metrics,
        toolbox: Toolbox | None = None,
        *,
        accepts_drafts: bool,
        max_chars: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._node = node
        self._store = store
        self._metrics = metrics
        self._toolbox = toolbox or Toolbox({}, metrics)
        self.accepts_drafts = accepts_drafts
        self._max_chars = max_chars
        self._work: dict[Key, _Work] = {}
        self._shares: Shares[Key] = Shares(MAX_ACTIVE_OF_ONE, MAX_ACTIVE)

    def update(
        self, owner: str, session_id: str, adapter: str | None, text: str, *, client: str | None = None
    ) -> None:
        """Take a draft that has grown, shrunk or changed. client: whose share it counts for (see `Services.client_of`), if not the owner's."""
        if not self.accepts_drafts or len(text) > self._max_chars():
            return
        if text := whole_words(text):
            self._put((owner, session_id), _Work(client or owner, adapter, text, PAUSE_S))

    def warm_history(
        self,
        owner: str,
        session_id: str,
        adapter: str | None,
        then: Callable[[], None],
        *,
        client: str | None = None,
    ) -> None:
        """Compute a session's history under an adapter for which it has no KV, so that a question need not wait for it.

        then: called when all of it is there. client: as in `update`.
        """
        if (owner, session_id) not in self._work:
            self._put((owner, session_id), _Work(client or owner, adapter, None, 0.0, then))

    def renew(self, owner: str, session_id: str) -> None:
        """Compute the draft anew behind the session's present history, which has changed: an answer has ended, for example."""
        key = (owner, session_id)
        work = self._work.get(key)
        if work is not None:
            self.stop(*key)
            self._put(key, _Work(work.client, work.adapter, work.text, work.pause_s, work.then))

    def renew_owner(self, owner: str) -> None:
        """Compute the owner's drafts anew, because the history of one of its sessions has changed."""
        for key in [key for key in self._work if key[0] == owner]:
            self.renew(*key)

    def stop(self, owner: str, session_id: str) -> None:
        """Stop computing for a session: the question was asked, or will not be."""
        self._shares.drop((owner, session_id))
        work = self._work.pop((owner, session_id), None)
        if work is not None and work.task is not None:
            work.task.cancel()

    def stop_owner(self, owner: str) -> None:
        """Stop computing for an owner whose key was withdrawn."""
        for key in [key for key in self._work if key[0] == owner]:
            self.stop(*key)

    async def close(self) -> None:
        """Stop all work and wait until its tasks have ended."""
        tasks = [work.task for work in self._work.values() if work.task is not None]
        for key in list(self._work):
            self.stop(*key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _put(self, key: Key, work: _Work) -> None:
        earlier = self._work.get(key)
        if earlier is not None and earlier.adapter == work.adapter:
            self._shares.touch(key)
            if earlier.text != work.text:
                earlier.text, earlier.pause_s = work.text, work.pause_s
                earlier.changed.set()
            return
        self.stop(*key)
        if (loser := self._shares.put(key, work.client)) is not None:
            self.stop(*loser)
        self._work[key] = work
        work.task = asyncio.create_task(self._run(key, work))

    async def _run(self, key: Key, work: _Work) -> None:
        try:
            while True:
                await self._pause(work)
                outlook = await self._outlook(key)
                # Behind an answer that is still being written nothing can be computed: when it ends, `renew` is called.
                if outlook is None or not outlook.is_answering:
                    await self._prefill(key, work, outlook)
                    if work.text is None:
                        break
                async with asyncio.timeout(60):  # nothing was typed for so long: it is no longer a draft
                    await work.changed.wait()
            work.then()
        except (BridgeError, GatewayError, TimeoutError) as error:
            log.debug("nothing was computed ahead: %s", type(error).__name__)
        except Exception:
            log.exception("computing ahead failed")
        finally:
            if self._work.get(key) is work:
                del self._work[key]
                self._shares.drop(key)

    async def _pause(self, work: _Work) -> None:
        """Wait until nothing was typed for a while."""
        while True:
            work.changed.clear()
            try:
                async with asyncio.timeout(work.pause_s):
                    await work.changed.wait()
            except TimeoutError:
                return

    async def _prefill(self, key: Key, work: _Work, outlook: NextPrompt | None) -> None:
        owner, session_id = key
        history: list[ChatMessage] = []
        offer = NO_TOOLS
        if outlook is not None:
            turns, pictures = await self._store.pictures.latest(owner, outlook.history, self._node.max_images)
            history = messages_of(turns, outlook.settings, pictures, keeps_calls=self._node.can_use_tools)
            offer = await self._toolbox.offer(outlook.settings.tools, self._node)
        if work.text is None and not history:
            work.then = lambda: None
            return
        request = EngineRequest(
            request_id=RequestId(f"draft-{uuid.uuid4().hex}"),
            messages=(*history, ChatMessage("user", work.text or "")),
            tools=offer.offered,
            tenant=tenant_of(owner),
            session_id=session_id or "",
            adapter=work.adapter or "",
            history_token_ids=outlook.token_ids if outlook is not None else b"",
        )
        num_tokens = await self._node.prefill(request)
        self._metrics.computed_ahead.labels("draft" if work.text is not None else "history").inc(num_tokens)

    async def _outlook(self, key: Key) -> NextPrompt | None:
        with contextlib.suppress(GatewayError):
            return await self._store.outlook(*key)
        return None


def whole_words(text: str) -> str:
    """Return a draft without the word that is being typed. It reads the end only, however long the draft is."""
    if not text or text[-1].isspace():
        return text.rstrip()
    whole, *typed = text.rsplit(maxsplit=1)
    return whole if typed else ""
