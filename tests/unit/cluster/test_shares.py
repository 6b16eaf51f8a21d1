"""Nodes of one machine share its cores and memory, and what does not fit is said before anything starts."""

from __future__ import annotations

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
def test_each_core_belongs_to_one_node_and_none_gets_much_more_than_another(
    cores: set[int], data: st.DataObject
) -> None:
    num_nodes = data.draw(st.integers(1, len(cores)))
    parts = shares.divide_cores(list(cores), num_nodes)
    assert sorted(core for part in parts for core in part) == sorted(cores)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_neighbouring_cores_stay_together() -> None:
    assert shares.divide_cores([3, 1, 0, 2], 2) == [(0, 1), (2, 3)]


def test_more_nodes_than_cores_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"3 nodes .* may use 2.* --nodes"):
        shares.divide_cores([0, 1], 3)


def test_settings_for_the_machine_are_divided_and_others_are_not() -> None:
    whole = engine(kv_cache_gib=4, kv_host_gib=2, kv_disk_gib=8, adapter_host_gib=1, max_num_seqs=64)
    part = shares.divide_engine(whole, 2, 3)
    assert (part.kv_cache_gib, part.kv_host_gib, part.kv_disk_gib, part.adapter_host_gib) == (2, 1, 4, 0.5)
    assert (part.cpu_threads, part.max_num_seqs) == (3, 64)


@pytest.mark.parametrize(
    ("device", "said", "got"), [("cpu", None, 0.5), ("cuda", 6, 6), ("cuda", None, None)]
)
def test_kv_on_cpus_is_the_machines_and_on_gpus_each_ones_own(
    device: str, said: float | None, got: float | None
) -> None:
    assert shares.divide_engine(engine(device=device, kv_cache_gib=said), 2, 4).kv_cache_gib == got


@pytest.mark.parametrize(("asked", "got"), [(None, 4), (1, 1), (16, 4)])
def test_a_node_computes_on_its_own_cores_at_most(asked: int | None, got: int) -> None:
    assert shares.divide_engine(engine(cpu_threads=asked), 2, 4).cpu_threads == got


def test_a_gpu_keeps_its_threads_to_itself() -> None:
    assert shares.divide_engine(engine(device="cuda"), 2, 4).cpu_threads is None


def test_nodes_that_do_not_fit_into_memory_are_refused() -> None:
    part = engine(kv_cache_gib=2, kv_host_gib=1)
    need = 2 * (shares.NODE_BYTES + GIB // 2 + 3 * GIB)
    shares.check_memory(part, 2, GIB // 2, need)
    with pytest.raises(ClusterError, match=r"2 nodes need 9\.6 GiB .*--kv-host-gib"):
        shares.check_memory(part, 2, GIB // 2, need - 1)


def test_on_gpus_weights_and_kv_take_no_memory_of_the_host() -> None:
    part = engine(device="cuda", kv_cache_gib=50, kv_host_gib=1)
    shares.check_memory(part, 1, 100 * GIB, shares.NODE_BYTES + GIB)
    with pytest.raises(ClusterError, match=r"1 nodes need 2\.3 GiB"):
        shares.check_memory(part, 1, 100 * GIB, shares.NODE_BYTES + GIB - 1)


def test_each_node_needs_a_gpu() -> None:
    shares.check_gpus(2, 2)
    with pytest.raises(ClusterError, match="shows 1"):
        shares.check_gpus(2, 1)
