"""Compiled grammars of running answers: each belongs to the answers of one tenant, is bounded in memory and time, and is freed with the last of them.

The matcher of llguidance keeps every state that its lexer has been in, and copies of a matcher share them. A grammar that is used for long therefore
fills up, and then fails for all its answers at once. So no grammar outlives its answers, no two tenants share one, and an answer whose matcher has
failed continues with a grammar that is compiled anew: only a failure there, too, is the answer's own fault. Source: vLLM 0.32,
`v1/structured_output/`; llguidance 1.7.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from threading import Lock
from typing import Any, TypeVar

import llguidance

from engine_bridge.driver.carried import facts_of
from engine_bridge.driver.serving.stream_failures import engine_failed
from engine_bridge.driver.vllm_api import (
    GracefulHTTPError,
    GuidanceBackend,
    GuidanceGrammar,
    StructuredOutputManager,
    VLLMValidationError,
    serialize_guidance_grammar,
)
from engine_bridge.driver.vllm_api import structured_output as manager_module
from engine_bridge.grammars.messages import readable
from engine_bridge.policy.limits.grammar_room import (
    GROWTH,
    LEAST_DEFAULT_BYTES,
    MAX_STATES,
    GrammarRoom,
    first_states,
    most_bytes,
)
from engine_bridge.policy.limits.matcher_budget import MatcherBudget

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_FAILURES = 1024
# vLLM's loggers that quote the tokens of an answer which its grammar ends.
_TELLERS = ("vllm.v1.core.sched.scheduler", "vllm.v1.structured_output")
# An answer that has brought this many tokens since its grammar was compiled may have it compiled again with the same number of states: most of the
# states that were filled up belong to tokens that it might have taken. Chosen: compiling and going over the answer so far takes as long as a few
# tokens.
MIN_PROGRESS_TOKENS = 64

TOO_SLOW = "This grammar is too ambiguous: working out the next token takes too long. The answer ends here."
TOO_LARGE = (
    "This answer cannot go on within its grammar: its strings and patterns have too many states. Bound them less, or ask for a "
    "shorter answer."
)
NO_ROOM = (
    "The grammars of your answers under way take all the memory that they may have (grammar_memory_mib). Wait for some of them "
    "to end, or make their patterns simpler."
)


class NoRoom(Exception):
    """There is no memory for a grammar of this tenant now."""


class CompiledGrammar:
    """One tenant's grammar while answers use it. Its matcher is never advanced: answers take copies."""

    def __init__(self, tenant: str, text: str, num_states: int, matcher: Any, compile_s: float) -> None:
        self.tenant = tenant
        self.text = text
        self.num_states = num_states
        self.matcher = matcher
        self.compile_s = compile_s
        self.budget = MatcherBudget()


def create_grammar(manager: Any, request: Any) -> GuidanceGrammar:
    """Compile a request's grammar for its tenant, on a thread of vLLM's, in the place of `StructuredOutputManager._create_grammar`.

    An error raised here ends the request, with the reason that is noted here.
    """
    try:
        kind, spec = request.structured_output_request.structured_output_key
        grammar: BoundedGrammar = manager.backend.grammar_for(facts_of(request).tenant, kind, spec)
    except NoRoom:
        _note_failure(request.request_id, _too_many())
        raise
    except Exception:
        log.exception("a grammar that was checked could not be compiled")
        _note_failure(request.request_id, engine_failed())
        raise
    return grammar


