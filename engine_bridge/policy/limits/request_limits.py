"""The limits of one request. Pure: settings and facts in, an error out that names the limit.

Each limit keeps some part of the server from working without end for one client: validating, compiling, tokenising, or every step of an answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import Api

# Characters of one stop string or bad word. Chosen: longer than any marker that people stop at.
MAX_WORD_CHARS = 1024
# Most tokens in a repetition that vLLM looks for at each token, and most triggers of a structural tag, each of which is tried for each structure.
# Chosen.
MAX_PATTERN_TOKENS, MAX_TRIGGERS = 64, 64
# Characters of a prompt for each token that the model reads, where no limit is set: four are usual, sixteen are white space or a repeated word.
CHARS_PER_TOKEN = 16
# The fields of the APIs whose text the model reads.
_READ = ("prompt", "suffix", "messages", "input", "system", "instructions", "tools", "functions", "documents")
_REPEAT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
# "name:" or "name ::=" at the beginning of a line, as Lark and EBNF have it. It allows blanks only: a pattern that matches line ends as well looks
# at a run of them again and again.
_RULE = re.compile(r"^[ \t]*[?!]?[\w.-]+[ \t]*(?:::=|:)", re.MULTILINE)
KIB = 1 << 10


class RequestLimits(Struct, frozen=True, kw_only=True):
    """The settings of the group "Limits" that requests are measured by; `gateway.settings.config` says what each means."""

    max_prompt_chars: int | None = None
    max_sequences: int = 256
    max_stop_strings: int = 64
    max_bad_words: int = 256
    max_logit_bias: int = 1024
    max_answer_logprobs: int = 20_000
    max_grammar_kib: int = 256
    max_grammar_rules: int = 2000
    max_schema_values: int = 10_000
    max_choices: int = 1000
    max_regex_chars: int = 8192
    max_regex_repeat: int = 1000
    grammar_check_s: float = 5.0
    grammar_check_mib: int = 512

    def prompt_chars(self, max_model_len: int) -> int:
        """Return the longest prompt in characters, for a model that reads `max_model_len` tokens."""
        return self.max_prompt_chars or CHARS_PER_TOKEN * max_model_len


def too_much(what: str, given: int, limit: int, setting: str, param: str) -> InvalidRequest:
    """Return the error for a count that is above the limit of a setting."""
    return InvalidRequest(f"{what}: {given:,}; this server takes at most {limit:,} ({setting}).", param=param)


def _bound(what: str, given: int, limits: RequestLimits, setting: str, param: str) -> None:
    """Raise InvalidRequest for a count above the limit of a setting."""
    limit = getattr(limits, setting) * (KIB if setting.endswith("_kib") else 1)
    if given > limit:
        raise too_much(what, given, limit, setting, param)


def check_prompt_chars(given: int, limit: int, param: str = "prompt") -> None:
    """Check a prompt's length before the text is split into tokens. Raises InvalidRequest: `prompt_too_long`."""
    if given > limit:
        raise InvalidRequest(
            f"The prompt has {given:,} characters; this server reads at most {limit:,} (max_prompt_chars). Shorten it.",
            param=param,
            code="prompt_too_long",
        )


def check_prompt(api: Api, body: Any, limit: int, num_image_chars: int = 0) -> None:
    """Check the length of the text that the model would read of a call's body. Raises InvalidRequest as `check_prompt_chars`.

    num_image_chars: characters of the body that are pictures.
    """
    if not isinstance(body, dict):
        return
    prompts = body.get("prompt") if api == "completions" else None
    if isinstance(prompts, list):  # each is a separate prompt
        longest = max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)
        check_prompt_chars(longest, limit)
        return
    num_chars = sum(measure(body[name])[1] for name in _READ if name in body) - num_image_chars
    name = next((name for name in _READ if name in body), "prompt")
    check_prompt_chars(num_chars, limit, name)


def check_sampling(params: Any, limits: RequestLimits) -> None:
    """Check a request's settings (vLLM's `SamplingParams`, or anything with its fields). Raises InvalidRequest."""
    _bound("Answers in one call (prompts × n)", params.n, limits, "max_sequences", "n")
    _check_repetition(getattr(params, "repetition_detection", None))
    _check_words("stop strings", params.stop, limits, "max_stop_strings", "stop")
    _check_words("bad words", params.bad_words, limits, "max_bad_words", "bad_words")
    for name in ("logit_bias", "stop_token_ids", "logprob_token_ids"):
        _bound(f"Entries of {name}", len(getattr(params, name, None) or ()), limits, "max_logit_bias", name)
    if params.structured_outputs is not None:
        check_structured(params.structured_outputs, limits)


