"""Our node in this process, driven as the gateway drives it: event loop and engine have threads of their own, commands come on the main one."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bench.live.peers.engine import KV_SPACE_GIB, Settings, configure_environment
from engine_bridge.local_node import LocalNode
from engine_bridge.settings.engine_config import EngineConfig

T = TypeVar("T")


class OwnNode(ABC):
    """A started node."""

    def __init__(self, settings: Settings) -> None:
        configure_environment(settings)
        self.settings = settings
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True).start()
        self._node = self._make_node()
        self._await(self._node.start())

    @abstractmethod
    def _make_node(self) -> LocalNode: ...

    def _engine_config(self, **more: Any) -> EngineConfig:
        """With exactly `num_blocks` KV blocks on the device, as its peers have."""
        return EngineConfig(
            model=self.settings.model,
            served_model_name="bench",
            dtype=self.settings.dtype,
            block_size=self.settings.block_size,
            max_model_len=self.settings.max_model_len,
            max_num_seqs=self.settings.max_num_seqs,
            kv_cache_gib=KV_SPACE_GIB,
            num_kv_blocks=self.settings.num_blocks,
            log_stats=False,
            **more,
        )

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _on_engine(self, run: Callable[[Any], T]) -> T:
        """The result of `run(driver)`, called on the engine thread between two steps."""
        return self._await(self._node.run_on_engine(run))

    def close(self) -> None:
        self._await(self._node.close())