class BoundedBackend(GuidanceBackend):
    """Compiles grammars for running answers. Called on vLLM's compiling threads and on the engine thread.

    Attributes:
        room_bytes: the bytes that all compiled grammars may take together; set before an engine is built.
    """

    room_bytes = LEAST_DEFAULT_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        self._in_use: weakref.WeakValueDictionary[tuple[str, str], CompiledGrammar] = (
            weakref.WeakValueDictionary()
        )
        self._room = GrammarRoom(self.room_bytes)
        self._lock = Lock()
        # Memory of grammars that were freed, by tenant. A finalizer may run in the middle of anything, so it takes no lock.
        self._returned: deque[tuple[str, int]] = deque()

    def grammar_for(self, tenant: str, kind: Any, spec: str) -> BoundedGrammar:
        """Return a new answer's place at the start of its grammar. Raises NoRoom."""
        text: str = serialize_guidance_grammar(
            kind, spec, self.disable_any_whitespace, self.disable_additional_properties
        )
        key = (tenant, text)
        with self._lock:
            compiled = self._in_use.get(key)
        if compiled is None or compiled.budget.is_spent:
            compiled = self.compile(tenant, text, first_states(len(text)))
            with self._lock:
                self._in_use[key] = compiled
        return BoundedGrammar(self, compiled)

    def compile(self, tenant: str, text: str, num_states: int) -> CompiledGrammar:
        """Compile a grammar that may have `num_states` lexer states. Raises NoRoom."""
        num_bytes = most_bytes(len(text), num_states)
        self._take_room(tenant, num_bytes)
        try:
            limits = llguidance.LLParserLimits(max_lexer_states=num_states, verbose_errors=False)
            started_s = time.thread_time()
            matcher = llguidance.LLMatcher(self.ll_tokenizer, text, log_level=0, limits=limits)
            compiled = CompiledGrammar(tenant, text, num_states, matcher, time.thread_time() - started_s)
        except BaseException:
            self._returned.append((tenant, num_bytes))
            raise
        weakref.finalize(compiled, self._returned.append, (tenant, num_bytes))
        return compiled

    def retire(self, compiled: CompiledGrammar) -> None:
        """Make sure that no new answer uses this grammar."""
        with self._lock:
            if self._in_use.get((compiled.tenant, compiled.text)) is compiled:
                del self._in_use[compiled.tenant, compiled.text]

    def _take_room(self, tenant: str, num_bytes: int) -> None:
        with self._lock:
            while self._returned:
                self._room.give_back(*self._returned.popleft())
            if not self._room.take(tenant, num_bytes):
                raise NoRoom


