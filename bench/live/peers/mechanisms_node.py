"""Our node with KV tiers and adapters, in this process, as `bench.live.mechanisms` drives it.

What reaches into the engine is gathered under "the engine's inside".
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bench.live.peers.adapters import AdapterSettings, forget_files
from bench.live.peers.adapters_ours import is_filled, is_quiet, leave
from bench.live.peers.node import OwnNode
from bench.live.peers.ours import TieredNode, make_advisories
from bench.live.peers.play import Asked
from engine_bridge.local_node import GIB, LocalNode, LocalNodeConfig
from engine_bridge.protocol.node import ChatMessage, GenerateRequest, RequestId, Sampling
from engine_bridge.protocol.request_context import RequestContext
from gateway.access.auth import tenant_of
from gateway.advisories.advisories import AdvisoryRecord, AdvisoryRequest

OWNER = "local"
WAIT_S = 30.0
LOOK_EVERY_S = 0.01
STILL_LOOKS = 30  # as many looks in a row without a change: nothing moves any more


class MechanismNode(TieredNode):
    """Steps have no bound in time, so that a request takes the same ones whenever it comes."""

    settings: AdapterSettings

    def __init__(self, settings: AdapterSettings, folder: Any) -> None:
        super().__init__(settings, has_tiers=True)
        self._advisories, self._store = self._await(make_advisories(self._node, folder))
        self.folders = dict(settings.adapters)
        self._on_engine(count_steps)

    def _make_node(self) -> LocalNode:
        config = self._engine_config(
            max_loras=self.settings.max_loras,
            max_lora_rank=self.settings.max_lora_rank,
            adapter_host_gib=self.settings.host_bytes / GIB,
            max_step_ms=0.0,
        )
        return LocalNode(LocalNodeConfig(engine=config, adapters=tuple(self.settings.adapters)), self._tiers)

    # -- requests and advisories ---------------------------------------------------------------------------------------

    def ask(
        self,
        prompt: list[int] | tuple[ChatMessage, ...],
        *,
        session: str = "",
        adapter: str = "",
        tenant: str = tenant_of(OWNER),
        num_tokens: int = 4,
    ) -> Asked:
        """A greedy answer of so many tokens to token ids or messages."""
        self._num_requests += 1
        given = isinstance(prompt, list)
        request = GenerateRequest(
            request_id=RequestId(f"m{self._num_requests}"),
            prompt_token_ids=tuple(prompt) if given else None,
            messages=() if given else prompt,
            context=RequestContext(tenant=tenant, session_id=session, adapter=adapter),
            sampling=Sampling(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        )
        return self._await(self._answered(request))

    def advise(
        self, session: str, adapter: str | None = None, follower: Any = None, ttl_s: float = 60.0
    ) -> AdvisoryRecord:
        """Word that a request of this session will come, as the chat page gives it."""

        async def submit() -> AdvisoryRecord:
            wanted = AdvisoryRequest(session_id=session, model=adapter, ttl_s=ttl_s)
            return self._advisories.submit(OWNER, wanted, "typing", follower)

        return self._await(submit())

    def switch(self, session: str, adapter: str) -> None:
        """Another adapter is picked on the chat page, and all that comes of it ahead of a question has come."""
        states: list[tuple[str, str]] = []

        def note(record: AdvisoryRecord) -> None:
            states.append((record.source, record.report.state if record.report is not None else ""))

        self.advise(session, adapter, note)
        self.wait_until(lambda: any(source == "computed" for source, _ in states))

    def wait_warm(self, record: AdvisoryRecord, adapter: str) -> None:
        """Until all that the advisory announced is as near as it comes."""

        def is_warm() -> bool:
            return record.report is not None and record.report.state == "warm" and self.is_in_slot(adapter)

        self.wait_until(is_warm)

    def wait_over(self, records: Sequence[AdvisoryRecord]) -> None:
        self.wait_until(lambda: all(record.is_over for record in records))

    def take_back(self, record: AdvisoryRecord) -> None:
        async def cancel() -> None:
            self._advisories.cancel(OWNER, record.id)

        self._await(cancel())

    def store_turn(self, session: str, question: str, answer: str) -> None:
        """A turn of a conversation, as the chat page leaves it."""
        self._await(
            self._store.record_turn(
                OWNER, session, f"{session}-1", question, answer=answer, makes_session=True, now=time.time()
            )
        )

    def load(self, name: str, folder: str) -> None:
        """Serve these files under the name, in place of what it named before."""
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        reply = self._await(self._node.load_adapter(body))
        if reply.status != 200:
            raise RuntimeError(f"{name} was not loaded: {reply.body!r}")

    def version(self, name: str) -> int:
        return int(self._node._catalog.current(name).version_id)

    # -- where things are ----------------------------------------------------------------------------------------------

    def put_adapter(self, name: str, place: str) -> None:
        """In a `slot` (it must be there already, or a request brings it), or on `disk` and in no page cache."""
        self.wait_until(lambda: self._on_engine(is_quiet))
        if place == "slot":
            self.ask([1] * 4, adapter=name, num_tokens=2)
            self.wait_until(lambda: self._on_engine(is_quiet))
        else:
            self._on_engine(lambda driver: leave(driver, [self.version(name)], keeps_host=False))
            forget_files([self.folders[name]])

    def is_in_slot(self, name: str) -> bool:
        return self._on_engine(lambda driver: is_quiet(driver) and is_filled(driver, self.version(name)))

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not is_so():
            if time.monotonic() > deadline_s:
                raise TimeoutError("it does not come about")
            time.sleep(LOOK_EVERY_S)

    def wait_still(self, look: Callable[[], Any]) -> Any:
        """What `look` sees when it has seen the same for a while."""
        seen, num_same = look(), 0
        deadline_s = time.monotonic() + WAIT_S
        while num_same < STILL_LOOKS:
            time.sleep(LOOK_EVERY_S)
            again = look()
            seen, num_same = again, num_same + 1 if again == seen else 0
            if time.monotonic() > deadline_s:
                raise TimeoutError("it does not come to rest")
        return seen

    def moved_bytes(self) -> tuple[int, int]:
        """So far: from host memory to the device; from disk."""
        stats = self._tiers.stats()
        return int(self._tiers.copier.back.num_bytes), int(stats.disk.bytes_read)

    def counted_bytes(self) -> list[int]:
        """What the metrics say was moved for advisories so far: from host memory to the device; from disk."""
        totals = Counter[str]()
        for metric in self._advisories._metrics.registry.collect():
            for sample in metric.samples:
                if sample.name == "overture_advisory_bytes_total":
                    totals[sample.labels["tier"]] += int(sample.value)
        return [totals["host"], totals["disk"]]

    def is_link_known(self) -> bool:
        """Whether the copies by which the node measures its link are behind it."""
        return self._tiers.link is not None

    def num_cached_blocks(self) -> int:
        """Blocks of the device that hold KV which a request could find."""
        return self._on_engine(num_cached_blocks)

    def counts(self) -> tuple[int, int]:
        """Steps that computed something, and preemptions, since the start."""
        return self._on_engine(lambda driver: (driver.num_computing_steps, driver._scheduler.num_preempted))

    def close(self) -> None:
        self._await(self._store.close())
        OwnNode.close(self)


class ProfiledNode(OwnNode):
    """The engine that `overture profile` measures: without tiers or lanes."""

    settings: AdapterSettings

    def _make_node(self) -> LocalNode:
        from engine_bridge.driver.profiling.machine import profiling_config

        config = self._engine_config(
            max_loras=self.settings.max_loras,
            max_lora_rank=self.settings.max_lora_rank,
            adapter_host_gib=self.settings.host_bytes / GIB,
        )
        return LocalNode(LocalNodeConfig(engine=profiling_config(config)))

    def laws(self, folder: Any, seconds: float) -> Any:
        """`AdapterProfile`: what adapters add to a decode step, as a line over both readings of their ranks."""
        from engine_bridge.driver.profiling.adapters import measure_adapters
        from engine_bridge.driver.profiling.budget import start
        from engine_bridge.driver.profiling.requests import CraftedRequests

        def measure(driver: Any) -> Any:
            budget = start(seconds, lambda what, share_done, left_s: None)
            with CraftedRequests(driver) as requests:
                return measure_adapters(
                    driver, requests, folder, self.settings.max_loras, self.settings.host_bytes, budget
                )

        return self._on_engine(measure)


# -- the engine's inside; all on the engine thread ---------------------------------------------------------------------


def count_steps(driver: Any) -> None:
    """Have the steps counted in which anything was computed."""
    driver.num_computing_steps = 0
    scheduler = driver._scheduler
    schedule = scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        driver.num_computing_steps += output.total_num_scheduled_tokens > 0
        return output

    scheduler.schedule = counting


def num_cached_blocks(driver: Any) -> int:
    return sum(block.block_hash is not None for block in driver._block_pool.blocks)
