"""One serving node: vLLM's scheduler and our driver classes, fed real requests, on a device in virtual time.

As in the live engine, one thing happens after the other: what came during a step is taken in after it, then a step is scheduled, then the device is
busy for as long as that takes. The clock is a simulator's, so several nodes may share one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from bench.emulated.core.adapters import AdapterMemory, EmulatedAdapters
from bench.emulated.core.arrivals import Arrival, Guesser, Timed
from bench.emulated.core.clock import Clock, Event
from bench.emulated.core.links import DeviceNoise, link_of
from bench.emulated.core.request_maker import RequestMaker
from bench.emulated.core.steps import StepCost, StepWork, work_of
from bench.emulated.core.tiers import EmulatedTiers, TierSizes
from bench.emulated.core.vllm_parts import Engine, make_scheduler, output_of
from engine_bridge.core.scheduling.pauses import Pauses
from engine_bridge.core.scheduling.refits import Work
from engine_bridge.core.scheduling.step_times import StepSeconds, StepTimes
from engine_bridge.driver.adapters.residency import lora_ids
from engine_bridge.driver.kv.prefixes import PREFIX_HALF_LIFE_S, Prefixes
from engine_bridge.driver.scheduling.pace import Pace
from engine_bridge.driver.scheduling.scheduling import Scheduling
from engine_bridge.policy.adapters.adapter_cache import PrefixFacts
from engine_bridge.policy.costs.costs import StepTable
from engine_bridge.policy.costs.decay import FadingRate
from engine_bridge.policy.kv.kv_layout import one_group
from engine_bridge.policy.scheduling.policies import POLICIES, MakePolicy

# While something waits that cannot start, it is asked again so often. As the engine thread does at first (engine_bridge/bridge.py, FIRST_WAIT_S).
STUCK_WAIT_S = 0.001
TOKEN = 7


@dataclass(slots=True, eq=False)
class Job(Timed):
    """A request and what became of it, times in virtual seconds."""

    arrival: Arrival
    rank: int = 0
    num_done: int = 0
    started_s: float = math.nan
    """For the first time."""
    first_token_s: float = math.nan
    ended_s: float = math.nan
    found_adapter: str = ""


class EmulatedNode:
    """Takes requests in by `submit` while `clock` runs.

    Args:
        policy: a name in the registry of policies, what makes another one, or "vllm" for vLLM's own queue.
        guesser: predicts answers' lengths, in place of the node's own predictor; None: the node's own.
        ranks: of the adapters that requests may name, by id.
        memory: where they may lie. With a host's help for those on their way, the cost names the host.
        tiers: host memory for KV that leaves the device; None: there is none.
        urgent_tpot_s: as `--urgent-tpot-ms`.
        noise: by which steps and copies take longer or shorter than the cost says.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        engine: Engine,
        policy: str | MakePolicy,
        *,
        guesser: Guesser | None = None,
        ranks: Sequence[int] = (),
        memory: AdapterMemory | None = None,
        tiers: TierSizes | None = None,
        urgent_tpot_s: float = 0.0,
        noise: DeviceNoise | None = None,
    ) -> None:
        self.clock, self.cost, self.engine = clock, cost, engine
        self._urgent_tpot_s = urgent_tpot_s
        self.num_steps = 0
        self.scheduler_s = 0.0
        """Wall time in vLLM's `schedule`, `add_request` and `update_from_output`, with all of ours that they call."""
        self.ended: list[Job] = []
        self.noise, self.link = noise, link_of(clock, cost.gpu, noise)
        """From host memory to the device: adapters and KV share it."""
        self.tiers = (
            EmulatedTiers(clock, tiers, cost, engine.block_tokens, engine.step_tokens, self.link, noise)
            if tiers is not None
            else None
        )
        self.scheduler = make_scheduler(engine, self.tiers.name if self.tiers is not None else None)
        if self.tiers is not None:
            self.tiers.serve(self.scheduler, self.wake)
        self._fits: list[Work] = []
        self._prefix_hits = FadingRate(PREFIX_HALF_LIFE_S)
        """Blocks of prompts that were found on the device."""
        memory = memory or AdapterMemory()
        self.adapters = self._make_adapters(ranks, memory) if ranks and memory.num_slots else None
        self.scheduling = self._make_scheduling(policy) if policy != "vllm" else None
        self._ranks = ranks
        self._jobs: dict[str, Job] = {}
        self._rank_of: dict[str, int] = {}
        self._came: list[Job] = []
        self._next: Event | None = None
        """Of a node that is idle or stuck: when it looks again."""
        self._is_busy = False
        """With a step that is under way, or held."""
        self._held: tuple[set[int], Callable[[], None]] | None = None
        """A step that waits for copies of these adapters, and what begins it."""
        self.on_end: Callable[[Job], None] = lambda job: None
        self.on_step: Callable[[], None] = lambda: None
        """Called when a step ends, before requests leave with it."""
        has_names = engine.has_prefix_cache or tiers is not None
        self.requests = RequestMaker(engine.block_tokens if has_names else None, guesser)

    def _make_scheduling(self, policy: str | MakePolicy) -> Scheduling:
        engine, scheduler, cost, table = self.engine, self.scheduler, self.cost, self.cost.table
        pool, layout = scheduler.kv_cache_manager.block_pool, one_group(engine.block_tokens)
        now: Callable[[], float] = lambda: self.clock.now  # noqa: E731
        scheduling = Scheduling(
            POLICIES[policy] if isinstance(policy, str) else policy,
            num_tokens=engine.num_tokens,
            num_blocks=engine.num_tokens // engine.block_tokens,
            num_host_tokens=self.tiers.hollow.num_host_blocks * engine.block_tokens if self.tiers else 0,
            layout=layout,
            is_ready=scheduler.is_ready,
            num_cached_tokens=Prefixes(pool, layout, self.tiers).num_cached_tokens,
            block_pool=pool,
            adapters=self.adapters,  # type: ignore[arg-type]  # asks the same of it as of the driver's own
            # Its table learns; the device's stays as it is.
            pace=Pace(
                scheduler,
                StepTable(table.grid()),
                StepTimes(StepSeconds.from_table(table), "mbgmv"),
                engine.max_step_s,
                now,
            )
            if table is not None
            else None,
            pauses=Pauses(lambda num, num_tokens: cost.step_s((), num, num_tokens), self._urgent_tpot_s),
            ways=self.tiers.way_counts if self.tiers is not None else None,
            clock=now,
            run_fit=self._fits.append,
        )
        scheduler.use(scheduling)
        return scheduling

    def _make_adapters(self, ranks: Sequence[int], memory: AdapterMemory) -> EmulatedAdapters:
        sizes = [self.cost.model.lora_bytes(rank) for rank in ranks]
        running = lambda: lora_ids(self.scheduler.running)  # noqa: E731
        adapters = EmulatedAdapters(
            self.clock, self.link, self.cost.gpu, sizes, memory, running, self._copied
        )
        if memory.in_kv:
            pool = self.scheduler.kv_cache_manager.block_pool
            adapters.use_blocks(pool, self._block_bytes, self._prefix_facts)
        self.scheduler.residency = adapters  # type: ignore[assignment]
        return adapters

    @property
    def _block_bytes(self) -> int:
        return self.engine.block_tokens * self.cost.model.kv_bytes_per_token

    def _prefix_facts(self, num_blocks: int) -> PrefixFacts:
        """Return what the live engine says of prefixes (engine_bridge/driver/engine/engine.py), by the device's own times."""
        return PrefixFacts(
            num_bytes=num_blocks * self._block_bytes,
            restore_s=self.cost.prefill_s(num_blocks * self.engine.block_tokens),
            reuse_per_s=self._prefix_hits.per_s(self.clock.now) / self.engine.num_blocks,
        )

    def _copied(self) -> None:
        """An adapter has come nearer: a step may have waited for it, the host may have helped with it, or a request waits."""
        if self._held is not None and self.adapters is not None and self.adapters.may_run(self._held[0]):
            begin, self._held = self._held[1], None
            begin()
        self.wake()

    @property
    def is_serving(self) -> bool:
        """Whether the node has requests, waiting or running."""
        return bool(self._came) or self.scheduler.has_requests()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, arrival: Arrival) -> None:
        """Send a request now; the node takes it in when no step is under way. Raises ValueError if it would never fit."""
        num_tokens = arrival.num_tokens
        if num_tokens > min(self.engine.num_tokens, self.engine.max_tokens):
            raise ValueError(f"{num_tokens} tokens do not fit the device")
        rank = self._ranks[arrival.adapter_id] if arrival.adapter_id is not None else 0
        self._came.append(Job(arrival, rank))
        self.wake()

    def advise(
        self,
        session: str,
        arrival_s: float | None = None,
        priority: int = 0,
        lifetime_s: float = 60.0,
        probability: float = 1.0,
    ) -> str:
        """Announce a request of this session, and return the advisory's id.

        arrival_s: it comes this many seconds from now or later; None: at an unknown time. lifetime_s: for how long the order of requests counts on
        it. probability: that it comes.
        """
        if self.scheduling is not None:
            self.scheduling.announced(session, lifetime_s, probability)
        if self.tiers is None:
            return ""
        self.wake()
        return self.tiers.advise(session, arrival_s, priority, probability)

    def retract(self, advisory_id: str) -> None:
        """Note that an advisory's lifetime has passed."""
        if self.tiers is not None:
            self.tiers.promoter.retract(advisory_id, is_expired=True)
            self.wake()

    def submit_ahead(self, arrival: Arrival) -> None:
        """Take in a request that came at its own time, before the first step; steps begin with the next `wake`."""
        self.clock.now = arrival.at_s
        self._came.append(Job(arrival))
        self._take_in()

    def wake(self) -> None:
        """Look for work now, or at the end of the step that is under way."""
        if self._is_busy:
            return
        if self._next is not None:
            self._next.cancel()
        self._next = self.clock.at(self.clock.now, self._begin)

    def _take_in(self) -> None:
        requests = [self._request_of(job) for job in self._came]
        self._came.clear()
        began_s = time.perf_counter()
        for request in requests:
            self.scheduler.add_request(request)
        self.scheduler_s += time.perf_counter() - began_s

    def _request_of(self, job: Job) -> Request:
        arrival = job.arrival
        self._jobs[arrival.request_id] = job
        lora = None
        if job.rank:
            self._rank_of[arrival.request_id] = job.rank
        if self.adapters is not None and arrival.adapter_id is not None:
            lora = LoRARequest(str(arrival.adapter_id), arrival.adapter_id + 1, "none")
            job.found_adapter = self.adapters.requested(arrival.request_id, lora.lora_int_id)
        return self.requests.make(arrival, job.rank, lora)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._next = None
        if self._is_busy:  # woken while the step that runs now was made
            return
        self._take_in()
        adapters = self.adapters
        written_s = adapters.advance(self.scheduler.has_requests()) if adapters is not None else 0.0
        if written_s:
            self._is_busy = True
            self.clock.at(now + written_s, self._schedule)
        else:
            self._schedule(now)

    def _schedule(self, now: float) -> None:
        self._is_busy = False
        if self.tiers is not None:
            self.tiers.take_over()
        if not self.scheduler.has_requests():
            self._rest(now)
            return
        began_s = time.perf_counter()
        output = self.scheduler.schedule()
        self.scheduler_s += time.perf_counter() - began_s
        self.run_fits()
        for new in output.scheduled_new_reqs:
            self._prefix_hits.add(new.num_computed_tokens / self.engine.block_tokens, now)
        if not output.total_num_scheduled_tokens:
            self.scheduler.update_from_output(output, output_of([], []))
            self._rest(now)
            return
        for new in output.scheduled_new_reqs:
            self._jobs[new.req_id].started_s = now
        self._is_busy = True
        needed = self._enter(output.num_scheduled_tokens)
        if self.adapters is None or self.adapters.may_run(needed):
            self._run(output, needed)
        else:
            self._held = needed, lambda: self._run(output, needed)

    def _run(self, output: Any, adapter_ids: Collection[int]) -> None:
        """Compute the scheduled step on the device, and on the host the adapters that the device lacks."""
        assisted = self.adapters.assisted(adapter_ids) if self.adapters is not None else ()
        work = work_of(
            self.cost, output.num_scheduled_tokens, self.scheduler.requests, self._rank_of, assisted
        )
        if self.noise is not None:
            work = work._replace(seconds=work.seconds * self.noise.step())
        began_s = self.clock.now
        ended: Callable[[set[int]], None] = lambda failed: self._end(output, work, began_s, failed)  # noqa: E731
        if self.tiers is None:
            self.clock.at(began_s + work.seconds, lambda now: ended(set()))
        else:
            self.tiers.run_step(output.kv_connector_metadata.moves, work.seconds, ended)

    def _rest(self, now: float) -> None:
        """No step can begin: look again if something may change by itself."""
        self._promote()
        if self.scheduler.has_requests():
            self._next = self.clock.at(now + STUCK_WAIT_S, self._begin)
        elif self._came or (self.adapters is not None and self.adapters.is_writing):
            self._next = self.clock.at(now, self._begin)
        elif self.tiers is not None and (wait_s := self.tiers.wait_s()) is not None:
            self._next = self.clock.at(now + max(wait_s, STUCK_WAIT_S), self._begin)

    def _promote(self) -> None:
        """Between steps: KV of sessions that are expected comes closer."""
        if self.tiers is not None:
            self.tiers.last_saves.advance()
            self.tiers.promoter.advance()

    def _enter(self, request_ids: Iterable[str]) -> set[int]:
        """The adapters that a step computes with have their slots."""
        if self.adapters is None:
            return set()
        needed = lora_ids(self.scheduler.requests[request_id] for request_id in request_ids)
        self.adapters.enter(needed)
        return needed

    def run_fits(self) -> None:
        """Run the fits that live run beside the steps, so that the next step has them and runs repeat exactly; their time is not the scheduler's."""
        fits, self._fits[:] = list(self._fits), []
        for fit in fits:
            fit()

    def _end(self, output: Any, work: StepWork, began_s: float, failed: set[int]) -> None:
        """failed: the device's blocks whose KV did not come."""
        now, giving = self.clock.now, work.giving
        self._is_busy = False
        self.num_steps += 1
        self.on_step()
        request_ids = list(output.num_scheduled_tokens)
        gets = set(giving)
        answer = output_of(
            request_ids, [[TOKEN] if request_id in gets else [] for request_id in request_ids], failed
        )
        updates_s = time.perf_counter()
        given = self.scheduler.update_from_output(output, answer)
        self.scheduler_s += time.perf_counter() - updates_s
        if failed:  # tokens that were computed on these blocks are computed again
            gets = {
                each.request_id
                for outputs in given.values()
                for each in outputs.outputs
                if each.new_token_ids
            }
            giving = [request_id for request_id in giving if request_id in gets]
        self._note_tokens(giving, now)
        self._promote()
        self._begin(now)

    def _note_tokens(self, giving: Iterable[str], now: float) -> None:
        for request_id in giving:
            job = self._jobs[request_id]
            if not job.num_done:
                job.first_token_s = now
            job.num_done += 1
            if job.num_done == job.arrival.num_answer_tokens:
                job.ended_s = now
                self.ended.append(job)
                del self._jobs[request_id]
                if self.adapters is not None and job.arrival.adapter_id is not None:
                    self.adapters.released(request_id, job.arrival.adapter_id + 1)
                self._rank_of.pop(request_id, None)
                self.requests.ended(job.arrival)
                self.on_end(job)

    def close(self) -> None:
        """Release what the node holds."""
        if self.scheduling is not None:
            self.scheduling.close()
        if self.tiers is not None:
            self.tiers.close()
