"""Conversations as coding agents send them, to a model whose chat template takes instructions at the beginning alone and has roles alternate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .conftest import Gateways, Seen, SharedNode, told
from .facts import CHAT, MESSAGES, MODEL, RESPONSES, Http, Patch

STRICT = (
    "{% for each in messages %}{% if each.role == 'system' and not loop.first %}{{ raise_exception('System first.') }}{% endif %}"
    "{% if not loop.first and each.role == loop.previtem.role %}{{ raise_exception('In turn.') }}{% endif %}"
    "<|{{ each.role }}|>{{ each.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BODY = {"model": MODEL, "max_tokens": 4, "temperature": 0}


def turns(api: str) -> list[dict[str, Any]]:
    """A conversation of which the third and the last message are instructions, after two questions in a row."""
    story = f"This one came by {api}. " + " ".join(
        f"The {number}th ship is called Anna." for number in range(40)
    )
    return [
        {"role": "user", "content": story},
        {"role": "assistant", "content": "I see."},
        {"role": "system", "content": "Mind the first ship."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Nothing."},
        {"role": "user", "content": "Wait."},
        {"role": "user", "content": "Who is it?"},
        {"role": "developer" if api == "chat" else "system", "content": "Mind the last ship."},
    ]


async def test_later_instructions_are_served_and_leave_the_cache_of_what_was_said_valid(
    node: SharedNode, gateways: Gateways, seen: Seen, monkeypatch: Patch
) -> None:
    from engine_bridge.driver.serving.serving import Serving  # which imports vLLM

    client, options = node._client, node._serving._options
    monkeypatch.setattr(client.renderer, "render_messages_async", client.renderer.render_messages_async)
    serving = Serving(client, replace(options, chat_template=STRICT))
    serving.warm_up()
    monkeypatch.setattr(node, "_serving", serving)
    tokenizer = client.renderer.get_tokenizer()
    server = await gateways()

    async def asked(http: Http, api: str, num_turns: int) -> tuple[int, str]:
        """The prompt's tokens that a cache had, and the prompt."""
        messages = turns(api)[:num_turns]
        match api:
            case "chat":
                usage = (await told(http.post(CHAT, json=BODY | {"messages": messages})))["usage"]
                num_cached = usage["prompt_tokens_details"]["cached_tokens"]
            case "responses":
                body = {"model": MODEL, "max_output_tokens": 16, "temperature": 0, "input": messages}
                usage = (await told(http.post(RESPONSES, json=body)))["usage"]
                num_cached = usage["input_tokens_details"]["cached_tokens"]
            case _:
                usage = (await told(http.post(MESSAGES, json=BODY | {"messages": messages})))["usage"]
                num_cached = usage["cache_read_input_tokens"]
        return num_cached, tokenizer.decode(seen.prompts[-1])

    async with Http(server.url) as http:
        for api in ("chat", "responses", "messages"):
            _, first = await asked(http, api, 4)
            num_tokens = len(seen.prompts[-1])
            num_cached, second = await asked(http, api, 8)
            assert num_cached > num_tokens - 64, api
            assert first.count("Mind the first ship.") == 1 == second.count("Mind the last ship."), api
            assert second.startswith(first.removesuffix("<|assistant|>")), api
