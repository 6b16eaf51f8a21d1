"""A model that thinks before it answers: what its thought may take, and answers of a form that are asked of it.

Runs before the shared engine starts (conftest).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from engine_bridge.calls.body_forms import usual_form
from engine_bridge.local_node import LocalNode
from engine_bridge.protocol.engine_request import EngineRequest
from gateway.settings.config import DEMO_MODEL_DIR

from . import nodes

OPENS, CLOSES, CALLS = 1280, 1281, 1273
"""The tokens <think>, </think> and <tool_call>."""
BEGINS = "<|assistant|>{%- if is_opened -%}<think>{%- endif -%}{#- enable_thinking -#}"
OPENED = {"chat_template_kwargs": {"is_opened": True}}
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def thinking_model(folder: Path) -> Path:
    """The demo model, which closes a thought wherever it would have written an exclamation mark."""
    shutil.copytree(DEMO_MODEL_DIR, folder)
    words, settings, weights = (
        folder / name for name in ("tokenizer.json", "config.json", "model.safetensors")
    )
    tokenizer = json.loads(words.read_text())
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for number, content in ((OPENS, "<think>"), (CLOSES, "</think>")):
        tokenizer["added_tokens"].append({"id": number, "content": content} | form)
    words.write_text(json.dumps(tokenizer))
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"vocab_size": CLOSES + 1}))
    template = folder / "tokenizer_config.json"
    known = json.loads(template.read_text())
    known["chat_template"] = known["chat_template"].replace(
        "<|assistant|>{%- endif -%}", BEGINS + "{%- endif -%}"
    )
    template.write_text(json.dumps(known))
    tensors = load_file(weights)
    rows = tensors["model.embed_tokens.weight"]
    closes = rows[tokenizer["model"]["vocab"]["!"]] * 1.1
    tensors["model.embed_tokens.weight"] = torch.cat([rows, torch.stack([torch.zeros_like(closes), closes])])
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalNode]:
    """Its answers are drafted, where vLLM refuses some settings of them."""
    model = thinking_model(tmp_path_factory.mktemp("thinking") / "model")
    settings = {"adapters_dir": None, "model": str(model), "enable_lora": False, "speculative_config": DRAFTS}
    async with nodes.engine(None, **settings) as node:
        yield node


async def say(node: LocalNode, text: str, **wish: Any) -> Any:
    """The choice of a chat completion, greedily."""
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 60}
    reply: Any = await node.serve("chat", body | {"return_token_ids": True} | wish, {}, EngineRequest())
    assert reply.status == 200, reply.body
    return json.loads(reply.body)["choices"][0]


async def test_a_thought_ends_when_its_budget_is_spent(node: LocalNode) -> None:
    free = await say(node, "My name is Bob.", **OPENED)
    assert free["token_ids"].index(CLOSES) > 2
    for budget in (0, 2):
        held = await say(node, "My name is Bob.", thinking_token_budget=budget, **OPENED)
        assert held["token_ids"].index(CLOSES) == budget
        assert held["message"]["content"]


async def test_a_call_that_is_not_wanted_is_not_begun(node: LocalNode) -> None:
    tools = [{"type": "function", "function": TOOL}]
    said = await say(node, "What is the weather in Paris?", tools=tools, tool_choice="none", bad_words=["at"])
    assert CALLS not in said["token_ids"] and said["finish_reason"] == "stop"


async def test_a_call_that_is_demanded_is_not_begun_within_the_thought(node: LocalNode) -> None:
    """By vLLM's parser for Qwen's models, a call ends the thought; the form that is demanded begins behind it."""
    asked = "What is the weather in Paris?"
    tools = [{"type": "function", "function": TOOL}]
    assert CALLS in (await say(node, asked, tools=tools))["token_ids"]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        assert CALLS not in (await say(node, asked, tools=tools, tool_choice=choice))["token_ids"]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": TOOL["parameters"]}}
    said = await say(node, "My name is Bob.", response_format=form)
    assert said["message"]["reasoning"] and json.loads(said["message"]["content"]) is not None


async def test_a_thought_has_both_names_that_clients_look_for(node: LocalNode) -> None:
    """Half of them read `reasoning_content` alone, the others `reasoning` alone."""
    said = (await say(node, "My name is Bob.", **OPENED))["message"]
    assert said["content"] and said["reasoning"] and said["reasoning_content"] == said["reasoning"]
    body = {"messages": [{"role": "user", "content": "My name is Bob."}], "temperature": 0, "max_tokens": 60}
    reply: Any = await node.serve("chat", body | OPENED | {"stream": True}, {}, EngineRequest())
    deltas: list[dict[str, str]] = []
    async for event in reply.events:
        if event.startswith(b'data: {"id":'):
            deltas += [choice["delta"] for choice in json.loads(event[6:])["choices"]]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == said[name]
    assert not any(delta.get("reasoning") and delta.get("content") for delta in deltas)


async def test_a_client_that_stores_nothing_carries_a_thought_to_the_next_response(node: LocalNode) -> None:
    """As Codex does: it gives back what is opaque to it, and leaves out a thought that it could read."""
    body = {"input": "My name is Bob.", "temperature": 0, "max_output_tokens": 60, "store": False} | OPENED
    plain: Any = await node.serve("responses", body, {}, EngineRequest())
    assert json.loads(plain.body)["output"][0]["encrypted_content"] is None
    body |= {"include": ["reasoning.encrypted_content"]}
    reply: Any = await node.serve("responses", body, {}, EngineRequest())
    thought, _ = json.loads(reply.body)["output"]
    stream: Any = await node.serve("responses", body | {"stream": True}, {}, EngineRequest())
    told = [
        json.loads(event.partition(b"data: ")[2]) async for event in stream.events if b"\ndata: " in event
    ]
    items = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    for item in (items[0], told[-1]["response"]["output"][0]):
        assert item["encrypted_content"] == thought["encrypted_content"]

    carried = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    (read,) = usual_form("responses", {"input": [carried]}, 1024)["input"]
    assert read["content"] == thought["content"] and thought["content"][0]["text"]
