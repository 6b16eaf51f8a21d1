"""An engine under test: its settings, the requests and conversations that are played on it, and where its KV and adapters are to lie before."""

from __future__ import annotations

import asyncio
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.live.peers.play import Answer, Ask, Conversations, StepLog, text
from bench.live.shared.models import ModelShape, model_folder
from engine_bridge.driver.in_process import runner_of, scheduler_of
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY

T = TypeVar("T")
# Twice what any engine here needs beyond its blocks; vLLM wants whole GiB.
KV_SPACE_GIB = 1
WARM_UP_TOKENS = (64, 512)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an engine; all engines of a run have the same model.

    Attributes:
        num_blocks: KV blocks on the device.
        adapters: pairs of a name and a PEFT folder; without any, LoRA is off.
        max_loras: adapters in one step.
        adapter_host_bytes, max_cpu_loras: bound of the adapters' host memory: ours in bytes, vLLM's by count.
        host_gib, disk_gib: memory of the KV tiers, ours only.
        has_tiers: ours only: KV that leaves the device is kept in host memory and on disk.
        has_page_cache: ours only: False has the kernel forget what the KV tiers read, so that reading it again reads the disk.
        scheduling_policy: ours only: which request starts next.
        device: "cpu" or "cuda". On a GPU vLLM compiles and captures graphs, as servers do.
        has_weights: False for a model whose weights vLLM makes up.
        offload_gib: stock only: host memory of vLLM's own OffloadingConnector; 0: it is not used.
        profile_dir: where `overture profile` keeps its measurements, ours only; "" for none.
    """

    model: str
    dtype: str
    folder: str
    num_blocks: int
    block_size: int | None = 32
    max_model_len: int = 8192
    max_num_batched_tokens: int | None = 2048
    max_num_seqs: int | None = 64
    adapters: list[tuple[str, str]] = field(default_factory=list)
    max_loras: int = 1
    max_lora_rank: int = 8
    adapter_host_bytes: int = 1 << 30
    max_cpu_loras: int = 1
    host_gib: float = 2.0
    disk_gib: float = 8.0
    has_tiers: bool = True
    has_page_cache: bool = True
    scheduling_policy: str = DEFAULT_POLICY
    profile_dir: str = ""
    device: str = "cpu"
    has_weights: bool = True
    offload_gib: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape, folder: Path, *, has_weights: bool = True, **more: Any) -> Settings:
        """Return the settings of an engine with a model of this shape, which is written if it is not there yet."""
        model = str(model_folder(shape, has_weights=has_weights))
        return cls(model=model, dtype=shape.dtype, folder=str(folder), has_weights=has_weights, **more)


def configure_environment(device: str = "cpu") -> None:
    """Must run before vllm or torch is imported."""
    compiles_nothing = {"TORCH_COMPILE_DISABLE": "1"} if device == "cpu" else {}
    for name, value in {
        **compiles_nothing,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_SPACE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def greedy(max_tokens: int) -> Any:
    """Return vLLM's `SamplingParams` for exactly `max_tokens` tokens, each in a separate output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def drop_page_cache(paths: Iterable[str | Path], *, is_written: bool = False) -> None:
    """Write the files out, unless that was done before, and have the kernel forget their pages: the next read is the disk's."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if not is_written:
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def forget_files(folders: Iterable[str]) -> None:
    """Have the kernel forget these adapters: the next load is the disk's. They were written out long ago; what a process maps stays."""
    drop_page_cache((path for folder in folders for path in Path(folder).iterdir()), is_written=True)


