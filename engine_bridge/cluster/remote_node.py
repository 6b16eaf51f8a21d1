"""A node in another process, behind the `Node` protocol.

What the protocol reads at once (progress, adapters, figures) comes from the node's last report: at most REPORT_EVERY_S old while it is up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

from msgspec.structs import replace

from engine_bridge.cluster import wire
from engine_bridge.cluster.link import AnswerBuffer, NodeLink
from engine_bridge.protocol.engine_request import ANONYMOUS, EngineRequest, RequestId, passed_on
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable
from engine_bridge.protocol.figures import EngineState, NodeFigures, NodeState, Progress
from engine_bridge.protocol.node import (
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
)


class RemoteNode:
    """See `engine_bridge.protocol.node.Node` for what each method promises.

    The placement attaches a link, and another one when that is lost.

    Args:
        model_names: the model's names until the node has reported its own.

    Attributes:
        num_adapter_reports: reports in which the node's adapters had changed.
    """

    def __init__(self, model_names: tuple[str, ...] = ("",)) -> None:
        self._model_names = model_names
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
        """Note that the node cannot be reached. Its last report still holds, but for the progress."""
        self._link = None

    def take_report(self, report: wire.NodeReport) -> None:
        """Keep the node's newest report, which answers all synchronous reads."""
        self._report = report
        if report.adapters is not None:
            self._adapters = {info.name: info for info in report.adapters}
            self.num_adapter_reports += 1

    # -- facts of the last report ----------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The progress of the last report; `starting` while there is no connection."""
        if self._link is None or self._report is None:
            return Progress("starting", "being connected", 0.0)
        return self._report.progress

    def _so(self, state: NodeState, stage: str) -> Progress:
        """Make a progress that counts from the time when the node was last up."""
        return Progress(state, stage, time.monotonic() - self._since_s)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The reported names, or the given ones before the first report."""
        return self._report.model_names if self._report is not None else self._model_names

    @property
    def max_model_len(self) -> int:
        """The longest prompt and answer together, in tokens; 0 before the first report."""
        return self._report.max_model_len if self._report is not None else 0

    @property
    def max_images(self) -> int:
        """The most pictures in one prompt; 0 before the first report."""
        return self._report.max_images if self._report is not None else 0

    @property
    def can_use_tools(self) -> bool:
        """Whether turns may offer tools; False before the first report."""
        return self._report is not None and self._report.can_use_tools

    def figures(self) -> NodeFigures:
        """Return the last report's figures, of a node that is away only counts; rebuilds count engines in one process, and processes."""
        figures = self._report.figures if self._report is not None else NodeFigures()
        if not self.is_up:
            figures = figures.without_load()
        if not self._num_deaths:
            return figures
        return replace(figures, num_rebuilds=figures.num_rebuilds + self._num_deaths)

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters of the last report."""
        return list(self._adapters.values())

    def adapters_by_name(self) -> Mapping[str, AdapterInfo]:
        """Return the same object until the adapters change. Do not change it."""
        return self._adapters

    @property
    def peer_address(self) -> str:
        """host:port where other nodes may ask this one for KV; "" while it is away."""
        return self._report.peer_address if self._report is not None and self.is_up else ""

    @property
    def is_up(self) -> bool:
        """Whether the connection to the node stands."""
        return self._link is not None and self._link.is_up

    @property
    def is_starting(self) -> bool:
        """Whether the node has yet to report an engine. Imports may keep it silent meanwhile."""
        return not self.is_up or self._report is None or self._report.progress.state == "starting"

    @property
    def incarnation(self) -> str:
        """Differs after each start of the node's process; "" while it is away."""
        return self._link.incarnation if self._link is not None and self._link.is_up else ""

    @property
    def report(self) -> wire.NodeReport | None:
        """The last report, another object after each; None before the first."""
        return self._report

    @property
    def reported_s(self) -> float:
        """When the last report came, on the loop's clock; 0 while it is away."""
        return self._link.reported_s if self._link is not None and self._link.is_up else 0.0

    def cut(self) -> None:
        """End the connection to a node that was silent for too long. Calls and answers under way fail."""
        if self._link is not None:
            self._link.abort()

    # -- work ----------------------------------------------------------------------------------------------------------

    def _up(self) -> NodeLink:
        if self._link is None or not self._link.is_up:
            progress = self.progress
            if progress.state == "starting":
                raise EngineUnavailable(f"the engine is starting ({progress.stage})", code="starting")
            raise EngineUnavailable("the engine has failed and is started again; try again in a moment")
        return self._link

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._up().call(method, *arguments)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Yield the answer as the node streams it. Raises EngineUnavailable when the connection is lost."""
        link = self._up()
        number, stream = link.open()
        self._numbers[request.request_id] = number
        try:
            await link.send(wire.Generate(request), number)
            while True:
                delta: Delta = await stream.next()
                # Its end follows, but the reader need not wait for that.
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
        self, api: Api, body: object, headers: Mapping[str, str], request: EngineRequest = ANONYMOUS
    ) -> JsonReply | SseReply:
        """Have an API call answered. Credentials among the headers are not passed on."""
        link = self._up()
        number, stream = link.open()
        is_streamed = False
        try:
            reply: JsonReply | None = await link.call(
                "serve", api, body, passed_on(headers), request, number=number
            )
            is_streamed = reply is None
        finally:
            if not is_streamed:
                stream.is_over = True
                link.close(number)
        return reply if reply is not None else SseReply(_Events(link, number, stream))

    async def cancel(self, request_id: RequestId) -> bool:
        """Stop an answer of this gateway."""
        return request_id in self._numbers and bool(await self._call("cancel", request_id))

    async def advise(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        """Pass an advisory on; `on_change` hears of it until it ends, or the connection does."""
        link = self._up()
        link.follow_advisory(advisory.advisory_id, on_change)
        try:
            await link.call("advise", advisory)
        except (BridgeError, asyncio.CancelledError):
            link.forget_advisory(advisory.advisory_id)
            raise

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """End an advisory, unless the node is away."""
        if self._link is not None:
            self._link.notice("retract", advisory_id, is_expired)

    async def prefill(self, request: EngineRequest) -> int:
        """Have a draft prefilled; returns its tokens."""
        return int(await self._call("prefill", request))

    def hint_session(self, hint: SessionHint) -> None:
        """Pass on what a session's KV is worth, unless the node is away."""
        if self._link is not None:
            self._link.notice("hint_session", hint)

    def end_session(self, tenant: str, session_id: str) -> None:
        """Let the node forget a session, unless it is away."""
        if self._link is not None:
            self._link.notice("end_session", tenant, session_id)

    async def erase_kv(self, tenant: str) -> int:
        """Have the node erase a tenant's KV."""
        return int(await self._call("erase_kv", tenant))

    async def models(self) -> JsonReply:
        """Ask for the list of models."""
        return cast(JsonReply, await self._call("models"))

    async def api_schemas(self) -> ApiSchemas:
        """Ask for the APIs' schemas."""
        return cast(ApiSchemas, await self._call("api_schemas"))

    async def engine_metrics(self) -> str:
        """Ask for vLLM's own metrics, in Prometheus' text form."""
        return cast(str, await self._call("engine_metrics"))

    async def load_adapter(self, body: object) -> JsonReply:
        """Load an adapter that lies on the node's machine."""
        return cast(JsonReply, await self._call("load_adapter", body))

    async def unload_adapter(self, body: object) -> JsonReply:
        """Unload an adapter."""
        return cast(JsonReply, await self._call("unload_adapter", body))

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        """Pin or unpin an adapter; None for an unknown name."""
        return cast(AdapterInfo | None, await self._call("pin_adapter", name, is_pinned))

    async def store(self, method: str, *arguments: Any) -> Any:
        """Call a method of the node's `AdapterStore`, one of wire.STORE_METHODS."""
        return await self._call(method, *arguments)

    async def engine_state(self, tenant: str, limit: int) -> EngineState:
        """Ask for the state of the engine, with `limit` requests at most."""
        return cast(EngineState, await self._call("engine_state", tenant, limit))

    async def sleep(self, mode: SleepMode, timeout_s: float) -> None:
        """Put the node's engine to sleep."""
        await self._call("sleep", mode, timeout_s)

    async def wake_up(self) -> None:
        """Wake the node's engine up."""
        await self._call("wake_up")

    async def drain(self, timeout_s: float) -> bool:
        """Drain the node. A node that cannot be reached has nothing under way."""
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
        """Stop the call if it is not over."""
        self._link.close(self._number)
