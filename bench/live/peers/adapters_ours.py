"""Our node with its adapters, in this process.

What reaches into it is gathered under "the residency's inside".
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.live.peers.adapters import (
    AdapterSettings,
    Answer,
    Ask,
    StepLog,
    account,
    as_dicts,
    asks_of,
    forget_files,
    warm_up_asks,
)
from bench.live.peers.engine import greedy
from bench.live.peers.node import OwnNode
from engine_bridge.local_node import GIB, LocalNode, LocalNodeConfig

PLACE_TIMEOUT_S = 30.0
LOOK_EVERY_S = 0.002


class NodeAdapters(OwnNode):
    """A node with adapters."""

    settings: AdapterSettings
    scheduling_policy = "vllm"

    def __init__(self, settings: AdapterSettings) -> None:
        super().__init__(settings)
        self._folders = dict(settings.adapters)
        self._num_asked = self._num_plays = 0
        missing = self._folders.keys() - {adapter.name for adapter in self._node.adapters()}
        if missing:
            raise RuntimeError(f"the node left out {sorted(missing)}")
        self._log = self._on_engine(note_steps)
        self._await(self._play(warm_up_asks()))

    def _make_node(self) -> LocalNode:
        settings = self.settings
        config = self._engine_config(
            enable_lora=bool(settings.adapters),
            scheduling_policy=self.scheduling_policy,
            kv_host_gib=settings.kv_host_bytes / GIB,
            max_loras=settings.max_loras,
            max_lora_rank=settings.max_lora_rank,
            adapter_host_gib=settings.host_bytes / GIB,
            profile_dir=Path(settings.profile_dir) if settings.profile_dir else None,
        )
        adapters = tuple((name, path) for name, path in settings.adapters)
        return LocalNode(LocalNodeConfig(engine=config, adapters=adapters))

    # -- commands ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        import torch

        def look(driver: Any) -> dict[str, Any]:
            return {
                "num_blocks": driver.counts().num_kv_blocks,
                "max_num_batched_tokens": driver.engine.vllm_config.scheduler_config.max_num_batched_tokens,
                "threads": torch.get_num_threads(),
            }

        return self._on_engine(look)

    def play(self, requests: list[dict[str, Any]], one_by_one: bool = False) -> list[dict[str, Any]]:
        """Answer requests at their times, or each when the one before it is done."""
        asks = asks_of(requests)
        self._num_plays += 1
        if not one_by_one:
            return as_dicts(self._await(self._play(asks)))
        return as_dicts([self._await(self._play([ask]))[0] for ask in asks])

    def put(self, adapters: list[str], place: str) -> None:
        """Have adapters in this place and no nearer one: in a `slot`, in `host` memory, on `disk` (and in no page cache)."""
        ids = [self._version_id(name) for name in adapters]
        if place == "slot":
            # Or one of them might make room for another: seldom used ones leave first.
            self._on_engine(lambda driver: leave(driver, [i for i in places(driver) if i not in ids], True))
            self._await(
                self._play([Ask(at_s=0.0, prompt=[1] * 4, max_tokens=2, adapter=name) for name in adapters])
            )
        self._wait_until(is_quiet)
        if place == "host":
            self._on_engine(lambda driver: [driver.adapters.core.prefetch(adapter_id) for adapter_id in ids])
            self._wait_until(lambda driver: is_quiet(driver) and are_in_host(driver, ids))
        if place != "slot":
            self._on_engine(lambda driver: leave(driver, ids, keeps_host=place == "host"))
        if place == "disk":
            forget_files(self._folders[name] for name in adapters)
        wrong = {i: found for i, found in self._on_engine(places).items() if i in ids and found != place}
        if wrong:
            raise RuntimeError(f"adapters are not in {place}: {wrong}")

    def set_assist(self, is_on: bool) -> None:
        self._on_engine(lambda driver: configure(driver, cpu_assist=is_on))

    def empty(self, policy: str) -> None:
        """Nothing but the disk holds an adapter, the prefix cache holds nothing, and nothing is known of past uses."""
        ids = [self._version_id(name) for name in self._folders]
        self._wait_until(is_quiet)
        self._on_engine(lambda driver: leave(driver, ids, keeps_host=False))
        self._on_engine(lambda driver: use_policy(driver, policy))

    def adapter_account(self) -> dict[str, Any]:
        """Since the start."""
        stats = self._node.adapter_stats()
        assert stats is not None
        found = {
            name.removeprefix("found:"): n for name, n in stats.counts.items() if name.startswith("found:")
        }
        counts = Counter(stats.counts)
        result = account(Counter(found), counts["loads:disk"], counts["load_bytes:disk"])
        return result | {"counts": stats.counts, "seconds": stats.seconds}

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _play(self, asks: Sequence[Ask]) -> list[Answer]:
        started_s = self._zero_s = time.perf_counter()
        is_over = asyncio.Event()
        tasks = [asyncio.create_task(self._answer(ask, started_s, is_over)) for ask in asks]
        await asyncio.gather(*(task for ask, task in zip(asks, tasks, strict=True) if not ask.is_background))
        is_over.set()
        return await asyncio.gather(*tasks)

    async def _answer(self, ask: Ask, started_s: float, is_over: asyncio.Event) -> Answer:
        due_s = started_s + ask.at_s
        delay_s = due_s - time.perf_counter()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        answer = Answer()
        request_id, outputs = self._generate(ask)
        async for output in outputs:
            answer.ttft_s = answer.ttft_s or time.perf_counter() - due_s
            answer.token_ids += output.outputs[0].token_ids
            if ask.is_background and is_over.is_set():
                break
        await outputs.aclose()
        self._log.take(request_id, answer, started_s)
        if self._node.num_rebuilds:
            raise RuntimeError("the engine failed and was rebuilt")
        return answer

    def _generate(self, ask: Ask) -> tuple[str, Any]:
        """Below `LocalNode.generate` only in that each token is an output, so that steps can be told apart."""
        from engine_bridge.driver.serving.call import CALL, ServingCall
        from engine_bridge.protocol.request_context import RequestContext

        self._num_asked += 1
        request_id = f"a{self._num_asked}"
        # Nobody finds the prefixes of another play.
        CALL.set(ServingCall(RequestContext(tenant=f"play {self._num_plays}")))
        adapter = self._node._serving.lora_request(ask.adapter or "")
        prompt = {"prompt_token_ids": ask.prompt}
        return request_id, self._node._client.generate(
            prompt, greedy(ask.max_tokens), request_id, lora_request=adapter, priority=ask.priority
        )

    def _version_id(self, name: str) -> int:
        return int(self._node._catalog.current(name).version_id)

    def _wait_until(self, is_so: Callable[[Any], bool]) -> None:
        deadline_s = time.monotonic() + PLACE_TIMEOUT_S
        while not self._on_engine(is_so):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"adapters still move: {self._node.adapter_stats()}")
            time.sleep(LOOK_EVERY_S)


# -- the residency's inside; all on the engine thread ------------------------------------------------------------------


def note_steps(driver: Any) -> StepLog:
    """Have each step noted."""
    log = StepLog(driver._scheduler, lambda unique_id: unique_id.rpartition("-")[0])
    step = driver.step
    driver.step = lambda: log.step(step)
    return log


def places(driver: Any) -> dict[int, str]:
    return driver.adapters.places()


def is_quiet(driver: Any) -> bool:
    """Does nothing move or run?"""
    is_busy = any(v.is_loading or v.num_layouts or v.requests for v in driver.adapters.core.table)
    return not is_busy and not driver.has_work()


def are_in_host(driver: Any, ids: Sequence[int]) -> bool:
    return all(driver.adapters.core.table[adapter_id].host_bytes is not None for adapter_id in ids)


def is_filled(driver: Any, adapter_id: int) -> bool:
    """Whether a step could compute with what lies in its slot."""
    return driver.adapters.is_at_hand(adapter_id) and driver.adapters.core.table[adapter_id].is_filled


def leave(driver: Any, ids: Sequence[int], keeps_host: bool) -> None:
    """Have adapters that nobody uses leave their slots and the KV blocks, and host memory too unless `keeps_host`."""
    driver.adapters.put_back(ids, keeps_host=keeps_host)


def configure(driver: Any, **changes: Any) -> None:
    core = driver.adapters.core
    core.rules = msgspec.structs.replace(core.rules, **changes)


def use_policy(driver: Any, name: str) -> None:
    """From now on this policy decides, and knows nothing yet."""
    driver.adapters.core.worth.use_policy(name)
    if not driver.engine.reset_prefix_cache():
        raise RuntimeError("the prefix cache is still in use")
