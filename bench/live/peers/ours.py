"""Our engine with KV tiers: a `LocalNode` in this process.

What reaches into the tiers is gathered under "the tiers' inside", but for `_keys_of`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench.live.peers.engine import DecodeClock, Engine, Settings, drop_page_cache, greedy
from bench.live.peers.node import OwnNode
from bench.live.peers.play import Asked, Conversations, text
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.local_node import GIB, LocalNode, LocalNodeConfig
from engine_bridge.protocol.node import GenerateRequest, RequestId, Sampling
from engine_bridge.protocol.request_context import RequestContext
from gateway.access.auth import tenant_of
from gateway.advisories.advisories import Advisories, AdvisoryRecord, AdvisoryRequest, outcome_of
from gateway.advisories.drafts import Drafts
from gateway.metrics.metrics import Metrics
from gateway.sessions import SessionStore
from kvtiers.io.files import Files
from kvtiers.keys import BlockKey
from kvtiers.policy.restore import FasterWins

_numbers = itertools.count()
SETTLE_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 60.0
WRONG_TTL_S = 2.0


class TieredNode(OwnNode, Engine):
    """A node with KV tiers, or the same node without them."""

    def __init__(self, settings: Settings, has_tiers: bool, files: SlowableFiles | None = None) -> None:
        self._files = files or SlowableFiles()
        self._tiers = make_tiers(settings, self._files) if has_tiers else None
        self.sources = ("recompute", "disk_cold", "disk", "host", "device") if has_tiers else ()
        self._num_requests = 0
        super().__init__(settings)
        self.turn([1] * 64, 2)

    def _make_node(self) -> LocalNode:
        return LocalNode(LocalNodeConfig(engine=self._engine_config(enable_lora=False)), self._tiers)

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
        self._num_requests += 1
        # Below `LocalNode.generate` only in that the prompt is given as token ids, so that lengths are exact.
        prompt = {"prompt_token_ids": tokens}
        return self._node._client.generate(prompt, greedy(max_tokens), f"r{self._num_requests}")

    # -- people and agents, by the gateway's own advisories ----------------------------------------------------------

    def begin(self, histories: dict[str, int]) -> None:
        self._await(self._begin(histories))

    async def _begin(self, histories: dict[str, int]) -> None:
        self.talk = Conversations()
        self._advisories, self._store = await make_advisories(self._node, Path(self.settings.folder))
        self._records: list[AdvisoryRecord] = []
        for session, num_tokens in histories.items():
            asked = await self._ask(session, self.talk.begin(session, num_tokens), 2)
            self.talk.answered(session, asked.answer)

    async def _ask(self, session: str, prompt: list[int], max_tokens: int) -> Asked:
        request = GenerateRequest(
            request_id=RequestId(f"b{next(_numbers)}"),
            prompt_token_ids=tuple(prompt),
            context=RequestContext(tenant=tenant_of(owner_of(session)), session_id=session),
            sampling=Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        )
        return await self._answered(request, self.talk.num_turns[session])

    async def _answered(self, request: GenerateRequest, turn: int = 0) -> Asked:
        started_s, ttft_s, cached, answer = time.perf_counter(), 0.0, 0, []
        async for delta in self._node.generate(request):
            ttft_s = ttft_s or time.perf_counter() - started_s
            answer += delta.token_ids
            cached = delta.usage.cached_tokens if delta.usage else cached
        return Asked(request.context.session_id, turn, ttft_s, cached, answer)

    def people(
        self, plan: list[dict[str, Any]], new_tokens: int, max_tokens: int, seed: str
    ) -> list[dict[str, Any]]:
        self.talk.restart(seed)
        return self._await(self._people(plan, new_tokens, max_tokens))

    async def _people(
        self, plan: list[dict[str, Any]], new_tokens: int, max_tokens: int
    ) -> list[dict[str, Any]]:
        asked: list[Asked] = []

        async def person(script: dict[str, Any]) -> None:
            session = script["session"]
            for asks_s, leads_s, wrong in zip(
                script["asks_s"], script["leads_s"], script["wrong"], strict=True
            ):
                lead_s = min(leads_s, asks_s) if leads_s is not None else 0.0
                await asyncio.sleep(asks_s - lead_s)
                if leads_s is not None:
                    self._advise(session)
                for other in wrong:
                    self._advise(other, ttl_s=WRONG_TTL_S)
                await asyncio.sleep(lead_s)
                prompt = self.talk.ask(session, self.talk.question(session, new_tokens))
                asked.append(await self._ask(session, prompt, max_tokens))
                self.talk.answered(session, asked[-1].answer)

        await asyncio.gather(*(person(script) for script in plan))
        return [item.as_dict() for item in asked]

    def _advise(self, session: str, **fields: Any) -> None:
        if self._tiers is None:
            return
        record = self._advisories.submit(
            owner_of(session), AdvisoryRequest(session_id=session, **fields), "typing"
        )
        if record not in self._records:
            self._records.append(record)

    def agents(self, stages: list[list[dict[str, Any]]], max_tokens: int) -> dict[str, Any]:
        return self._await(self._agents(stages, max_tokens))

    async def _agents(self, stages: list[list[dict[str, Any]]], max_tokens: int) -> dict[str, Any]:
        """While one stage works, the next one's agents are advised about."""
        started_s = time.perf_counter()
        said: list[int] = []
        for number, stage in enumerate(stages):
            for agent in stages[number + 1] if number + 1 < len(stages) else ():
                self._advise(agent["session"], expected_arrival_s=0.0)

            async def work(agent: dict[str, Any], said: list[int]) -> list[int]:
                session = agent["session"]
                prompt = self.talk.ask(session, said + text(agent["new_tokens"], agent["task"]))
                answer = (await self._ask(session, prompt, max_tokens)).answer
                self.talk.answered(session, answer)
                return answer

            answers = await asyncio.gather(*(work(agent, said) for agent in stage))
            said = [token for answer in answers for token in answer]
        return {"elapsed_s": time.perf_counter() - started_s, "said": said}

    def draft(self, tokens: list[int], tail: list[int], is_typed: bool) -> dict[str, Any]:
        """TTFT of a pasted question, whose text was (or was not) there for a while before Enter."""
        return self._await(self._draft(tokens, tail, is_typed))

    async def _draft(self, tokens: list[int], tail: list[int], is_typed: bool) -> dict[str, Any]:
        session = f"draft{next(_numbers)}"
        if is_typed:
            await self._node.prefill(
                GenerateRequest(
                    request_id=RequestId(session),
                    prompt_token_ids=tuple(tokens),
                    context=RequestContext(session_id=session),
                )
            )
        return (await self._ask(session, self.talk.ask(session, tokens + tail), 2)).as_dict()

    def advisory_cost(self, sessions: list[str]) -> float:
        """Seconds of the event loop's processor time for each advisory, from the call to its last state."""
        return self._await(self._advisory_cost(sessions))

    async def _advisory_cost(self, sessions: list[str]) -> float:
        started_s = time.thread_time()
        records = [
            self._advisories.submit("cost", AdvisoryRequest(session_id=session, ttl_s=0.2), "typing")
            for session in sessions
        ]
        while not all(record.is_over for record in records):  # noqa: ASYNC110  (waking with each end would be counted)
            await asyncio.sleep(0.05)
        return (time.thread_time() - started_s) / len(records)

    def accounts(self) -> list[dict[str, Any]]:
        """How the advisories since the last call ended."""
        over = [record for record in self._records if record.is_over]
        self._records = [record for record in self._records if not record.is_over]
        return [outcome_of(record.report) for record in over if record.report is not None]

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

    def _keys_of(self, tokens: list[int]) -> list[BlockKey]:
        """The keys of a prompt's whole blocks, as a request of ours has them."""
        return self._await(self._keys(tokens))

    async def _keys(self, tokens: list[int]) -> list[BlockKey]:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from engine_bridge.protocol.request_context import NOBODY

        client = self._node._client
        unique_id, core_request = client.submit(
            {"prompt_token_ids": tokens},
            SamplingParams(max_tokens=1),
            "keys",
            None,
            context=NOBODY,
            lora_request=None,
        )
        client.forget(unique_id, abort=False)
        hasher = self.llm.engine_core.engine_core.request_block_hasher
        return [
            BlockKey(bytes(key))
            for key in Request.from_engine_core_request(core_request, hasher).block_hashes
        ]

    def close(self) -> None:
        if hasattr(self, "_store"):
            self._await(self._store.close())
        super().close()


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


def owner_of(session: str) -> str:
    """Conversations that nobody goes on with are another key's, whose client advises about them all the same."""
    return "broken" if session.startswith("idle") else "local"


async def make_advisories(node: LocalNode, folder: Path) -> tuple[Advisories, SessionStore]:
    """The gateway's, in front of this node."""
    store = await SessionStore.open(folder / "sessions.sqlite3")
    metrics = Metrics(CollectorRegistry())
    drafts = Drafts(node, store, metrics, accepts_drafts=True)
    return Advisories(node, store, metrics, drafts), store


def forget_disk(tiers: KvTiers) -> None:
    """Have the disk tier know no block any more."""
    disk = tiers.store._disk

    async def forget() -> None:  # its index belongs to the I/O thread
        disk.forget(list(disk._contents.index))

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
        if num_read < len(keys) or set(stage.origins) != {"disk"}:
            raise RuntimeError(
                f"{num_read} of {len(keys)} blocks came, {stage.origins.count('disk')} from disk"
            )
    finally:
        store.release(stage)
    return {"bytes": len(keys) * store.shape.block_bytes, "seconds": seconds}
