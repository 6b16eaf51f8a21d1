"""Several nodes as one: a `Node` that sends each request where `Homes` says, and tells `Homes` where the session's KV is then.

A request of which nothing was passed on yet is tried once more on another node when its node fails, and its client does not notice; an answer that
has begun ends with the error, which may be retried. What concerns no single request (progress, adapters, figures) is put together from all nodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import TypeVar

from msgspec import structs

from engine_bridge.cluster.ray_placement import RayPlacement
from engine_bridge.cluster.remote_node import RemoteNode
from engine_bridge.engine_metrics import joined
from engine_bridge.policy.adapters import adapter_places
from engine_bridge.policy.nodes.session_locations import Homes, doors_of
from engine_bridge.protocol.engine_request import ANONYMOUS, EngineRequest, RequestId
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable, NotSupported
from engine_bridge.protocol.figures import EngineState, NodeFigures, NodeState, Progress
from engine_bridge.protocol.node import (
    ADVISORY_ENDS,
    AdapterInfo,
    Advisory,
    AdvisoryReport,
    Api,
    ApiSchemas,
    Delta,
    JsonReply,
    SessionHint,
    SleepMode,
    SseReply,
    Usage,
)
from gateway.nodes import router_figures
from gateway.nodes.adapter_sync import AdapterSync
from gateway.nodes.chosen_node import ChosenNode, Places
from gateway.nodes.estimates import Asks
from gateway.nodes.members import Members, MemberStatus
from gateway.nodes.routed_call import RoutedCall
from kvtiers.closing import going_on

T = TypeVar("T")
# How long stopping an answer waits for its node to confirm it. Chosen: a node that is well takes milliseconds.
CANCEL_S = 2.0


class _Answer:
    """A `generate` under way. is_stopped: whether `cancel` stopped it."""

    def __init__(self) -> None:
        self.place: ChosenNode | None = None
        self.is_stopped = False


class Router:
    """A `Node` made of several nodes. `engine_bridge.protocol.node.Node` says what each method promises.

    Args:
        placement: has the nodes; started and closed with the router.
        adapters: the adapters of these nodes; started and closed with the router, too.
        policy: the name of the policy that chooses: `auto` or one of `routing.POLICIES`.
    """

    def __init__(self, placement: RayPlacement, adapters: AdapterSync, policy: str = "auto") -> None:
        self._policy = policy
        self.homes = Homes(doors_of(policy, ()))
        self._placement = placement
        self._members = Members(placement, self.homes)
        self._places = Places(self._members, self.homes)
        self._asks = Asks(adapters.find)
        self._adapters = adapters
        self._answers: dict[RequestId, _Answer] = {}
        self._advised: dict[str, str] = {}
        self._watching: asyncio.Task[None] | None = None
        self._end: NodeState | None = None
        self._has_adapters = False

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the placement and the adapters. Raises what stopped them."""
        self._watching = asyncio.create_task(self._members.watch(self._choose_doors), name="nodes")
        await self._placement.start()
        self._members.look()
        await self._adapters.start()
        self._has_adapters = True

    def _choose_doors(self) -> None:
        """Choose the routing policy anew, as nodes learn how fast they are."""
        self.homes.doors = doors_of(self._policy, self.homes.facts())

    async def drain(self, timeout_s: float) -> bool:
        """Wait for all requests. The nodes themselves are not told: they may serve other gateways, and this one when it is back."""
        self._end, self._places.is_closed = "draining", True
        return await self._places.until_empty(None, timeout_s)

    async def sleep(self, mode: SleepMode, timeout_s: float) -> None:
        """Refuse: the others would have to take a sleeping node's requests, which is what a drain is for. Raises NotSupported."""
        raise NotSupported("One of several nodes is drained, not put to sleep: POST /v1/nodes/{id}/drain.")

    async def wake_up(self) -> None:
        """Refuse as `sleep` does. Raises NotSupported."""
        await self.sleep("wait", 0)

    async def close(self) -> None:
        """End the adapters' work and the placement."""
        self._end, self._places.is_closed = "closed", True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        with going_on("adapters of all nodes"):
            await self._adapters.close()
        await self._placement.close()

    # -- one node's life -----------------------------------------------------------------------------------------------

    def nodes_state(self) -> list[MemberStatus]:
        """Return the state of each node."""
        self._members.look()
        return list(self._members.statuses())

    @property
    def nodes(self) -> Mapping[str, RemoteNode]:
        """The nodes by name."""
        return self._placement.nodes

    async def drain_node(self, node_id: str, timeout_s: float, *, is_forced: bool = False) -> bool:
        """Send a node nothing new, and wait until what runs there has ended. Returns True if all did in time.

        Raises:
            InvalidRequest: for an unknown node, and, unless `is_forced`, for the last node that takes requests.
        """
        began_s = time.monotonic()
        if not is_forced:
            await self._bring_in_step(timeout_s, but=node_id)
        self._members.set_draining(node_id, True, is_forced=is_forced)
        return await self._places.until_empty(node_id, max(timeout_s - (time.monotonic() - began_s), 0.0))

    async def _bring_in_step(self, timeout_s: float, *, but: str) -> None:
        """Wait until all nodes but this one serve the list of adapters: a node that came back may still be sent what only this one serves."""
        joining = asyncio.gather(
            *(self._adapters.joined(name) for name in self._placement.nodes if name != but),
            return_exceptions=True,
        )
        with suppress(TimeoutError):
            # Shielded: adapters on their way to a node must not be cut off when this wait ends.
            await asyncio.wait_for(asyncio.shield(joining), timeout_s)

    def reopen_node(self, node_id: str) -> None:
        """Send a drained node requests again. Raises InvalidRequest for an unknown node."""
        self._members.set_draining(node_id, False)

    async def restart_node(self, node_id: str, timeout_s: float, *, is_forced: bool = False) -> None:
        """Drain a node, end its process and start it again under its name; return when it is ready.

        Args:
            node_id: the node's name.
            timeout_s: the time after which requests that still run there are cut off.
            is_forced: whether the last node that takes requests may be restarted, too.

        Raises:
            InvalidRequest: as `drain_node` does.
            EngineUnavailable: if the node cannot be started again.
        """
        await self.drain_node(node_id, timeout_s, is_forced=is_forced)
        try:
            await self._placement.restart(node_id)
        finally:
            self.reopen_node(node_id)

    def counts(self) -> dict[str, int]:
        """Return `Places.counts`. From any thread."""
        return dict(self._places.counts)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def home_of(self, tenant: str, session_id: str) -> str:
        """Return the node that has a session's KV, as far as is known; "" for none."""
        return self.homes.home((tenant, session_id))

    def remember(self, homes: Iterable[tuple[str, str, str]]) -> None:
        """Take over (tenant, session, node) of sessions that went on before this process; the latest sessions come last."""
        for tenant, session_id, node_id in homes:
            self.homes.placed((tenant, session_id), node_id)

    def end_session(self, tenant: str, session_id: str) -> None:
        """Tell all nodes that a session has ended: it may have been on any of them."""
        self.homes.forgotten((tenant, session_id))
        # It may have been on any of them.
        for node in self._members.all():
            node.end_session(tenant, session_id)

    async def erase_kv(self, tenant: str) -> int:
        """Have all nodes erase a tenant's KV, and return the number of blocks on their disks. Raises as `Node` does, after all have tried."""
        nodes = self._members.all()
        found = await asyncio.gather(*(node.erase_kv(tenant) for node in nodes), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return sum(each for each in found if isinstance(each, int))

    def hint_session(self, hint: SessionHint) -> None:
        """Tell all nodes what a session's KV is worth: it may be on any of them, and may move."""
        for node in self._members.all():
            node.hint_session(hint)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Stream one answer from the chosen node, or from another one if that fails before it begins."""
        answer = self._answers[request.request_id] = _Answer()
        failed: dict[str, BridgeError] = {}
        try:
            while True:
                place = answer.place = self._enter(request, failed)
                has_begun = False
                try:
                    async with aclosing(place.node.generate(place.request(request))) as deltas:  # type: ignore[type-var]
                        async for delta in deltas:
                            has_begun = True
                            self._note_end(place, delta.usage)
                            yield delta
                    return
                except EngineUnavailable as error:
                    self._places.fail(place, failed, error, has_begun=has_begun)
                finally:
                    self._places.leave(place)
                if answer.is_stopped:
                    yield Delta("", finish_reason="stopped", usage=Usage(0, 0, 0))
                    return
        finally:
            if self._answers.get(request.request_id) is answer:
                del self._answers[request.request_id]

    def _enter(self, request: EngineRequest, failed: Mapping[str, BridgeError]) -> ChosenNode:
        return self._places.enter(
            (request.tenant, request.session_id),
            lambda name: self._asks.of_request(name, request),
            failed,
        )

    def _note_end(self, place: ChosenNode, usage: Usage | None) -> None:
        if usage is not None:
            place.num_tokens = usage.prompt_tokens + usage.completion_tokens
            self._asks.answered(usage.completion_tokens)

    async def cancel(self, request_id: RequestId) -> bool:
        """Stop a running `generate`; see `Node`."""
        answer = self._answers.get(request_id)
        if answer is None:
            return False
        answer.is_stopped = True
        if answer.place is not None:
            # Where the node has just failed, the answer's next try sees that it was stopped; a silent node may never confirm it.
            with suppress(EngineUnavailable, TimeoutError):
                await asyncio.wait_for(answer.place.node.cancel(request_id), CANCEL_S)
        return True

    async def serve(
        self, api: Api, body: object, headers: Mapping[str, str], request: EngineRequest = ANONYMOUS
    ) -> JsonReply | SseReply:
        """Answer one API call on the chosen node; see `Node`."""
        call = RoutedCall(self._places, self._asks, api, body, headers, request)
        reply = await call.begin()
        return SseReply(call) if reply is None else reply

    async def prefill(self, request: EngineRequest) -> int:
        """Compute KV ahead of a request on the node that the request would go to."""
        key = (request.tenant, request.session_id)
        with self._places.ahead(key, lambda name: self._asks.of_request(name, request)) as place:
            place.num_tokens = await place.node.prefill(place.request(request))
            return place.num_tokens

    # -- advisories ----------------------------------------------------------------------------------------------------

    async def advise(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        """Pass an advisory on to the node that its request would go to."""
        name = advisory.advisory_id
        place = self._places.expect(
            (advisory.tenant, advisory.session_id),
            name,
            lambda _: self._asks.of_advisory(advisory),
        )
        self._advised[name] = place.node_id

        def changed(report: AdvisoryReport) -> None:
            """Pass a report on, and forget the advisory with its last one."""
            if report.state in ADVISORY_ENDS:
                self._end_advisory(name)
            on_change(report)

        try:
            await place.node.advise(structs.replace(advisory, kv_from=place.kv_from), changed)
        except BaseException:
            self._end_advisory(name)
            raise

    def _end_advisory(self, advisory_id: str) -> None:
        self._advised.pop(advisory_id, None)
        self.homes.retracted(advisory_id)

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """End an advisory on its node."""
        self.homes.retracted(advisory_id)
        node = self._members.node(self._advised.get(advisory_id, ""))
        if node is not None:
            node.retract(advisory_id, is_expired=is_expired)

    # -- all nodes together --------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The progress of all nodes together; `starting` until the adapters are served."""
        self._members.look()
        told = self._members.progress()
        if self._end is not None and told.state != "failed":
            return Progress(self._end, told.stage, told.elapsed_s)
        if told.state == "ready" and not self._has_adapters:
            return Progress("starting", "loading adapters on all nodes", told.elapsed_s)
        return told

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the base model, which all nodes share."""
        return next((node.model_names for node in self._members.all()), ("",))

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and answer together, on the node that takes the longest."""
        return max((node.max_model_len for node in self._members.all()), default=0)

    @property
    def max_images(self) -> int:
        """The most pictures in one prompt, on the node that reads the most."""
        return max((node.max_images for node in self._members.all()), default=0)

    @property
    def can_use_tools(self) -> bool:
        """Whether turns may offer tools on each node that is up: any of them may answer the next one."""
        ready = [node for node in self._members.all() if node.progress.state == "ready"]
        return bool(ready) and all(node.can_use_tools for node in ready)

    def figures(self) -> NodeFigures:
        """Return the figures of all nodes together."""
        parts = [node.figures() for node in self._members.all()]
        stats = [part.adapter_stats for part in parts if part.adapter_stats is not None]
        adapters = adapter_places.merged_stats(stats, self._adapters.merged(), self._adapters.problems())
        return router_figures.figures_of(parts, adapters)

    async def engine_state(self, tenant: str, limit: int) -> EngineState:
        """Return the state of all open nodes' engines together; see `Node`."""
        parts = await self._of_open(lambda node: node.engine_state(tenant, limit))
        return router_figures.engine_state_of(parts, self.progress.state, limit)

    async def models(self) -> JsonReply:
        """Return the body of `/v1/models`, from any open node."""
        return await self._of_one(lambda node: node.models())

    async def api_schemas(self) -> ApiSchemas:
        """Return what the calls take and give, from any open node."""
        return await self._of_one(lambda node: node.api_schemas())

    async def engine_metrics(self) -> str:
        """Return the metrics of all open nodes' engines, with the label `node`."""
        nodes = dict(self._members.open())
        texts = await asyncio.gather(
            *(node.engine_metrics() for node in nodes.values()), return_exceptions=True
        )
        answered = {name: text for name, text in zip(nodes, texts, strict=True) if isinstance(text, str)}
        return await asyncio.to_thread(joined, answered)

    # -- adapters ------------------------------------------------------------------------------------------------------

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters that all nodes should serve, and where they are."""
        return self._adapters.merged()

    def failed_adapters(self, node_id: str) -> dict[str, str]:
        """Return why a node does not serve adapters that it should serve, by name."""
        return self._adapters.failures(node_id)

    async def load_adapter(self, body: object) -> JsonReply:
        """Load an adapter on all nodes; see `AdapterSync.load`."""
        return await self._adapters.load(body)

    async def unload_adapter(self, body: object) -> JsonReply:
        """Take an adapter off the list that all nodes share."""
        return await self._adapters.unload(body)

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        """Keep an adapter in the memory of all nodes, or no longer."""
        return await self._adapters.pin(name, is_pinned)

    # -- asking them ---------------------------------------------------------------------------------------------------

    async def _of_open(self, ask: Callable[[RemoteNode], Awaitable[T]]) -> list[T]:
        """Ask all nodes that take requests. A node that fails meanwhile is left out; raises what the last node raised if all fail."""
        self._members.look()
        given = await asyncio.gather(*map(ask, self._members.open().values()), return_exceptions=True)
        found: list[T] = []
        error: BaseException = self._places.nobody()
        for each in given:
            if isinstance(each, EngineUnavailable):
                error = each
            elif isinstance(each, BaseException):
                raise each
            else:
                found.append(each)
        if not found:
            raise error
        return found

    async def _of_one(self, ask: Callable[[RemoteNode], Awaitable[T]]) -> T:
        """Ask any node that takes requests. Raises what the last node raised if all fail."""
        self._members.look()
        error: BridgeError = self._places.nobody()
        for node in self._members.open().values():
            try:
                return await ask(node)
            except EngineUnavailable as failure:
                error = failure
        raise error
