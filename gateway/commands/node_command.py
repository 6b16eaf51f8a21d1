"""`overture node`: one node on this machine, for the gateways of a cluster."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import NoReturn

import uvloop

from engine_bridge.cluster.ray_placement import RayPlacement
from engine_bridge.process_end import leave
from engine_bridge.protocol.errors import BridgeError, ClusterError, EngineUnavailable
from gateway.app import node_config, on_signal, say
from gateway.errors import StartupError
from gateway.nodes.cluster import default_name, make_placement
from gateway.settings.config import Config, ConfigError

log = logging.getLogger(__name__)


def run(config: Config) -> NoReturn:
    """Serve as a node until SIGTERM, SIGINT, or a gateway removes the node; then end the process with its exit code."""
    uvloop.run(_run_and_leave(config))
    raise AssertionError("the process has ended")


async def _run_and_leave(config: Config) -> None:
    leave(await _run(config))


async def _run(config: Config) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, stop, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: it is to survive its terminal
        loop.add_signal_handler(signal.SIGHUP, stop.set)
    name = config.node_name or default_name()
    try:
        placement = await asyncio.to_thread(_place, config, name)
    except (ConfigError, StartupError, BridgeError) as error:
        say(f"error: {error}")
        return 2
    try:
        return await _serve(config, placement, name, stop)
    finally:
        await placement.close()


def _place(config: Config, name: str) -> RayPlacement:
    config.prepare_data_dir()
    return make_placement(
        config,
        node_config(config),
        lambda node_id, stage: say(f"  {node_id or name}: {stage}"),
        names=(name,),
        follows_all=False,
    )


async def _serve(config: Config, placement: RayPlacement, name: str, stop: asyncio.Event) -> int:
    say(f"{name} joins the cluster at {config.ray_address}")
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(placement.start())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return 0
    try:
        await starting
    except (EngineUnavailable, ClusterError) as error:
        say(f"error: the node could not be started: {error}")
        return 1
    say(f"{name} serves {config.served_model_name} to the gateways of this cluster")
    removed = asyncio.create_task(placement.emptied())
    await asyncio.wait({removed, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if removed.done():
        say("a gateway has removed this node")
        return 0
    removed.cancel()
    say("leaving: running answers may finish; interrupt again to cut them off")
    await asyncio.gather(*(node.drain(config.drain_timeout_s) for node in placement.nodes.values()))
    return 0
