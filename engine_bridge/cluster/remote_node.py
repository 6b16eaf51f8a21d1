"""A node in another process, behind the `Node` protocol.

What the protocol reads at once (progress, adapters, figures) is what the node's last report said: at most REPORT_EVERY_S old while it is up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

from engine_bridge.cluster import wire
from engine_bridge.cluster.link import AnswerBuffer, NodeLink
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable
from engine_bridge.protocol.node import (
    AdapterInfo,
    AdapterStats,
    Advisory,
    AdvisoryReport,
    Api,
    ApiSchemas,
    Delta,
    EngineState,
    GenerateRequest,
    GrammarStats,
    JsonReply,
    NodeState,
    Progress,
    RequestId,
    SchedulingStats,
    SseReply,
    TokenizerStats,
)
from engine_bridge.protocol.node_facts import NodeFacts
from engine_bridge.protocol.request_context import NOBODY, RequestContext, passed_on
from kvtiers.stats import TierStats


class RemoteNode:
    """See `engine_bridge.protocol.node.Node` for what each method promises.

    What places the node attaches a link to it, and another one when that is lost.

    Args:
        served_model_name: until the node has said its own.

    Attributes:
        num_adapter_reports: how often it has said something else of its adapters than before.
    """

    def __init__(self, served_model_name: str = "") -> None:
        self._model_name = served_model_name
        self._link: NodeLink | None = None
        self._report: wire.NodeReport | None = None
        self._adapters: dict[str, AdapterInfo] = {}
        self.num_adapter_reports = 0
        self._numbers: dict[RequestId, int] = {}
        self._num_deaths = 0
        self._since_s = time.monotonic()

    def attach(self, link: NodeLink) -> None:
        """Send work over this link from now on."""
        self._link = link

    def detach(self) -> None:
        """The node cannot be reached. What it said last stands, but for its progress."""
        self._link = None

    def take_report(self, report: wire.NodeReport) -> None:
        """Keeps the node's newest report, from which everything synchronous is answered."""
        self._report = report
        if report.adapters is not None:
            self._adapters = {info.name: info for info in report.adapters}
            self.num_adapter_reports += 1

    # -- what the last report says ---------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        if self._link is None or self._report is None:
            return Progress("starting", "being connected", 0.0)
        return self._report.progress

    def _so(self, state: NodeState, stage: str) -> Progress:
        """Since it was last up."""
        return Progress(state, stage, time.monotonic() - self._since_s)

    @property
    def model_name(self) -> str:
        return self._report.model_name if self._report is not None else self._model_name

    @property
    def max_model_len(self) -> int:
        return self._report.max_model_len if self._report is not None else 0

    @property
    def num_steps(self) -> int:
        return self._report.num_steps if self._report is not None else 0

    @property
    def num_rebuilds(self) -> int:
        """Of engines in one process, and of processes."""
        return self._num_deaths + (self._report.num_rebuilds if self._report is not None else 0)

    def kv_tiers(self) -> TierStats | None:
        return self._report.kv_tiers if self._report is not None else None

    def adapters(self) -> list[AdapterInfo]:
        return list(self._adapters.values())

    def adapters_by_name(self) -> Mapping[str, AdapterInfo]:
        """The same object until they change. Not to be changed."""
        return self._adapters

    def adapter_stats(self) -> AdapterStats | None:
        return self._report.adapter_stats if self._report is not None else None

    def tokenizer_stats(self) -> TokenizerStats | None:
        return self._report.tokenizer_stats if self._report is not None else None

    def grammar_stats(self) -> GrammarStats | None:
        return self._report.grammar_stats if self._report is not None else None

    def scheduling_stats(self) -> SchedulingStats | None:
        return self._report.scheduling_stats if self._report is not None else None

    def facts(self) -> NodeFacts | None:
        return self._report.facts if self._report is not None else None

    @property
    def peer_address(self) -> str:
        """Where other nodes may ask it for KV; "" while it is away."""
        return self._report.peer_address if self._report is not None and self.is_up else ""

    @property
    def is_up(self) -> bool:
        """Whether the connection to the node stands."""
        return self._link is not None and self._link.is_up

    @property
    def is_starting(self) -> bool:
        """Whether it has yet to say that its engine is there: importing what that needs may keep it from saying anything."""
        return not self.is_up or self._report is None or self._report.progress.state == "starting"

    @property
    def incarnation(self) -> str:
        """Another one after each start of the node's process; "" while it is away."""
        return self._link.incarnation if self._link is not None and self._link.is_up else ""

    @property
    def report(self) -> wire.NodeReport | None:
        """The last one; another object after each. None before the first."""
        return self._report

    @property
    def reported_s(self) -> float:
        """When the last report came, on the loop's clock; 0 while it is away."""
        return self._link.reported_s if self._link is not None and self._link.is_up else 0.0

    def cut(self) -> None:
        """End the connection: it has not been heard of for too long. What is under way on it ends."""
        if self._link is not None:
            self._link.abort()

    # -- work ----------------------------------------------------------------------------------------------------------

    def _up(self) -> NodeLink:
        """Raises EngineUnavailable."""
        if self._link is None or not self._link.is_up:
            progress = self.progress
            if progress.state == "starting":
                raise EngineUnavailable(f"the engine is starting ({progress.stage})", code="starting")
            raise EngineUnavailable("the engine has failed and is started again; try again in a moment")
        return self._link

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._up().call(method, *arguments)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        link = self._up()
        number, stream = link.open()
        self._numbers[request.request_id] = number
        try:
            await link.send(wire.Generate(request), number)
            while True:
                delta: Delta = await stream.next()
                # Its end follows, but whoever reads need not wait for that.
                stream.is_over = delta.finish_reason is not None
                yield delta
                if stream.is_over:
                    return
        except StopAsyncIteration:
            raise wire.error_of(wire.GONE) from None
        finally:
            self._numbers.pop(request.request_id, None)
            link.close(number)

    async def serve(
        self, api: Api, body: object, headers: Mapping[str, str], context: RequestContext = NOBODY
    ) -> JsonReply | SseReply:
        link = self._up()
        number, stream = link.open()
        is_streamed = False
        try:
            reply: JsonReply | None = await link.call(
                "serve", api, body, passed_on(headers), context, number=number
            )
            is_streamed = reply is None
        finally:
            if not is_streamed:
                stream.is_over = True
                link.close(number)
        return reply if reply is not None else SseReply(_Events(link, number, stream))

    async def cancel(self, request_id: RequestId) -> bool:
        return request_id in self._numbers and bool(await self._call("cancel", request_id))

    async def advise(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        link = self._up()
        link.follow_advisory(advisory.advisory_id, on_change)
        try:
            await link.call("advise", advisory)
        except (BridgeError, asyncio.CancelledError):
            link.forget_advisory(advisory.advisory_id)
            raise

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        if self._link is not None:
            self._link.notice("retract", advisory_id, is_expired)

    async def prefill(self, request: GenerateRequest) -> int:
        return int(await self._call("prefill", request))

    def end_session(self, tenant: str, session_id: str) -> None:
        if self._link is not None:
            self._link.notice("end_session", tenant, session_id)

    async def models(self) -> JsonReply:
        return cast(JsonReply, await self._call("models"))

    async def api_schemas(self) -> ApiSchemas:
        return cast(ApiSchemas, await self._call("api_schemas"))

    async def engine_metrics(self) -> str:
        return cast(str, await self._call("engine_metrics"))

    async def load_adapter(self, body: object) -> JsonReply:
        return cast(JsonReply, await self._call("load_adapter", body))

    async def unload_adapter(self, body: object) -> JsonReply:
        return cast(JsonReply, await self._call("unload_adapter", body))

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        return cast(AdapterInfo | None, await self._call("pin_adapter", name, is_pinned))

    async def store(self, method: str, *arguments: Any) -> Any:
        """A method of the node's `AdapterStore`: one of wire.STORE_METHODS."""
        return await self._call(method, *arguments)

    async def engine_state(self, tenant: str, limit: int) -> EngineState:
        return cast(EngineState, await self._call("engine_state", tenant, limit))

    async def drain(self, timeout_s: float) -> bool:
        """Nothing is under way on a node that cannot be reached."""
        if self._link is None or not self._link.is_up:
            return True
        try:
            return bool(await self._link.call("drain", timeout_s))
        except EngineUnavailable:
            return True


class _Events:
    """Server-sent events of one call. Closing them before the first is read stops the call, too, which no generator would do."""

    def __init__(self, link: NodeLink, number: int, stream: AnswerBuffer) -> None:
        self._link, self._number, self._stream = link, number, stream

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> bytes:
        try:
            event: bytes = await self._stream.next()
        except BaseException:
            await self.aclose()
            raise
        return event

    async def aclose(self) -> None:
        self._link.close(self._number)
