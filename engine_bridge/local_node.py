"""A node in this process: vLLM on a thread of its own, behind the `Node` protocol."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from engine_bridge.adapters.catalog import Catalog, open_registry
from engine_bridge.adapters.files import ModelContract
from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.adapters.watch import Changes, Folder, is_odd
from engine_bridge.bridge import DELIVERY_INTERVAL_S, EngineThread
from engine_bridge.driver.background import BACKGROUND_PREFIX
from engine_bridge.driver.engine import EngineCounts, VllmDriver
from engine_bridge.driver.kv_tiers import KvTiers, TiersConfig
from engine_bridge.engine_config import EngineConfig
from engine_bridge.errors import BridgeError, EngineUnavailable, InvalidRequest, NotSupported
from engine_bridge.grammars.checker import GrammarChecker
from engine_bridge.node import (
    AdapterInfo,
    AdapterPlace,
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
    NodeStats,
    Progress,
    RequestId,
    SchedulingStats,
    SseReply,
    TokenizerStats,
    unpack_token_ids,
)
from engine_bridge.policy.request_limits import RequestLimits
from engine_bridge.predict.node_lengths import NodeLengths
from engine_bridge.request_context import NOBODY, RequestContext
from engine_bridge.token_stream import TokenStream
from kvtiers.stats import TierStats

if TYPE_CHECKING:
    from engine_bridge.core.promotions import Hashes
    from engine_bridge.driver.adapters.residency import Residency
    from engine_bridge.driver.engine_client import BridgeEngineClient
    from engine_bridge.driver.serving import Prepared, Serving
    from engine_bridge.driver.tokenizer_queue import TokenizerQueue

log = logging.getLogger(__name__)

T = TypeVar("T")
# Chosen: if the engine becomes as many times slower while an answer runs, its deltas still come every quarter of a second.
MAX_STREAM_INTERVAL = 8
# Chosen: how long a request may wait behind a piece of background work, and its size before prefill was measured.
BACKGROUND_S, BACKGROUND_TOKENS = 0.05, 256
# How often the folder of adapters is looked at. Chosen: a listing of hundreds takes milliseconds.
WATCH_EVERY_S = 2.0
GIB = 1 << 30


class LocalNodeConfig(Struct, frozen=True, kw_only=True):
    """An engine and what is served with it.

    adapters: (name, folder) pairs that are served from the start. adapters_dir: a folder whose adapters are served, now and as they come, change and
    go. state_dir: where the registry of adapters and what is known of answer lengths are kept; None: in memory. length_predictor: `module:Name` of
    a user's own, which is asked before ours. limits: of what one request may ask.
    """

    engine: EngineConfig
    adapters: tuple[tuple[str, str], ...] = ()
    adapters_dir: Path | None = None
    state_dir: Path | None = None
    length_predictor: str | None = None
    limits: RequestLimits = RequestLimits()
    tool_parser: str | None = None
    reasoning_parser: str = ""
    chat_template: str | None = None


class LocalNode:
    """See `engine_bridge.node.Node` for what each method promises."""

    def __init__(self, config: LocalNodeConfig, tiers: KvTiers | None = None) -> None:
        self._config = config
        self._thread = EngineThread(self._make_driver, self._deliver, self._fail)
        self._tiers = tiers or make_tiers(config.engine)
        if self._tiers is not None:
            self._tiers.on_progress = self._thread.wake
        self._client: BridgeEngineClient | None = None
        self._catalog: Catalog | None = None
        self._grammars: GrammarChecker | None = None
        self._lengths: NodeLengths | None = None
        self._watching: asyncio.Task[None] | None = None
        self._serving: Serving | None = None
        self._tokenizer: TokenizerQueue | None = None
        self._schemas: ApiSchemas | None = None
        self._running: dict[RequestId, TokenStream] = {}
        self._is_draining = False
        self._stage = "waiting"
        self._error: str | None = None
        self._since = time.monotonic()

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._since = time.monotonic()
        self._loop = asyncio.get_running_loop()
        try:
            await self._open_lengths()
            await self._thread.start()
            await self._build_serving()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            raise
        self._stage = "ready"

    async def _open_lengths(self) -> None:
        """Before the engine, so that a predictor that cannot be had is told at once. vLLM's own queue asks for no lengths."""
        config = self._config
        if config.engine.scheduling_policy != "vllm":
            self._stage = "reading what is known of answer lengths"
            self._lengths = await asyncio.to_thread(
                NodeLengths.open, config.state_dir, config.engine.model, config.length_predictor
            )

    async def _build_serving(self) -> None:
        from engine_bridge.driver.engine_client import BridgeEngineClient
        from engine_bridge.driver.serving import Serving, ServingOptions
        from engine_bridge.driver.tokenizer_queue import be_fair
        from engine_bridge.driver.vllm_api.features import KEPT_TOKENS, TOKENIZER_TURNS
        from engine_bridge.driver.vllm_api.start import serving_off

        config = self._config
        off = await asyncio.to_thread(serving_off, config.engine.device)
        engine, contract = await self._thread.call(_engine_and_contract)
        if contract is not None:
            registry = await asyncio.to_thread(open_registry, config.state_dir)
            self._catalog = Catalog(registry, contract, int(config.engine.adapter_host_gib * GIB))
        self._stage = "starting the check of grammars"
        self._grammars = await asyncio.to_thread(_grammar_checker, engine, config.limits)
        self._client = BridgeEngineClient(
            self._thread, engine, self._grammars, self._catalog, self._lengths, config.limits
        )
        if TOKENIZER_TURNS not in off:
            self._tokenizer = be_fair(self._client.renderer)
        serving = Serving(
            self._client,
            ServingOptions(
                served_model_name=config.engine.served_model_name,
                model_path=config.engine.model,
                tool_parser=config.tool_parser,
                reasoning_parser=config.reasoning_parser,
                chat_template=config.chat_template,
                keeps_token_ids=KEPT_TOKENS not in off,
                max_prompt_chars=config.limits.prompt_chars(engine.model_config.max_model_len),
            ),
        )
        self._stage = "compiling the chat template"
        await asyncio.to_thread(serving.warm_up)
        await self._serve_adapters(serving)
        self._serving = serving
        if self._catalog is not None:
            self._watching = asyncio.create_task(self._watch(serving))

    async def _serve_adapters(self, serving: Serving) -> None:
        """Check all adapters that are there at the start. One that fails is left out."""
        in_folder = await asyncio.to_thread(find_adapters, self._config.adapters_dir)
        found = (*self._config.adapters, *in_folder)
        for number, (name, path) in enumerate(found, 1):
            self._stage = f"checking adapter {name} ({number} of {len(found)})"
            problem = await serving.add_adapter(name, path)
            if problem is not None:
                log.error("adapter %s is left out: %s", name, problem)

    async def _watch(self, serving: Serving) -> None:
        """Follow the folder of adapters, and write down now and then what was used."""
        assert self._catalog is not None
        folder = _folder(self._config.adapters_dir, self._catalog)
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                if folder is not None:
                    await self._follow(serving, await asyncio.to_thread(folder.changes, time.time()))
                await asyncio.to_thread(self._catalog.flush)
            except Exception:
                log.exception("looking after the adapters failed; it is tried again")

    async def _follow(self, serving: Serving, changes: Changes) -> None:
        for name, path in (*changes.added, *changes.changed):
            problem = await serving.add_adapter(name, str(path))
            if problem is not None:
                log.error("adapter %s is left as it was: %s", name, problem)
        for name in changes.removed:
            log.info("adapter %s has gone from its folder", name)
            await serving.drop_adapter(name)

    def _make_driver(self) -> VllmDriver:
        known = self._catalog.served() if self._catalog is not None else ()
        return VllmDriver(
            self._config.engine,
            known,
            self._report,
            self._tiers,
            self._thread.wake,
            self._fail_requests,
            self._lengths,
        )

    def _fail_requests(self, request_ids: list[str], error: Exception) -> None:
        """On the engine thread: these will get no answer."""
        if self._client is not None:
            self._loop.call_soon_threadsafe(self._client.fail_some, request_ids, error)

    def _report(self, stage: str) -> None:
        self._stage = stage

    def _deliver(self, outputs: list[Any]) -> None:
        if self._client is not None:
            self._client.deliver(outputs)

    def _fail(self, error: BaseException) -> None:
        self._since = time.monotonic()
        if self._client is not None:
            self._client.fail_all()

    async def drain(self, timeout_s: float) -> bool:
        self._is_draining = True
        if self._client is None:
            return True
        try:
            await asyncio.wait_for(self._client.idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self._is_draining = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._thread.close()
        if self._client is not None:
            self._client.fail_all()
        if self._grammars is not None:
            await asyncio.to_thread(self._grammars.close)
        if self._tiers is not None:
            await asyncio.to_thread(self._tiers.close)
        if self._lengths is not None:
            await asyncio.to_thread(self._lengths.close)
        if self._catalog is not None:
            await asyncio.to_thread(self._catalog.close)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> NodeState:
        state = self._thread.state
        if self._error is not None:
            return "failed"
        if state == "ready" and self._serving is None:
            return "starting"
        return "draining" if state == "ready" and self._is_draining else state

    @property
    def model_name(self) -> str:
        return self._config.engine.served_model_name

    @property
    def progress(self) -> Progress:
        error = self._error or (str(self._thread.error) if self._thread.error else None)
        return Progress(self.state, self._stage, time.monotonic() - self._since, error)

    async def stats(self) -> NodeStats:
        return self._stats(await self._thread.call(lambda driver: driver.counts()))

    def _stats(self, counts: EngineCounts) -> NodeStats:
        return NodeStats(
            state=self.state,
            model=self._config.engine.served_model_name,
            max_model_len=self.max_model_len,
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            num_kv_blocks=counts.num_kv_blocks,
            num_free_kv_blocks=counts.num_free_kv_blocks,
            block_size=counts.block_size,
            num_steps=self._thread.num_steps,
            num_rebuilds=self._thread.num_rebuilds,
            kv_tiers=self.kv_tiers(),
        )

    def grammar_stats(self) -> GrammarStats | None:
        checker = self._grammars
        if checker is None:
            return None
        return GrammarStats(checker.num_checked, checker.num_refused, checker.num_deaths, checker.seconds)

    def scheduling_stats(self) -> SchedulingStats | None:
        driver = self._thread.driver
        return driver.report.stats() if driver is not None else None

    async def engine_state(self, tenant: str, limit: int) -> EngineState:
        if self._client is None:
            raise EngineUnavailable(f"the engine is starting ({self._stage})", code="starting")
        counts, scheduling, requests = await self._thread.call(
            lambda driver: (driver.counts(), driver.report.stats(), driver.report.requests(tenant, limit))
        )
        waiting, running, num_waiting, num_running = requests
        return EngineState(
            engine=self._stats(counts),
            scheduling=scheduling,
            waiting=waiting,
            running=running,
            num_waiting=num_waiting,
            num_running=num_running,
        )

    def kv_tiers(self) -> TierStats | None:
        return self._tiers.stats() if self._tiers is not None else None

    def end_session(self, tenant: str, session_id: str) -> None:
        if self._tiers is not None and self._tiers.store is not None:
            self._tiers.store.end(session_id, tenant=tenant)

    @property
    def max_model_len(self) -> int:
        return self._client.model_config.max_model_len if self._client is not None else 0

    @property
    def num_steps(self) -> int:
        return self._thread.num_steps

    @property
    def num_rebuilds(self) -> int:
        return self._thread.num_rebuilds

    @property
    def stream_interval(self) -> int:
        """How many tokens of one answer vLLM may hold back before it makes an output of them.

        As many as the engine computes between two deliveries anyway: an output per token would only be merged again. The first and
        the last token are never held back. Source: vLLM's SamplingParams.stream_interval.
        """
        per_delivery = DELIVERY_INTERVAL_S / self._thread.step_s if self._thread.step_s else 1
        return min(max(int(per_delivery), 1), MAX_STREAM_INTERVAL)

    # -- work --------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        serving, client = self._ready()
        stream = TokenStream()
        # Known from the first moment, so that a stop that comes while the prompt is tokenised is not lost.
        self._running[request.request_id] = stream
        unique_id: str | None = None
        try:
            with self._reading(request):
                prepared = await serving.prepare(request, self.stream_interval)
            stream.prompt = prepared.prompt
            if not stream.is_over:
                client.check_ready()
                unique_id, core_request = client.submit(
                    prepared.engine_input,
                    prepared.params,
                    request.request_id,
                    stream,
                    context=request.context,
                    lora_request=prepared.lora_request,
                )
                await client.foretell(core_request)
                client.launch(unique_id, core_request, None)
            while True:
                delta = await stream.next()
                yield delta
                if delta.finish_reason is not None:
                    return
        except BridgeError:
            raise
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        except Exception as error:
            raise EngineUnavailable(str(error)) from error
        finally:
            if unique_id is not None:
                client.forget(unique_id, abort=not stream.is_ended_by_engine)
            self._running.pop(request.request_id, None)

    @contextmanager
    def _reading(self, request: GenerateRequest) -> Iterator[None]:
        """The request's rendering and tokenising is its tenant's. Raises TooBusy."""
        from engine_bridge.driver.call import called_by

        self._check_room(request.context.tenant)
        with called_by(request.context):
            yield

    def _check_room(self, tenant: str) -> None:
        """Raises TooBusy where too much of this tenant waits to be tokenised."""
        if self._tokenizer is not None:
            self._tokenizer.check_room(tenant)

    def tokenizer_stats(self) -> TokenizerStats | None:
        return self._tokenizer.stats() if self._tokenizer is not None else None

    async def cancel(self, request_id: RequestId) -> bool:
        stream = self._running.get(request_id)
        if stream is not None:
            stream.stop()
        return stream is not None

    async def serve(
        self,
        api: Api,
        body: Any,
        headers: Mapping[str, str],
        context: RequestContext = NOBODY,
    ) -> JsonReply | SseReply:
        serving, _ = self._ready()
        self._check_room(context.tenant)
        return await serving.serve(api, body, headers, context)

    async def models(self) -> JsonReply:
        """The body of `/v1/models`."""
        serving, _ = self._ready()
        return await serving.models_reply()

    async def api_schemas(self) -> ApiSchemas:
        if self._schemas is None:
            # Before that, importing vLLM for them would only slow the engine's start.
            if self._serving is None:
                raise EngineUnavailable(f"the engine is starting ({self._stage})", code="starting")
            from engine_bridge.driver.api_schemas import api_schemas

            self._schemas = await asyncio.to_thread(api_schemas)
        return self._schemas

    def adapters(self) -> list[AdapterInfo]:
        if self._catalog is None:
            return []
        residency = self._residency()
        places = residency.places() if residency is not None else {}
        return [_info(record, places.get(record.version_id, "disk")) for record in self._catalog.served()]

    def adapter_stats(self) -> AdapterStats | None:
        residency = self._residency()
        return residency.stats() if residency is not None else None

    def _residency(self) -> Residency | None:
        driver = self._thread.driver
        return driver.adapters if driver is not None else None

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        _, client = self._ready()
        if self._catalog is None:
            raise NotSupported("this server runs without adapters")
        record = await asyncio.to_thread(self._catalog.set_pinned, name, is_pinned)
        if record is None:
            return None
        client.know(record)
        return next(info for info in self.adapters() if info.name == name)

    async def load_adapter(self, body: Any) -> JsonReply:
        serving, _ = self._ready()
        return await serving.load_adapter(body)

    async def unload_adapter(self, body: Any) -> JsonReply:
        serving, _ = self._ready()
        return await serving.unload_adapter(body)

    async def advise(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        if self._tiers is None:
            raise NotSupported("this server has no KV tiers to warm a session from (--kv-host-gib 0)")
        serving, client = self._ready()
        adapter = serving.lora_request(advisory.adapter or "")
        salt = client.salt_of(advisory.tenant, adapter)
        if adapter is not None:
            self._thread.submit(lambda driver: driver.prefetch_adapter(adapter.lora_int_id))
        loop = asyncio.get_running_loop()

        def report(state: AdvisoryReport) -> None:
            loop.call_soon_threadsafe(on_change, state)

        hashes: Hashes = ()
        if advisory.token_ids and not await self._thread.call(
            lambda driver: driver.remembers(advisory.session_id, salt)
        ):
            token_ids = unpack_token_ids(advisory.token_ids)
            hashes = await asyncio.to_thread(client.hashes_of, token_ids, salt, adapter)
        self._thread.submit(lambda driver: driver.advise(advisory, hashes, salt, report))

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        self._thread.submit(lambda driver: driver.retract(advisory_id, is_expired))

    async def prefill(self, request: GenerateRequest) -> int:
        serving, client = self._ready()
        with self._reading(request):
            prepared = await serving.prepare_draft(request)
        token_ids: list[int] = prepared.engine_input["prompt_token_ids"]
        block_size: int = client.vllm_config.cache_config.block_size
        end = len(token_ids) // block_size * block_size
        done = 0
        while done < end:
            done = min(done + self._background_tokens(block_size), end)
            await self._prefill_to(client, prepared, token_ids[:done], request)
        return end

    async def _prefill_to(
        self, client: BridgeEngineClient, prepared: Prepared, token_ids: list[int], request: GenerateRequest
    ) -> None:
        """Compute what is missing of these tokens' KV, once nothing else runs."""
        stream = TokenStream()
        unique_id, core_request = client.submit(
            {"prompt_token_ids": token_ids},
            prepared.params.clone(),
            f"{BACKGROUND_PREFIX}{request.request_id}",
            stream,
            context=request.context,
            lora_request=prepared.lora_request,
        )
        client.launch_in_background(unique_id, core_request)
        try:
            while (await stream.next()).finish_reason is None:
                pass
        finally:
            client.forget(unique_id, abort=not stream.is_ended_by_engine)

    def _background_tokens(self, block_size: int) -> int:
        """How many tokens a piece of background work computes: whoever comes meanwhile waits for no longer than BACKGROUND_S."""
        seconds = self._tiers.prefill_s_per_token() if self._tiers is not None else None
        num_tokens = int(BACKGROUND_S / seconds) if seconds else BACKGROUND_TOKENS
        return max(num_tokens // block_size, 1) * block_size

    async def run_on_engine(self, run: Callable[[VllmDriver], T]) -> T:
        """The result of `run(driver)`, called on the engine thread between two steps. For benches and tests."""
        return await self._thread.call(run)

    def _ready(self) -> tuple[Serving, BridgeEngineClient]:
        if self._is_draining:
            raise EngineUnavailable("the server is going down; try again in a moment", code="draining")
        if self._serving is None or self._client is None:
            raise EngineUnavailable(f"the engine is starting ({self._stage})", code="starting")
        self._client.check_ready()
        return self._serving, self._client


def _engine_and_contract(driver: VllmDriver) -> tuple[Any, ModelContract | None]:
    return driver.engine, driver.adapters.contract if driver.adapters is not None else None


def _grammar_checker(engine: Any, limits: RequestLimits) -> GrammarChecker:
    """Its processes start meanwhile."""
    from engine_bridge.driver.grammars import tokenizer_of

    tokenizer = tokenizer_of(engine.renderer.get_tokenizer(), engine.model_config.get_vocab_size())
    checker = GrammarChecker(tokenizer, timeout_s=limits.grammar_check_s, memory_mib=limits.grammar_check_mib)
    checker.warm_up()
    return checker


def _info(record: AdapterRecord, place: AdapterPlace) -> AdapterInfo:
    return AdapterInfo(
        name=record.name,
        rank=record.rank,
        num_bytes=record.num_bytes,
        target_modules=record.target_modules,
        base_model=record.base_model,
        version=record.content_hash[:12],
        place=place,
        is_pinned=record.is_pinned,
        num_uses=record.num_uses,
        last_used_at=record.last_used_at,
    )


def make_tiers(config: EngineConfig) -> KvTiers | None:
    """The KV tiers that a configuration asks for; None for none."""
    if not config.kv_host_gib:
        return None
    return KvTiers(
        TiersConfig(
            host_bytes=int(config.kv_host_gib * GIB),
            disk_bytes=int(config.kv_disk_gib * GIB),
            folder=config.kv_dir,
        )
    )


def _folder(path: Path | None, catalog: Catalog) -> Folder | None:
    """The folder of adapters, told what of it is served since the start."""
    if path is None:
        return None
    known = {
        record.name: record.signature for record in catalog.served() if record.path == str(path / record.name)
    }
    return Folder(path, known)


def find_adapters(folder: Path | None) -> tuple[tuple[str, str], ...]:
    """(name, path) of every PEFT adapter directly under `folder`, by name. Missing folder: none."""
    if folder is None or not folder.is_dir():
        return ()
    return tuple(
        (path.name, str(path))
        for path in sorted(folder.iterdir())
        if (path / "adapter_config.json").is_file() and not is_odd(path.name)
    )
