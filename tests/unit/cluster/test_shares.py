import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.cluster import shares
from engine_bridge.protocol.errors import ClusterError
from engine_bridge.settings.engine_config import EngineConfig

GIB = shares.GIB


def engine(**changes: object) -> EngineConfig:
    return EngineConfig(model="m", served_model_name="m", **changes)  # type: ignore[arg-type]


@given(cores=st.sets(st.integers(0, 255), min_size=1), data=st.data())
def test_each_core_belongs_to_one_node_and_parts_are_alike(cores: set[int], data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, len(cores)))
    parts = shares.divide_cores(list(cores), num_nodes)
    assert sorted(core for part in parts for core in part) == sorted(cores)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


WHOLE = {"kv_cache_gib": 4, "kv_host_gib": 2, "kv_disk_gib": 8, "adapter_host_gib": 1}
PART = {"kv_cache_gib": 2, "kv_host_gib": 1, "kv_disk_gib": 4, "adapter_host_gib": 0.5, "batch_seqs": 64}


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        (WHOLE, PART),
        ({"cpu_threads": 1}, {"kv_cache_gib": 0.5, "cpu_threads": 1}),
        ({"cpu_threads": 16}, {"cpu_threads": 4}),
        ({"device": "cuda"}, {"kv_cache_gib": None, "cpu_threads": None}),
        ({"device": "cuda", "kv_cache_gib": 6}, {"kv_cache_gib": 6}),
    ],
)
def test_settings_for_the_machine_are_divided(whole: dict[str, object], part: dict[str, object]) -> None:
    """KV on CPUs is the machine's, on GPUs each one's own; a node computes on its own cores at most."""
    divided = shares.divide_engine(engine(**whole), 2, 4)
    assert {name: getattr(divided, name) for name in part} == part


def test_nodes_that_do_not_fit_into_memory_are_refused() -> None:
    """On GPUs weights and KV take no memory of the host."""
    on_cpu, on_gpu = (
        engine(kv_cache_gib=2, kv_host_gib=1),
        engine(device="cuda", kv_cache_gib=50, kv_host_gib=1),
    )
    for part, num_nodes, weights_bytes, node_bytes, gib in (
        (on_cpu, 2, GIB // 2, shares.NODE_BYTES + GIB // 2 + 3 * GIB, "9.6"),
        (on_gpu, 1, 100 * GIB, shares.NODE_BYTES + GIB, "2.3"),
    ):
        shares.check_memory(part, num_nodes, weights_bytes, num_nodes * node_bytes)
        with pytest.raises(ClusterError, match=rf"{num_nodes} nodes need {gib} GiB .*--kv-host-gib"):
            shares.check_memory(part, num_nodes, weights_bytes, num_nodes * node_bytes - 1)


def test_each_node_needs_a_core_and_on_gpus_a_gpu() -> None:
    assert shares.divide_cores([3, 1, 0, 2], 2) == [(0, 1), (2, 3)], "neighbours stay together"
    with pytest.raises(ClusterError, match=r"3 nodes .* may use 2.* --nodes"):
        shares.divide_cores([0, 1], 3)
    shares.check_gpus(2, 2)
    with pytest.raises(ClusterError, match="shows 1"):
        shares.check_gpus(2, 1)