class BoundedGrammar(GuidanceGrammar):
    """One answer's place in its grammar. Ends the answer when its matcher fails for good or has spent its budget."""

    def __init__(self, backend: BoundedBackend, compiled: CompiledGrammar) -> None:
        super().__init__(compiled.matcher.deep_copy(), backend.ll_tokenizer, backend.vocab_size)
        self.printed_error = True  # vLLM would log the client's grammar
        self._backend = backend
        self.budget = compiled.budget
        self._compiled: CompiledGrammar | None = compiled  # None: there is no room for another one
        self._num_states = compiled.num_states
        self._consumed: list[int] = []
        self._is_renewed = False
        self._num_at_renewal = 0
        self._failure: Exception | None = None

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        """Allow, in row `idx`, the tokens that the grammar takes next; all of them once the answer is to end."""
        if not self.budget.is_spent and self._failure is None:
            self.budget.next_token()
            inherited: Any = super()
            with self._charged():
                self._renewing(lambda: inherited.fill_bitmask(bitmask, idx))
        if self.budget.is_spent or self.ll_matcher.is_error():
            bitmask[idx].fill_(-1)  # any token: none of it reaches the client

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advance by these tokens. False ends the answer with an error, whose reason `take_failure` returns."""
        if not self.budget.is_spent and self._failure is None:
            was_stopped = self.ll_matcher.is_stopped() and not self.ll_matcher.is_error()
            inherited: Any = super()
            with self._charged():
                is_accepted = self._renewing(lambda: inherited.accept_tokens(request_id, tokens))
            if is_accepted and not self.ll_matcher.is_error():
                self._consumed += [] if was_stopped else tokens
                return True
        _note_failure(request_id, self._reason())
        return False

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the leading tokens that the grammar would take, without advancing."""
        inherited: Any = super()
        with self._charged():
            return self._renewing(lambda: inherited.validate_tokens(tokens))

    def rollback(self, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back."""
        num_consumed = max(num_tokens - self.rollback_lag, 0)
        if num_consumed:
            del self._consumed[-num_consumed:]
        super().rollback(num_tokens)

    @contextmanager
    def _charged(self) -> Iterator[None]:
        budget, started_s = self.budget, time.thread_time()
        yield
        budget.spend(time.thread_time() - started_s)

    def _renewing(self, ask_matcher: Callable[[], T]) -> T:
        """Return the matcher's answer, or that of a matcher compiled anew where the old one has failed."""
        answer = ask_matcher()
        while self.ll_matcher.is_error() and self._renew():
            answer = ask_matcher()
        return answer

    def _renew(self) -> bool:
        """Continue with a grammar that is compiled anew, at the same place. False where that would be of no use, or cannot be done."""
        num_states, failed = self._next_num_states(), self._compiled
        if failed is None or num_states is None or failed.compile_s > self.budget.left_s:
            return False
        self._backend.retire(failed)
        tenant, text = failed.tenant, failed.text
        failed = self._compiled = None  # their memory may be needed
        try:
            self._compiled = self._backend.compile(tenant, text, num_states)
        except NoRoom:
            self._failure = _too_many()
            return False
        self._num_states = num_states
        self._is_renewed = True
        self._num_at_renewal = len(self._consumed)
        self.ll_matcher = self._compiled.matcher.deep_copy()
        self.ll_matcher.consume_tokens(self._consumed)
        return True

    def _next_num_states(self) -> int | None:
        """Return the number of states that the next lexer may have; None: another lexer would fail like this one."""
        num_new = len(self._consumed) - self._num_at_renewal
        if not self._is_renewed or num_new >= max(MIN_PROGRESS_TOKENS, len(self._consumed) // 4):
            return self._num_states
        needs_more = "too many states" in self.ll_matcher.get_error() and self._num_states < MAX_STATES
        return min(self._num_states * GROWTH, MAX_STATES) if needs_more else None

    def _reason(self) -> Exception:
        if self.budget.is_spent:
            return VLLMValidationError(TOO_SLOW)
        if self._failure is not None:
            return self._failure
        error = self.ll_matcher.get_error()
        if "lexer error" in error or not error:
            return VLLMValidationError(TOO_LARGE)
        return VLLMValidationError(f"This answer cannot go on within its grammar: {readable(error)}")


def _too_many() -> Exception:
    return GracefulHTTPError(NO_ROOM, HTTPStatus.TOO_MANY_REQUESTS)


# The reasons for which answers were ended, by the engine's id of the request. The engine thread reads, vLLM's compiling threads write, too.
_failures: OrderedDict[str, Exception] = OrderedDict()
_failures_lock = Lock()


def _note_failure(request_id: str, reason: Exception) -> None:
    with _failures_lock:
        _failures[request_id] = reason
        if len(_failures) > MAX_FAILURES:
            _failures.popitem(last=False)


def take_failure(internal_id: str) -> Exception | None:
    """Return why the grammar ended a request, or one of its n answers; None if it did not. Asked once, on the engine thread."""
    if not _failures:
        return None
    with _failures_lock:
        name = next(
            (name for name in _failures if name == internal_id or name.endswith(f"_{internal_id}")), None
        )
        return _failures.pop(name) if name is not None else None


def _is_no_rejection(record: logging.LogRecord) -> bool:
    """Return whether vLLM's log record is not about an answer that its grammar ended.

    vLLM reports each such answer as an internal error, with the answer's tokens.
    """
    return not str(record.msg).startswith("Unexpected: grammar ")


def install(room_bytes: int) -> None:
    """Make engines of this process compile grammars with these classes."""
    BoundedBackend.room_bytes = room_bytes
    manager_module.GuidanceBackend = BoundedBackend
    StructuredOutputManager._create_grammar = create_grammar
    for name in _TELLERS:
        logging.getLogger(name).addFilter(_is_no_rejection)
