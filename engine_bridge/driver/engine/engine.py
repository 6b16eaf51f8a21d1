"""vLLM's in-process engine behind the bridge's `Driver` methods. Everything in this package runs on, or is about, that one engine."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_bridge.adapters.registry import AdapterRecord
from engine_bridge.core.adapters.step_layouts import StepFacts
from engine_bridge.core.kv.sources import Sources
from engine_bridge.core.scheduling.pauses import Pauses
from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.engine.absent import Idle, NoAdapters, NoPromoter, NoRanks
from engine_bridge.driver.engine.building import build_engine, configure_environment, logs_as_usual
from engine_bridge.driver.engine.model_facts import check_model
from engine_bridge.driver.engine.warm_up import warm_up
from engine_bridge.driver.in_process import know_weights, ranks_of, reuses_kv, scheduler_of
from engine_bridge.driver.kv.layer_groups import known_layout_of
from engine_bridge.driver.kv.prefixes import Prefixes
from engine_bridge.driver.ranks.starting import ranks_starting
from engine_bridge.driver.scheduling.pace import Pace
from engine_bridge.driver.scheduling.request_spans import RequestSpans
from engine_bridge.driver.vllm_api import start
from engine_bridge.driver.vllm_api.features import (
    CUDA_COPIES,
    KV_TIERS,
    MODEL_FACTS,
    PROMOTION,
    REPORT,
)
from engine_bridge.policy.adapters.adapter_cache import PrefixFacts
from engine_bridge.policy.costs.costs import TablePrefill
from engine_bridge.policy.scheduling.policies import POLICIES
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.profile import MachineProfile
from engine_bridge.tracing import NO_TRACES, Traces
from kvtiers.closing import going_on

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.residency import Residency
    from engine_bridge.driver.corrections.compute_threads import ComputeThreads
    from engine_bridge.driver.engine.node_load import LoadReader, Speeds
    from engine_bridge.driver.kv.held_blocks import HeldBlocks
    from engine_bridge.driver.kv.kv_tiers import KvTiers
    from engine_bridge.driver.kv.last_saves import LastSaves
    from engine_bridge.driver.kv.link_measuring import LinkMeasuring
    from engine_bridge.driver.kv.promoter import Promoter
    from engine_bridge.driver.ranks.connection import LateAnswers
    from engine_bridge.driver.scheduling.report import SchedulingReport
    from engine_bridge.driver.scheduling.scheduling import Scheduling
    from engine_bridge.driver.vllm_api import EngineCoreRequest, RequestOutput
    from engine_bridge.predict.length import LengthPredictor

log = logging.getLogger(__name__)


class VllmDriver:
    """One `LLMEngine`, built, stepped and closed on the engine thread.

    Args:
        adapters: versions that requests may name at once; later ones are added by `self.adapters`.
        report: called with a phrase at each stage of the start.
        tiers: the tiers for KV that leaves the device; the caller owns them, and they outlive this engine.
        wake: called on another thread when `advance` may have something to do.
        fail: called with the ids of requests that cannot be served, and why.
        predictor: of answer lengths; outlives this engine, too. None: a new, empty one.
        copy_of: returns the path of an adapter's copy by its content's hash, "" if there is none.
        traces: where the spans of requests go.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapters: Iterable[AdapterRecord] = (),
        report: Callable[[str], None] = lambda stage: None,
        tiers: KvTiers | None = None,
        wake: Callable[[], None] = lambda: None,
        fail: Callable[[list[str], Exception], object] = lambda request_ids, error: None,
        predictor: LengthPredictor | None = None,
        copy_of: Callable[[str], str] = lambda content_hash: "",
        traces: Traces = NO_TRACES,
    ) -> None:
        configure_environment(config)
        self._tiers = tiers
        self._fail = fail
        self._predictor = predictor
        self._copy_of = copy_of
        self._traces = traces
        try:
            report("importing vLLM")
            # Before anything of ours that starts ranks stands in vLLM's places, which would be taken for a vLLM that has moved.
            self._off = start.engine_off(config.device)
            has_ranks = config.tensor_parallel_size > 1
            with ranks_starting(is_quiet=logs_as_usual()) if has_ranks else nullcontext():
                self._build(config, adapters, report, wake)
        except BaseException:
            # No caller gets this driver, so no caller can close the parts that were built.
            self.close()
            raise

    def _build(
        self,
        config: EngineConfig,
        adapters: Iterable[AdapterRecord],
        report: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        config = self._build_engine(config, report)
        tiers = self._tiers
        # These are not kept in variables of this frame: see `close`.
        self._scheduler = scheduler_of(self.engine)
        self._ranks = ranks_of(self.engine) or NoRanks()
        self._ranks.watch(wake)
        self._block_pool = self._scheduler.kv_cache_manager.block_pool
        self.layout = known_layout_of(self._scheduler.kv_cache_config, self.engine.vllm_config)
        self.capacity_tokens = self.layout.capacity_tokens(
            self._block_pool.num_gpu_blocks - 1, self.engine.vllm_config.model_config.max_model_len
        )
        """The tokens of requests that the device holds at a time, without the block that holds none."""
        # In the figures; a block of one group of several holds fewer layers of more tokens.
        self._block_size = max(self.capacity_tokens // max(self._block_pool.num_gpu_blocks - 1, 1), 1)
        self._internal_ids: dict[str, str] = {}
        self._silent: set[str] = set()  # requests that have given no output yet
        self._background: deque[tuple[str, EngineCoreRequest]] = deque()
        self._adapter_ids: dict[str, int] = {}  # of requests that use an adapter
        self._prefixes = Prefixes(self._block_pool, self.layout, tiers)
        self._held = tiers.hold_in(self._block_pool) if tiers is not None else Idle()
        self._last_saves = self._make_last_saves() or Idle()
        self.promoter = self._make_promoter(self._scheduler) or NoPromoter()
        report("warming up")
        compiles_late = config.enable_lora and config.device != "cpu" and isinstance(self._ranks, NoRanks)
        self.steps = warm_up(self.engine, self._scheduler, tiers, with_adapter=compiles_late)
        give_back_free_memory()
        self.profile = self._find_profile(config)
        """The measurements of this model on this machine; None where it has not been measured."""
        if self.profile is not None:
            self.steps = self.profile.steps.table()
        self.adapters = self._make_residency(config, wake) if config.enable_lora else NoAdapters()
        for record in adapters:
            self.adapters.add(record)
        self._link_measuring = (self._use_tiers(tiers) if tiers is not None else None) or Idle()
        self._late_answers = self._make_late_answers()
        self.speeds = self._make_speeds()
        self.scheduling = self._make_scheduling(config) if config.scheduling_policy != "vllm" else None
        self.report = self._make_report()
        # Without traces no request costs anything for them.
        self._spans = RequestSpans(self._traces.tracer, self.report.reasons) if self._traces.is_on else None
        self.node_load = self._make_node_load()

    def _build_engine(self, config: EngineConfig, report: Callable[[str], None]) -> EngineConfig:
        """Build vLLM's engine, after a check of what the model can have. Returns the settings without features that turn out to be off."""
        tiers = self._tiers
        config = start.without(config, self._off)
        if self._off & {KV_TIERS, CUDA_COPIES}:
            self._tiers = tiers = None
        if tiers is not None or config.profile_dir is not None:
            know_weights(config.model, config.weights_memory, report)
        num_ranks, name = config.tensor_parallel_size, Path(config.model).name
        report(f"loading {name}" if num_ranks == 1 else f"loading {name} on {num_ranks} ranks")
        self._threads = make_threads(config)
        if MODEL_FACTS not in self._off:
            config = check_model(config, tiers)
        self.engine = build_engine(config, tiers, self._off)
        self._threads.mend()
        if tiers is not None and not reuses_kv(self.engine.vllm_config):
            tiers.switch_off("vLLM computes every prompt of this model anew here (its prefix caching is off)")
            self._tiers = None
        self._off = start.built_off(self.engine, config.device, self._off, has_ranks=num_ranks > 1)
        return start.without(config, self._off)

    # -- the bridge's side -------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Return whether `step` has something to do."""
        # has_unfinished_requests() would not do: the scheduler also has finished ids to flush.
        has_requests = self._scheduler.has_requests() or bool(self._background)
        return has_requests or self._has_work_beside() or self._ranks.has_failed

    def is_stuck(self) -> bool:
        """Return whether no request runs and there is nothing to move between steps, so that waiting requests cannot start."""
        return self._scheduler.get_request_counts()[0] == 0 and not self._has_work_beside()

    def wait_s(self) -> float | None:
        """Return the seconds until there is work by itself; None: until something comes."""
        waits = [part.wait_s() for part in self._beside()]
        return min((wait for wait in waits if wait is not None), default=None)

    def _beside(
        self,
    ) -> tuple[
        HeldBlocks | Idle,
        Promoter | NoPromoter,
        Residency | NoAdapters,
        LinkMeasuring | Idle,
        LateAnswers | Idle,
    ]:
        return self._held, self.promoter, self.adapters, self._link_measuring, self._late_answers

    def _has_work_beside(self) -> bool:
        return any(part.has_work() for part in self._beside())

    def step(self) -> list[RequestOutput]:
        """Run one step, and move blocks and adapters before and after it. Returns the outputs of its requests."""
        self._ranks.check()
        self._held.advance()
        if self._background and not sum(self._scheduler.get_request_counts()):
            self._begin_background()
        if self.adapters.has_work():
            self.adapters.advance()
        outputs = self._step_engine() if self._scheduler.has_requests() else []
        self._last_saves.advance()
        self.promoter.advance()
        self._link_measuring.advance()
        self._late_answers.advance()
        return outputs

    def _begin_background(self) -> None:
        request_id, request = self._background.popleft()
        try:
            self.add(request_id, request, None)
        except Exception as error:
            # Its adapter may have been removed while it was queued. Raising here would fail the step, and end all requests for one request that no
            # client waits for.
            self._fail([request_id], error)

    def _step_engine(self) -> list[RequestOutput]:
        self.adapters.begin_step()
        if self._spans is not None:
            self._spans.before_step()
        outputs = self.engine.step()
        self._ranks.check()
        self._threads.mend()
        failed = self.adapters.end_step()
        if failed:
            outputs = [each for each in outputs if self._adapter_ids.get(each.request_id) not in failed]
            self.adapters.settle(failed)
        if self._silent:
            self._note_sources(outputs)
        for output in outputs:
            if any(completion.finish_reason == "error" for completion in output.outputs):
                from engine_bridge.driver.grammars.running import take_failure

                failure = take_failure(self._internal_ids.get(output.request_id, ""))
                output.failure = failure or failure_of(output)
            if output.finished:
                if self._spans is not None:
                    self._spans.ended(output.request_id, output.metrics, output.outputs[0].finish_reason)
                self._internal_ids.pop(output.request_id, None)
                self._release(output.request_id)
        return outputs

    def _note_sources(self, outputs: list[RequestOutput]) -> None:
        """Write on each request's first output where its prompt's KV came from."""
        restores = self._tiers.restores if self._tiers is not None else None
        for output in outputs:
            internal_id = self._internal_ids.get(output.request_id)
            if internal_id is None or output.request_id not in self._silent:
                continue
            self._prefixes.found(output.num_cached_tokens or 0)
            if restores is not None:
                output.kv_sources = restores.take_sources(internal_id)
            if self._spans is not None:
                sources = getattr(output, "kv_sources", None) or Sources(output.num_cached_tokens or 0)
                self._spans.first_output(output.request_id, sources)

    def is_urgent(self, outputs: list[RequestOutput]) -> bool:
        """Return whether these outputs should be sent at once: a request has ended, or gives its first output."""
        is_urgent = any(output.finished for output in outputs)
        if self._silent:
            speaking = self._silent.intersection(output.request_id for output in outputs)
            self._silent -= speaking
            is_urgent = is_urgent or bool(speaking)
        return is_urgent

    def close(self) -> None:
        """Give all memory back, whatever fails on the way, and whichever parts were built.

        This also works where other code still holds this object: an import error that a library keeps holds the frames that led to it.
        """
        made = self.__dict__.copy()
        self.__dict__.clear()
        for name, close in (
            ("scheduling", lambda part: part.close()),
            ("adapters", lambda part: part.close()),
            ("engine", lambda part: part.engine_core.shutdown()),
            ("_tiers", lambda part: part.detach()),
        ):
            if (part := made.pop(name, None)) is not None:
                with going_on(f"the engine ({name.removeprefix('_')})"):
                    close(part)
        made.clear()
        gc.collect()
        give_back_free_memory()

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request_id: str, request: EngineCoreRequest, prompt_text: str | None) -> None:
        """Queue a validated request under our own id, which must be unique. Raises AdapterRejected where its adapter was removed."""
        if request.lora_request is not None:
            adapter_id = request.lora_request.lora_int_id
            self.adapters.requested(request_id, adapter_id)
            self._adapter_ids[request_id] = adapter_id
        try:
            self._internal_ids[request_id] = self.engine.add_request(
                request_id, request, request.params, prompt_text=prompt_text
            )
        except BaseException:
            self._release(request_id)
            raise
        self._silent.add(request_id)
        if self._spans is not None:
            context = facts_of(request)
            self._spans.added(request_id, context.traceparent, context.accepted_s)

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown or finished ids are no error. No output follows."""
        self._silent.discard(request_id)
        self._background = deque(item for item in self._background if item[0] != request_id)
        internal_id = self._internal_ids.pop(request_id, None)
        if internal_id is not None:
            if self._spans is not None:
                state = self.engine.output_processor.request_states.get(internal_id)
                self._spans.ended(request_id, state and state.stats, "abort")
            # The internal id is used: aborting by the external one leaks the parent record of n > 1.
            self.engine.abort_request([internal_id], internal=True)
        self._release(request_id)

    def _release(self, request_id: str) -> None:
        adapter_id = self._adapter_ids.pop(request_id, None)
        if adapter_id is not None:
            self.adapters.released(request_id, adapter_id)

    def _give_up(self, request_ids: list[str], error: Exception) -> None:
        """End requests whose adapter cannot be had, and report the error."""
        for request_id in request_ids:
            self.abort(request_id)
        self._fail(request_ids, error)

    def add_background(self, request_id: str, request: EngineCoreRequest) -> None:
        """Queue a request that runs when no other one runs or waits."""
        self._background.append((request_id, request))

    def use_reasoning_parser(self, name: str) -> None:
        """Make grammars begin where the reasoning ends, not at the first token. While no request runs.

        `name` is that of vLLM's parser of the model's reasoning; "" for a model that does not reason.
        """
        from engine_bridge.driver.vllm_api import ReasoningParserManager

        manager = self.engine.engine_core.engine_core.structured_output_manager
        manager.reasoner_cls = ReasoningParserManager.get_reasoning_parser(name) if name else None

    def _make_last_saves(self) -> LastSaves | None:
        """Return what saves the blocks once more that the device is about to lose; None where there are no tiers to save them to."""
        from engine_bridge.driver.kv.last_saves import LastSaves, num_leaving

        if self._tiers is None or self._tiers.store is None:
            return None
        return LastSaves(self._block_pool, self._tiers, num_leaving(self._scheduler, self.layout))

    def _make_promoter(self, scheduler: Any) -> Promoter | None:
        from engine_bridge.driver.kv.promoter import Promoter

        if self._tiers is None or self._tiers.store is None or PROMOTION in self._off:
            return None
        promoter = Promoter(self._block_pool, self._tiers, scheduler.get_request_counts)
        self._tiers.listener = promoter
        return promoter

    def _use_tiers(self, tiers: KvTiers) -> LinkMeasuring | None:
        """Tell the tiers the costs of this engine.

        Returns:
            The measurement of the link while there are no requests, where no profile knows its speed; else None.
        """
        from engine_bridge.driver.kv.link_measuring import LinkMeasuring

        tiers.use_costs(TablePrefill(self.steps, self._scheduler.max_num_scheduled_tokens))
        if self.profile is not None:
            tiers.use_profile(self.profile)
        if tiers.store is None or (self.profile is not None and self.profile.copies is not None):
            return None
        return LinkMeasuring(tiers, self._block_pool.num_gpu_blocks, self._scheduler.get_request_counts)

    def _make_late_answers(self) -> LateAnswers | Idle:
        """Return what hears of copies that ranks make after a step."""
        if isinstance(self._ranks, NoRanks) or self._tiers is None or self._tiers.store is None:
            return Idle()
        from engine_bridge.driver.ranks.calls import RanksCopier
        from engine_bridge.driver.ranks.connection import LateAnswers

        copier, count = self._tiers.copier, self._scheduler.get_request_counts
        assert isinstance(copier, RanksCopier)
        return LateAnswers(copier, lambda: sum(count()) > 0)

    def _find_profile(self, config: EngineConfig) -> MachineProfile | None:
        from engine_bridge.driver.engine.subject import subject_of

        if config.profile_dir is None:
            return None
        profile = MachineProfile.load(config.profile_dir, subject_of(self.engine).fingerprint)
        if profile is not None:
            log.info("step times come from %s", profile.summary)
        return profile

    def _num_host_tokens(self) -> int:
        store = self._tiers.store if self._tiers is not None else None
        return int(store.num_host_blocks / self.layout.blocks_per_token) if store is not None else 0

    def _make_scheduling(self, config: EngineConfig) -> Scheduling:
        from engine_bridge.driver.scheduling.scheduling import Scheduling

        pace = Pace(self._scheduler, self.steps, self.speeds.times, config.max_step_ms / 1e3)
        scheduling = Scheduling(
            POLICIES[config.scheduling_policy],
            num_tokens=self.capacity_tokens,
            num_blocks=self._block_pool.num_gpu_blocks - 1,
            num_host_tokens=self._num_host_tokens(),
            layout=self.layout,
            is_ready=self._scheduler.is_ready,
            num_cached_tokens=self._prefixes.num_cached_tokens,
            block_pool=self._block_pool,
            adapters=None if isinstance(self.adapters, NoAdapters) else self.adapters,
            ways=self._tiers.way_counts if self._tiers is not None else None,
            pace=pace,
            pauses=Pauses(pace.decode_s, config.urgent_tpot_ms / 1e3),
            predictor=self._predictor,
            refit_every_s=config.lane_refit_s,
            lane_rule=config.lane_rule,
        )
        self._scheduler.use(scheduling)
        return scheduling

    def _make_report(self) -> SchedulingReport:
        from engine_bridge.driver.scheduling.report import SchedulingReport

        knows_why = REPORT not in self._off
        outputs = self.engine.output_processor if knows_why else None
        blocks = self._block_pool, self._block_size
        return SchedulingReport(
            self._scheduler, self.scheduling, outputs, self.adapters.places, *blocks, knows_why
        )

    def _make_speeds(self) -> Speeds:
        from engine_bridge.driver.engine.node_load import Speeds

        return Speeds(self.steps, self.profile, self._tiers)

    def _make_node_load(self) -> LoadReader:
        from engine_bridge.driver.engine.node_load import LoadReader

        load = self.scheduling.dispatcher.load if self.scheduling is not None else None
        return LoadReader(self._scheduler, load, self._block_size, self.speeds)

    def _make_residency(self, config: EngineConfig, wake: Callable[[], None]) -> Residency:
        from engine_bridge.driver.adapters.build import make_residency, own_parts

        if not isinstance(self._ranks, NoRanks):
            from engine_bridge.driver.ranks.adapters import rank_parts

            parts = rank_parts(self.engine, self._ranks, config, self._copy_of)
        else:
            parts = own_parts(self.engine, config, self._copy_of)
        return make_residency(
            self.engine,
            config,
            parts,
            wake=wake,
            fail=self._give_up,
            prefix_facts=self._prefix_facts,
            step_facts=self._step_facts,
            on_spoiled=lambda adapter_id: _forget_rows(adapter_id, self._scheduler, self._tiers),
            profile=self.profile,
        )

    def _step_facts(self) -> StepFacts:
        running = self._scheduler.running
        num_tokens = sum(request.num_tokens for request in running)
        return StepFacts(len(running), self.steps.step_s(0, len(running), num_tokens))

    def _prefix_facts(self, num_blocks: int) -> PrefixFacts:
        assert self.adapters.copies is not None
        return self._prefixes.cost(num_blocks, self.adapters.copies.blocks.block_bytes)


def make_threads(config: EngineConfig) -> ComputeThreads:
    """Make this thread compute on as many threads as the settings say. vLLM reads VLLM_CPU_OMP_THREADS_BIND in other processes only."""
    from engine_bridge.driver.corrections.compute_threads import ComputeThreads

    if config.tensor_parallel_size > 1:
        return ComputeThreads(1)  # the ranks compute
    return ComputeThreads(config.cpu_threads if config.device == "cpu" else None)


def failure_of(output: Any) -> Exception | None:
    """Return why vLLM has ended a request whose grammar cannot be compiled: the client's fault. None for any other end.

    vLLM says it from 0.33 on. Before, such an answer ends with an error of the server's.
    """
    from engine_bridge.driver.vllm_api import VLLMValidationError

    error = getattr(output, "error", None)
    return (
        VLLMValidationError(error.message) if error is not None and error.code == "validation_error" else None
    )


def _forget_rows(adapter_id: int, scheduler: Any, tiers: KvTiers | None) -> None:
    """Make sure that the KV of this adapter's rows is found by no request: the step under way computes them without the adapter."""
    manager = scheduler.kv_cache_manager
    for request in scheduler.running:
        if request.lora_request is not None and request.lora_request.lora_int_id == adapter_id:
            groups = manager.get_block_ids(request.request_id)
            manager.evict_blocks({block_id for block_ids in groups for block_id in block_ids})
    if tiers is not None:
        tiers.is_step_spoiled = True


def give_back_free_memory() -> None:
    """Make the C library return freed memory to the system, where it can (glibc).

    An engine is built and taken apart in millions of small pieces. Measured: each engine of the demo model that was closed left 30 to 70 MiB behind
    that malloc kept for itself, building one of a model of 75 M parameters with LoRA 1.2 GB. Takes milliseconds.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
