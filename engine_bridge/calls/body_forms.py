"""Bodies of API calls in the forms that vLLM's classes take, of those that the APIs' own descriptions allow. Pure: JSON in and out.

OpenAI's and Anthropic's servers take a field that is null for one that is left out, messages with and without a type, and texts in several parts;
their clients send all of that. A body is never changed in place: what is changed is copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from engine_bridge.calls.built_in_tools import (
    as_functions,
    in_rounds,
    with_plain_input,
    with_schema,
    without_hosted,
)
from engine_bridge.calls.carried_thoughts import unpacked
from engine_bridge.calls.old_functions import with_tool_messages, with_tools
from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import Api

# The fields that bound an answer's tokens, in each API.
_MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# The `top_p` that leaves the likeliest token alone: OpenAI and Anthropic say that by 0, which vLLM refuses.
_LEAST_TOP_P = 1e-6
# The least thinking budget of Anthropic's API.
_MIN_BUDGET = 1024
# Of allowed tools: whether the model may or must call one.
_MODES = ("auto", "required")
# Fields of vLLM up to 0.11, and where their values stand in `structured_outputs`. Source: vLLM's "Structured Outputs", on what was removed.
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
_TEXTS = ("output_text", "input_text", "text", "summary_text", "reasoning_text")


def usual_form(api: Api, body: Any, max_model_len: int) -> Any:
    """Return a body as vLLM's class for this API takes it. Malformed fields stay as they are, for vLLM to explain.

    Raises:
        InvalidRequest: for a field that vLLM would ignore without a word.
    """
    if not isinstance(body, dict):
        return body
    body = _clipped(_without_outer_nulls(api, body), max_model_len)
    change = _CHANGES.get(api)
    return change(body) if change is not None else body


def _without_outer_nulls(api: Api, body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without nulls, which mean nothing; for `/v1/completions` as it is, where vLLM takes null for an answer of any length."""
    means_something = ("max_tokens",) if api == "completions" else ()
    return {name: value for name, value in body.items() if value is not None or name in means_something}


