"""Our node with a policy of starting that can be exchanged between two plays."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.live.peers.adapters import Ask
from bench.live.peers.adapters_ours import NodeAdapters
from bench.live.peers.play import text
from bench.predicting import note_copies, note_steps
from engine_bridge.driver.kv.link_measuring import LinkMeasuring
from engine_bridge.local_node import LocalNode
from engine_bridge.policy.scheduling.policies import DEFAULT_POLICY
from engine_bridge.predict.length import LengthFeatures, LengthGuess, OnlineLengths
from engine_bridge.protocol.request_context import RequestContext
from kvtiers.policy.restore import Action, RestoreDecision, RestoreFacts

DEFAULT_ADAPTER_POLICY = "adaptive"
REFIT_TIMEOUT_S, QUEUE_TIMEOUT_S = 60.0, 120.0


class Blind:
    """Our predictor, which is not told the client's bound: in a bench that is how long the answer will be."""

    def __init__(self) -> None:
        self._inner = OnlineLengths()

    def predict(self, features: LengthFeatures) -> LengthGuess:
        return self._inner.predict(_blinded(features))

    def observe(self, features: LengthFeatures, num_tokens: int) -> None:
        self._inner.observe(_blinded(features), num_tokens)

    def refit(self) -> None:
        self._inner.refit()


def _blinded(features: LengthFeatures) -> LengthFeatures:
    return msgspec.structs.replace(features, max_tokens=None)


class Oracle:
    """Knows the length, in so many of all cases; in the others it gives that of some other request.

    Source: Chameleon §5.4, accuracies of 100, 80 and 60%.
    """

    def __init__(self, accuracy: float, lengths: Sequence[int]) -> None:
        self._accuracy, self._lengths = accuracy, lengths
        self._chance = random.Random(f"oracle {accuracy}")

    def predict(self, features: LengthFeatures) -> LengthGuess:
        length = features.max_tokens or 1
        if self._chance.random() >= self._accuracy:
            length = self._chance.choice(self._lengths)
        return LengthGuess(length, length, "oracle")

    def observe(self, features: LengthFeatures, num_tokens: int) -> None: ...

    def refit(self) -> None: ...


class FixedRestoreMethod:
    """Load whatever the tiers hold, or nothing."""

    def __init__(self, loads: bool) -> None:
        self._loads = loads

    def decide(self, facts: RestoreFacts) -> RestoreDecision:
        if not self._loads:
            return RestoreDecision(Action.LOAD, 0, "always recompute", 0.0)
        if facts.num_ready_blocks >= facts.num_blocks:
            return RestoreDecision(Action.LOAD, facts.num_blocks, "always swap", 0.0)
        return RestoreDecision(Action.WAIT, 0, "always swap", 0.0)


