"""Our node in this process, driven as the gateway drives it: event loop and engine have threads of their own, commands come on the main one.

What reaches into the node is gathered in `ours_inside`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import psutil
from prometheus_client import CollectorRegistry

from bench.live.peers import ours_inside as inside
from bench.live.peers.engine import (
    KV_SPACE_GIB,
    Engine,
    Settings,
    configure_environment,
    drop_page_cache,
    forget_files,
    greedy,
)
from bench.live.peers.play import STREAM_ANSWER_TOKENS, STREAM_PROMPT_TOKENS, Ask, text
from bench.predicting import note_copies, note_steps
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.local_node import GIB, LocalNode
from engine_bridge.protocol.engine_request import EngineRequest, RequestId, Sampling
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.node_config import LocalNodeConfig
from gateway.access.auth import tenant_of
from gateway.advisories.advisories import Advisories, AdvisoryRequest
from gateway.advisories.drafts import Drafts
from gateway.metrics.metrics import Metrics
from gateway.sessions import SessionStore
from kvtiers.io.files import Files

T = TypeVar("T")
OWNER = "local"
REBUILD_TIMEOUT_S = 240.0
SETTLE_TIMEOUT_S, CHANGE_TIMEOUT_S, QUEUE_TIMEOUT_S = 60.0, 60.0, 120.0
LOOK_EVERY_S = 0.002
ADAPTER_POLICY = "adaptive"
MEMCPY_BYTES = 64 << 20


class ForgettingFiles(Files):
    """The real file system without a page cache: each read part is forgotten, so that reading it again reads the disk."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, and have the page cache forget the part."""
        num_bytes = super().preadv(fd, buffers, offset)
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        return num_bytes


