"""What a rank's process does beside vLLM's worker: it has our parts in it, answers the engine's process, and ends with it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from engine_bridge.driver.engine import worker_parts
from engine_bridge.driver.in_process import kv_caches_in
from engine_bridge.driver.ranks.calls import answered
from engine_bridge.driver.ranks.failing import telling
from engine_bridge.driver.ranks.messages import RegionCopy
from engine_bridge.driver.vllm_api.features import FEATURES
from engine_bridge.policy.limits.model_support import CannotHave
from engine_bridge.process_end import leave, stop_collecting

if TYPE_CHECKING:
    from engine_bridge.driver.adapters.weights import ContractFacts
    from engine_bridge.driver.kv.layer_groups import LayerFacts
    from engine_bridge.driver.ranks.messages import StepAnswers
    from engine_bridge.driver.ranks.rank_copies import RankCopies

PR_SET_PDEATHSIG = 1
# Of multiprocessing's finalizers, which it calls when a process ends: behind all others.
LAST = -1000


class Rank:
    """A part of the class of a rank's worker; the other part is vLLM's. vLLM makes it in the rank's process."""

    on_cpu: bool
    vllm_config: Any
    rank: int
    model_runner: Any

    @telling
    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        end_with_parent()
        # Taking all objects apart has kept ranks for longer than the 9 s after which vLLM kills them (measured on two busy cores).
        Finalize(None, leave, args=(0,), exitpriority=LAST)
        named = vllm_config.additional_config.get("without", ())
        self._off = frozenset(feature for feature in FEATURES if feature.name in named)
        has_adapters = vllm_config.lora_config is not None
        worker_parts.install(self._off, on_cpu=self.on_cpu, has_adapters=has_adapters)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    @telling
    def init_device(self) -> None:
        """Set up this rank's device, and find the other ranks."""
        super().init_device()

    @telling
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load this rank's part of the model, and put our parts into its runner."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        has_adapters = self.vllm_config.lora_config is not None
        worker_parts.watch(self.model_runner, self._off, on_cpu=self.on_cpu, has_adapters=has_adapters)

    def shutdown(self) -> None:
        """Give back what a process's end does not give back."""
        stop_collecting()
        super().shutdown()

    # -- the engine's process asks -----------------------------------------------------------------------------------

    @answered
    def overture_layers(self) -> LayerFacts | str:
        """Return how this rank keeps its KV; a text that says why its blocks cannot be copied, where they cannot."""
        try:
            return self._copies().facts()
        except CannotHave as error:
            return error.reasons["KV tiers"]

    @answered
    def overture_attach(self, path: str, num_slots: int) -> None:
        """Map the host memory that all ranks share."""
        self._copies().attach(path, num_slots, self.rank, self.vllm_config.parallel_config.world_size)

    @answered
    def overture_copy(self, number: int, copies: Sequence[RegionCopy]) -> StepAnswers | None:
        """Begin copies. Returns which copies are made since the last answer; None for none."""
        return self._copies().carry_out(number, copies)

    @answered
    def overture_answers(self) -> StepAnswers | None:
        """Return which copies are made since the last answer; None for none."""
        return self._copies().take_answers()

    @answered
    def overture_adapters(
        self, base_models: tuple[str, ...], max_idle_bytes: int, authkey: bytes
    ) -> tuple[ContractFacts, int, str]:
        """Begin to hold adapters.

        Returns:
            What the layers accept, the number of slots, and the address where this rank is called beside the steps.
        """
        from engine_bridge.driver.ranks.rank_adapters import RankAdapters

        self._adapters = RankAdapters(self.model_runner.lora_manager, base_models, max_idle_bytes)
        return self._adapters.facts, self._adapters.num_slots, self._adapters.serve(authkey)

    @answered
    def overture_fill(self, slot: int, adapter_id: int, load_number: int) -> None:
        """Make the steps from here on compute rows of a slot with this adapter, as it was loaded under this number."""
        self._adapters.fill(slot, adapter_id, load_number)

    @answered
    def overture_drop(self, load_number: int) -> None:
        """Let go of an adapter that was loaded under this number."""
        self._adapters.drop(load_number)

    @answered
    def overture_fill_cache(self) -> tuple[int, int]:
        """Write numbers into this rank's KV cache, for a measurement. Returns the number of its regions, and a block's bytes in one of them."""
        from engine_bridge.driver.memory.block_copy import layer_bytes
        from engine_bridge.driver.profiling.requests import fill_kv

        caches = kv_caches_in(self.model_runner)
        fill_kv(caches)
        return len(caches), layer_bytes(caches[0])

    @answered
    def overture_zero(self, blocks: list[int]) -> None:
        """Overwrite these blocks of this rank's KV cache."""
        from engine_bridge.driver.memory.zeroing import zero

        zero(kv_caches_in(self.model_runner), blocks)

    def _copies(self) -> RankCopies:
        from engine_bridge.driver.vllm_api import get_kv_transfer_group

        copies: RankCopies = get_kv_transfer_group().copies
        return copies


def end_with_parent() -> None:
    """Make this process end when the engine's thread that has started it ends, and not before.

    A rank that is in a step does not look whether its parent is there. A terminal and some service managers send their signals to all processes of a
    server at once, which then still ends its answers.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it has ended before
        os._exit(1)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    # The signal was held back until here, where it is ignored: see `starting.ranks_starting`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