class ScheduledNode(NodeAdapters):
    """Commands of `NodeAdapters`, and `use`."""

    scheduling_policy = DEFAULT_POLICY

    def use(
        self,
        policy: str,
        history: list[list[Any]],
        rate_per_s: float,
        accuracy: float | None = None,
        way: str = "cheaper",
    ) -> dict[str, Any]:
        """From now on this policy decides who starts, and knows of nothing but `history`.

        Args:
            history: requests that came before, at this rate: prompt tokens, answer tokens, adapter (or None). Lanes and predictor are fitted to them.
            accuracy: of an oracle in place of our predictor.
            way: how a preempted request gets its KV back: "cheaper", "swap" or "recompute".
        """
        predictor = Blind() if accuracy is None else Oracle(accuracy, [length for _, length, _ in history])
        ranks = {name: record.rank for name, record in self._records().items()}
        self._on_engine(lambda driver: change_policy(driver, self._node, policy, predictor))
        self._on_engine(lambda driver: learn(driver.scheduling, history, ranks, rate_per_s))
        self._await(self._fitted())
        if self._node._tiers is not None:
            self._set_way(way)
        return self._on_engine(lambda driver: driver.scheduling.state())

    def _set_way(self, way: str) -> None:
        """A fixed way knows no costs, by which a way would be chosen for each victim when it is preempted."""
        tiers = self._node._tiers
        self._by_cost = getattr(self, "_by_cost", (tiers.policy, tiers._prefill))
        fixed = FixedRestoreMethod(way == "swap"), None
        tiers.policy, tiers._prefill = self._by_cost if way == "cheaper" else fixed

    def _records(self) -> dict[str, Any]:
        return {record.name: record for record in self._node._catalog.served()}

    async def _fitted(self) -> None:
        """Until lanes and predictor are fitted to the history."""
        async with asyncio.timeout(REFIT_TIMEOUT_S):
            while not await self._node.run_on_engine(lambda driver: apply_refit(driver.scheduling)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def empty(self, policy: str = DEFAULT_ADAPTER_POLICY) -> None:
        """As `NodeAdapters.empty`; without adapters the prefix cache alone."""
        if self._folders:
            super().empty(policy)
        else:
            self._on_engine(lambda driver: driver.engine.reset_prefix_cache())

    def preemptions(self) -> dict[str, int]:
        """Since the start: all, and by the way in which requests came back."""
        tiers = self._node._tiers
        ways = dict(tiers.resumed) if tiers is not None else {}
        return {"all": int(self._on_engine(lambda driver: driver._scheduler.num_preempted))} | ways

    def decision_share(self, num: int, seconds: float) -> dict[str, Any]:
        """With so many requests queued: seconds of deciding over seconds of steps."""
        return self._await(self._decision_share(num, seconds))

    async def _decision_share(self, num: int, seconds: float) -> dict[str, Any]:
        history, default = [[16, 32, None]] * 512, self.scheduling_policy
        await self._node.run_on_engine(lambda driver: change_policy(driver, self._node, default, Blind()))
        await self._node.run_on_engine(lambda driver: learn(driver.scheduling, history, {}, 10.0))
        times: list[float] = []
        await self._node.run_on_engine(lambda driver: time_steps(driver, times))
        started_s = time.perf_counter()
        asks = [Ask(at_s=0.0, prompt=text(16, "queue", n), max_tokens=32) for n in range(num)]
        tasks = [asyncio.create_task(self._answer(ask, started_s, asyncio.Event())) for ask in asks]
        async with asyncio.timeout(QUEUE_TIMEOUT_S):
            while not await self._node.run_on_engine(lambda driver: is_queued(driver, num)):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        first = await self._node.run_on_engine(look_at_decisions)
        num_before = len(times)
        await asyncio.sleep(seconds)
        last = await self._node.run_on_engine(look_at_decisions)
        steps = times[num_before:]
        num_waiting = (await self._node.stats()).num_waiting
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

    def note_work(self) -> None:
        """Write down the steps of the policy in use from now on."""
        self._steps: list[tuple[float, ...]] = []
        self._on_engine(lambda driver: note_work(driver.scheduling.pace, self._steps))

    def steps(self) -> dict[str, Any]:
        """Since `note_work`: prefill tokens, decodes, context tokens, when it began and ended; and when the last play began."""
        return {"steps": self._steps, "zero_s": self._zero_s}

    def note_predictions(self) -> None:
        """Write down what is predicted of steps and copies, and what comes of it. Once."""
        self._predicted: dict[str, list[list[float]]] = {"step": [], "out": [], "back": []}
        self._on_engine(lambda driver: note_predictions(driver, self._predicted))

    def predictions(self) -> dict[str, Any]:
        """Since the last call."""
        found = {name: list(seen) for name, seen in self._predicted.items()}
        for seen in self._predicted.values():
            seen.clear()
        return found

    def equal_copies(self, num_blocks: int, num: int) -> dict[str, list[float]]:
        """Seconds of so many copies of so many blocks each way, on an engine without requests."""
        return self._on_engine(lambda driver: equal_copies(driver, num_blocks, num))

    def counts(self) -> dict[str, Any]:
        """Of the policy in use."""
        return self._on_engine(lambda driver: driver.scheduling.state())


# -- the scheduling's inside; all on the engine thread -----------------------------------------------------------------


def change_policy(driver: Any, node: LocalNode, policy: str, predictor: Any) -> None:
    if sum(driver._scheduler.get_request_counts()):
        raise RuntimeError("requests are left")
    driver.scheduling.close()
    config = msgspec.structs.replace(node._config.engine, scheduling_policy=policy)
    driver.scheduling = driver._make_scheduling(config)
    driver.scheduling.predictor = predictor


def learn(scheduling: Any, history: list[list[Any]], ranks: dict[str, int], rate_per_s: float) -> None:
    """Tell predictor and lanes of requests as if they had run until now."""
    own, now = scheduling.dispatcher, scheduling.now()
    for number, (num_prompt, num_answer, adapter) in enumerate(history):
        features = LengthFeatures(num_prompt_tokens=num_prompt, context=RequestContext(adapter=adapter or ""))
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
    own = scheduling.dispatcher
    own.advance_refits(scheduling.now())
    return own.counts["refits"] > 0 or own.laned is None


def time_steps(driver: Any, times: list[float]) -> None:
    """Have the seconds of each step written down."""
    step = driver._step_engine

    def timed() -> Any:
        started_s = time.perf_counter()
        outputs = step()
        times.append(time.perf_counter() - started_s)
        return outputs

    driver._step_engine = timed


def note_work(pace: Any, steps: list[tuple[float, ...]]) -> None:
    observe = pace.table.observe

    def noted(*work_and_seconds: float) -> None:
        *work, seconds = work_and_seconds
        now = time.perf_counter()
        steps.append((*work, now - seconds, now))
        observe(*work_and_seconds)

    pace.table.observe = noted


def note_predictions(driver: Any, seen: dict[str, list[list[float]]]) -> None:
    tiers = driver._tiers
    note_steps(driver.steps, seen["step"])
    note_copies(tiers.copy_times.out, seen["out"])
    note_copies(tiers.copy_times.back, seen["back"])


def equal_copies(driver: Any, num_blocks: int, num: int) -> dict[str, list[float]]:
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


def is_queued(driver: Any, num: int) -> bool:
    """Have nearly all come, and does the policy know of all that have?"""
    scheduling = driver.scheduling
    return len(scheduling.queue) > 0.9 * num and not len(scheduling.dispatcher.unready)


def look_at_decisions(driver: Any) -> dict[str, float]:
    return dict(driver.scheduling.seconds())
