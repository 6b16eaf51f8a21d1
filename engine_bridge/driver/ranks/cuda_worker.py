"""The worker of a rank on a CUDA device."""

from __future__ import annotations

from engine_bridge.driver.ranks.worker import Rank
from engine_bridge.driver.vllm_api import Worker


class RankWorker(Rank, Worker):
    """vLLM's worker with our parts."""

    on_cpu = False