def _clipped(body: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """Return a body with numbers that vLLM takes.

    Its answer has no more tokens than the model reads: vLLM clips only smaller numbers that are too large for this prompt.
    """
    clipped: dict[str, Any] = {
        name: max_model_len for name in _MAX_TOKENS if _as_number(body.get(name)) > max_model_len
    }
    if body.get("top_p", 1) == 0:
        clipped["top_p"] = _LEAST_TOP_P
    return body | clipped if clipped else body


def _as_number(value: Any) -> float:
    """Return a field as vLLM's models read it: "16" and 16.0 are 16. Returns 0 for a value that is no number."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return 0


def without_nulls(value: Any) -> Any:
    """Return an object without its nulls; any other value as it is."""
    return (
        {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value
    )


def _changed(value: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a list with each object in it changed; any other value as it is."""
    return (
        [change(each) if isinstance(each, dict) else each for each in value]
        if isinstance(value, list)
        else value
    )


# -- OpenAI: chat completions ------------------------------------------------------------------------------------------


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    body = with_tools(body)
    if "messages" in body:
        body = body | {"messages": _changed(with_tool_messages(body["messages"]), _chat_message)}
    if "stream_options" in body:
        body = body | {"stream_options": without_nulls(body["stream_options"])}
    if isinstance(body.get("response_format"), dict):
        body = body | {"response_format": _form_of_the_answer(body["response_format"])}
    return _with_allowed_tools(_without_empty_tools(_guided(body)))


def _guided(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose answer's form stands where vLLM looks for it since 0.12: it passes over the fields from before.

    Beside another form, or tools, which vLLM refuses together, they are still passed over.
    """
    form = {name: body[field] for field, name in _GUIDED.items() if field in body}
    if not form or any(body.get(name) for name in ("structured_outputs", "response_format", "tools")):
        return body
    return {name: value for name, value in body.items() if name not in _GUIDED} | {"structured_outputs": form}


def _without_empty_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body that offers tools only where it has some: clients that build the list send an empty one, too, which vLLM refuses."""
    if body.get("tools", []):
        return body
    means_nothing = {"tools", *(["tool_choice"] if body.get("tool_choice") in ("auto", "none") else [])}
    return {name: value for name, value in body.items() if name not in means_nothing}


def _form_of_the_answer(form: dict[str, Any]) -> dict[str, Any]:
    """Return the form of an answer as vLLM reads it: with a name, which means nothing here, and with a schema where vLLM looks for it.

    Source: "JSON mode" of Together and of llama.cpp, whose clients send `{"type": "json_object", "schema": …}`.
    """
    form = without_nulls(form)
    if form.get("type") == "json_object" and isinstance(form.get("schema"), dict):
        form = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    if form.get("type") == "json_schema" and isinstance(form.get("json_schema"), dict):
        form = form | {"json_schema": {"name": "answer"} | form["json_schema"]}
    return form


def _with_allowed_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body that offers only the tools that its `tool_choice` allows. vLLM refuses such a choice, or takes it for "auto".

    Source: OpenAI's "Function calling", "Allowed tools": in chat completions an object within the choice, in responses the choice itself.
    """
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return body
    allowed = choice.get("allowed_tools", choice)
    given = allowed.get("tools") if isinstance(allowed, dict) else None
    offered = body.get("tools")
    if not isinstance(given, list) or not isinstance(offered, list) or allowed.get("mode") not in _MODES:
        raise InvalidRequest(
            "`tool_choice` of the type 'allowed_tools' needs a `mode`, 'auto' or 'required', and a list of `tools`.",
            param="tool_choice",
        )
    names = [_tool_name(tool) for tool in given]
    kept = [tool for tool in offered if _tool_name(tool) in names]
    if not kept:
        raise InvalidRequest("`tool_choice` allows none of the `tools`.", param="tool_choice")
    return body | {"tools": kept, "tool_choice": allowed["mode"]}


def _tool_name(tool: Any) -> Any:
    """Return the name of a tool in the form of chat completions or of responses; a hosted tool's type; None for no tool."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool)
    return function.get("name", tool.get("type")) if isinstance(function, dict) else None


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without nulls: clients send an answer back with all fields that it may have, and tools may say nothing.

    The content of a question is not to be null, and that of an answer may be beside tool calls.
    """
    may_be_null = message.get("role") in ("user", "assistant")
    kept = {
        name: value
        for name, value in message.items()
        if value is not None or (may_be_null and name == "content")
    }
    if isinstance(kept.get("content"), list):
        kept["content"] = _changed(kept["content"], without_nulls)
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = _changed(kept["tool_calls"], _tool_call)
    return kept


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a tool as OpenAI has it: clients of Ollama leave out the type, and arguments that are none, and give others as an object."""
    call = without_nulls(call)
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    function = {"arguments": "{}"} | without_nulls(function)
    if isinstance(function["arguments"], dict):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {"type": "function"} | call | {"function": function}


# -- OpenAI: text completions ------------------------------------------------------------------------------------------


def _completions(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without an empty suffix, which editors send for none: vLLM refuses any for most models."""
    body = _guided(body)
    if body.get("suffix") == "":
        return {name: value for name, value in body.items() if name != "suffix"}
    return body


# -- OpenAI: responses -------------------------------------------------------------------------------------------------


def _responses(body: dict[str, Any]) -> dict[str, Any]:
    for name in ("reasoning", "text"):
        if name in body:
            body = body | {name: without_nulls(body[name])}
    if isinstance(body.get("input"), list):
        items = [
            each
            for item in body["input"]
            for each in (as_functions(item) if isinstance(item, dict) else [item])
        ]
        body = body | {"input": _changed(items, _item)}
    if isinstance(body.get("include"), list):
        # vLLM knows not all of what OpenAI's search of the web may tell, and there is none here.
        kept = [each for each in body["include"] if not str(each).startswith("web_search_call.")]
        body = body | {"include": kept}
    if isinstance(body.get("tools"), list):
        body = body | {"tools": _changed(body["tools"], with_plain_input)}
    return _with_allowed_tools(body)


def _item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of `input`. An item with a role is a message, whether it says so or not."""
    item = without_nulls(item)
    if item.get("type", "message") == "message" and "role" in item:
        if item["role"] == "assistant":
            return _assistant(item)
        # The type is said, so that what does not fit is told of this form and of no other.
        return item | {"type": "message"} | _parts(item, "content")
    if item.get("type") == "reasoning":
        return _reasoning(item)
    return item | _parts(item, "output")


def _parts(item: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an item with its parts of this name without nulls; pictures get the usual detail where they name none."""

    def part(value: dict[str, Any]) -> dict[str, Any]:
        """Return one part."""
        kept: dict[str, Any] = without_nulls(value)
        return {"detail": "auto"} | kept if value.get("type") == "input_image" else kept

    return {name: _changed(item[name], part)} if isinstance(item.get(name), list) else {}


def _assistant(item: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the model's, with all of its text in one part: vLLM reads the first one only."""
    content = item.get("content")
    if not isinstance(content, list):
        return item | {"type": "message", "content": "" if content is None else content}
    text = "".join(_text_of(part) for part in content)
    return item | {"type": "message", "content": [{"type": "output_text", "text": text, "annotations": []}]}


def _text_of(part: Any) -> str:
    """Return the text of a message's part, or why the model refused. Raises InvalidRequest for a part of another kind."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in (*_TEXTS, "refusal") or not isinstance(text, str):
        raise InvalidRequest(
            "A message of the assistant may have parts of the types 'output_text' and 'refusal', each with its text.",
            param="input",
        )
    return text


def _reasoning(item: dict[str, Any]) -> dict[str, Any]:
    """Return the model's reasoning, with all of it in one part; what another server has encrypted of it, nobody can read here."""
    if not item.get("content") and (thought := unpacked(item.get("encrypted_content"))):
        item = item | {"content": [{"type": "reasoning_text", "text": thought}]}
    joined = {
        name: [{"type": kind, "text": "".join(_text_of(part) for part in item[name])}] if item[name] else []
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
        if isinstance(item.get(name), list)
    }
    readable = {name: value for name, value in item.items() if name != "encrypted_content"}
    return {"summary": []} | readable | joined


# -- Anthropic ---------------------------------------------------------------------------------------------------------


def _messages(body: dict[str, Any]) -> dict[str, Any]:
    if isinstance(body.get("messages"), list):
        rounds = [
            each
            for message in body["messages"]
            for each in (in_rounds(message) if isinstance(message, dict) else [message])
        ]
        body = body | {"messages": _changed(rounds, _anthropic_message)}
    if isinstance(body.get("tools"), list):
        tools = [with_schema(tool) for tool in without_hosted(body["tools"], body.get("tool_choice"))]
        _check_tools(tools)
        body = body | {"tools": _changed(tools, without_nulls)}
    return _thinking(_with_format(body))


def _with_format(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose answer's form stands where vLLM looks for it. Source: Anthropic's "Structured outputs", first in a field of its own."""
    config, form = body.get("output_config"), body.get("output_format")
    if form is None or not isinstance(config, dict | None):
        return body
    return body | {"output_config": {"format": form} | without_nulls(config or {})}


def _check_tools(tools: Any) -> None:
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom") and "input_schema" not in tool:
            raise InvalidRequest(
                f"Tools of the type {str(kind)[:100]!r} are not known here. Offer each tool with a `name` and an `input_schema`.",
                param="tools",
            )


def _thinking(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose thinking budget is below the answer's tokens. Without room for a budget, thinking is adaptive."""
    thinking, num_tokens = body.get("thinking"), _as_number(body.get("max_tokens"))
    if not isinstance(thinking, dict):
        return body
    budget = _as_number(thinking.get("budget_tokens"))
    if not num_tokens or budget < num_tokens or budget < _MIN_BUDGET:
        return body
    if num_tokens <= _MIN_BUDGET:
        return body | {"thinking": {"type": "adaptive"}}
    return body | {"thinking": thinking | {"budget_tokens": int(num_tokens) - 1}}


def _anthropic_message(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": _changed(message.get("content"), _block)}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block of a message. Documents and results of a search are text to the model."""
    if block.get("type") == "document":
        return _document(block)
    if block.get("type") == "search_result":
        return _as_text(
            block.get("title"), block.get("source"), *_texts(block.get("content"), "search_result")
        )
    if block.get("type") == "tool_result" and isinstance(block.get("content"), list):
        return block | {"content": [_result_block(each) for each in block["content"]]}
    return block


def _result_block(block: Any) -> Any:
    """Return a block of a tool's result. Raises InvalidRequest for a block of another kind, which vLLM would ignore."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in ("text", "image", "document", "search_result", "tool_reference"):
        raise InvalidRequest(
            f"A tool's result may have blocks of the types 'text', 'image', 'document' and 'search_result', not {str(kind)[:100]!r}.",
            param="messages",
        )
    return _block(block)


def _document(block: dict[str, Any]) -> dict[str, Any]:
    given = block.get("source")
    source: dict[str, Any] = given if isinstance(given, dict) else {}
    kind = source.get("type")
    if kind == "text" and isinstance(source.get("data"), str):
        texts = [source["data"]]
    elif kind == "content":
        texts = _texts(source.get("content"), "document")
    else:
        raise InvalidRequest(
            "This server reads documents whose `source` is of the type 'base64', 'text' or 'content': it keeps no uploaded files and fetches none.",
            param="messages",
        )
    return _as_text(block.get("title"), block.get("context"), *texts)


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of a document's or a search result's content."""
    if isinstance(content, str):
        return [content]
    blocks = content if isinstance(content, list) else []
    texts = [each["text"] for each in blocks if isinstance(each, dict) and isinstance(each.get("text"), str)]
    if len(texts) < len(blocks):
        raise InvalidRequest(
            f"The content of a {where} may have blocks of the type 'text' only.", param="messages"
        )
    return texts


def _as_text(*texts: Any) -> dict[str, Any]:
    return {"type": "text", "text": "\n".join(text for text in texts if isinstance(text, str) and text)}


_CHANGES: Mapping[Api, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "chat": _chat,
    "tokenize": _chat,
    "completions": _completions,
    "responses": _responses,
    "input_tokens": _responses,
    "messages": _messages,
    "count_tokens": _messages,
}
