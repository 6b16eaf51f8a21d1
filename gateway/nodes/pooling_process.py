"""A model for embeddings or scores in a process of its own: what the gateway keeps, and what that process does first."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, cast

from engine_bridge.cluster import host
from engine_bridge.cluster.guard import own_group
from engine_bridge.cluster.process import LOOK_EVERY_S, ProcessNode
from engine_bridge.driver.engine.building import configure_environment, users_environment
from engine_bridge.pooling_node import PoolingNode
from engine_bridge.protocol.engine_request import EngineRequest
from engine_bridge.protocol.errors import EngineUnavailable
from engine_bridge.protocol.node import Api, JsonReply, Node
from engine_bridge.settings.engine_config import Device, EngineConfig
from engine_bridge.settings.node_config import LocalNodeConfig
from gateway.nodes.engine_process import ChildSettings, pack_settings, read_settings
from gateway.settings import logs
from gateway.settings.config import Config
from gateway.settings.sources import template_of

log = logging.getLogger(__name__)

# vLLM compares this share of a GPU with what the chat model has left free; what the model takes is its weights and --embedding-kv-cache-gib.
GPU_SHARE = 0.01
# By what a model is for: what it is called, and the beginning of a line of the log about its calls.
_WORDS: dict[Api, tuple[str, str]] = {
    "embeddings": ("embedding", "embeddings are"),
    "rerank": ("rerank", "scores are"),
}


def models_beside(config: Config, device: Device) -> dict[Api, PoolingModel]:
    """Return the models for embeddings and for scores that are named, by what they are for."""
    embeds = {"served_model_name": config.embedding_model_name, "engine_args": config.embedding_engine_args}
    scores = {
        "served_model_name": config.rerank_model_name,
        "engine_args": config.rerank_engine_args,
        "chat_template": template_of(config, "rerank_chat_template"),
    }
    named: list[tuple[Api, str | None, dict[str, Any]]] = [
        ("embeddings", config.embedding_model, embeds),
        ("rerank", config.rerank_model, scores),
    ]
    return {
        api: PoolingModel(api, _engine(config, path, device, own), config.log_format, config.log_level)
        for api, path, own in named
        if path is not None
    }


def _engine(config: Config, model: str, device: Device, own: Mapping[str, Any]) -> EngineConfig:
    """Return what the engine of such a model is built from. own: the settings that it alone has. No prefixes are shared between its clients."""
    return EngineConfig(
        model=model,
        **own,
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
        max_model_len="auto",
    )


class PoolingModel(ProcessNode):
    """Keeps the model's process.

    Args:
        api: what the model is for: `embeddings` or `rerank`.
        engine: what its engine is built from.
        log_format, log_level: of the process.
    """

    def __init__(self, api: Api, engine: EngineConfig, log_format: str, log_level: str) -> None:
        self._kind, self._does = _WORDS[api]
        command = (sys.executable, "-m", "gateway.nodes.pooling_process", api)
        settings = pack_settings(ChildSettings(LocalNodeConfig(engine=engine), log_format, log_level))
        # Without what this process has set for the chat model's engine: its cores, and whether a hub may be asked.
        environ, what = users_environment(), f"the {self._kind} model's process"
        super().__init__(command, settings, engine.model_names, what, environ)
        self.name, self.path = engine.served_model_name, engine.model

    async def start_behind(self, chat: Node) -> None:
        """Start the process once the chat model is ready, which measures first how much memory is free.

        A model that cannot be loaded is not tried again: `check_is_up` says so from then on.
        """
        while chat.progress.state != "ready":  # noqa: ASYNC110 - a node in another process tells of no event
            await asyncio.sleep(LOOK_EVERY_S / 4)
        log.info("loading the %s model %s", self._kind, self.name)
        try:
            await self.start()
        except EngineUnavailable as error:
            log.error("%s off: %s could not be loaded: %s", self._does, self.name, error)
            await self.close()
        else:
            log.info("%s ready: %s reads up to %d tokens", self._does, self.name, self.max_model_len)

    def check_is_up(self) -> None:
        """Raise EngineUnavailable, for clients, while no call can be answered."""
        state = self.progress.state
        if state in ("failed", "closed"):
            raise EngineUnavailable(f"The {self._kind} model could not be loaded: the server's log says why.")
        if state != "ready":
            how = "is starting" if state == "starting" else "has failed and is started again"
            raise EngineUnavailable(f"The {self._kind} model {how}: try again in a moment.", code="starting")

    async def answer(
        self, api: Api, body: object, headers: Mapping[str, str], request: EngineRequest
    ) -> JsonReply:
        """Answer a call for embeddings, or for scores as `rerank` or `score`. Raises EngineUnavailable."""
        return cast(JsonReply, await self.serve(api, body, headers, request))


def main() -> None:
    """Serve a model for embeddings or scores on the socket that the gateway handed over, until the gateway ends."""
    own_group()
    settings = read_settings(sys.stdin.buffer.read())
    logs.setup(settings.log_format, settings.log_level)
    config = settings.node.engine
    # All of its threads: those of the chat model's engine compute on the last cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: config.cpu_threads])
    configure_environment(config)
    # The gateway asks nothing of it that it does not have.
    api, socket = sys.argv[1:]
    host.serve(cast("Node", PoolingNode(config, cast(Api, api))), int(socket))


if __name__ == "__main__":
    main()
