"""Structured output that cannot hurt others: vLLM's guidance backend, of which each grammar was checked elsewhere and each step is bounded.

vLLM itself validates grammars on the caller's thread and compiles them in this process, where a bad one ends everything. Here its validation
does nothing, and `check_grammar` asks `engine_bridge.grammars` before a request is queued. Source: vLLM 0.32, `v1/structured_output/`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections import OrderedDict
from threading import Lock
from typing import Any

from engine_bridge.driver.vllm_api import (
    GuidanceBackend,
    GuidanceGrammar,
    SamplingParams,
    VLLMValidationError,
    backend_guidance,
    get_structured_output_key,
    serialize_guidance_grammar,
)
from engine_bridge.driver.vllm_api import structured_output as manager_module
from engine_bridge.grammars.checker import GrammarChecker, Tokenizer
from engine_bridge.policy.matcher_budget import MatcherBudget
from engine_bridge.tool_schemas import closed, is_held

log = logging.getLogger(__name__)

# Compiled grammars that are kept for the next request with the same one. Chosen: a compiled one takes up to a few MB.
MAX_COMPILED = 32
MAX_FAILURES = 1024

TOO_SLOW = "This grammar is too ambiguous: working out the next token takes too long. The answer ends here."


class BoundedBackend(GuidanceBackend):
    """Compiles a grammar once for all requests that use it, and bounds what matching takes. Called on vLLM's compiling thread."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compiled: OrderedDict[tuple[Any, str], Any] = OrderedDict()
        self._budgets: weakref.WeakValueDictionary[tuple[Any, str], MatcherBudget] = (
            weakref.WeakValueDictionary()
        )
        self._lock = Lock()  # vLLM compiles on several threads where there are more cores

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> GuidanceGrammar:
        key = (request_type, grammar_spec)
        with self._lock:
            fresh = self._compiled.get(key)
        if fresh is None:
            fresh = super().compile_grammar(request_type, grammar_spec, stop_token_ids).ll_matcher
        with self._lock:
            self._compiled[key] = fresh
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            budget = self._budgets.get(key)
            if budget is None or budget.is_spent:
                budget = self._budgets[key] = MatcherBudget()
        return BoundedGrammar(fresh.deep_copy(), self.ll_tokenizer, self.vocab_size, budget)


class BoundedGrammar(GuidanceGrammar):
    """One answer's place in its grammar. Ends the answer when the matcher fails or has spent its budget."""

    def __init__(self, matcher: Any, tokenizer: Any, vocab_size: int, budget: MatcherBudget) -> None:
        super().__init__(matcher, tokenizer, vocab_size)
        self.budget = budget
        self.printed_error = True  # vLLM would log the client's grammar

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        if self.budget.is_spent:
            bitmask[idx].fill_(-1)  # any token: none of it reaches the client
            return
        self.budget.next_token()
        started_s = time.thread_time()
        super().fill_bitmask(bitmask, idx)
        self.budget.spend(time.thread_time() - started_s)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """False ends the answer with an error, of which `take_failure` tells the reason."""
        if not self.budget.is_spent and not self.ll_matcher.is_error():
            started_s = time.thread_time()
            is_accepted: bool = super().accept_tokens(request_id, tokens)
            self.budget.spend(time.thread_time() - started_s)
            if is_accepted and not self.ll_matcher.is_error():
                return True
        _note_failure(request_id, TOO_SLOW if self.budget.is_spent else _reason(self.ll_matcher.get_error()))
        return False


# Why answers were ended, by the engine's id of the request; on the engine thread only.
_failures: OrderedDict[str, str] = OrderedDict()


def _note_failure(request_id: str, reason: str) -> None:
    _failures[request_id] = reason
    if len(_failures) > MAX_FAILURES:
        _failures.popitem(last=False)


def take_failure(internal_id: str) -> str | None:
    """Why the grammar ended a request, or one of its n answers. Asked once, on the engine thread."""
    if not _failures:
        return None
    name = next((name for name in _failures if name == internal_id or name.endswith(f"_{internal_id}")), None)
    return _failures.pop(name) if name is not None else None


def _reason(error: str) -> str:
    first = error.strip().split("\n", 1)[0].split(" <state>", 1)[0][:200]
    return f"This answer cannot go on within its grammar: {first}" if first else TOO_SLOW


async def check_grammar(
    params: SamplingParams | None, config: Any, checker: GrammarChecker, tenant: str
) -> None:
    """Tighten a request's JSON schema and have its grammar checked; a bad one that no client has asked for is left out of `params`.

    config: the engine's `StructuredOutputsConfig`. Raises VLLMValidationError for a grammar that the engine must not see.
    """
    if params is None:
        return
    close_schema(params)
    grammar = grammar_of(params, config)
    if grammar is None or not (reason := await checker.check(grammar, tenant)):
        return
    if params.structured_outputs is None or not is_held(params.structured_outputs.grammar):
        raise VLLMValidationError(f"Invalid grammar: {reason}")
    params.structured_outputs = None


def close_schema(params: SamplingParams) -> None:
    """Tighten a request's JSON schema (`tool_schemas.closed`), before its grammar is made of it. A schema that is no JSON stays for `grammar_of`."""
    structured = params.structured_outputs
    if structured is None or structured.json is None:
        return
    with contextlib.suppress(ValueError, RecursionError):
        schema = structured.json
        structured.json = closed(json.loads(schema) if isinstance(schema, str) else schema)


def grammar_of(params: SamplingParams, config: Any) -> str | None:
    """A request's grammar as the engine will compile it; None without one. Raises VLLMValidationError for what is no grammar at all.

    config: the engine's `StructuredOutputsConfig`.
    """
    structured = params.structured_outputs
    if structured is None or structured.all_constraints_none():
        return None
    try:
        kind, spec = get_structured_output_key(structured)
        text: str = serialize_guidance_grammar(
            kind, spec, config.disable_any_whitespace, config.disable_additional_properties
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VLLMValidationError(f"Invalid grammar specification: {error}") from error
    return text


def tokenizer_of(tokenizer: Any, vocab_size: int) -> Tokenizer:
    """What a helper process needs of the engine's tokenizer. One that is not Hugging Face's fast kind is stood in for by one of bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return Tokenizer("byte")
    definition = json.loads(backend.to_str())
    definition["padding"] = definition["truncation"] = None
    return Tokenizer(json.dumps(definition), max(vocab_size, len(tokenizer)), tokenizer.eos_token_id)


def _checked_elsewhere(sampling_params: SamplingParams, tokenizer: Any = None) -> None:
    """In the place of vLLM's validation: see the module's text."""


def install() -> None:
    """Make engines of this process use the bounded backend."""
    manager_module.GuidanceBackend = BoundedBackend
    backend_guidance.validate_guidance_grammar = _checked_elsewhere
