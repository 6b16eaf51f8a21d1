"""Several nodes of one machine: what each is told to be, and where it keeps its things."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine_bridge.cluster import shares
from engine_bridge.cluster.ray_placement import RayPlacement
from engine_bridge.settings import machine
from gateway.app import node_config
from gateway.errors import StartupError
from gateway.nodes import cluster
from gateway.nodes.engine_process import read_settings
from gateway.settings.config import Config

NUM_CORES = len(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(NUM_CORES < 2, reason="two nodes need two cores")


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose memory nobody else uses."""
    here = machine.look()
    monkeypatch.setattr(machine, "look", lambda: structs.replace(here, available_bytes=64 * shares.GIB))


def config_of(folder: Path) -> Config:
    return Config(data_dir=folder, device="cpu", kv_host_gib=0.5, nodes=2)


def placement_of(config: Config, **options: Any) -> RayPlacement:
    return cluster.make_placement(config, node_config(config), lambda node_id, stage: None, **options)


def test_each_node_has_folders_of_its_own_and_half_of_the_memory(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first, second = cluster.nodes_of(config, node_config(config), ("node-1", "node-2"))
    for node in (first, second):
        made = read_settings(node.settings).node
        assert made.state_dir == tmp_path / "nodes" / node.node_id and made.state_dir.is_dir()
        assert made.engine.kv_dir == tmp_path / "kv" / node.node_id
        assert made.engine.kv_host_gib == 0.25
        assert made.adapters_dir is None, "gateways bring them"
        assert made.engine.profile_dir == tmp_path / "profiles", "one profile is for all of them"
    assert first.turns == second.turns
    assert not set(first.cores) & set(second.cores)


def test_nodes_share_a_token_that_is_made_once_and_a_folder_in_which_another_one_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "FORMER_S", 0.0)
    config = config_of(tmp_path)
    assert list(placement_of(config).nodes) == ["node-1", "node-2"]
    token = (tmp_path / "cluster-token").read_bytes()
    with (tmp_path / "nodes" / "node-2" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StartupError, match="another process runs node-1 or node-2"):
            placement_of(config)
    placement_of(config)
    assert list(placement_of(config, names=("b",)).nodes) == ["b"]
    assert (tmp_path / "cluster-token").read_bytes() == token