class Ours(Engine):
    """A started node, with the gateway's advisories in front of it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        configure_environment(settings.device)
        threading.Thread(target=self.loop.run_forever, name="event-loop", daemon=True).start()
        self.tiers: Any = self._make_tiers() if settings.has_tiers else None
        self.node = LocalNode(
            LocalNodeConfig(
                engine=EngineConfig(
                    model=settings.model,
                    served_model_name="bench",
                    dtype=settings.dtype,
                    device=settings.device,
                    engine_args=() if settings.has_weights else ("load_format=dummy",),
                    block_size=settings.block_size,
                    max_num_batched_tokens=settings.max_num_batched_tokens,
                    max_model_len=settings.max_model_len,
                    max_num_seqs=settings.max_num_seqs,
                    kv_cache_gib=KV_SPACE_GIB if settings.device == "cpu" else None,
                    num_kv_blocks=settings.num_blocks,
                    log_stats=False,
                    scheduling_policy=settings.scheduling_policy,
                    enable_lora=bool(settings.adapters),
                    max_loras=settings.max_loras,
                    max_lora_rank=settings.max_lora_rank,
                    adapter_host_gib=settings.adapter_host_bytes / GIB,
                    profile_dir=Path(settings.profile_dir) if settings.profile_dir else None,
                ),
                adapters=tuple((name, path) for name, path in settings.adapters),
            ),
            self.tiers,
        )
        self.do(self.node.start())
        missing = self.folders.keys() - {adapter.name for adapter in self.node.adapters()}
        if missing:
            raise RuntimeError(f"the node left out {sorted(missing)}")
        self.log = self.on_engine(inside.note_steps)
        self._advisories, self._store = self.do(self._make_advisories())
        self._predicted: dict[str, list[list[float]]] = {"step": [], "out": [], "back": []}
        self._numbers = itertools.count()
        self._num_broken = 0
        self.warm_up()

    def _make_tiers(self) -> KvTiers:
        settings = self.settings
        sizes = TiersConfig(
            host_bytes=int(settings.host_gib * GIB),
            disk_bytes=int(settings.disk_gib * GIB),
            folder=Path(settings.folder),
        )
        return KvTiers(sizes, files=Files() if settings.has_page_cache else ForgettingFiles())

    async def _make_advisories(self) -> tuple[Advisories, SessionStore]:
        store = await SessionStore.open(Path(self.settings.folder) / "sessions.sqlite3")
        metrics = Metrics(CollectorRegistry())
        drafts = Drafts(self.node, store, metrics, accepts_drafts=True)
        return Advisories(self.node, store, metrics, drafts), store

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the event loop's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def on_engine(self, run: Callable[[Any], T]) -> T:
        """The result of `run(driver)`, called on the engine thread between two steps."""
        return self.do(self.node.run_on_engine(run))

    def with_vllm(self, run: Callable[[Any], T]) -> T:
        """Call `run` on the engine thread between two steps."""
        return self.on_engine(lambda driver: run(driver.engine))

    def close(self) -> None:
        """Close the session store and the node."""
        self.do(self._store.close())
        self.do(self.node.close())

    # -- requests ----------------------------------------------------------------------------------------------------

    async def outputs(self, request_id: str, ask: Ask, salt: str) -> AsyncGenerator[Sequence[int], None]:
        """Ask as the gateway does where there is a session, else just below that: each token is an output, so that steps can be told apart."""
        if ask.session:
            request = EngineRequest(
                request_id=RequestId(request_id),
                prompt_token_ids=tuple(ask.prompt),
                tenant=tenant_of(OWNER),
                session_id=ask.session,
                sampling=Sampling(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True),
            )
            async for delta in self.node.generate(request):
                yield delta.token_ids
            return
        answer = inside.generate(self.node, request_id, ask, salt, greedy(ask.max_tokens))
        # A request that runs in the background is left before its end.
        async with aclosing(answer) as outputs:
            async for output in outputs:
                yield output.outputs[0].token_ids
        if self.node.figures().num_rebuilds > self._num_broken:
            raise RuntimeError("the engine failed and was rebuilt")

    def break_a_step(self, tokens: list[int]) -> dict[str, Any]:
        """Have the step fail that computes this prompt, and wait for the engine that is built in its place. Returns what came of it.

        Raises:
            TimeoutError: there is no new engine.
        """
        self._num_broken += 1
        self.on_engine(inside.break_next_step)
        began_s = time.perf_counter()
        said = ""
        try:
            self.turn(tokens, 1)
        except Exception as error:
            said = str(error)
        self.do(self._rebuilt())
        self.log = self.on_engine(inside.note_steps)
        return {"said": said[:120], "rebuilt_s": round(time.perf_counter() - began_s, 2)}

    async def _rebuilt(self) -> None:
        async with asyncio.timeout(REBUILD_TIMEOUT_S):
            while self.node.figures().num_rebuilds < self._num_broken or self.node.state != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    # -- advisories and drafts ---------------------------------------------------------------------------------------

    def advise(self, session: str, **fields: Any) -> None:
        """Send the gateway's advisory of a person who types."""
        if self.tiers is None:
            return
        self._advisories.submit(OWNER, AdvisoryRequest(session_id=session, **fields), "typing")

    def draft(self, tokens: list[int], tail: list[int], is_typed: bool) -> dict[str, Any]:
        """Return the TTFT of a pasted question whose text was computed before Enter, or was not."""
        session = f"draft{next(self._numbers)}"
        if is_typed:
            request = EngineRequest(
                request_id=RequestId(session), prompt_token_ids=tuple(tokens), session_id=session
            )
            self.do(self.node.prefill(request))
        return {"ttft_s": self.do(self.say(session, tokens + tail, 2)).ttft_s}

    def people_beside(self, num_streams: int, seed: str, **script: Any) -> dict[str, Any]:
        """Play `people` beside `num_streams` streams.

        Returns:
            The answers, the streams' tokens per second, and the bytes that the tiers and the disk itself have read.
        """
        self.talk.restart(seed)
        return self.do(self._people_beside(num_streams, script))

    async def _people_beside(self, num_streams: int, script: dict[str, Any]) -> dict[str, Any]:
        num_came = [0] * num_streams
        streams = [asyncio.create_task(self._stream(num_came, at)) for at in range(num_streams)]
        while not all(num_came):  # noqa: ASYNC110  (a few steps)
            await asyncio.sleep(0.01)
        began = self._bytes_read(), sum(num_came), time.perf_counter()
        try:
            asked = await self.ask_people(**script)
        finally:
            ended = self._bytes_read(), sum(num_came), time.perf_counter()
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return {
            "asked": asked,
            "decode_tokens_per_s": (ended[1] - began[1]) / (ended[2] - began[2]),
            "tier_bytes": ended[0][0] - began[0][0],
            "disk_bytes": ended[0][1] - began[0][1],
        }

    async def _stream(self, num_came: list[int], at: int) -> None:
        for number in self._numbers:
            ask = Ask(prompt=text(STREAM_PROMPT_TOKENS, "stream", number), max_tokens=STREAM_ANSWER_TOKENS)
            async for token_ids in self.outputs(f"stream{number}", ask, ""):
                num_came[at] += len(token_ids)

    def _bytes_read(self) -> tuple[int, int]:
        """Bytes that the tiers have read, and those of this process that were fetched from storage, not from the page cache."""
        return self.tiers.stats().disk.bytes_read, psutil.Process().io_counters().read_bytes

    # -- KV ----------------------------------------------------------------------------------------------------------

    def place(self, source: str) -> None:
        """Leave a history's KV in `source` and in no faster tier: also "host", "disk", or "disk_cold" (and in no page cache)."""
        super().place(source)
        if self.tiers is None or source == "device":
            return
        if source == "recompute":
            inside.forget_disk(self.tiers)
        if source != "host":
            self.tiers.store.drop_host()
        if source == "disk_cold":
            drop_page_cache(path for path in Path(self.settings.folder).rglob("*") if path.is_file())

    def hits(self) -> dict[str, int]:
        """Return the blocks that restores have found in host memory and on disk since the start."""
        stats = self.tiers.stats()
        return {"host": stats.host.num_hits, "disk": stats.disk.num_hits}

    def copied_bytes(self) -> int:
        """Return the bytes that have been copied to the device so far."""
        found: int = self.on_engine(lambda driver: self.tiers.copier.back.num_bytes)
        return found

    def settle(self) -> None:
        """Return once the tiers have written everything. Raises TimeoutError."""
        if self.tiers is not None and not self.tiers.store.flush(SETTLE_TIMEOUT_S):
            raise TimeoutError("the tiers still write")

    def memcpy(self) -> float:
        """Bytes per second of plain copies of memory on the thread on which the connector copies, with its OpenMP settings."""
        return self.on_engine(lambda driver: copy_rate())

    def host_copy(self, tokens: list[int]) -> dict[str, Any]:
        """Bytes and seconds of copying this prompt's whole blocks from host to device memory."""
        keys = inside.keys_of(self.node, tokens)
        return self.on_engine(lambda driver: inside.time_host_copy(driver, self.tiers, keys))

    # -- adapters ----------------------------------------------------------------------------------------------------

    def put(self, adapters: list[str], place: str) -> None:
        """Have adapters in this place; see `Engine`."""
        ids = self._version_ids(adapters)
        if place == "slot":
            # Or one of them might make room for another: seldom used ones leave first.
            others = self._version_ids(name for name in self.folders if name not in adapters)
            self.on_engine(lambda driver: driver.adapters.put_back(others, keeps_host=True))
            self.play([Ask(prompt=[1] * 4, max_tokens=2, adapter=name) for name in adapters])
        self._until(inside.is_quiet)
        if place == "host":
            self.on_engine(lambda driver: [driver.adapters.core.prefetch(adapter_id) for adapter_id in ids])
            self._until(lambda driver: inside.is_quiet(driver) and inside.are_in_host(driver, ids))
        if place != "slot":
            self.on_engine(lambda driver: driver.adapters.put_back(ids, keeps_host=place == "host"))
        if place == "disk":
            forget_files(self.folders[name] for name in adapters)
        places = self.on_engine(lambda driver: driver.adapters.places())
        wrong = {adapter_id: found for adapter_id, found in places.items() if adapter_id in ids}
        if set(wrong.values()) != {place}:
            raise RuntimeError(f"adapters are not in {place}: {wrong}")

    def empty(self) -> None:
        """Leave adapters on disk only, without knowledge of past uses, and empty the prefix cache."""
        if self.folders:
            ids = self._version_ids(self.folders)
            self._until(inside.is_quiet)
            self.on_engine(lambda driver: driver.adapters.put_back(ids, keeps_host=False))
            self.on_engine(lambda driver: driver.adapters.core.worth.use_policy(ADAPTER_POLICY))
        self.with_vllm(lambda llm: llm.reset_prefix_cache())

    def found(self) -> dict[str, int]:
        """Return how many requests found their adapter in each place."""
        stats = self.node.figures().adapter_stats
        assert stats is not None
        counts = stats.counts.items()
        return {name.removeprefix("found:"): num for name, num in counts if name.startswith("found:")}

    def _version_ids(self, names: Any) -> list[int]:
        return [int(self.node._catalog.current(name).version_id) for name in names]

    def _until(self, is_so: Callable[[Any], bool]) -> None:
        """Return once the driver says so, and most often after some milliseconds. Raises TimeoutError."""
        deadline_s = time.monotonic() + CHANGE_TIMEOUT_S
        while not self.on_engine(is_so):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no change; adapters: {self.node.figures().adapter_stats}")
            time.sleep(LOOK_EVERY_S)

    # -- scheduling --------------------------------------------------------------------------------------------------

    def use(self, policy: str, history: list[list[Any]], rate_per_s: float, way: str = "cheaper") -> None:
        """Let this policy decide from now on which request starts, with no other knowledge than `history`.

        history: earlier requests at this rate: prompt tokens, answer tokens, adapter (or None). Lanes and predictor are fitted to them. way: how a
        preempted request gets its KV back: "cheaper", or "swap".
        """
        ranks = {record.name: record.rank for record in self.node._catalog.served()}
        self.on_engine(lambda driver: inside.change_policy(driver, self.node, policy))
        self.on_engine(lambda driver: inside.learn(driver.scheduling, history, ranks, rate_per_s))
        self._until(lambda driver: inside.apply_refit(driver.scheduling))
        if self.tiers is not None:
            self._set_way(way)

    def _set_way(self, way: str) -> None:
        """A fixed way knows no costs, by which a way would be chosen for each victim when it is preempted."""
        tiers = self.tiers
        self._by_cost = getattr(self, "_by_cost", (tiers.policy, tiers._prefill))
        tiers.policy, tiers._prefill = self._by_cost if way == "cheaper" else (inside.AlwaysSwap(), None)

    def preemptions(self) -> dict[str, int]:
        """Return the preemptions since the start: all, and by the way in which requests came back."""
        ways = dict(self.tiers.resumed) if self.tiers is not None else {}
        return {"all": int(self.on_engine(lambda driver: driver._scheduler.num_preempted))} | ways

    def decision_share(self, num: int, seconds: float) -> dict[str, Any]:
        """Queue `num` requests; return the time of deciding over the time of steps."""
        self.use(self.settings.scheduling_policy, [[16, 32, None]] * 512, 10.0)
        return self.do(self._decision_share(num, seconds))

    async def _decision_share(self, num: int, seconds: float) -> dict[str, Any]:
        times: list[float] = []
        await self.node.run_on_engine(lambda driver: inside.time_steps(driver, times))
        started_s, is_over = time.perf_counter(), asyncio.Event()
        asks = [Ask(prompt=text(16, "queue", number), max_tokens=32) for number in range(num)]
        tasks = [asyncio.create_task(self.answer(ask, "queue", started_s, is_over)) for ask in asks]
        async with asyncio.timeout(QUEUE_TIMEOUT_S):
            while not await self.node.run_on_engine(lambda driver: inside.is_queued(driver, num)):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        first = await self.node.run_on_engine(lambda driver: dict(driver.scheduling.seconds()))
        num_before = len(times)
        await asyncio.sleep(seconds)
        last = await self.node.run_on_engine(lambda driver: dict(driver.scheduling.seconds()))
        steps = times[num_before:]
        num_waiting = await self.node.run_on_engine(lambda driver: driver.report.stats().num_waiting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        decide_s = last["step"] - first["step"]
        return {
            "share": round(decide_s / sum(steps), 5),
            "decide_us": round(decide_s / len(steps) * 1e6, 1),
            "policy_us": round((last["decide"] - first["decide"]) / len(steps) * 1e6, 1),
            "step_ms": round(sum(steps) / len(steps) * 1e3, 2),
            "num_steps": len(steps),
            "num_waiting": num_waiting,
        }

    # -- predictions -------------------------------------------------------------------------------------------------

    def note_predictions(self) -> None:
        """Begin to record predicted and measured times of steps and copies. Call it once."""
        tiers = self.tiers
        self.on_engine(lambda driver: note_steps(driver.steps, self._predicted["step"]))
        note_copies(tiers.copy_times.out, self._predicted["out"])
        note_copies(tiers.copy_times.back, self._predicted["back"])

    def predictions(self) -> dict[str, Any]:
        """Since the last call."""
        found = {name: list(seen) for name, seen in self._predicted.items()}
        for seen in self._predicted.values():
            seen.clear()
        return found

    def equal_copies(self, num_blocks: int, num: int) -> dict[str, list[float]]:
        """Return the seconds of `num` copies of `num_blocks` blocks each way, on an engine without requests."""
        return self.on_engine(lambda driver: inside.equal_copies(driver, num_blocks, num))


def copy_rate() -> float:
    """Return bytes per second of plain copies of memory: the better of one numpy thread and torch's threads."""
    import numpy as np
    import torch

    source, target = (torch.full((MEMCPY_BYTES,), fill, dtype=torch.uint8) for fill in (1, 2))
    flat_source, flat_target = source.numpy(), target.numpy()
    times = []
    for copy in (lambda: np.copyto(flat_target, flat_source), lambda: target.copy_(source)) * 2:
        started_s = time.perf_counter()
        copy()
        times.append(time.perf_counter() - started_s)
    return MEMCPY_BYTES / min(times)
