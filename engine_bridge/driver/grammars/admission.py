"""Structured output that cannot hurt other requests: each grammar is checked elsewhere before a request is queued.

vLLM itself validates grammars on the caller's thread and compiles them in this process, where a bad one ends everything. Here its validation does
nothing, and `check_grammar` asks `engine_bridge.grammars`. Once a grammar runs, `running` bounds its memory and time. Source: vLLM 0.32,
`v1/structured_output/`.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from engine_bridge.calls.tool_schemas import closed, is_held, loosened, opened, spaced, without_remarks
from engine_bridge.driver.grammars import running
from engine_bridge.driver.vllm_api import (
    SamplingParams,
    VLLMValidationError,
    backend_guidance,
    get_structured_output_key,
    serialize_guidance_grammar,
)
from engine_bridge.grammars.checker import GrammarChecker
from engine_bridge.grammars.messages import readable
from engine_bridge.grammars.worker import GrammarTokenizer
from engine_bridge.policy.limits.request_limits import RequestLimits


def checker_of(engine: Any, limits: RequestLimits) -> GrammarChecker:
    """Return the check of an engine's grammars, whose processes start meanwhile."""
    tokenizer = tokenizer_of(engine.renderer.get_tokenizer(), engine.model_config.get_vocab_size())
    checker = GrammarChecker(tokenizer, timeout_s=limits.grammar_check_s, memory_mib=limits.grammar_check_mib)
    checker.warm_up()
    return checker


async def check_grammar(
    params: SamplingParams | None,
    config: Any,
    checker: GrammarChecker,
    tenant: str,
    *,
    is_strict: bool = True,
) -> None:
    """Tighten a request's JSON schema and have its grammar checked.

    Of a bad grammar that no client has asked for nothing is left in `params`; of a JSON schema, what need not be held is left out.

    Args:
        params: the request's, which are changed.
        config: the engine's `StructuredOutputsConfig`.
        checker: checks grammars.
        tenant: whose request it is.
        is_strict: whether the whole schema must be held, but for tools in it that need not be.

    Raises:
        VLLMValidationError: for a grammar that the engine must not see.
    """
    if params is None:
        return
    structured = params.structured_outputs
    given = structured.json if structured is not None else None
    reason = await _fault(params, config, checker, tenant)
    if not reason or structured is None:
        return
    if is_held(structured.grammar):
        params.structured_outputs = None
        return
    if given is not None:
        structured.json = (opened if is_strict else loosened)(_parsed(given))
        if structured.json != given and not await _fault(params, config, checker, tenant):
            return
    raise VLLMValidationError(f"Invalid grammar: {reason}")


async def _fault(params: SamplingParams, config: Any, checker: GrammarChecker, tenant: str) -> str:
    """Return why the grammar of a request is refused, "" for a good one. Its schema is tightened."""
    close_schema(params)
    grammar = grammar_of(params, config)
    return await checker.check(grammar, tenant) if grammar is not None else ""


def _parsed(schema: Any) -> Any:
    """Return a JSON schema that may come as a text; a text that is no JSON as it is."""
    if isinstance(schema, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(schema)
    return schema


def close_schema(params: SamplingParams) -> None:
    """Tighten a request's JSON schema (`tool_schemas.closed`) and say how its JSON is written (`spaced`), before its grammar is made of it.

    Any object at all is such a schema, too. A schema that is not JSON stays for `grammar_of` to refuse.
    """
    structured = params.structured_outputs
    if structured is not None and structured.json is None and structured.json_object:
        structured.json, structured.json_object = {"type": "object"}, None
    if structured is None or structured.json is None:
        return
    if not isinstance(given := _parsed(structured.json), str) or given != structured.json:
        with contextlib.suppress(RecursionError):
            structured.json = spaced(closed(without_remarks(given)))


def grammar_of(params: SamplingParams, config: Any) -> str | None:
    """Return a request's grammar as the engine will compile it; None without one.

    `config` is the engine's `StructuredOutputsConfig`.

    Raises:
        VLLMValidationError: for a text that is no grammar at all.
    """
    structured = params.structured_outputs
    if structured is None or structured.all_constraints_none():
        return None
    try:
        kind, spec = get_structured_output_key(structured)
        text: str = serialize_guidance_grammar(
            kind, spec, config.disable_any_whitespace, config.disable_additional_properties
        )
    except ValueError as error:
        raise VLLMValidationError(f"Invalid grammar specification: {readable(str(error))}") from None
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VLLMValidationError("Invalid grammar specification: it has not the form of one.") from error
    return text


def tokenizer_of(tokenizer: Any, vocab_size: int) -> GrammarTokenizer:
    """Return the tokenizer that a helper process needs. A tokenizer that is not of Hugging Face's fast kind is replaced by one of bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return GrammarTokenizer("byte")
    definition = json.loads(backend.to_str())
    definition["padding"] = definition["truncation"] = None
    return GrammarTokenizer(json.dumps(definition), max(vocab_size, len(tokenizer)), tokenizer.eos_token_id)


def _checked_elsewhere(sampling_params: SamplingParams, tokenizer: Any = None) -> None:
    """Do nothing, in the place of vLLM's validation: see the module's text."""


def install(room_bytes: int) -> None:
    """Make engines of this process compile only checked grammars, within `room_bytes` bytes for all running answers."""
    running.install(room_bytes)
    backend_guidance.validate_guidance_grammar = _checked_elsewhere
