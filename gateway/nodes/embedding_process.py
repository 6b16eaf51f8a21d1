"""The embedding model in a process of its own: what the gateway keeps, and what that process does first."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from typing import cast

from engine_bridge.cluster import host
from engine_bridge.cluster.guard import own_group
from engine_bridge.cluster.process import LOOK_EVERY_S, ProcessNode
from engine_bridge.driver.engine.building import configure_environment, users_environment
from engine_bridge.embedding_node import EmbeddingNode
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import JsonReply, Node
from engine_bridge.settings.engine_config import Device, EngineConfig
from engine_bridge.settings.node_config import LocalNodeConfig
from gateway.nodes.engine_process import ChildSettings, pack_settings, read_settings
from gateway.settings import logs
from gateway.settings.config import Config

log = logging.getLogger(__name__)

# vLLM compares this share of a GPU with what the chat model has left free; what the model takes is its weights and --embedding-kv-cache-gib.
GPU_SHARE = 0.01


def embedding_engine(config: Config, device: Device) -> EngineConfig:
    """Return what the engine of a gateway's embedding model is built from. No prefixes are shared between its clients."""
    assert config.embedding_model is not None
    return EngineConfig(
        model=config.embedding_model,
        served_model_name=config.embedding_model_name,
        device=device,
        cpu_threads=config.embedding_threads,
        kv_cache_gib=config.embedding_kv_cache_gib,
        gpu_memory_utilization=GPU_SHARE,
        enforce_eager=config.enforce_eager,
        trust_remote_code=config.trust_remote_code,
        download_dir=config.download_dir,
        enable_lora=False,
        enable_prefix_caching=False,
        log_stats=False,
    )


class EmbeddingModel(ProcessNode):
    """Keeps the embedding model's process.

    Args:
        engine: what its engine is built from.
        log_format, log_level: of the process.
    """

    def __init__(self, engine: EngineConfig, log_format: str, log_level: str) -> None:
        command = (sys.executable, "-m", "gateway.nodes.embedding_process")
        settings = pack_settings(ChildSettings(LocalNodeConfig(engine=engine), log_format, log_level))
        # Without what this process has set for the chat model's engine: its cores, and whether a hub may be asked.
        environ, what = users_environment(), "the embedding model's process"
        super().__init__(command, settings, engine.model_names, what, environ)
        self.name, self.path = engine.served_model_name, engine.model

    async def start_behind(self, chat: Node) -> None:
        """Start the process once the chat model is ready, which measures first how much memory is free.

        A model that cannot be loaded is not tried again: `check_is_up` says so from then on.
        """
        while chat.progress.state != "ready":  # noqa: ASYNC110 - a node in another process tells of no event
            await asyncio.sleep(LOOK_EVERY_S / 4)
        log.info("loading the embedding model %s", self.name)
        try:
            await self.start()
        except EngineUnavailable as error:
            log.error("embeddings are off: %s could not be loaded: %s", self.name, error)
            await self.close()
        else:
            log.info("embeddings are ready: %s reads up to %d tokens", self.name, self.max_model_len)

    def check_is_up(self) -> None:
        """Raise EngineUnavailable, for clients, while no call can be answered."""
        state = self.progress.state
        if state in ("failed", "closed"):
            raise EngineUnavailable("The embedding model could not be loaded: the server's log says why.")
        if state != "ready":
            how = "is starting" if state == "starting" else "has failed and is started again"
            raise EngineUnavailable(f"The embedding model {how}: try again in a moment.", code="starting")

    async def embed(self, body: object, headers: Mapping[str, str], request: EngineRequest) -> JsonReply:
        """Answer a call of the embeddings API. Raises EngineUnavailable."""
        return cast(JsonReply, await self.serve("embeddings", body, headers, request))


def main() -> None:
    """Serve an embedding model on the socket that the gateway handed over, until the gateway ends."""
    own_group()
    settings = read_settings(sys.stdin.buffer.read())
    logs.setup(settings.log_format, settings.log_level)
    config = settings.node.engine
    # All of its threads: those of the chat model's engine compute on the last cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: config.cpu_threads])
    configure_environment(config)
    # The gateway asks nothing of it that it does not have.
    host.serve(cast("Node", EmbeddingNode(config)), int(sys.argv[1]))


if __name__ == "__main__":
    main()
