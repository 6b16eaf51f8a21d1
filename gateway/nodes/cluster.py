"""The settings of several nodes behind one gateway: each node's share of this machine, its folder, and how the nodes trust each other."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec

from engine_bridge.cluster import shares
from engine_bridge.cluster.file_locks import wait_until_free
from engine_bridge.cluster.host import LOCK
from engine_bridge.cluster.orders import ClusterSettings, NodeToStart
from engine_bridge.cluster.peers import PeerConfig
from engine_bridge.cluster.ray_placement import RayPlacement
from engine_bridge.cluster.trust import Trust, read_token
from engine_bridge.protocol.errors import ClusterError
from engine_bridge.settings import machine
from engine_bridge.settings.node_config import LocalNodeConfig
from gateway.errors import StartupError
from gateway.nodes.engine_process import ChildSettings, pack_settings
from gateway.settings.config import Config
from gateway.settings.model_files import weight_bytes_of

log = logging.getLogger(__name__)

MAKE_NODE = "gateway.nodes.engine_process:make_local_node"
# How long nodes of a killed gateway are waited for: their guard gives them 25 s to end. Chosen.
FORMER_S = 30.0
# Below that a node's threads share one core with its engine, and two nodes had better share both. Chosen.
MIN_CORES_TO_KEEP_TO = 2


def make_placement(
    config: Config,
    settings: LocalNodeConfig,
    on_stage: Callable[[str, str], None],
    *,
    names: tuple[str, ...] | None = None,
    follows_all: bool = True,
) -> RayPlacement:
    """Make the placement of the nodes on this machine, and, with `follows_all`, of the nodes that others have started in the same cluster.

    Reads and makes files.

    Args:
        config: the gateway's settings.
        settings: the settings of one node that has the machine to itself.
        on_stage: is told of each node's progress.
        names: the nodes' names; None: `config.nodes` nodes.
        follows_all: whether other machines' nodes are used, too.

    Raises:
        StartupError: the nodes cannot be placed.
    """
    _check_ray()
    names = names if names is not None else _names(config)
    command = (sys.executable, "-m", "gateway.nodes.cluster_process", config.log_format, config.log_level)
    try:
        cluster = ClusterSettings(
            address=config.ray_address or "",
            host=config.cluster_host,
            port=config.cluster_port,
            folder="",
            trust=_trust(config),
            nodes=nodes_of(config, settings, names),
            make_node=MAKE_NODE,
            follows_all=follows_all,
        )
    except ClusterError as error:
        raise StartupError(str(error)) from error
    return RayPlacement(command, cluster, config.model_names, on_stage)


def _names(config: Config) -> tuple[str, ...]:
    """Return the nodes' names: numbers; in a cluster that others may have nodes in, behind this machine's name."""
    before = (config.node_name or default_name()) if config.ray_address is not None else "node"
    return tuple(f"{before}-{number + 1}" for number in range(config.nodes))


def _check_ray() -> None:
    try:
        metadata.version("ray")
    except metadata.PackageNotFoundError as error:
        raise StartupError(
            "several nodes need Ray, which is not installed. In a checkout `make ray` installs it, elsewhere "
            "`pip install 'overture-gateway[cluster]'`."
        ) from error


def default_name() -> str:
    """Return the default name of this machine's node. Names of hosts may have characters that names of nodes may not."""
    host = socket.gethostname().partition(".")[0]
    return "".join(mark if mark.isalnum() else "-" for mark in host).strip("-")[:63] or "node"


def _trust(config: Config) -> Trust:
    assert config.cluster_token_file is not None  # filled in by Config
    trust = Trust(
        token=read_token(config.cluster_token_file),
        cert=str(config.cluster_cert or ""),
        key=str(config.cluster_key or ""),
    )
    # Errors in the files are reported now, not by each node.
    trust.server_tls()
    trust.check_name(config.cluster_host)
    return trust


def nodes_of(config: Config, settings: LocalNodeConfig, names: tuple[str, ...]) -> tuple[NodeToStart, ...]:
    """Nodes that have this machine to themselves. Makes their folders. Raises ClusterError."""
    if not names:
        return ()
    engine = settings.engine
    cores = shares.divide_cores(sorted(os.sched_getaffinity(0)), len(names))
    _make_folders(config, names)
    here = machine.look()
    parts = [shares.divide_engine(engine, len(names), len(own)) for own in cores]
    shares.check_memory(parts[0], len(names), weight_bytes_of(Path(engine.model)), here.available_bytes)
    if engine.device == "cuda":
        shares.check_gpus(len(names), len(here.gpus), engine.tensor_parallel_size)
    keeps_cores = len(names) > 1 and len(cores[0]) >= MIN_CORES_TO_KEEP_TO
    turns = config.data_dir / "nodes" / "turns"
    return tuple(
        NodeToStart(
            node_id=name,
            settings=pack_settings(
                ChildSettings(
                    _with_own_folders(config, msgspec.structs.replace(settings, engine=part), name),
                    config.log_format,
                    config.log_level,
                )
            ),
            folder=str(config.data_dir / "nodes" / name),
            cores=own if keeps_cores else (),
            num_gpus=engine.tensor_parallel_size if engine.device == "cuda" else 0,
            turns=str(turns),
        )
        for name, own, part in zip(names, cores, parts, strict=True)
    )


def _make_folders(config: Config, names: tuple[str, ...]) -> None:
    """Waits for nodes of a gateway that was killed: they hold memory, and KV that is on its way to the disk."""
    assert config.kv_dir is not None  # filled in by Config
    folders = [config.data_dir / "nodes" / name for name in names]
    try:
        # The nodes would make the KV's for everybody to read.
        for folder in (config.kv_dir, *folders):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_free = all(_is_free_in_time(folder) for folder in folders)
    except OSError as error:
        raise ClusterError(f"data_dir: cannot make {error.filename}: {error.strerror}") from error
    if not is_free:
        raise ClusterError(
            f"data_dir: another process runs {' or '.join(names)} in {config.data_dir}. Use a folder of its own."
        )


def _is_free_in_time(folder: Path) -> bool:
    if wait_until_free(folder / LOCK, 0.0):
        return True
    log.info("%s of the gateway before is still ending; waiting for it", folder.name)
    return wait_until_free(folder / LOCK, FORMER_S)


def _with_own_folders(config: Config, settings: LocalNodeConfig, name: str) -> LocalNodeConfig:
    """Two engines cannot write to one store or one registry of adapters."""
    engine = settings.engine
    engine = msgspec.structs.replace(
        engine,
        kv_dir=engine.kv_dir / name if engine.kv_dir is not None else None,
    )
    # Gateways bring its adapters.
    return msgspec.structs.replace(
        settings,
        engine=engine,
        state_dir=config.data_dir / "nodes" / name,
        adapters=(),
        adapters_dir=None,
        peers=PeerConfig(trust=_trust(config), host=config.cluster_host),
    )
