"""A node in this process: vLLM on a thread of its own, behind the `Node` protocol."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from engine_bridge.adapters.catalog import Catalog, open_registry
from engine_bridge.adapters.copies import Copies
from engine_bridge.bridge import EngineThread
from engine_bridge.cluster.peers import Peering
from engine_bridge.driver.engine.absent import NoAdapters
from engine_bridge.driver.engine.building import load_vllm
from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.engine.fallback import build_with_what_works
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.driver.serving.call import called_by
from engine_bridge.driver.serving.streams import Streams
from engine_bridge.driver.serving.tokenizer_queue import NoTokenizerQueue, TokenizerQueue
from engine_bridge.driver.vllm_api.features import KEPT_TOKENS
from engine_bridge.driver.vllm_api.start import serving_off
from engine_bridge.engine_metrics import engine_metrics
from engine_bridge.grammars.checker import GrammarChecker
from engine_bridge.node_adapters import AdapterWatch, catch_up, listed
from engine_bridge.predict.node_lengths import NodeLengths
from engine_bridge.protocol.engine_request import ANONYMOUS, EngineRequest, RequestId
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable
from engine_bridge.protocol.figures import EngineState, LeftOut, NodeFigures, NodeState, Progress
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
from engine_bridge.protocol.node_facts import NodeFacts
from engine_bridge.protocol.token_stream import TokenStream
from engine_bridge.settings.engine_arguments import named, without_effect
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.node_config import LocalNodeConfig
from engine_bridge.sleeping import Sleep, why_never
from engine_bridge.tracing import Traces
from kvtiers.closing import close_all, going_on

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency
    from engine_bridge.driver.engine.node_load import LoadReader
    from engine_bridge.driver.serving.engine_client import BridgeEngineClient
    from engine_bridge.driver.serving.serving import Serving

log = logging.getLogger(__name__)

T = TypeVar("T")
# Chosen: if the engine becomes as many times slower while an answer runs, its deltas still come every quarter of a second.
MAX_STREAM_INTERVAL = 8
GIB = 1 << 30


class LocalNode:
    """A node in this process. `engine_bridge.protocol.node.Node` says what each method promises."""

    def __init__(self, config: LocalNodeConfig, tiers: KvTiers | None = None) -> None:
        self._config = config
        self._streams = Streams()
        self._engine = config.engine
        """The settings that the engine was built with: see `build_with_what_works`."""
        self._left_out: tuple[LeftOut, ...] = ()
        self._thread = EngineThread(
            self._make_driver,
            self._streams.deliver,
            self._fail,
            lambda driver: catch_up(driver.adapters, self._catalog),
            delivery_s=config.engine.delta_ms / 1000,
        )
        self._tiers = tiers or make_tiers(config)
        if self._tiers is not None:
            self._tiers.on_progress = self._thread.wake
        self._client: BridgeEngineClient | None = None
        self._catalog = Catalog()
        self._grammars: GrammarChecker | None = None
        self._lengths: NodeLengths | None = None
        self._traces = Traces(config.engine.otlp_endpoint)
        self._watch = AdapterWatch(config.adapters_dir, config.adapters)
        self._copies = Copies(config.state_dir)
        self._serving: Serving | None = None
        self._tokenizer: TokenizerQueue | NoTokenizerQueue = NoTokenizerQueue()
        self._schemas: ApiSchemas | None = None
        self._running: dict[RequestId, TokenStream] = {}
        self._is_draining = False
        self._sleep = Sleep(why_never(config.engine), self._thread, self._streams)
        self._stage, self._since = "waiting", time.monotonic()
        self._error: str | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Import vLLM: takes seconds, and nothing that engines of a machine share. `start` does it, too. Raises what importing raises."""
        self._report("importing vLLM")
        load_vllm()
        self._report("waiting for the other nodes of this machine")

    async def start(self) -> None:
        """Bring the engine up; see `Node`."""
        self._since, self._loop = time.monotonic(), asyncio.get_running_loop()
        engine = self._config.engine
        for name, why in without_effect(named(engine.engine_args), engine.device).items():
            if why:
                log.warning("%s changes nothing here: %s", name, why)
        if engine.enable_sleep_mode and (never := why_never(engine)):
            log.warning("this engine cannot be put to sleep: %s", never)
        try:
            # Before the engine, so that a predictor that cannot be loaded is reported at once.
            if engine.scheduling_policy != "vllm":
                self._report("reading what is known of answer lengths")
                known = (self._config.state_dir, engine.model, self._config.length_predictor)
                self._lengths = await asyncio.to_thread(NodeLengths.open, *known)
            await self._thread.start()
            await self._build_serving()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            raise

    async def _build_serving(self) -> None:
        from engine_bridge.driver.grammars.admission import checker_of
        from engine_bridge.driver.serving.engine_client import BridgeEngineClient
        from engine_bridge.driver.serving.options import prepare_renderer, serving_options
        from engine_bridge.driver.serving.serving import Serving

        config = self._config
        off = await asyncio.to_thread(serving_off, config.engine.device)
        engine, contract = await self._thread.call(lambda driver: (driver.engine, driver.adapters.contract))
        if contract is not None:
            registry = await asyncio.to_thread(open_registry, config.state_dir)
            host_bytes = int(config.engine.adapter_host_gib * GIB)
            self._catalog = Catalog(registry, contract, host_bytes, self._copies)
        self._stage = "starting the check of grammars"
        self._grammars = grammars = await asyncio.to_thread(checker_of, engine, config.limits)
        self._client = BridgeEngineClient(
            self._thread,
            engine,
            grammars,
            self._streams,
            self._catalog,
            self._lengths,
            config.limits,
            has_prompt_logprobs=config.engine.has_prompt_logprobs,
        )
        self._tokenizer = await asyncio.to_thread(prepare_renderer, self._client, config, off)
        options = await asyncio.to_thread(
            serving_options, config, engine, keeps_token_ids=KEPT_TOKENS not in off
        )
        serving = Serving(self._client, options)
        self._stage = "compiling the chat template"
        await asyncio.to_thread(serving.warm_up)
        await serving.check_template_arguments()
        await self._watch.start(serving.adapters, self._catalog, self._report)
        await self._thread.call(lambda driver: driver.use_reasoning_parser(serving.reasoning_parser))
        self._serving = serving

    def _make_driver(self) -> VllmDriver:
        def make(config: EngineConfig, tiers: KvTiers | None) -> VllmDriver:
            """Return a driver with the adapters that the node serves now."""
            return VllmDriver(
                config,
                self._catalog.served(),
                self._report,
                tiers,
                self._thread.wake,
                lambda ids, error: self._loop.call_soon_threadsafe(self._streams.give_up, ids, error),
                self._lengths,
                self._copies.path_of,
                self._traces,
            )

        tiers = self._tiers if self._tiers is not None and not self._tiers.is_off else None
        if self._serving is None:
            needs_adapters = self._engine.needs_adapters or bool(self._config.adapters)
            driver, self._engine, self._left_out = build_with_what_works(
                self._engine, tiers, make, needs_adapters=needs_adapters
            )
        else:  # an engine has run with these settings, so what fails now says nothing of the model
            driver = make(self._engine, tiers)
            driver.use_reasoning_parser(self._serving.reasoning_parser)
        return driver

    def _report(self, stage: str) -> None:
        self._stage = stage

    def _fail(self, error: BaseException) -> None:
        self._since = time.monotonic()
        self._streams.fail_all()

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for the running ones; see `Node`."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._streams.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def sleep(self, mode: SleepMode, timeout_s: float) -> None:
        """Give up the device's memory; see `Node`."""
        if not self._sleep.is_on:
            self._ready()
        await self._sleep.begin(mode, timeout_s)

    async def wake_up(self) -> None:
        """Take it back; see `Node`."""
        await self._sleep.end()

    async def close(self) -> None:
        """End the engine and all parts of the node."""
        self._is_draining = True
        with going_on("the watch over adapters"):
            await self._watch.close()
        parts = (self._grammars, self._tiers, self._lengths, self._catalog, self._traces)
        if self._thread.close_later(lambda: close_all(*parts)):
            return  # the process may end meanwhile
        await self._thread.close()
        self._streams.fail_all()
        await asyncio.to_thread(close_all, *parts)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> NodeState:
        """The node's state: the engine's, unless serving is not ready or the node drains."""
        state = self._thread.state
        if self._error is not None:
            return "failed"
        if state == "ready" and self._serving is None:
            return "starting"
        if state == "ready" and self._sleep.is_on:
            return "asleep"
        return "draining" if state == "ready" and self._is_draining else state

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the base model."""
        return self._config.engine.model_names

    @property
    def progress(self) -> Progress:
        """How far the node has come on its way to `ready`."""
        error = self._error or (str(self._thread.error) if self._thread.error else None)
        stage = self._stage if self.state in ("starting", "rebuilding", "failed") else "ready"
        return Progress(self.state, stage, time.monotonic() - self._since, error)

    def figures(self) -> NodeFigures:
        """Return all figures as one snapshot. From any thread."""
        driver = self._thread.driver
        return NodeFigures(
            num_steps=self._thread.num_steps,
            num_rebuilds=self._thread.num_rebuilds,
            num_ranks=self._config.engine.tensor_parallel_size,
            kv_tiers=self._tiers.stats() if self._tiers is not None else None,
            adapter_stats=self._watch.told(self._residency().stats()),
            tokenizer_stats=self._tokenizer.stats(),
            grammar_stats=self._grammars.stats() if self._grammars is not None else None,
            scheduling_stats=driver.report.stats() if driver is not None else None,
            left_out=self._left_out,
            facts=self._facts(),
        )

    async def engine_state(self, tenant: str, limit: int) -> EngineState:
        """Return the engine as it is between two steps; see `Node`."""
        if self._client is None:
            raise self._starting()
        scheduling, requests = await self._thread.call(
            lambda driver: (driver.report.stats(), driver.report.requests(tenant, limit))
        )
        waiting, running, num_waiting, num_running = requests
        return EngineState(
            state=self.state,
            num_steps=self._thread.num_steps,
            num_rebuilds=self._thread.num_rebuilds,
            scheduling=scheduling,
            waiting=waiting,
            running=running,
            num_waiting=num_waiting,
            num_running=num_running,
        )

    def _facts(self) -> NodeFacts | None:
        # While the engine closes there is no driver, so there are no facts.
        load: LoadReader | None = getattr(self._thread.driver, "node_load", None)
        if load is None:
            return None
        return msgspec.structs.replace(load.facts(), is_open=self.state == "ready")

    def hint_session(self, hint: SessionHint) -> None:
        """Note what the KV of a session is worth; see `Node`."""
        store = self._tiers.store if self._tiers is not None else None
        if store is None or self._serving is None or self._client is None:
            return
        from engine_bridge.driver.serving.advising import hint_session

        hint_session(self._thread, self._client, self._serving, store, hint)

    def end_session(self, tenant: str, session_id: str) -> None:
        """Let the KV of a session go first; see `Node`."""
        if self._tiers is not None and self._tiers.store is not None:
            self._tiers.store.end(session_id, tenant=tenant)
            self._thread.submit(lambda driver: driver.promoter.forget(session_id, tenant))

    async def erase_kv(self, tenant: str) -> int:
        """Erase a tenant's KV; see `Node`."""
        from engine_bridge.driver.kv.erasing import erase_kv

        self._ready()
        return await erase_kv(self._thread, self._tiers, tenant)

    @property
    def peer_address(self) -> str:
        """The address where other nodes may ask it for KV, from now on; "" for nowhere. Raises OSError."""
        return self._tiers.peer_address() if self._tiers is not None else ""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and answer together; 0 until the engine is up."""
        return self._client.model_config.max_model_len if self._client is not None else 0

    @property
    def max_images(self) -> int:
        """The most pictures that the model reads in one prompt; 0 for a model that reads none, and until the engine is up."""
        return self._client.max_images if self._client is not None else 0

    @property
    def can_use_tools(self) -> bool:
        """Whether turns may offer tools; see `Node`."""
        return self._serving is not None and self._serving.can_use_tools

    @property
    def stream_interval(self) -> int:
        """How many tokens of one answer vLLM may hold back before it makes an output of them.

        It is the number of tokens that the engine computes between two deliveries anyway: an output per token would only be merged again. The first
        and the last token are never held back. Source: vLLM's SamplingParams.stream_interval.
        """
        step_s, delivery_s = self._thread.step_s, self._config.engine.delta_ms / 1000
        return min(max(int(delivery_s / step_s), 1), MAX_STREAM_INTERVAL) if step_s else 1

    # -- work --------------------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Stream one answer; see `Node`."""
        serving, client = self._ready()
        stream = TokenStream()
        # The stream is known from the first moment, so that a stop that comes while the prompt is tokenised is not lost.
        self._running[request.request_id] = stream
        unique_id: str | None = None
        try:
            with self._reading(request):
                submitted = await serving.submit(request, stream, self.stream_interval)
            if submitted is not None:
                unique_id, core_request = submitted
                await client.predict_length(core_request)
                client.launch(unique_id, core_request, None)
            while True:
                delta = await stream.next()
                yield delta
                if delta.finish_reason is not None:
                    return
        except Exception as error:
            raise _told(error) from error
        finally:
            if unique_id is not None:
                client.forget(unique_id, abort=not stream.is_ended_by_engine)
            self._running.pop(request.request_id, None)

    @contextmanager
    def _reading(self, request: EngineRequest) -> Iterator[None]:
        """Count rendering and tokenising inside `with` as the tenant's of the request. Raises TooBusy."""
        self._tokenizer.check_room(request.tenant)
        with called_by(request):
            yield

    async def cancel(self, request_id: RequestId) -> bool:
        """Stop a running `generate`; see `Node`."""
        stream = self._running.get(request_id)
        if stream is not None:
            stream.stop()
        return stream is not None

    async def serve(
        self,
        api: Api,
        body: Any,
        headers: Mapping[str, str],
        request: EngineRequest = ANONYMOUS,
    ) -> JsonReply | SseReply:
        """Answer one API call; see `Node`."""
        serving, _ = self._ready()
        self._tokenizer.check_room(request.tenant)
        return await serving.serve(api, body, headers, request)

    async def models(self) -> JsonReply:
        """Return the body of `/v1/models`."""
        serving, _ = self._ready()
        return await serving.models_reply()

    async def engine_metrics(self) -> str:
        """Return vLLM's own figures as Prometheus' text."""
        return await asyncio.to_thread(engine_metrics)

    async def api_schemas(self) -> ApiSchemas:
        """Return what the calls take and give."""
        if self._schemas is None:
            # Before that, importing vLLM for them would only slow the engine's start.
            if self._serving is None:
                raise self._starting()
            from engine_bridge.driver.apis.api_schemas import api_schemas

            self._schemas = await asyncio.to_thread(api_schemas)
        return self._schemas

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters on offer."""
        return listed(self._catalog.served(), self._residency().places(), self._serving)

    def _residency(self) -> Residency | NoAdapters:
        driver = self._thread.driver
        return driver.adapters if driver is not None else NoAdapters()

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        """Keep an adapter in memory, or no longer; see `Node`."""
        _, client = self._ready()
        record = await asyncio.to_thread(self._catalog.set_pinned, name, is_pinned)
        if record is None:
            return None
        client.versions.know(record)
        return next((info for info in self.adapters() if info.name == name), None)

    async def load_adapter(self, body: Any) -> JsonReply:
        """Load an adapter; see `Node`."""
        return await self._ready()[0].adapters.load(body)

    async def unload_adapter(self, body: Any) -> JsonReply:
        """Take an adapter off the list; see `Node`."""
        return await self._ready()[0].adapters.unload(body)

    async def advise(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        """Prepare for a request to come; see `Node`."""
        from engine_bridge.driver.serving.advising import advise

        serving, client = self._ready()
        await advise(self._thread, client, serving.lora_request(advisory.adapter or ""), advisory, on_change)

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """End an advisory; see `Node`."""
        self._thread.submit(lambda driver: driver.promoter.retract(advisory_id, is_expired=is_expired))

    async def prefill(self, request: EngineRequest) -> int:
        """Compute the KV of a prompt that may come; see `Node`."""
        from engine_bridge.driver.serving.prefill import prefill

        serving, client = self._ready()
        try:
            with self._reading(request):
                prompt = await serving.draft_prompt(request)
            return await prefill(client, request, prompt, serving.lora_request(request.adapter), self._tiers)
        except Exception as error:
            raise _told(error) from error

    async def run_on_engine(self, run: Callable[[VllmDriver], T]) -> T:
        """Return the result of `run(driver)`, called on the engine thread between two steps. For benches and tests."""
        return await self._thread.call(run)

    def _ready(self) -> tuple[Serving, BridgeEngineClient]:
        if self._is_draining:
            raise EngineUnavailable("the server is going down; try again in a moment", code="draining")
        if self._serving is None or self._client is None:
            raise self._starting()
        self._sleep.check()
        self._client.check_ready()
        return self._serving, self._client

    def _starting(self) -> EngineUnavailable:
        return EngineUnavailable(f"the engine is starting ({self._stage})", code="starting")


def _told(error: Exception) -> BridgeError:
    """Return a failure as the gateway may know it."""
    from engine_bridge.driver.apis.failures import as_bridge_error

    return as_bridge_error(error)


def make_tiers(node: LocalNodeConfig) -> KvTiers | None:
    """Return the KV tiers that a configuration asks for; None for none."""
    config = node.engine
    if not config.kv_host_gib:
        return None
    return KvTiers(
        TiersConfig(
            host_bytes=int(config.kv_host_gib * GIB),
            disk_bytes=int(config.kv_disk_gib * GIB),
            folder=config.kv_dir,
        ),
        peering=Peering(node.peers) if node.peers is not None else None,
    )
