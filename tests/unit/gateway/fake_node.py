"""A node without a model: it answers what a test tells it to, misbehaves on demand, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from engine_bridge.protocol.engine_request import CalledTool, EngineRequest, RequestId
from engine_bridge.protocol.errors import BridgeError, EngineUnavailable, NotSupported
from engine_bridge.protocol.figures import EngineState, NodeFigures, NodeState, Progress, SchedulingStats
from engine_bridge.protocol.node import (
    ADVISORY_ENDS,
    AdapterInfo,
    AdapterPlace,
    Advisory,
    AdvisoryReport,
    AdvisoryState,
    Delta,
    KvSources,
    Prompt,
    SessionHint,
    Timings,
    Usage,
    pack_token_ids,
)
from engine_bridge.protocol.node_facts import NodeFacts, Ranks
from kvtiers.stats import TierStats

PATIENCE_S = 10.0
"""How long a test waits for what must come. Only a failing test ever waits so long."""


class Answer:
    """One answer under way, which a test writes.

    Attributes:
        request: what was asked.
        is_cancelled: `Node.cancel` ended it. is_closed: its reader let go of it before the end.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.is_cancelled = False
        self.is_closed = False
        self.is_over = False
        self.num_pieces = 0
        self._steps: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

    def say(self, *pieces: str) -> None:
        for text in pieces:
            self.num_pieces += 1
            self._steps.put_nowait(Delta(text=text, token_ids=(self.num_pieces,)))

    def think(self, *pieces: str) -> None:
        for reasoning in pieces:
            self.num_pieces += 1
            self._steps.put_nowait(Delta(text="", reasoning=reasoning, token_ids=(self.num_pieces,)))

    def finish(self, *pieces: str, reason: str = "stop", text: str = "") -> None:
        """Say the pieces, then the end; `text` is what the last delta itself still carries."""
        self.say(*pieces)
        self._steps.put_nowait(self._end(reason, text))

    def call(self, *calls: CalledTool) -> None:
        """Call tools, which ends the answer."""
        self._steps.put_nowait(replace(self._end("stop", ""), calls=calls))

    def fail(self, error: BaseException) -> None:
        self._steps.put_nowait(error)

    def cancel(self) -> None:
        """As a real node does: what was said before is merged and kept."""
        self.is_cancelled = True
        self._steps.put_nowait(self._end("stopped", ""))

    def _end(self, reason: str, text: str) -> Delta:
        return Delta(
            text=text,
            finish_reason=reason,  # type: ignore[arg-type]
            usage=Usage(3, self.num_pieces, 0),
            timings=Timings(0.1, 1.0, None, 2.0, KvSources(0, 0, 0, 3)),
            prompt=Prompt(pack_token_ids([7, 8, 9]), "first"),
        )

    @property
    def is_read(self) -> bool:
        """Whether its reader has taken all that was said."""
        return self._steps.empty()

    async def deltas(self) -> AsyncIterator[Delta]:
        try:
            while not self.is_over:
                step = await self._steps.get()
                if isinstance(step, BaseException):
                    self.is_over = True
                    raise step
                self.is_over = step.finish_reason is not None
                yield step
        finally:
            self.is_closed = not self.is_over


