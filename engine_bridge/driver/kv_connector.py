"""vLLM's KV connector over the tiers: saves each layer of finished blocks as it is computed, loads each layer before it is needed.

vLLM makes two of these in one process, one for the scheduler and one for the worker; both find their `KvTiers` by the name in the
connector's configuration. What the scheduler's side decides for a step travels to the worker's side in `StepMetadata`.

Order of calls in a step that loads: bind_connector_metadata, start_load_kv, {wait_for_layer_load, attention, save_kv_layer} per layer,
wait_for_save. In a step that loads nothing vLLM calls start_load_kv after the forward pass, so each step is set up when its metadata is bound.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from engine_bridge.driver.background import is_background
from engine_bridge.driver.kv_tiers import KvTiers, find_tiers
from engine_bridge.driver.scheduling.facts import facts_of
from engine_bridge.errors import SeamMoved
from kvtiers.keys import BlockKey
from kvtiers.policy.restore import Action, RestoreFacts
from kvtiers.store import KvStore, Save, Stage

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

# A step with fewer tokens says little about the speed of prefill.
MIN_PREFILL_TOKENS = 128
# A layer that was predicted to come in time and does not: after this long its blocks are given up and computed again. Chosen.
LAYER_TIMEOUT_S = 0.5


@dataclass(slots=True)
class Load:
    """Blocks `first ..` of a stage go to the device's `block_ids` in this step. The worker's side releases the stage.

    `is_whole`: all layers are in host memory, so none has to be waited for.
    """

    stage: Stage
    first: int
    block_ids: list[int]
    is_whole: bool


@dataclass(slots=True)
class SaveJob:
    """The device's `block_ids` go to the slots of `save` in this step."""

    save: Save
    block_ids: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What one step loads and saves."""

    loads: list[Load] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)


@dataclass(slots=True)
class Sources:
    """Where the KV of a request's prompt came from, in tokens; the rest was computed."""

    device: int
    host: int = 0
    disk: int = 0


@dataclass(slots=True)
class _Restore:
    """What waits in the tiers for a waiting request: a stage from its block `first` on, of which the device lacks all but `num_skipped`."""

    stage: Stage
    first: int
    num_skipped: int = 0


class TieredConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Best effort: whatever fails here is a miss, and the blocks are computed."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise SeamMoved("KV tiers serve models with one kind of attention; this one has several")
        self._vllm_config = vllm_config
        self._tiers: KvTiers = find_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config["tiers"])
        if role == KVConnectorRole.SCHEDULER:
            self._tiers.scheduler_side = self
            self._plan = _Plan(self._tiers, vllm_config.cache_config.block_size)
        else:
            self._step = _Step(self._tiers)

    # -- what kind of connector this is --------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a lost save is a later miss

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # the hooks of each layer do not run inside a full graph

    # -- scheduler's side ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._plan.enter(request)
        promoter = self._tiers.promoter
        if promoter is not None and not is_background(request.request_id):
            promoter.safely(promoter.arrived, request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._plan.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self._plan.admit(
            request, blocks.get_block_ids()[0] if num_external_tokens else [], num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._plan.next_step(scheduler_output, self._kv_cache_manager.get_block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            manager = self._kv_cache_manager
            manager.evict_blocks(
                self._plan.spoiled_by(connector_output.invalid_block_ids, manager.get_block_ids)
            )

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        self._plan.forget(request)
        promoter = self._tiers.promoter
        if promoter is not None and not is_background(request.request_id):
            promoter.safely(promoter.remember, request)
        return False, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def take_sources(self, request_id: str) -> Sources | None:
        """Where a running request's KV came from; asked once, with its first output."""
        return self._plan.sources.pop(request_id, None)

    # -- worker's side -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._tiers.attach(kv_caches, self._vllm_config)
        self._layer_of = {name: index for index, name in enumerate(kv_caches)}

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._step.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass  # each layer is copied when the forward pass comes to it; reading from disk began long before

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._step.load(self._layer_of[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._step.save(self._layer_of[layer_name])

    def wait_for_save(self) -> None:
        self._step.end()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._step.take_failed()


class _Plan:
    """The scheduler's side: what waits for which request, and what the next step moves."""

    def __init__(self, tiers: KvTiers, block_size: int) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self.requests: dict[str, Request] = {}
        self.sources: dict[str, Sources] = {}
        self._entered: dict[
            str, tuple[str, str]
        ] = {}  # tenant and group that the store was told of, by request
        self._restores: dict[str, _Restore | None] = {}
        self._loads: list[Load] = []
        self._num_offered: dict[str, int] = {}  # blocks of each started request that the tiers were offered
        self._last_step = (0.0, 0)

    # -- a request waits -----------------------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """It is in the engine: its session's KV is worth keeping in host memory, also where it runs, as it may be preempted."""
        self.requests[request.request_id] = request
        if self._tiers.store is not None:
            facts = facts_of(request)
            tenant, group = self._entered[request.request_id] = facts.tenant, group_of(request)
            self._tiers.store.enter(group, tenant=tenant, weight=facts.weight)

    def match(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens behind the device's own that the next step can load; None: they are on their way, ask again.

        Asked in every step while the request waits, so all but the first call only look at how far its stage is.
        """
        if (
            request.skip_reading_prefix_cache
        ):  # it wants what only a computation gives, such as log probabilities of the prompt
            return 0
        if request.num_preemptions == 0:
            self.sources[request.request_id] = Sources(num_computed_tokens)
        first = num_computed_tokens // self._block_size
        restore = self._find_restore(request, first)
        if restore is None:
            return 0
        restore.num_skipped = first - restore.first
        facts = self._facts(request, restore)
        if facts.num_blocks <= 0:
            return 0
        decision = self._tiers.policy.decide(facts)
        if decision.action is Action.WAIT:
            return None
        return decision.num_blocks * self._block_size

    def _find_restore(self, request: Request, first: int) -> _Restore | None:
        """What the tiers hold for a request; staged at the first call, and anew if the device has lost blocks before the stage."""
        store = self._tiers.store
        if store is None or self._tiers.is_paused:
            return None
        if request.request_id in self._restores:
            restore = self._restores[request.request_id]
            if restore is None or first >= restore.first:
                return restore
            store.release(restore.stage)
        # The last token is always computed: its logits are what the request is for.
        last = (request.num_tokens - 1) // self._block_size
        restore = None
        if first < last:
            tenant = facts_of(request).tenant
            stage = store.stage(group_of(request), _keys(request, first, last), tenant=tenant)
            if stage.blocks:
                restore = _Restore(stage, first)
        self._restores[request.request_id] = restore
        return restore

    def _facts(self, request: Request, restore: _Restore) -> RestoreFacts:
        store, tiers = self._store, self._tiers
        progress = store.progress(restore.stage)
        end_tokens = (restore.first + progress.num_blocks) * self._block_size
        return RestoreFacts(
            num_blocks=progress.num_blocks - restore.num_skipped,
            num_ready_blocks=max(progress.num_ready_blocks - restore.num_skipped, 0),
            num_tail_tokens=request.num_tokens - end_tokens,
            block_size_tokens=self._block_size,
            block_bytes=store.shape.block_bytes,
            num_layers=store.shape.num_layers,
            num_ready_layers=progress.num_ready_layers,
            disk_bytes_done=progress.disk_bytes_done,
            disk_bytes_left=progress.disk_bytes_left,
            disk_bytes_ahead=progress.disk_bytes_ahead,
            waited_s=progress.waited_s,
            prefill_s_per_token=tiers.prefill_s_per_token(),
            disk_bytes_per_s=progress.disk_bytes_per_s,
            host_bytes_per_s=tiers.host_bytes_per_s(),
        )

    def admit(self, request: Request, block_ids: Sequence[int], num_tokens: int) -> None:
        """The request runs from the next step on, with so many tokens loaded into its `block_ids`."""
        restore = self._restores.pop(request.request_id, None)
        if request.num_preemptions > 0:
            self._tiers.resumed[self._way_back(request, restore, num_tokens)] += 1
        if restore is None:
            return
        num_blocks = num_tokens // self._block_size
        if not num_blocks:
            self._store.release(restore.stage)
            return
        start, skipped = restore.first + restore.num_skipped, restore.num_skipped
        is_whole = self._store.progress(restore.stage).num_ready_blocks >= skipped + num_blocks
        block_ids = list(block_ids[start : start + num_blocks])
        self._loads.append(Load(restore.stage, skipped, block_ids, is_whole))
        sources = self.sources.get(request.request_id)
        if sources is not None and request.num_preemptions == 0:
            num_read = sum(restore.stage.is_from_disk[skipped : skipped + num_blocks])
            sources.disk = num_read * self._block_size
            sources.host = num_tokens - sources.disk

    def _way_back(self, request: Request, restore: _Restore | None, num_tokens: int) -> str:
        if not num_tokens:
            return "recompute"
        assert restore is not None
        num_lacking = (request.num_tokens - 1) // self._block_size - restore.first - restore.num_skipped
        return "swap" if num_tokens // self._block_size >= num_lacking else "split"

    def forget(self, request: Request) -> None:
        """The request has ended, however."""
        request_id = request.request_id
        self.requests.pop(request_id, None)
        self._num_offered.pop(request_id, None)
        restore = self._restores.pop(request_id, None)
        if restore is not None:
            self._store.release(restore.stage)
        entered = self._entered.pop(request_id, None)
        if entered is not None:
            tenant, group = entered
            self._store.leave(group, tenant=tenant)
        # An output that ends a request is built before this; one that was aborted has none to come.
        if len(self.sources) > 2 * len(self.requests) + 64:
            self.sources = {name: kept for name, kept in self.sources.items() if name in self.requests}

    # -- a step is scheduled -------------------------------------------------------------------------------------------

    def next_step(self, scheduler_output: Any, block_ids_of: Any) -> StepMetadata:
        self._note_time(scheduler_output)
        step = StepMetadata(self._loads)
        self._loads = []
        store = self._tiers.store
        if store is None or self._tiers.is_paused:
            return step
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or is_background(request_id):
                continue  # what nobody has asked yet (a draft) is to be nowhere but on the device
            # From 0 at its start, though the device may hold a prefix: the tiers may have lost it. A block whose last token is not known
            # yet (asynchronous scheduling) has no hash; it is offered one step later.
            first = self._num_offered.get(request_id, 0)
            num_computed = request.num_computed_tokens + num_tokens  # not advanced yet
            last = min(num_computed // self._block_size, len(request.block_hashes))
            self._num_offered[request_id] = max(first, last)
            if first < last:
                keys = _keys(request, first, last)
                save = store.begin_save(group_of(request), keys, tenant=facts_of(request).tenant)
                if save.blocks:
                    block_ids = block_ids_of(request_id)[0]
                    step.saves.append(SaveJob(save, [block_ids[first + i] for i in save.positions]))
        return step

    def _note_time(self, scheduler_output: Any) -> None:
        """Steps follow one another without a pause while requests run, so the time between two is what the first has cost."""
        now = time.perf_counter()
        then, num_tokens = self._last_step
        if num_tokens >= MIN_PREFILL_TOKENS and scheduler_output.scheduled_cached_reqs.req_ids:
            self._tiers.note_prefill(num_tokens, now - then)
        self._last_step = (now, scheduler_output.total_num_scheduled_tokens)

    def spoiled_by(self, invalid: set[int], block_ids_of: Any) -> set[int]:
        """Device blocks whose KV is not to be trusted when `invalid` ones did not load: those, and all behind them in any conversation.

        vLLM computes them again for the requests that run, but leaves them in its prefix cache meanwhile, where another request could
        take them for good.
        """
        spoiled = set(invalid)
        for request_id in self._num_offered:
            block_ids = block_ids_of(request_id)[0]
            first = next((i for i, block_id in enumerate(block_ids) if block_id in invalid), None)
            if first is not None:
                spoiled.update(block_ids[first:])
                sources = self.sources.get(request_id)
                if sources is not None:
                    loaded = max(first * self._block_size - sources.device, 0)
                    sources.host = min(sources.host, loaded)
                    sources.disk = min(sources.disk, loaded - sources.host)
        return spoiled

    @property
    def _store(self) -> KvStore:
        store = self._tiers.store
        assert store is not None
        return store


class _Step:
    """The worker's side: the copies of one step."""

    def __init__(self, tiers: KvTiers) -> None:
        self._tiers = tiers
        self._loads: list[Load] = []
        self._saves: list[Save] = []
        self._save_blocks: list[int] = []
        self._save_slots: list[list[int]] = []
        self._failed: set[int] = set()

    def begin(self, metadata: StepMetadata) -> None:
        self._loads = metadata.loads
        self._saves = [job.save for job in metadata.saves]
        self._save_blocks = [block_id for job in metadata.saves for block_id in job.block_ids]
        slots = [slots for save in self._saves for slots in save.slots]
        self._save_slots = [list(layer) for layer in zip(*slots, strict=True)]

    def load(self, layer: int) -> None:
        """Bring a layer of all blocks to load, before its attention runs."""
        for load in self._loads:
            if not load.block_ids:
                continue
            store, copier = self._tiers.store, self._tiers.copier
            assert store is not None and copier is not None
            num_ready = len(load.block_ids)
            if not load.is_whole:
                end = load.first + num_ready
                num_ready = store.wait_for_layer(load.stage, end, layer, LAYER_TIMEOUT_S) - load.first
            if num_ready < len(load.block_ids):
                num_ready = max(num_ready, 0)
                self._failed.update(load.block_ids[num_ready:])
                del load.block_ids[num_ready:]
            blocks = load.stage.blocks[load.first : load.first + num_ready]
            if blocks:
                copier.to_device(layer, load.block_ids, [block.slots[layer] for block in blocks])

    def save(self, layer: int) -> None:
        """Take a layer of all finished blocks, after its attention has run."""
        if self._save_blocks:
            copier = self._tiers.copier
            assert copier is not None
            copier.to_host(layer, self._save_blocks, self._save_slots[layer])

    def end(self) -> None:
        """The forward pass is over (or launched): let go of what was loaded, hand over what was saved."""
        if not (self._loads or self._saves):
            return
        store, copier = self._tiers.store, self._tiers.copier
        assert store is not None and copier is not None
        loads, saves = self._loads, self._saves
        # Blocks computed on top of KV that did not come are wrong; which ones is not worth finding out.
        keep = store.commit if not self._failed else store.abandon
        self._loads, self._saves, self._save_blocks, self._save_slots = [], [], [], []

        def let_go() -> None:
            for save in saves:
                keep(save)
            for load in loads:
                store.release(load.stage)

        copier.end_step(let_go)

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        if failed:
            self._tiers.num_failed_loads += len(failed)
            log.warning(
                "%d KV blocks did not come in time or were damaged; they are computed again", len(failed)
            )
        return failed


def group_of(request: Request) -> str:
    """What a request's KV is kept together with, among its tenant's: its session, or whatever began with the same block."""
    if request.session_id is not None:
        return str(request.session_id)
    return bytes(request.block_hashes[0]).hex() if request.block_hashes else request.request_id


def _keys(request: Request, first: int, last: int) -> list[BlockKey]:
    return [BlockKey(bytes(key)) for key in request.block_hashes[first:last]]
