"""How the nodes of one machine share it. Pure: the machine's resources go in, each node's part comes out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from engine_bridge.protocol.errors import ClusterError
from engine_bridge.settings.engine_config import GIB, EngineConfig

# Memory of a node's process beside weights and KV: Python, torch, vLLM and helper processes. Measured: 1.3 GiB with the demo model on a CPU.
NODE_BYTES = int(1.3 * GIB)
# Settings that are made for the machine, and divided among its nodes; on a CPU the KV cache, too.
DIVIDED = ("kv_host_gib", "kv_disk_gib", "adapter_host_gib")


def divide_cores(cores: Sequence[int], num_nodes: int) -> list[tuple[int, ...]]:
    """Divide the cores among nodes: neighbouring cores together, sizes one apart at most. Raises ClusterError if a node would get none."""
    if num_nodes > len(cores):
        raise ClusterError(
            f"{num_nodes} nodes need as many cores, and this process may use {len(cores)}. Start fewer with --nodes."
        )
    ordered = sorted(cores)
    starts = [number * len(ordered) // num_nodes for number in range(num_nodes + 1)]
    return [tuple(ordered[low:high]) for low, high in pairwise(starts)]


def divide_engine(engine: EngineConfig, num_nodes: int, num_cores: int) -> EngineConfig:
    """Return one node's part of the settings for a machine of `num_nodes`. num_cores: of the node. A GPU belongs to one node whole."""
    parts: dict[str, float] = {name: getattr(engine, name) / num_nodes for name in DIVIDED}
    if engine.device == "cpu":
        parts["cpu_threads"] = min(engine.cpu_threads or num_cores, num_cores)
        parts["kv_cache_gib"] = (engine.kv_cache_bytes or 0) / GIB / num_nodes
    return msgspec.structs.replace(engine, **parts)


def check_memory(engine: EngineConfig, num_nodes: int, weights_bytes: int, available_bytes: int) -> None:
    """Check that `num_nodes` nodes, each with its part of the settings, fit into the free memory. Raises ClusterError."""
    on_cpu = engine.device == "cpu"
    cache_bytes = engine.kv_cache_bytes or 0 if on_cpu else 0
    node_bytes = NODE_BYTES + (weights_bytes if on_cpu else 0) + cache_bytes + int(engine.kv_host_gib * GIB)
    if num_nodes * node_bytes <= available_bytes:
        return
    raise ClusterError(
        f"{num_nodes} nodes need {num_nodes * node_bytes / GIB:.1f} GiB of memory, and {available_bytes / GIB:.1f} GiB are free. "
        "Start fewer with --nodes, or give them less with --kv-host-gib and --kv-cache-gib."
    )


def check_gpus(num_nodes: int, num_gpus: int, num_of_each: int = 1) -> None:
    """Check that each node gets its GPUs. num_of_each: a node's, over which its model is split. Raises ClusterError."""
    if num_nodes * num_of_each > num_gpus:
        wanted = "a GPU" if num_of_each == 1 else f"{num_of_each} GPUs"
        raise ClusterError(
            f"{num_nodes} nodes need {wanted} each, and this machine shows {num_gpus}. Start fewer with --nodes."
        )
