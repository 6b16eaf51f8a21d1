"""The place of each request: `Homes` decides, and here its decision becomes a node to call, until the request has ended."""

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
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable
from gateway.nodes.members import Members

log = logging.getLogger(__name__)

# To the node where it was announced; where its session was; elsewhere, though its session has a home; without a home.
HOW = ("announced", "home", "moved", "new")

MakeAsk = Callable[[str], RequestEstimate]
"""Takes the name that the request gets."""


class ChosenNode:
    """A node that works on a request.

    Attributes:
        num_prompt_tokens: the estimated length of the prompt.
        is_cut: whether the node failed the request.
        num_tokens: tokens of its session whose KV is on the node when the request is over; 0 if that is not known.
    """

    def __init__(
        self, key: SessionKey, node_id: str, node: RemoteNode, ask: RequestEstimate, kv_from: str
    ) -> None:
        self.key, self.node_id, self.node, self.kv_from = key, node_id, node, kv_from
        self.name, self.num_prompt_tokens = ask.request_id, ask.num_prompt_tokens
        self.is_cut = False
        self.num_tokens = 0

    def request(self, request: EngineRequest) -> EngineRequest:
        """Return the request as it is sent to this node: with the peer that has KV of its session, if any."""
        return structs.replace(request, kv_from=self.kv_from) if self.kv_from else request


class Places:
    """The places of one router's requests.

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
        """Choose a node for a request; `leave` must follow.

        Args:
            key: the request's session.
            make_ask: makes the estimate of the request.
            failed: the errors of the nodes that have failed the request, by node.

        Raises:
            EngineUnavailable: where no other node takes the request; the first error of `failed`, if any.
        """
        ask = self._ask(make_ask)
        home = self._homes.home(key)
        sent = self._homes.requested(key, ask, asyncio.get_running_loop().time(), failed.keys())
        place = self._place(key, sent, ask, next(iter(failed.values()), None))
        self.counts["tried_again" if failed else _how(sent, home)] += 1
        return place

    @contextmanager
    def ahead(self, key: SessionKey, make_ask: MakeAsk) -> Iterator[ChosenNode]:
        """Choose a node for work that is done before a request comes, as long as the `with` block runs. Raises EngineUnavailable."""
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
        """Choose a node for an advisory, which counts as no request there, so it need not leave. Raises EngineUnavailable."""
        ask = self._ask(make_ask)
        return self._place(key, self._homes.advised(key, advisory_id, ask), ask)

    def fail(
        self, place: ChosenNode, failed: dict[str, BridgeError], error: EngineUnavailable, *, has_begun: bool
    ) -> None:
        """Note that a node failed a request. Another node may take it: once, and as long as nothing was passed on.

        Args:
            place: the node.
            failed: as for `enter`; the node is added.
            error: what the node raised; it is raised again where no other node may take the request.
            has_begun: whether something was passed on.
        """
        place.is_cut = True
        if has_begun or failed:
            self.counts["cut"] += 1
            raise error
        failed[place.node_id] = error
        log.warning("node %s failed before an answer began: it is tried elsewhere", place.node_id)

    def leave(self, place: ChosenNode) -> None:
        """Note that a request has ended on its node."""
        moved_from = self._homes.ended(place.name, num_tokens=place.num_tokens, is_cut=place.is_cut)
        if moved_from:
            self._let_leave(place.key, moved_from)
        self._somebody_left.set()

    async def until_empty(self, node_id: str | None, timeout_s: float) -> bool:
        """Wait until all requests on a node (None: on any node) have ended. Returns whether they did in time."""
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
            # On the node that its KV is fetched from, the KV stays until the answer has ended.
            if sent.over[0] not in (sent.node_id, sent.kv_at, self._homes.home(key)):
                self._let_leave(key, sent.over[0])
        node = self._members.node(sent.node_id) if sent.node_id is not None else None
        if sent.node_id is None or node is None:
            raise instead or self.nobody()
        return ChosenNode(key, sent.node_id, node, ask, self._members.address(sent.kv_at))

    def _let_leave(self, key: SessionKey, node_id: str) -> None:
        """Tell a node that its KV of a session is a second copy, which makes room for other KV first."""
        node = self._members.node(node_id)
        if node is not None:
            node.end_session(*key)

    def _take_back(self, node_id: str, advisory_id: str) -> None:
        """End an advisory on a node where it is of no use any more."""
        node = self._members.node(node_id)
        if node is not None:
            node.retract(advisory_id, is_expired=False)

    def nobody(self) -> EngineUnavailable:
        """Return the error for a request that no node takes."""
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
