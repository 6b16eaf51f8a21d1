"""Our engine with KV tiers: a `LocalNode` in this process, driven as the gateway drives it (event loop, engine thread, bridge).

What reaches into the tiers is gathered under "the tiers' inside", but for `_keys_of`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.live.peers.engine import (
    KV_SPACE_GIB,
    DecodeClock,
    Engine,
    Settings,
    configure_environment,
    drop_page_cache,
)
from engine_bridge.driver.engine import EngineConfig
from engine_bridge.driver.kv_tiers import KvTiers, TiersConfig
from engine_bridge.local_node import GIB, LocalNode, LocalNodeConfig
from kvtiers.io.files import Files
from kvtiers.keys import BlockKey
from kvtiers.policy.restore import FasterWins

T = TypeVar("T")
SETTLE_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 60.0


class TieredNode(Engine):
    """A node with KV tiers, or the same node without them.

    Commands come on the main thread; the node's event loop has a thread of its own, and the engine another.
    """

    def __init__(self, settings: Settings, has_tiers: bool) -> None:
        configure_environment(settings)
        self.settings = settings
        self._files = SlowableFiles()
        self._tiers = make_tiers(settings, self._files) if has_tiers else None
        self.sources = ("recompute", "disk_cold", "disk", "host", "device") if has_tiers else ()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="event-loop", daemon=True).start()
        self._num_requests = 0
        self._node = make_node(settings, self._tiers)
        self._await(self._node.start())
        self.turn([1] * 64, 2)

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _on_engine(self, run: Callable[[Any], T]) -> T:
        """The result of `run(driver)`, called on the engine thread between two steps."""
        return self._await(self._node.run_on_engine(run))

    # -- commands ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        def look(driver: Any) -> dict[str, Any]:
            self.llm = driver.engine
            return Engine.describe(self)

        return self._on_engine(look)

    def turn(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        return self._await(self._turn(tokens, max_tokens))

    async def _turn(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        ttft_s, num_cached, answer = None, 0, []
        started_s = time.perf_counter()
        async for output in self._generate(tokens, max_tokens):
            if ttft_s is None:
                ttft_s = time.perf_counter() - started_s
                num_cached = output.num_cached_tokens or 0
            answer += output.outputs[0].token_ids
        return {"ttft_s": ttft_s, "token_ids": answer, "num_cached_tokens": num_cached}

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        return self._await(self._batch(prompts, max_tokens))

    async def _batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        clock = DecodeClock(len(prompts))

        async def one(number: int, tokens: list[int]) -> None:
            async for output in self._generate(tokens, max_tokens):
                clock.count(str(number), len(output.outputs[0].token_ids))

        await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(prompts)))
        return clock.result()

    def _generate(self, tokens: list[int], max_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._num_requests += 1
        # Below `LocalNode.generate` only in that the prompt is given as token ids, so that lengths are exact.
        return self._node._client.generate({"prompt_token_ids": tokens}, params, f"r{self._num_requests}")

    def place(self, source: str) -> None:
        if source == "device":
            return
        self.settle()
        self._on_engine(self._forget_device)
        if source == "recompute":
            forget_disk(self._tiers)
        if source != "host":
            self._tiers.store.drop_host()
        if source == "disk_cold":
            drop_page_cache(self.kv_files())

    def _forget_device(self, driver: Any) -> None:
        self.llm = driver.engine
        self.forget_device()

    def memcpy(self, repeats: int) -> list[float]:
        # Where the connector's copies run, with that thread's OpenMP settings.
        return self._on_engine(lambda driver: Engine.memcpy(self, repeats))

    def settle(self) -> None:
        if self._tiers is not None and not self._tiers.store.flush(SETTLE_TIMEOUT_S):
            raise TimeoutError("the tiers still write")

    def host_copy(self, tokens: list[int]) -> dict[str, Any]:
        """Bytes and seconds of copying this prompt's whole blocks from host to device memory."""
        keys = self._keys_of(tokens)
        return self._on_engine(lambda driver: time_host_copy(driver, self._tiers, keys))

    def disk_read(self, tokens: list[int]) -> dict[str, Any]:
        """Bytes and seconds of reading this prompt's whole blocks from disk into host memory."""
        keys = self._keys_of(tokens)
        return self._on_engine(lambda driver: time_disk_read(self._tiers, keys))

    def slow_disk(self, bytes_per_s: float | None) -> None:
        """Have the disk read no faster than this; None: as fast as it can."""
        self._files.bytes_per_s = bytes_per_s

    def layerwise(self, is_on: bool) -> None:
        """Load layer by layer under the forward pass, or have all layers in host memory before it begins."""
        self._tiers.policy = FasterWins(overlaps=is_on)

    def tier_stats(self) -> dict[str, Any]:
        return msgspec.to_builtins(self._tiers.stats()) | {"num_failed_loads": self._tiers.num_failed_loads}

    def _keys_of(self, tokens: list[int]) -> list[BlockKey]:
        """The keys of a prompt's whole blocks, as a request of ours has them."""
        return self._await(self._keys(tokens))

    async def _keys(self, tokens: list[int]) -> list[BlockKey]:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        client = self._node._client
        unique_id, core_request = client.submit(
            {"prompt_token_ids": tokens},
            SamplingParams(max_tokens=1),
            "keys",
            None,
            tenant="",
            lora_request=None,
        )
        client.forget(unique_id, abort=False)
        hasher = self.llm.engine_core.engine_core.request_block_hasher
        return [
            BlockKey(bytes(key))
            for key in Request.from_engine_core_request(core_request, hasher).block_hashes
        ]

    def close(self) -> None:
        self._await(self._node.close())


