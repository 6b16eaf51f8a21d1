"""What an engine is built from: plain data that the gateway fills in and the driver reads."""

from __future__ import annotations

from msgspec import Struct


class EngineConfig(Struct, frozen=True, kw_only=True):
    """What an engine is built from. Memory in GiB; lengths in tokens."""

    model: str
    served_model_name: str
    device: str = "cpu"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    block_size: int | None = None
    kv_cache_gib: float = 1.0
    num_kv_blocks: int | None = None
    """Blocks of KV on the device, whatever memory there is; None: as many as fit."""
    cpu_threads: int | None = None
    """Cores that a CPU engine computes on, the last ones that this process may use; None: all."""
    gpu_memory_utilization: float = 0.9
    enable_lora: bool = True
    max_loras: int = 8
    """Adapters of the largest rank that requests may use at once; on a CPU more of smaller ones, in the same memory."""
    max_lora_rank: int = 128
    adapter_host_gib: float = 1.0
    """Host memory for adapters that may be needed soon."""
    cpu_assist: bool = True
    """Requests start while their adapter is still on its way to where it is computed with."""
    cpu_assist_workers: int = 0
    """Processes that compute with adapters on their way; 0: the engine's own threads do."""
    adapter_policy: str = "expected_gain"
    """Which adapters leave memory first: a name in engine_bridge.policy.adapter_cache.POLICIES."""
    adapters_in_kv: bool = True
    """Unused adapters lie in KV blocks that nobody needs."""
    adapter_prefetch: bool = False
    """Adapters are loaded ahead by the times between their last requests."""
    scheduling_policy: str = "mlq"
    """Who starts next: a name in engine_bridge.policy.registry.POLICIES, or "vllm" for its own queue (first come, first served)."""
    decision_log: str | None = None
    """A file for what the policy is told and decides (`overture replay`); None: none."""
    decision_log_mib: int = 64
    max_step_ms: float = 500.0
    """How long a step may take: prompts are computed in parts that keep to it. 0: as long as it takes. Not for the policy "vllm"."""
    seed: int = 0
    enforce_eager: bool | None = None
    """None: on a CPU yes (vLLM compiles nothing there once LoRA is on), on CUDA no."""
    kv_host_gib: float = 0.0
    """Host memory for KV that leaves the device; 0: none, and no disk tier either."""
    kv_disk_gib: float = 0.0
    kv_dir: str | None = None
    profile_dir: str | None = None
    """Folder of profiles (engine_bridge/profile.py); None: costs are learned from real steps alone."""
    log_stats: bool = True

    @property
    def is_eager(self) -> bool:
        return self.device == "cpu" if self.enforce_eager is None else self.enforce_eager
