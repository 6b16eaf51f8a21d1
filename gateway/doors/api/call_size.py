"""The bounds of a call's body, checked before anything is made of it. Pure.

The settings of an answer (stop strings, grammars …) are measured where they are known: `engine_bridge.policy.limits.request_limits`. So is its
prompt, of which the node may leave out a part: `engine_bridge.calls.context_overflow`.
"""

from __future__ import annotations

from typing import Any

import orjson

from engine_bridge.calls.prompt_embeds import embeddings_of
from engine_bridge.policy.limits.request_limits import check_prompt_chars, too_much
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import Api


def check_shape(num_values: int, depth: int, *, max_values: int, max_depth: int) -> None:
    """Raise InvalidRequest for a JSON text that would take long to decode and validate."""
    if depth > max_depth:
        raise InvalidRequest(
            f"The body nests {depth:,} levels deep; this server takes at most {max_depth:,} (max_json_depth)."
        )
    if num_values > max_values:
        raise InvalidRequest(
            f"The body has {num_values:,} values; this server takes at most {max_values:,} (max_json_values)."
        )


def check_call(api: Api, body: Any, *, max_messages: int, max_sequences: int) -> None:
    """Raise InvalidRequest for a call that is too large for this server. Malformed fields are left for vLLM to explain."""
    if not isinstance(body, dict):
        return
    for name in ("messages", "input"):
        messages = body.get(name)
        if isinstance(messages, list) and len(messages) > max_messages:
            raise too_much("Number of messages", len(messages), max_messages, "max_messages", name)
    _check_sequences(api, body, max_sequences)


# The fields of a call that hold its texts, one or a list of them.
_INPUTS = {"embeddings": ("input",), "rerank": ("query", "documents")}
_SCORED = ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2")


def check_inputs(api: Api, body: Any, *, max_inputs: int, max_chars: int, max_all_chars: int) -> None:
    """Raise InvalidRequest for a call for embeddings or scores with too many inputs, or with one too long (`max_chars`) to be split into tokens.

    Malformed fields are left for vLLM to explain, but for the form of the reply: it is JSON.

    Args:
        api: the call's.
        body: its JSON value.
        max_inputs: the most texts of a field.
        max_chars: the most characters of a text.
        max_all_chars: the most of all that is read, where a single text is read with each of the other field's, and a padded one as the longest.
    """
    if not isinstance(body, dict):
        return
    form = body.get("encoding_format") if api == "embeddings" else None
    if isinstance(form, str) and form not in ("float", "base64"):
        raise InvalidRequest(
            "The embeddings come as `float` or as `base64`: set encoding_format to one of them.",
            param="encoding_format",
        )
    is_padded = body.get("padding") == "max_length"
    sizes: dict[str, tuple[int, int]] = {}
    for field in _INPUTS.get(api, _SCORED):
        inputs = body.get(field)
        if not isinstance(inputs, list) or (inputs and isinstance(inputs[0], int)):
            inputs = [inputs]  # one text, or the token ids of one
        if len(inputs) > max_inputs:
            raise too_much("Number of inputs", len(inputs), max_inputs, "max_embedding_inputs", field)
        if api != "embeddings" and any(isinstance(each, dict) for each in inputs):
            message = (
                "This server scores texts only, no pictures: give each text as a string, not as an object."
            )
            raise InvalidRequest(message, param=field)
        lengths = [len(each) for each in inputs if isinstance(each, str)]
        check_prompt_chars(max(lengths, default=0), max_chars, field)
        if inputs != [None]:
            sizes[field] = len(inputs), len(inputs) * max_chars if is_padded else sum(lengths)
    # What a template puts before each pair.
    told = {name: body[name] for name in ("instruction", "chat_template_kwargs") if body.get(name)}
    if told and api != "embeddings":
        sizes["instruction"] = 1, len(orjson.dumps(told))
        check_prompt_chars(sizes["instruction"][1], max_chars, "instruction")
    most = max((num for num, _ in sizes.values()), default=1)
    all_chars = sum(chars * (most if num == 1 else 1) for num, chars in sizes.values())
    if all_chars > max_all_chars:
        what = "Characters to be read of all inputs"
        raise too_much(what, all_chars, max_all_chars, "max_body_bytes", next(iter(sizes)))


def _check_sequences(api: Api, body: dict[str, Any], limit: int) -> None:
    """Raise InvalidRequest for a call that asks for too many answers (prompts × n)."""
    prompt = body.get("prompt") if api == "completions" else None
    is_many = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    num_prompts = len(prompt) if is_many and isinstance(prompt, list) else 1
    num_prompts = max(num_prompts, len(embeddings_of(api, body)))
    wanted = [_as_number(body.get(name)) for name in ("n", "best_of")]
    num_sequences = num_prompts * max(wanted, default=1)
    if num_sequences > limit:
        raise too_much("Answers in one call (prompts × n)", num_sequences, limit, "max_sequences", "n")


def _as_number(value: Any) -> int:
    """Return a field as vLLM's models read it: "16" and 16.0 are 16. Returns 1 for a value that is no number."""
    try:
        return int(float(value)) if isinstance(value, int | float | str) else 1
    except (ValueError, OverflowError):
        return 1