def _check_repetition(detection: Any) -> None:
    """Bound the patterns that vLLM compares with the end of an answer at each token, for each size of pattern."""
    size = getattr(detection, "max_pattern_size", 0) or 0
    if size > MAX_PATTERN_TOKENS:
        raise InvalidRequest(
            f"max_pattern_size is {size:,}; patterns of at most {MAX_PATTERN_TOKENS} tokens are looked for.",
            param="repetition_detection",
        )


def _check_words(
    what: str, words: Iterable[str] | str | None, limits: RequestLimits, setting: str, param: str
) -> None:
    words = [words] if isinstance(words, str) else list(words or ())
    _bound(f"Number of {what}", len(words), limits, setting, param)
    longest = max(map(len, words), default=0)
    if longest > MAX_WORD_CHARS:
        raise InvalidRequest(
            f"One of the {what} has {longest:,} characters; at most {MAX_WORD_CHARS:,} are read.", param=param
        )


def check_structured(structured: Any, limits: RequestLimits) -> None:
    """Check a grammar in any of its forms (vLLM's `StructuredOutputsParams`). Raises InvalidRequest."""
    for name in ("json", "structural_tag"):
        _check_schema(getattr(structured, name, None), limits)
    _check_choices(structured.choice, limits)
    if isinstance(structured.regex, str):
        _check_regex(structured.regex, limits)
    if isinstance(structured.grammar, str):
        _check_grammar(structured.grammar, limits)


def _check_schema(schema: Any, limits: RequestLimits) -> None:
    if schema is None:
        return
    if isinstance(schema, str):
        _bound("Characters of the grammar", len(schema), limits, "max_grammar_kib", "response_format")
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            return  # vLLM says why it is no JSON
    triggers = schema.get("triggers") if isinstance(schema, dict) else None
    if isinstance(triggers, list) and len(triggers) > MAX_TRIGGERS:
        raise InvalidRequest(
            f"A structural tag may have at most {MAX_TRIGGERS} triggers.", param="structural_tag"
        )
    num_values, num_chars = measure(schema, limits.max_schema_values)
    if num_values > limits.max_schema_values:
        raise InvalidRequest(
            f"The JSON schema has more than {limits.max_schema_values:,} values (max_schema_values).",
            param="response_format",
        )
    _bound("Characters of the JSON schema", num_chars, limits, "max_grammar_kib", "response_format")


def measure(value: Any, stop_after: float = math.inf) -> tuple[int, int]:
    """Return (values, characters of strings and keys) of a JSON value; counting ends soon after `stop_after` values."""
    num_values = num_chars = 0
    left = [value]
    while left and num_values <= stop_after:
        each = left.pop()
        num_values += 1
        if isinstance(each, str):
            num_chars += len(each)
        elif isinstance(each, dict):
            num_chars += sum(len(key) for key in each if isinstance(key, str))
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
    return num_values, num_chars


def _check_choices(choices: Any, limits: RequestLimits) -> None:
    if not isinstance(choices, list):
        return
    _bound("Number of choices", len(choices), limits, "max_choices", "choice")
    num_chars = sum(len(choice) for choice in choices if isinstance(choice, str))
    _bound("Characters of all choices", num_chars, limits, "max_grammar_kib", "choice")


def _check_regex(regex: str, limits: RequestLimits) -> None:
    _bound("Characters of the regex", len(regex), limits, "max_regex_chars", "regex")
    bounds = [int(number[:9]) for match in _REPEAT.finditer(regex) for number in match.groups() if number]
    _bound("Repetitions in the regex", max(bounds, default=0), limits, "max_regex_repeat", "regex")


def _check_grammar(grammar: str, limits: RequestLimits) -> None:
    _bound("Characters of the grammar", len(grammar), limits, "max_grammar_kib", "grammar")
    num_rules = len(_RULE.findall(grammar)) + grammar.count("|")
    _bound("Rules and alternatives of the grammar", num_rules, limits, "max_grammar_rules", "grammar")