# -- the tiers' inside -------------------------------------------------------------------------------------------------


class SlowableFiles(Files):
    """The real file system, with a disk that can be made slow: one reader at a time, so many bytes per second."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._disk = threading.Lock()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.bytes_per_s is None:
            return super().preadv(fd, buffers, offset)
        with self._disk:
            started_s = time.perf_counter()
            num_bytes = super().preadv(fd, buffers, offset)
            time.sleep(max(num_bytes / self.bytes_per_s - (time.perf_counter() - started_s), 0))
        return num_bytes


def make_tiers(settings: Settings, files: Files) -> KvTiers:
    sizes = TiersConfig(
        host_bytes=int(settings.host_gib * GIB),
        disk_bytes=int(settings.disk_gib * GIB),
        folder=Path(settings.folder),
    )
    return KvTiers(sizes, files=files)


def make_node(settings: Settings, tiers: KvTiers | None) -> LocalNode:
    """A node with exactly `num_blocks` KV blocks on the device, as its peers have."""
    config = EngineConfig(
        model=settings.model,
        served_model_name="bench",
        dtype=settings.dtype,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_cache_gib=KV_SPACE_GIB,
        num_kv_blocks=settings.num_blocks,
        enable_lora=False,
        log_stats=False,
    )
    return LocalNode(LocalNodeConfig(engine=config), tiers)


def forget_disk(tiers: KvTiers) -> None:
    """Have the disk tier know no block any more."""
    disk = tiers.store._disk

    async def forget() -> None:  # its index belongs to the I/O thread
        disk.forget(list(disk._index))

    tiers._io.start(forget()).result()


def time_host_copy(driver: Any, tiers: KvTiers, keys: Sequence[BlockKey]) -> dict[str, Any]:
    """Copy blocks from host memory to free device blocks, layer by layer, as a restore does. On the engine thread."""
    store, copier, pool = tiers.store, tiers.copier, driver._block_pool
    stage = store.stage("bench", keys)
    blocks = pool.get_new_blocks(len(stage.blocks))
    try:
        progress = store.progress(stage)
        if progress.num_ready_blocks < len(keys):
            raise RuntimeError(f"{progress.num_ready_blocks} of {len(keys)} blocks are in host memory")
        block_ids = [block.block_id for block in blocks]
        started_s = time.perf_counter()
        for layer in range(store.shape.num_layers):
            copier.to_device(layer, block_ids, [block.slots[layer] for block in stage.blocks])
        seconds = time.perf_counter() - started_s
    finally:
        pool.free_blocks(blocks)
        store.release(stage)
    return {"bytes": len(keys) * store.shape.block_bytes, "seconds": seconds}


def time_disk_read(tiers: KvTiers, keys: Sequence[BlockKey]) -> dict[str, Any]:
    """Read blocks from disk into host memory, as a restore does. On the engine thread."""
    store = tiers.store
    started_s = time.perf_counter()
    stage = store.stage("bench", keys)
    try:
        num_read = store.wait_for_layer(stage, len(keys), store.shape.num_layers - 1, READ_TIMEOUT_S)
        seconds = time.perf_counter() - started_s
        if num_read < len(keys) or not all(stage.is_from_disk):
            raise RuntimeError(f"{num_read} of {len(keys)} blocks came, {sum(stage.is_from_disk)} from disk")
    finally:
        store.release(stage)
    return {"bytes": len(keys) * store.shape.block_bytes, "seconds": seconds}
