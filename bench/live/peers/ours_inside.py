"""What the benches reach into of our node; on the engine thread, where nothing else is said."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.live.peers.play import Ask, StepLog
from engine_bridge.driver.kv.link_measuring import LinkMeasuring
from engine_bridge.local_node import LocalNode
from engine_bridge.predict.length import OnlineLengths
from engine_bridge.protocol.engine_request import EngineRequest, LengthGuess
from engine_bridge.protocol.node import pack_token_ids
from kvtiers.keys import BlockKey
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts


def generate(node: LocalNode, request_id: str, ask: Ask, tenant: str, sampling: Any) -> Any:
    """Return the outputs of a request of this tenant, whose requests alone find each other's KV. On the event loop."""
    from engine_bridge.driver.serving.call import CALL, Call

    CALL.set(Call(EngineRequest(tenant=tenant)))
    client, serving = node._client, node._serving
    assert client is not None and serving is not None
    adapter = serving.lora_request(ask.adapter or "")
    return client.generate({"prompt_token_ids": ask.prompt}, sampling, request_id, lora_request=adapter)


def note_steps(driver: Any) -> StepLog:
    """Have each step noted."""
    log = StepLog(driver._scheduler, lambda unique_id: unique_id.rpartition("-")[0])
    step = driver.step
    driver.step = lambda: log.step(step)
    return log


def break_next_step(driver: Any) -> None:
    """Have the next step with requests fail, as a CUDA error would let it."""

    def fail() -> None:
        """Fail."""
        raise RuntimeError("a step was made to fail")

    driver.engine.step = fail


# -- KV ----------------------------------------------------------------------------------------------------------------


def forget_disk(tiers: Any) -> None:
    """Have the disk tier know no block any more. From any thread."""
    disk = tiers.store._disk

    async def forget() -> None:
        """Forget all blocks on the I/O thread, to which the index belongs."""
        disk.forget(list(disk._contents.index))

    tiers._io.start(forget()).result()


def keys_of(node: LocalNode, tokens: list[int]) -> list[BlockKey]:
    """Return the keys of the whole blocks of a prompt that was asked without a tenant and an adapter. From any thread."""
    assert node._client is not None
    versions = node._client.versions
    hashes = versions.hashes_of(pack_token_ids(tokens), versions.salt_of("", None), None)
    return [BlockKey(bytes(block_hash)) for block_hash in hashes]


def time_host_copy(driver: Any, tiers: Any, keys: Sequence[BlockKey]) -> dict[str, Any]:
    """Copy blocks from host memory to free device blocks, layer by layer, as a restore does."""
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


def equal_copies(driver: Any, num_blocks: int, num: int) -> dict[str, list[float]]:
    """Return the seconds of each of `num` copies each way."""
    copier = driver._tiers.copier
    counts = driver._scheduler.get_request_counts
    measuring = LinkMeasuring(driver._tiers, driver._block_pool.num_gpu_blocks, counts)
    times: dict[str, list[float]] = {"out": [], "back": []}
    for _ in range(num):
        before = {name: getattr(copier, name).seconds for name in times}
        measuring._copy(num_blocks)
        for name, seconds in times.items():
            seconds.append(getattr(copier, name).seconds - before[name])
    return times


# -- adapters ----------------------------------------------------------------------------------------------------------


def is_quiet(driver: Any) -> bool:
    """Return whether no adapter moves and no request runs."""
    is_busy = any(v.is_loading or v.num_layouts or v.requests for v in driver.adapters.core.table)
    return not is_busy and not driver.has_work()


def are_in_host(driver: Any, ids: Sequence[int]) -> bool:
    """Return whether all of these adapters are in host memory."""
    return all(driver.adapters.core.table[adapter_id].host_bytes is not None for adapter_id in ids)


# -- scheduling --------------------------------------------------------------------------------------------------------


class Blind(OnlineLengths):
    """Our predictor, which is not told the client's bound: in a bench that is how long the answer will be."""

    def predict(self, features: EngineRequest) -> LengthGuess:
        """Predict an answer's length without its bound."""
        return super().predict(msgspec.structs.replace(features, max_tokens=None))

    def observe(self, features: EngineRequest, num_tokens: int) -> None:
        """Learn an answer's length."""
        super().observe(msgspec.structs.replace(features, max_tokens=None), num_tokens)


class AlwaysSwap:
    """Load whatever the tiers hold."""

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        """Load everything that the tiers hold once it is ready."""
        if facts.num_ready_blocks >= facts.num_blocks:
            return RestoreDecision(Action.LOAD, facts.num_blocks, "always swap", 0.0)
        return RestoreDecision(Action.WAIT, 0, "always swap", 0.0)


def change_policy(driver: Any, node: LocalNode, policy: str) -> None:
    """Put another policy and a new predictor in place of the engine's. Raises RuntimeError while requests are left."""
    if sum(driver._scheduler.get_request_counts()):
        raise RuntimeError("requests are left")
    driver.scheduling.close()
    config = msgspec.structs.replace(node._config.engine, scheduling_policy=policy)
    driver.scheduling = driver._make_scheduling(config)
    driver.scheduling.predictor = Blind()


def learn(scheduling: Any, history: list[list[Any]], ranks: dict[str, int], rate_per_s: float) -> None:
    """Tell predictor and lanes of requests as if they had run until now."""
    own, now = scheduling.dispatcher, scheduling.now()
    for number, (num_prompt, num_answer, adapter) in enumerate(history):
        features = EngineRequest(num_prompt_tokens=num_prompt, adapter=adapter or "")
        guess = scheduling.predictor.predict(features)
        scheduling.predictor.observe(features, num_answer)
        sizes = (float(num_prompt), float(guess.p50), float(ranks.get(adapter, 0)))
        own.sizes.seen(*sizes)
        tokens, took_s = num_prompt + num_answer, num_answer * own.token_s
        own.refits.arrived(
            f"past {number}", sizes, tokens, took_s, now - (len(history) - number) / rate_per_s
        )
        own.refits.ended(f"past {number}", tokens, took_s)
    own.refits.due_s = 0.0


def apply_refit(scheduling: Any) -> bool:
    """Apply a refit that is ready; return whether the lanes are fitted, or the policy has none."""
    own = scheduling.dispatcher
    own.advance_refits(scheduling.now())
    return own.counts["refits"] > 0 or own.laned is None


def time_steps(driver: Any, times: list[float]) -> None:
    """Have the seconds of each step written down."""
    step = driver._step_engine

    def timed() -> Any:
        """Step the engine and record the seconds."""
        started_s = time.perf_counter()
        outputs = step()
        times.append(time.perf_counter() - started_s)
        return outputs

    driver._step_engine = timed


def is_queued(driver: Any, num: int) -> bool:
    """Return whether nearly all of `num` requests have arrived and the policy has taken all arrived ones in."""
    scheduling = driver.scheduling
    return len(scheduling.queue) > 0.9 * num and not len(scheduling.dispatcher.unready)
