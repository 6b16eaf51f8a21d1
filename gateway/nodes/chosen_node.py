"""Where each request goes: `Homes` decides, here its decision becomes a node to call, until the request has ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from msgspec import structs

from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.policy.nodes.routing import RequestEstimate
from engine_bridge.policy.nodes.session_locations import Homes, Sent, SessionKey
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable
from engine_bridge.protocol.node import GenerateRequest
from engine_bridge.protocol.request_context import RequestContext
from gateway.nodes.members import Members

log = logging.getLogger(__name__)

# To the node where it was announced; where its session was; elsewhere, though its session has a home; without a home.
HOW = ("announced", "home", "moved", "new")

MakeAsk = Callable[[str], RequestEstimate]
"""Takes the name that the request gets."""


class ChosenNode:
    """A node that works on a request.

    Attributes:
        num_prompt_tokens: as estimated. is_cut: the node failed it. num_tokens: that its session has KV of there when it is over, 0 if nobody knows.
    """

    def __init__(
        self, key: SessionKey, node_id: str, node: RemoteNode, ask: RequestEstimate, kv_from: str
    ) -> None:
        self.key, self.node_id, self.node, self.kv_from = key, node_id, node, kv_from
        self.name, self.num_prompt_tokens = ask.request_id, ask.num_prompt_tokens
        self.is_cut = False
        self.num_tokens = 0

    def context(self, context: RequestContext) -> RequestContext:
        """As it is sent to the node."""
        return structs.replace(context, kv_from=self.kv_from) if self.kv_from else context

    def request(self, request: GenerateRequest) -> GenerateRequest:
        """The request as this place gets it: with the peers that have its KV, where there are any."""
        return structs.replace(request, context=self.context(request.context)) if self.kv_from else request


class Places:
    """Of one router.

    Attributes:
        counts: requests, by how they came to their node (one of HOW), `tried_again` on another node, and `cut`: whose answers ended with their node.
    """

    def __init__(self, members: Members, homes: Homes) -> None:
        self._members, self._homes = members, homes
        self._names = map(str, itertools.count(1))
        self._somebody_left = asyncio.Event()
        self.is_closed = False
        self.counts: Counter[str] = Counter()

    # -- in and out ----------------------------------------------------------------------------------------------------

    def enter(self, key: SessionKey, make_ask: MakeAsk, failed: Mapping[str, BridgeError]) -> ChosenNode:
        """For a request; `leave` must follow.

        failed: what the nodes raised that have failed it. Raises the first of these, or EngineUnavailable, where no other node takes it.
        """
        ask = self._ask(make_ask)
        home = self._homes.home(key)
        sent = self._homes.requested(key, ask, asyncio.get_running_loop().time(), failed.keys())
        place = self._place(key, sent, ask, next(iter(failed.values()), None))
        self.counts["tried_again" if failed else _how(sent, home)] += 1
        return place

    @contextmanager
    def ahead(self, key: SessionKey, make_ask: MakeAsk) -> Iterator[ChosenNode]:
        """For what is computed ahead of a request. Raises EngineUnavailable."""
        ask = self._ask(make_ask)
        sent = self._homes.prepared(key, ask, asyncio.get_running_loop().time())
        place = self._place(key, sent, ask)
        try:
            yield place
        except BridgeError:
            place.is_cut = True
            raise
        finally:
            self.leave(place)

    def expect(self, key: SessionKey, advisory_id: str, make_ask: MakeAsk) -> ChosenNode:
        """For an advisory, which is at no place and need not leave. Raises EngineUnavailable."""
        ask = self._ask(make_ask)
        return self._place(key, self._homes.advised(key, advisory_id, ask), ask)

    def fail(
        self, place: ChosenNode, failed: dict[str, BridgeError], error: EngineUnavailable, *, has_begun: bool
    ) -> None:
        """A node failed a request, which another one may take: once, and as long as nothing was passed on. Else raises the error.

        failed: as for `enter`; the node is added.
        """
        place.is_cut = True
        if has_begun or failed:
            self.counts["cut"] += 1
            raise error
        failed[place.node_id] = error
        log.warning("node %s failed before an answer began: it is tried elsewhere", place.node_id)

    def leave(self, place: ChosenNode) -> None:
        moved_from = self._homes.ended(place.name, num_tokens=place.num_tokens, is_cut=place.is_cut)
        if moved_from:
            self._let_leave(place.key, moved_from)
        self._somebody_left.set()

    async def until_empty(self, node_id: str | None, timeout_s: float) -> bool:
        """Whether all that was sent to a node (None: to any) has ended, in this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._homes.num_requests(node_id):
                    self._somebody_left.clear()
                    await self._somebody_left.wait()
        return not self._homes.num_requests(node_id)

    # -- choosing ------------------------------------------------------------------------------------------------------

    def _ask(self, make_ask: MakeAsk) -> RequestEstimate:
        if self.is_closed:
            raise EngineUnavailable("the server is going down; try again in a moment", code="draining")
        self._members.look()
        return make_ask(next(self._names))

    def _place(
        self, key: SessionKey, sent: Sent, ask: RequestEstimate, instead: BridgeError | None = None
    ) -> ChosenNode:
        if sent.over is not None:
            self._take_back(*sent.over)
            # Where its KV is fetched from, it stays until its answer has ended.
            if sent.over[0] not in (sent.node_id, sent.kv_at, self._homes.home(key)):
                self._let_leave(key, sent.over[0])
        node = self._members.node(sent.node_id) if sent.node_id is not None else None
        if sent.node_id is None or node is None:
            raise instead or self.nobody()
        return ChosenNode(key, sent.node_id, node, ask, self._members.address(sent.kv_at))

    def _let_leave(self, key: SessionKey, node_id: str) -> None:
        """A node's KV of a session is a second copy, which makes room for others first."""
        node = self._members.node(node_id)
        if node is not None:
            node.end_session(*key)

    def _take_back(self, node_id: str, advisory_id: str) -> None:
        """An advisory elsewhere that is of no use any more."""
        node = self._members.node(node_id)
        if node is not None:
            node.retract(advisory_id, is_expired=False)

    def nobody(self) -> EngineUnavailable:
        """For what no node takes."""
        state = self._members.progress().state
        code = state if state in ("starting", "draining") else "engine_failed"
        return EngineUnavailable(
            f"no node takes requests now ({self._members.in_words()}); try again in a moment", code=code
        )


def _how(sent: Sent, home: str) -> str:
    if sent.route is None:
        return "announced"
    if not home:
        return "new"
    return "home" if sent.node_id == home else "moved"
