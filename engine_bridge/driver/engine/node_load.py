"""The facts of one engine that routing uses: the work it has, and how fast it is. Read from any thread, a few times a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from engine_bridge.core.scheduling.load import Counted, LoadTracker
from engine_bridge.core.scheduling.step_times import UNKNOWN_ERROR, StepSeconds, StepTimes
from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.scheduling.report import copy_of
from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.protocol.node_facts import KernelName, NodeFacts, NodePerf
from engine_bridge.protocol.urgency import is_urgent
from engine_bridge.settings.profile import MachineProfile

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers


class Speeds:
    """The speeds of one engine: at first the profile's, else the warm-up's; later corrected by steps that are timed anyway.

    Args:
        steps: how long steps take, as far as it is known.
        profile: the measurements of this machine; None: there are none.
        tiers: they know how long moving KV takes; None: there are no tiers.
    """

    def __init__(self, steps: StepTable, profile: MachineProfile | None, tiers: KvTiers | None) -> None:
        self._tiers = tiers
        adapters = profile.adapters if profile is not None else None
        # The kernel whose line explains more of the measurements; unmeasured: our own wrapper's way, each adapter by its own rank.
        kernel: KernelName = "mbgmv"
        line = adapters.mbgmv if adapters is not None else None
        padded = adapters.bgmv if adapters is not None else None
        if padded is not None and (line is None or padded.r2 > line.r2):
            kernel, line = "bgmv", padded
        rank_s = max(line.a, 0.0) if line is not None else 0.0
        error = steps.usual_error if profile is not None else UNKNOWN_ERROR
        self.times = StepTimes(StepSeconds.from_table(steps, rank_s), kernel, error)

    def perf(self, prompt_tokens: float, answer_tokens: float) -> NodePerf:
        """Return the speeds for prompts and answers of the usual lengths, in tokens. From any thread."""
        times = self.times
        perf = times.seconds.perf(times.kernel, prompt_tokens, answer_tokens, times.error)
        if self._tiers is None:
            return perf
        device_s, disk_s, fetch_s = self._tiers.kv_token_s()
        return msgspec.structs.replace(
            perf, kv_token_s=device_s, kv_disk_token_s=disk_s, kv_fetch_token_s=fetch_s
        )


class LoadReader:
    """A view of one engine's load that changes nothing and waits for no step.

    Args:
        scheduler: vLLM's, with our seam.
        load: the load as our scheduling counts it; None where vLLM's own queue decides: then requests are counted one by one.
    """

    def __init__(self, scheduler: Any, load: LoadTracker | None, block_size: int, speeds: Speeds) -> None:
        self._scheduler, self._load = scheduler, load
        self._pool, self._block_size = scheduler.kv_cache_manager.block_pool, block_size
        self._speeds = speeds

    def facts(self) -> NodeFacts:
        """Return the facts of this engine, under an empty name. From any thread."""
        running = copy_of(self._scheduler.running)
        load = self._load or self._counted(running)
        # Blocks whose KV or adapters no request uses count as free, in vLLM's pool as here.
        num_free = self._pool.get_num_free_blocks() * self._block_size
        perf = self._speeds.perf(load.prompt_tokens, load.answer_tokens)
        return load.facts(sum(each.num_tokens for each in running), num_free, perf)

    def _counted(self, running: list[Any]) -> LoadTracker:
        """Count the requests of vLLM's own queue; answers are not predicted here."""
        load = LoadTracker()
        for each in copy_of(self._scheduler.waiting):
            load.waits(_counted(each))
        for each in running:
            load.runs(_counted(each))
        return load


def _counted(request: Any) -> Counted:
    num_tokens: int = request.num_tokens
    rank = facts_of(request).rank
    return Counted(request.request_id, rank, num_tokens, num_tokens, num_tokens, is_urgent(request.priority))