class Engine(ABC):
    """A started engine. The public methods are a worker's commands, on the main thread."""

    log: StepLog

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folders = dict(settings.adapters)
        self.loop = asyncio.new_event_loop()
        self.talk = Conversations()
        self._num_asked = self._num_plays = 0

    # -- what the two engines do in their own ways ---------------------------------------------------------------------

    @abstractmethod
    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return what the coroutine returns on the event loop."""

    @abstractmethod
    def with_vllm(self, run: Callable[[Any], T]) -> T:
        """Return the result of `run(LLMEngine)`, called on the engine's thread between two steps."""

    @abstractmethod
    def outputs(self, request_id: str, ask: Ask, salt: str) -> AsyncGenerator[Sequence[int], None]:
        """Ask, and yield token ids as they come. salt: requests find the KV of others with the same one."""

    @abstractmethod
    def put(self, adapters: list[str], place: str) -> None:
        """Have adapters in this place and no nearer one: in a `slot`, in `host` memory, on `disk` (and in no page cache)."""

    @abstractmethod
    def empty(self) -> None:
        """Leave adapters on disk only, and empty the prefix cache."""

    @abstractmethod
    def found(self) -> dict[str, int]:
        """Return how many requests since the start found their adapter in each place when they came."""

    @abstractmethod
    def preemptions(self) -> dict[str, int]:
        """Return the preemptions since the start: all, and by the way in which requests came back where there are several."""

    @abstractmethod
    def close(self) -> None:
        """End the engine."""

    def settle(self) -> None:  # noqa: B027  (vLLM writes nothing behind)
        """Return once nothing is being written any more."""

    def advise(self, session: str, **fields: Any) -> None:  # noqa: B027  (vLLM takes no advice)
        """Tell the engine that this session is about to ask."""

    # -- commands ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the engine's blocks and threads."""
        import torch

        return self.with_vllm(
            lambda llm: {
                "num_blocks": scheduler_of(llm).kv_cache_manager.block_pool.num_gpu_blocks,
                "block_size": llm.vllm_config.cache_config.block_size,
                "threads": torch.get_num_threads(),
            }
        )

    def warm_up(self) -> None:
        """Answer two requests that do not count."""
        self.play([Ask(prompt=[1] * num_tokens, max_tokens=2) for num_tokens in WARM_UP_TOKENS])

    def play(self, asks: Sequence[Ask], one_by_one: bool = False) -> list[Answer]:
        """Answer requests at their times, or each when the one before it is done; they find no KV of an earlier play."""
        self._num_plays += 1
        groups: list[Sequence[Ask]] = [[ask] for ask in asks] if one_by_one else [asks]
        answers = [self.do(self._play(group, f"play {self._num_plays}")) for group in groups]
        return [answer for group in answers for answer in group]

    def turn(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        """Run one request alone, which finds the KV of earlier turns."""
        (answer,) = self.do(self._play([Ask(prompt=tokens, max_tokens=max_tokens)]))
        return {"ttft_s": answer.ttft_s, "token_ids": answer.token_ids}

    def together(self, asks: Sequence[Ask], advised: Sequence[tuple[float, str]] = ()) -> list[Answer]:
        """Answer requests at their times, which find the KV of earlier turns. advised: when to send an advisory of which session, in seconds."""
        return self.do(self._together(asks, advised))

    async def _together(self, asks: Sequence[Ask], advised: Sequence[tuple[float, str]]) -> list[Answer]:
        async def advise(at_s: float, session: str) -> None:
            """Send an advisory at its time."""
            await asyncio.sleep(at_s)
            self.advise(session)

        answers, *_ = await asyncio.gather(self._play(asks), *(advise(*each) for each in advised))
        return answers

    def place(self, source: str) -> None:
        """Leave a history's KV in `source` and in no faster tier: "device", or "recompute" for nowhere."""
        if source != "device":
            self.settle()
            self.with_vllm(forget_device)

    def begin(self, histories: dict[str, int]) -> None:
        """Run the first turns, with these numbers of tokens by session, one after the other."""
        for session, num_tokens in histories.items():
            self.do(self.say(session, text(num_tokens, "history", session), 2))

    def people(self, seed: str, **script: Any) -> list[dict[str, Any]]:
        """Ask every person's questions at their times, with their advisories; each continues after the answer."""
        self.talk.restart(seed)
        return self.do(self.ask_people(**script))

    def agents(self, stages: list[list[dict[str, Any]]], max_tokens: int) -> dict[str, Any]:
        """Run stages of agents that work side by side, each on what the stage before has said; return the seconds and the last answers.

        While one stage works, the next one's agents are advised about.
        """
        started_s = time.perf_counter()
        said: list[int] = []
        for number, stage in enumerate(stages):
            said = self.do(self._stage(stage, stages[number + 1 : number + 2], said, max_tokens))
        return {"elapsed_s": time.perf_counter() - started_s, "said": said}

    # -- on the event loop -------------------------------------------------------------------------------------------

    async def _play(self, asks: Sequence[Ask], salt: str = "") -> list[Answer]:
        began_s, is_over = time.perf_counter(), asyncio.Event()
        tasks = [asyncio.create_task(self.answer(ask, salt, began_s, is_over)) for ask in asks]
        await asyncio.gather(*(task for ask, task in zip(asks, tasks, strict=True) if not ask.is_background))
        is_over.set()
        return await asyncio.gather(*tasks)

    async def answer(self, ask: Ask, salt: str, began_s: float, is_over: asyncio.Event) -> Answer:
        """Ask at the request's time, `began_s` being the play's start, and read the whole answer."""
        due_s = began_s + ask.at_s
        await asyncio.sleep(due_s - time.perf_counter())
        self._num_asked += 1
        request_id, answer = f"r{self._num_asked}", Answer()
        async with aclosing(self.outputs(request_id, ask, salt)) as outputs:
            async for token_ids in outputs:
                answer.ttft_s = answer.ttft_s or time.perf_counter() - due_s
                answer.token_ids += token_ids
                if ask.is_background and is_over.is_set():
                    break
        self.log.take(request_id, answer, began_s)
        return answer

    async def say(self, session: str, new: Sequence[int], max_tokens: int) -> Answer:
        """Play the next turn of a conversation."""
        ask = Ask(prompt=self.talk.ask(session, new), max_tokens=max_tokens, session=session)
        (answer,) = await self._play([ask])
        self.talk.answered(session, answer.token_ids)
        return answer

    async def ask_people(
        self, plan: list[dict[str, Any]], new_tokens: int, max_tokens: int
    ) -> list[dict[str, Any]]:
        """Play every person's script, with their advisories."""
        asked: list[dict[str, Any]] = []

        async def person(script: dict[str, Any]) -> None:
            """Ask one person's questions."""
            session = script["session"]
            for asks_s, leads_s in zip(script["asks_s"], script["leads_s"], strict=True):
                lead_s = min(leads_s, asks_s) if leads_s is not None else 0.0
                await asyncio.sleep(asks_s - lead_s)
                if leads_s is not None:
                    self.advise(session)
                await asyncio.sleep(lead_s)
                answer = await self.say(session, self.talk.question(session, new_tokens), max_tokens)
                turn = self.talk.num_turns[session]
                asked.append(
                    {"session": session, "turn": turn, "ttft_s": answer.ttft_s, "answer": answer.token_ids}
                )

        await asyncio.gather(*(person(script) for script in plan))
        return asked

    async def _stage(
        self, stage: list[dict[str, Any]], following: list[list[dict[str, Any]]], said: list[int], num: int
    ) -> list[int]:
        for agent in (agent for each in following for agent in each):
            self.advise(agent["session"], expected_arrival_s=0.0)
        answers = await asyncio.gather(
            *(
                self.say(agent["session"], said + text(agent["new_tokens"], agent["task"]), num)
                for agent in stage
            )
        )
        return [token for answer in answers for token in answer.token_ids]


# -- vLLM's inside -----------------------------------------------------------------------------------------------------


def forget_device(llm: Any) -> None:
    """Empty the prefix cache and overwrite its memory, so that what comes back can only come from another tier."""
    while scheduler_of(llm).has_requests():
        llm.step()
    reset_prefix_cache(llm)
    for layer in runner_of(llm).compilation_config.static_forward_context.values():
        if hasattr(getattr(layer, "kv_cache", None), "fill_"):
            layer.kv_cache.fill_(7.0)


def reset_prefix_cache(llm: Any) -> None:
    """Empty the prefix cache. Raises RuntimeError if it is in use."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache is still in use")
