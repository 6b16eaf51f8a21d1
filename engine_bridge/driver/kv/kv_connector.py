"""vLLM's KV connector over the tiers: saves each layer of finished blocks as it is computed, loads each layer before it is needed.

vLLM makes two connectors, one for the scheduler and one for the worker. Here both are in one process, and find their `KvTiers` by the name in the
connector's configuration; `driver/ranks` has the connector whose workers are other processes. What the scheduler's side decides for a step travels to
the worker's side in `StepMetadata`.

Order of calls in a step that loads: bind_connector_metadata, start_load_kv, {wait_for_layer_load, attention, save_kv_layer} per layer, wait_for_save.
In a step that loads nothing vLLM calls start_load_kv after the forward pass, so each step is set up when its metadata is bound.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_bridge.core.kv.asked import NewRequest
from engine_bridge.core.kv.kv_transfers import Restores
from engine_bridge.core.kv.prefill_meter import PrefillMeter
from engine_bridge.core.kv.restoring import LoadBlocks
from engine_bridge.core.kv.step_moves import StepMoves
from engine_bridge.driver.background import is_background
from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.in_process import reuses_kv
from engine_bridge.driver.kv.kv_tiers import KvTiers, find_tiers, settle
from engine_bridge.driver.kv.layer_groups import Layers, layout_of
from engine_bridge.driver.kv.step_copies import StepCopies
from engine_bridge.driver.memory import block_copy
from engine_bridge.driver.vllm_api import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from kvtiers.blocks import Save

if TYPE_CHECKING:
    import torch

    from engine_bridge.driver.memory.block_copy import BlockCopier
    from engine_bridge.driver.vllm_api import Request

log = logging.getLogger(__name__)

# If a layer that was predicted to come in time takes longer than this, its blocks are given up and computed again. Chosen.
LAYER_TIMEOUT_S = 0.5


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The loads and saves of one step, in the form that its worker's side understands."""

    moves: Any


class TieredConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector: see the module. It works on a best-effort basis: a failure is a miss, and the blocks are computed."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._layout = layout_of(kv_cache_config, vllm_config)
        self._vllm_config, self._cache_config = vllm_config, kv_cache_config
        self._by_layer = bool(vllm_config.kv_transfer_config.kv_connector_extra_config["by_layer"])
        if role == KVConnectorRole.SCHEDULER:
            self._tiers = find_tiers(vllm_config)
            self._requests: dict[str, Request] = {}
            self._prefills = PrefillMeter()
            self._restores = Restores(self._tiers, self._layout)
            self._tiers.restores = self._restores

    # -- what kind of connector this is --------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM must not lose a save. It may: a lost save is only a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether layers are copied as the forward pass comes to them: such hooks do not run inside a full CUDA graph."""
        return bool(extra_config["by_layer"])

    # -- scheduler's side ----------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Enter a request into the restores, and tell the listener that it has arrived unless it is a background request."""
        facts = facts_of(request)
        has_asker = not is_background(request.request_id)
        self._requests[request.request_id] = request
        self._restores.enter(
            NewRequest(
                request_id=request.request_id,
                keys=request.block_hashes,
                tenant=facts.tenant,
                session=str(request.session_id) if request.session_id is not None else None,
                weight=facts.weight,
                is_saved=has_asker,
                may_load=not request.skip_reading_prefix_cache,
                kv_from=facts.kv_from,
            )
        )
        if self._tiers.listener is not None and has_asker:
            self._tiers.listener.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones the tiers will load, and False: none is loaded asynchronously."""
        num_tokens = self._restores.match(
            request.request_id,
            num_computed_tokens,
            request.num_tokens,
            is_resumed=request.num_preemptions > 0,
        )
        if self._layout.state_groups:
            # vLLM ends a step where requests that began alike parted, so that the state there can be kept, if it knows of that place.
            common_tokens = self._restores.common_tokens(request.request_id)
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, common_tokens)
        return num_tokens, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Note that a request starts, with the blocks that its `num_external_tokens` are to be loaded into."""
        if self._tiers.listener is not None:
            self._tiers.listener.started(request)
        self._restores.admit(
            request.request_id,
            blocks.get_block_ids() if num_external_tokens else [],
            num_external_tokens,
            request.num_tokens,
            is_resumed=request.num_preemptions > 0,
        )

    def preempted(self, request: Request) -> None:
        """Note that a request is preempted. Our scheduler calls this while the request's blocks and its computed tokens are still known."""
        self._restores.preempted(request.request_id, request.num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Decide what the step that vLLM has scheduled loads and saves, and learn the prefill speed from the step before."""
        measured = self._prefills.stepped(
            scheduler_output.total_num_scheduled_tokens,
            has_running=bool(scheduler_output.scheduled_cached_reqs.req_ids),
            now=self._tiers.clock(),
        )
        if measured is not None:
            self._tiers.note_prefill(*measured)
        scheduled = (
            # `num_computed_tokens` does not count this step's tokens yet.
            (request_id, self._requests[request_id].num_computed_tokens + num_tokens)
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
            if request_id in self._requests
        )
        offered = scheduler_output.kv_connector_block_state
        states = offered.boundary_state_offloads if offered is not None else {}
        moves = self._restores.next_step(scheduled, self._block_ids_of, states)
        self._tiers.begin_moves(moves)
        return StepMetadata(moves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Evict the blocks that a failed load has spoiled, with all blocks computed on top of them."""
        invalid = connector_output.invalid_block_ids
        if invalid:
            self._kv_cache_manager.evict_blocks(self._restores.spoiled_by(invalid, self._block_ids_of))

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks will be free when a copy beside the steps is made. vLLM then waits for them, and preempts no request."""
        held = self._tiers.held
        return held is not None and held.holds_last

    def finish_copies(self) -> None:
        """Return when no copy holds blocks of the device any more."""
        self._tiers.finish_copies()

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        """Forget a finished request and tell the listener, unless it is a background request.

        Returns:
            False, as the request's blocks may be freed at once, and None, as there are no transfer parameters.
        """
        self._requests.pop(request.request_id, None)
        self._restores.forget(request.request_id)
        if self._tiers.listener is not None and not is_background(request.request_id):
            self._tiers.listener.ended(request)
        return False, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a finished request, for models with one KV cache group: see `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def _block_ids_of(self, request_id: str) -> Sequence[Sequence[int]]:
        block_ids: Sequence[Sequence[int]] = self._kv_cache_manager.get_block_ids(request_id)
        return block_ids

    # -- worker's side -------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Attach the tiers to a new engine's cache, a tensor per layer by the layer's name."""
        self._layers = Layers(kv_caches, self._cache_config.kv_cache_groups, self._cache_config.num_blocks)
        self._step = self.begin_work(self._layers)

    def begin_work(self, layers: Layers) -> Any:
        """Attach the tiers to this worker's layers, and return what copies in its steps."""
        tiers = find_tiers(self._vllm_config)
        # If vLLM has switched its prefix cache off, KV cannot be reused here. Then there is no store, and nothing is loaded or saved.
        if reuses_kv(self._vllm_config):
            tiers.attach(
                layers.facts(),
                self._layout,
                self._vllm_config,
                lambda pool, waiter: block_copy.make_copier(layers.regions, pool.region, waiter),
            )
        return _OwnStep(tiers, layers, self._layout.state_groups, by_layer=self._by_layer)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin the worker's side of a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._step.begin(connector_metadata.moves)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load all that the step loads, where layers have no hooks or are not copied by them."""
        self._step.start()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Bring a layer of all blocks to load to the device, before its attention runs."""
        self._step.layer_begins(self._layers.region_of[layer_name])

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy a layer of all finished blocks to host memory, after its attention has run."""
        group = self._layers.group_of.get(layer_name)
        if group is not None:
            self._step.layer_ends(group, self._layers.region_of[layer_name])

    def wait_for_save(self) -> None:
        """End the worker's side of a step. Copies may still run afterwards."""
        self._step.end()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return, once, the blocks whose loads have failed since the last call."""
        return self._step.take_failed()


class _OwnStep(StepCopies):
    """The copies of one step of an engine whose worker is in this process.

    A load need not be whole: the layers that are still on their way are waited for when the forward pass comes to them.
    """

    def __init__(
        self, tiers: KvTiers, layers: Layers, state_groups: Collection[int], *, by_layer: bool = True
    ) -> None:
        super().__init__(layers, state_groups, by_layer=by_layer)
        self._tiers = tiers
        self._loads: list[LoadBlocks] = []
        self._saves: list[Save] = []
        self._has_missed = False
        self._failed: set[int] = set()
        self._moves = StepMoves()

    @property
    def copier(self) -> BlockCopier:
        """The copier of this process."""
        assert self._tiers.copier is not None
        return self._tiers.copier

    def begin(self, moves: StepMoves) -> None:
        """Take over a step's loads and saves from its metadata."""
        self._moves, self._has_missed = moves, False
        self._loads, self._saves = moves.loads, [job.save for job in moves.saves]
        self.begin_copies(copies_of(moves))

    @property
    def has_loads(self) -> bool:
        """Whether the step loads anything."""
        return bool(self._loads)

    def load_region(self, region: int) -> None:
        """Copy a region of all blocks to load to the device.

        Of a load that is not whole yet, blocks that do not come within LAYER_TIMEOUT_S are given up.
        """
        for load in self._loads:
            if not load.block_ids:
                continue
            if not load.is_whole:
                store = self._tiers.store
                assert store is not None
                num_wanted = load.positions[-1] + 1
                num_ready = store.wait_for_layer(load.stage, num_wanted, region, LAYER_TIMEOUT_S)
                missed = load.cut(num_ready)
                self._failed.update(missed)
                self._has_missed = self._has_missed or bool(missed)
            slots = [load.stage.blocks[position].slots[region] for position in load.positions]
            if slots:
                self.copier.to_device(region, load.block_ids, slots)

    def end(self) -> None:
        """Release the loaded blocks and commit the saved ones, once the forward pass is over (or launched) or has failed."""
        is_spoiled, self._tiers.is_step_spoiled = self._tiers.is_step_spoiled, False
        if not (self._loads or self._saves):
            return
        if sys.exception() is None:
            self.save_rest()
        # Blocks computed on top of KV that did not come are wrong; which ones is not worth finding out.
        is_right = self.has_saved_all and not self._has_missed and not is_spoiled
        moves, store = self._moves, self._tiers.store
        assert store is not None
        self.copier.end_step(
            lambda: settle(store, moves, is_right=is_right), lambda: settle(store, moves, is_right=False)
        )
        self._loads, self._saves = [], []
        self._tiers.end_moves(moves)
        self._tiers.hear_copies()

    def take_failed(self) -> set[int]:
        """Return, once, the blocks that did not come, and count them."""
        failed, self._failed = self._failed, set()
        if failed:
            self._tiers.num_failed_loads += len(failed)
            log.warning(
                "%d KV blocks did not come in time or were damaged; they are computed again", len(failed)
            )
        return failed


def copies_of(moves: StepMoves) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the group, the device's block and the host slots of each block that a step saves."""
    for job in moves.saves:
        yield from zip(job.groups, job.block_ids, job.save.slots, strict=True)
