"""Steps of a node in virtual time: what goes into each, how many are counted together, and what has happened at their end."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence

from bench.sim.core.node_state import NodeState, Step
from bench.sim.core.requests import Request, Stage
from bench.sim.core.shapes import BLOCK_TOKENS
from bench.sim.core.steps import Chunk


class NodeSteps(NodeState, ABC):
    """Runs steps while there is something to do. Before each, the layers above are asked (`_begin`); they call `_form` for the next one."""

    _step: Step | None = None
    _is_timeless: bool

    @abstractmethod
    def _begin(self, now: float) -> None:
        """The engine is free: decide who starts, and run the next step if there is something to do."""

    @abstractmethod
    def _make_room(self, now: float) -> bool:
        """Preempt until the next decode step's KV fits. Whether anybody was."""

    @abstractmethod
    def _outgrown(self, request: Request) -> None:
        """It has as many tokens as were reckoned with."""

    @abstractmethod
    def _end(self, request: Request, now: float) -> None:
        """It has all its tokens."""

    def _wake(self, now: float) -> None:
        """Something came. If steps are under way, the next one begins with a decision."""
        self._has_changed = True
        if self._stalled_since_s is not None:
            return
        step = self._step
        if step is None:
            self._begin(now)
        elif step.num > 1 and step.decoding is not None:
            step.num = step.decoding.steps_until(now - step.began_s, step.num)
            step.end.cancel()
            step.end = self.clock.at(max(step.began_s + step.decoding.total_s(step.num), now), self._end_step)

    def _form(self, now: float) -> None:
        """Begin the next step, or a run of them; nothing if there is nothing to do."""
        does_decode = self._num_decodes > 0 and (self.shape.is_mixed or not self._prefilling)
        if does_decode:
            self._make_room(now)
            if self._is_held_up:
                self._stalled_since_s = now
                return
            does_decode = self._num_decodes > 0
        chunks = self._chunks(self._step_tokens - (self._num_decodes if does_decode else 0))
        if not chunks and not does_decode:
            return
        if chunks:
            decoding, num = None, 1
            seconds = self._mixed_s(chunks, does_decode)
        else:
            decoding = self.cost.decoding(self._num_decodes, self._context, self._ranks_read)
            num = self._num_alike()
            seconds = decoding.total_s(num)
        end = self.clock.at(now + seconds, self._end_step)
        self._step = Step(now, num, chunks, decoding, does_decode, end, 1.0, now)

    def _chunks(self, num_tokens: int) -> list[tuple[Request, int]]:
        """Of prompts in the order in which they started; whole ones where steps are not mixed, and then at least one."""
        chunks: list[tuple[Request, int]] = []
        for request in self._prefilling:
            left = request.num_unfilled
            if self.shape.is_mixed:
                left = min(left, self._chunk_tokens, num_tokens)
                if left <= 0:
                    break
            elif left > num_tokens and chunks:
                break
            chunks.append((request, left))
            num_tokens -= left
        return chunks

    def _mixed_s(self, chunks: Sequence[tuple[Request, int]], does_decode: bool) -> float:
        parts = [
            Chunk(
                num,
                request.num_prefilled,
                request.rank,
                request.num_prefilled + num >= request.num_tokens,
                not self._has_adapter(request),
            )
            for request, num in chunks
        ]
        if not does_decode:
            return self.cost.step_s(parts)
        return self.cost.step_s(parts, self._num_decodes, self._context, self._ranks_read)

    def _num_alike(self) -> int:
        """How many decode steps can be counted together: until something is due, memory lacks, or a policy might change its mind."""
        if self.waiting and (self._has_changed or not self._is_timeless):
            return 1
        while self._due and self._due[0].generation != self._due[0].request.generation:
            heapq.heappop(self._due)
        num = self._due[0].at - self._counter
        free = self.free_blocks
        while num > 1 and self._grown(num) > free:
            num = num // 2
        return num

    def _copied(self, now: float) -> None:
        """A copy has ended: those who waited for it go on."""
        if self._stalled_since_s is None:
            self._wake(now)
        elif not self._is_held_up:
            self.tally.stalled_s += now - self._stalled_since_s
            self._stalled_since_s = None
            self._form(now)

    def _take_over(self, adapter_id: int, now: float) -> None:
        """If the step under way has the host compute this adapter, the device does the rest. Source: CaraServe §4.1."""
        step = self._step
        if step is None or step.end.at_s <= now:
            return
        if all(request.arrival.adapter_id != adapter_id for request, _ in step.chunks):
            return
        step.left *= (step.end.at_s - now) / (step.end.at_s - step.since_s)
        step.since_s = now
        step.end.cancel()
        seconds = self._mixed_s(step.chunks, step.does_decode)
        step.end = self.clock.at(now + step.left * seconds, self._end_step)

    def _end_step(self, now: float) -> None:
        step = self._step
        assert step is not None, "a step ended that had not begun"
        self._step = None
        self.tally.busy_s += now - step.began_s
        self.tally.counts["steps"] += step.num
        if step.does_decode:
            self._take(self._grown(step.num), now)
            self._counter += step.num
            self._context += step.num * self._num_decodes
            self.tally.counts["decode_tokens"] += step.num * self._num_decodes
        for request, num in step.chunks:
            self._prefilled(request, num, now)
        self._settle(now)
        for request in self._joining:
            self._enter_decoding(request)
        self._joining.clear()
        self._begin(now)

    def _prefilled(self, request: Request, num: int, now: float) -> None:
        self.tally.counts["prefill_tokens"] += num
        request.num_prefilled += num
        if request.num_unfilled > 0:
            return
        self._prefilling.remove(request)
        if request.num_front:
            self._front_computed(request)
            return
        if request.num_done == 0:
            request.first_token_s = now
        request.num_done += 1
        self.tally.counts["first_tokens"] += 1
        self.num_changes += 1
        self._join(request)

    def _front_computed(self, request: Request) -> None:
        """What is behind it comes from host memory, or has come."""
        if request.num_loaded:
            self._enter_prefill(request, request.num_loaded)
        else:
            request.stage = Stage.SWAPPING

    def _join(self, request: Request) -> None:
        """All its KV is there but the last token's: it decodes with the next step, if it has its adapter, or needs none because it is done."""
        if not self._has_adapter(request) and request.num_done < request.arrival.num_answer_tokens:
            self._await_adapter(request)
        elif self._step is None:
            self._enter_decoding(request)
        else:
            self._joining.append(request)

    def _settle(self, now: float) -> None:
        """What is due by now: ends first in order of planning, since whoever has ended does not grow."""
        while self._due and self._due[0].at <= self._counter:
            due = heapq.heappop(self._due)
            if due.generation != due.request.generation:
                continue
            if due.what == "end":
                self._end(due.request, now)
            elif due.what == "grow":
                slot = due.request.grow_slot = (self._counter + 1) % BLOCK_TOKENS
                self._growth[slot] += 1
            else:
                self._outgrown(due.request)
