"""Engines of a small model with settings of their own, and requests to nodes without a gateway before them."""

from __future__ import annotations

import functools
import itertools
import json
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from engine_bridge.driver.kv.kv_tiers import KvTiers
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.engine_request import ChatMessage, EngineRequest, LengthGuess, RequestId, Sampling
from engine_bridge.protocol.node import KvSources, Prompt
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.node_config import LocalNodeConfig
from gateway.settings.config import DEMO_ADAPTERS_DIR, DEMO_MODEL_DIR
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts

NUM_LAYERS = 2
_ids = itertools.count()
_kept = tempfile.TemporaryDirectory(prefix="overture-tests-")


class Small(NamedTuple):
    """Where a model lies, and its adapters."""

    model: Path
    adapters: Path


@functools.cache
def small() -> Small:
    """The demo model and the folder of its adapters, each with the first two of four layers: a step costs two thirds, and no answer needs sense."""
    made = Small(Path(_kept.name) / "model", Path(_kept.name) / "adapters")
    _cut(DEMO_MODEL_DIR, made.model)
    for adapter in DEMO_ADAPTERS_DIR.iterdir():
        _cut(adapter, made.adapters / adapter.name)
    return made


def _cut(source: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file  # which import torch

    left_out = tuple(f".layers.{layer}." for layer in range(NUM_LAYERS, 4))
    folder.mkdir(parents=True)
    for file in source.glob("*.json"):
        settings = json.loads(file.read_text())
        if "num_hidden_layers" in settings:
            settings["num_hidden_layers"] = NUM_LAYERS
        (folder / file.name).write_text(json.dumps(settings))
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        kept = {name: each for name, each in tensors.items() if not any(part in name for part in left_out)}
        save_file(kept, folder / file.name, metadata={"format": "pt"})


@asynccontextmanager
async def engine(
    tiers: KvTiers | None = None, *, state_dir: Path | None = None, **settings: Any
) -> AsyncIterator[LocalNode]:
    """A node with an engine of its own; `settings` are those of EngineConfig that differ from here, `adapters_dir` and `context_overflow`."""
    usual = {"model": str(small().model), "max_model_len": 1024, "max_num_seqs": 8, "cpu_threads": 1}
    usual["kv_cache_gib"] = 0.125  # which is written when the engine starts
    own = {"adapters_dir": small().adapters, "context_overflow": "error"}
    own |= {name: settings.pop(name) for name in tuple(own) if name in settings}
    config = EngineConfig(served_model_name="demo", dtype="float32", **usual | settings)
    node = LocalNode(LocalNodeConfig(engine=config, state_dir=state_dir, **own), tiers)
    await node.start()
    _replace_kernels_once()
    try:
        yield node
    finally:
        await node.close()


@functools.cache
def _replace_kernels_once() -> None:
    """Keep vLLM from putting its functions for CPUs in the place of Triton's at each later start.

    It looks through all modules for them, which takes 0.4 s, and wraps what it has put there before.
    """
    from vllm.triton_utils import dispatcher  # which is slow to import

    register, known = dispatcher.register_kernels, dispatcher._registry.keys()
    dispatcher.register_kernels = lambda kernels: kernels.keys() <= known or register(kernels)


class Said(NamedTuple):
    """A whole answer. kv: where its prompt's KV came from; prompt: how the node made it."""

    token_ids: list[int]
    text: str
    kv: KvSources
    prompt: Prompt | None

    @property
    def num_reused(self) -> int:
        """Tokens of the prompt that were not computed."""
        return self.kv.device + self.kv.host + self.kv.disk + self.kv.peer


Asked = str | Sequence[int] | Sequence[ChatMessage]


def request(prompt: Asked, num_tokens: int = 8, **fields: Any) -> EngineRequest:
    """A greedy request for so many tokens; `prompt` is what a user says, token ids, or messages."""
    asked: Any = (ChatMessage("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
    return EngineRequest(
        request_id=RequestId(f"request-{next(_ids)}"),
        sampling=Sampling(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        **{"messages" if isinstance(asked[0], ChatMessage) else "prompt_token_ids": asked} | fields,
    )


async def generate(node: Any, prompt: Asked, num_tokens: int = 8, **fields: Any) -> Said:
    """Ask a node, and read the whole answer."""
    deltas = [delta async for delta in node.generate(request(prompt, num_tokens, **fields))]
    assert all(delta.prompt is None for delta in deltas[:-1])
    token_ids = [token for delta in deltas for token in delta.token_ids]
    kv = next(delta.timings.kv for delta in reversed(deltas) if delta.timings)
    return Said(token_ids, "".join(delta.text for delta in deltas), kv, deltas[-1].prompt)


async def ask(
    node: Any, prompt: Asked, num_tokens: int = 8, adapter: str | None = None, **fields: Any
) -> list[int]:
    """The token ids of a whole answer."""
    return (await generate(node, prompt, num_tokens, adapter=adapter or "", **fields)).token_ids


def text(seed: object, length: int) -> list[int]:
    """Token ids that say nothing."""
    chance = random.Random(repr(seed))
    return [chance.randrange(20, 900) for _ in range(length)]


async def load(node: LocalNode, name: str, path: Path, **options: Any) -> None:
    """Have the node serve an adapter."""
    reply = await node.load_adapter({"lora_name": name, "lora_path": str(path)} | options)
    assert reply.status == 200, reply.body


async def unload(node: LocalNode, name: str) -> None:
    """Have the node serve an adapter no more."""
    assert (await node.unload_adapter({"lora_name": name})).status == 200


class WaitsForTheDisk:
    """Restores whatever a tier holds, however slow this machine's copies and disk are at the moment."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        is_there = facts.num_ready_blocks == facts.num_blocks
        return RestoreDecision(Action.LOAD if is_there else Action.WAIT, facts.num_blocks, "patient", 0.0)


class Expects:
    """A predictor that learns nothing and says with confidence how long an answer will be."""

    def __init__(self, num_tokens: Callable[[EngineRequest], int]) -> None:
        self._num_tokens = num_tokens

    def predict(self, features: EngineRequest) -> LengthGuess:
        guess = self._num_tokens(features)
        return LengthGuess(guess, guess, "made up")

    def observe(self, features: EngineRequest, num_tokens: int) -> None: ...

    def refit(self) -> None: ...