class Told:
    """One advisory that the node was given."""

    def __init__(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        self.advisory = advisory
        self.is_over = False
        self._on_change = on_change

    def report(self, state: AdvisoryState, **fields: object) -> None:
        self.is_over = state in ADVISORY_ENDS
        names = {"advisory_id": self.advisory.advisory_id, "session_id": self.advisory.session_id}
        self._on_change(AdvisoryReport(state=state, **names, **fields))  # type: ignore[arg-type]


class FakeNode:
    """See `engine_bridge.protocol.node.Node`.

    Attributes:
        script: pieces that every answer has at once; None lets the test write each answer.
        refusal: raised by `generate` before anything else. advise_error, prefill_error: by those.
        gate: while it is not set, `advise` and `prefill` hang (a rebuild, a busy engine).
        scheduling, tiers: what it says of its engine and of its KV tiers.
        answers, advisories, retracted, prefills, ended_sessions, session_hints: what came, in order.
    """

    def __init__(self, script: Sequence[str] | None = None) -> None:
        self.script = script
        self.state: NodeState = "ready"
        self.model_names: tuple[str, ...] = ("fake-model",)
        self.adapter_names = ["shout", "pirate"]
        self.adapter_place: AdapterPlace = "disk"
        self.refusal: BaseException | None = None
        self.advise_error: BridgeError | None = None
        self.prefill_error: BridgeError | None = None
        self.erase_error: BridgeError | None = None
        self.erased: list[str] = []
        self.may_erase = asyncio.Event()  # a test that clears it makes erasures long
        self.may_erase.set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.answers: list[Answer] = []
        self.advisories: list[Told] = []
        self.retracted: list[tuple[str, bool]] = []
        self.prefills: list[EngineRequest] = []
        self.cancelled_prefills = 0
        self.ended_sessions: list[tuple[str, str]] = []
        self.session_hints: list[SessionHint] = []
        self.max_model_len = 4096
        self.max_images = 0
        self.can_use_tools = True
        self.num_steps = self.num_rebuilds = 0
        self.scheduling: SchedulingStats | None = None
        self.tiers: TierStats | None = None
        self._changed = asyncio.Event()

    async def asked(self, number: int = 0) -> Answer:
        """The answer to the question of that number, once it was asked."""
        await self.until(lambda: len(self.answers) > number)
        return self.answers[number]

    async def told(self, number: int = 0) -> Told:
        await self.until(lambda: len(self.advisories) > number)
        return self.advisories[number]

    async def prefilled(self, number: int = 0) -> EngineRequest:
        await self.until(lambda: len(self.prefills) > number)
        return self.prefills[number]

    def cut_off(self) -> None:
        """Stop every answer that was left unfinished."""
        for answer in self.answers:
            answer.cancel()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something that this node was told makes `is_so` true."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    @property
    def progress(self) -> Progress:
        return Progress(self.state, "in a test", 0.0)

    async def start(self) -> None:
        self.state = "ready"

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        answer = Answer(request)
        self.answers.append(answer)
        self._changed.set()
        if self.refusal is not None:
            answer.is_over = True
            raise self.refusal
        if self.script is not None:
            answer.finish(*self.script)
        async for delta in answer.deltas():
            yield delta

    async def cancel(self, request_id: RequestId) -> bool:
        for answer in self.answers:
            if answer.request.request_id == request_id and not (answer.is_over or answer.is_closed):
                answer.cancel()
                self._changed.set()
                return True
        return False

    async def advise(self, advisory: Advisory, on_change: Callable[[AdvisoryReport], None]) -> None:
        await self.gate.wait()
        if self.advise_error is not None:
            raise self.advise_error
        self.advisories.append(Told(advisory, on_change))
        self._changed.set()

    def retract(self, advisory_id: str, *, is_expired: bool) -> None:
        """An advisory that is not known (yet) is passed over, as on the engine thread."""
        self.retracted.append((advisory_id, is_expired))
        self._changed.set()
        for told in self.advisories:
            if told.advisory.advisory_id == advisory_id and not told.is_over:
                told.report("expired" if is_expired else "cancelled")

    async def prefill(self, request: EngineRequest) -> int:
        self.prefills.append(request)
        self._changed.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled_prefills += 1
            self._changed.set()
            raise
        if self.prefill_error is not None:
            raise self.prefill_error
        return 16

    def hint_session(self, hint: SessionHint) -> None:
        self.session_hints.append(hint)

    def end_session(self, tenant: str, session_id: str) -> None:
        self.ended_sessions.append((tenant, session_id))

    async def erase_kv(self, tenant: str) -> int:
        if self.erase_error is not None:
            raise self.erase_error
        await self.may_erase.wait()
        self.erased.append(tenant)
        return 3

    def adapters(self) -> list[AdapterInfo]:
        return [AdapterInfo(name, 8, place=self.adapter_place) for name in self.adapter_names]

    def figures(self) -> NodeFigures:
        running = Ranks(sum(not (answer.is_over or answer.is_closed) for answer in self.answers))
        load = {"num_tokens": 0, "queued_tokens": 0, "free_tokens": 10**6}
        return NodeFigures(
            num_steps=self.num_steps,
            num_rebuilds=self.num_rebuilds,
            kv_tiers=self.tiers,
            scheduling_stats=self.scheduling,
            facts=NodeFacts(node_id="", running=running, queued=Ranks(), **load),
        )

    async def engine_metrics(self) -> str:
        return ""

    async def _refuse(self, *args: object) -> Any:
        raise NotSupported("this node serves no HTTP calls")

    api_schemas = serve = models = load_adapter = unload_adapter = _refuse

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | None:
        return None

    async def engine_state(self, tenant: str, limit: int) -> EngineState:
        raise EngineUnavailable("this node has no engine")

    async def drain(self, timeout_s: float) -> bool:
        self.state = "draining"
        return all(answer.is_over or answer.is_closed for answer in self.answers)

    async def sleep(self, mode: Any, timeout_s: float) -> None:
        self.slept = (mode, timeout_s)
        self.state = "asleep"

    async def wake_up(self) -> None:
        self.state = "ready"

    async def close(self) -> None:
        self.state = "closed"


class Breakable(FakeNode):
    """A node whose engine breaks when it is to sleep, and cannot be built where a file lies."""

    def __init__(self, script: Sequence[str], file: Path) -> None:
        super().__init__(script)
        self._file = file
        self.state = "starting"

    async def start(self) -> None:
        self.state = "failed" if await asyncio.to_thread(self._file.exists) else "ready"

    async def sleep(self, mode: Any, timeout_s: float) -> None:
        self.state = "failed"
