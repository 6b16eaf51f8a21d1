"""The worker of a rank on a CPU."""

from __future__ import annotations

import os
from typing import Any

from engine_bridge.driver.ranks.worker import Rank
from engine_bridge.driver.vllm_api import CpuCommunicator, CPUWorker
from engine_bridge.policy.limits.cores import WAITING


class RankWorker(Rank, CPUWorker):
    """vLLM's worker with our parts.

    vLLM's own exchange between ranks on a CPU waits without giving its core away. Where cores are few, ranks exchange by gloo, which waits in the
    kernel.
    """

    on_cpu = True

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if os.environ.get(WAITING) != "spin":
            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda communicator: False
        super().__init__(vllm_config, *args, **kwargs)
