"""`litellm` as a proxy in front of Overture, asked as an OpenAI server is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import openai
from harness import (
    BASE_URL,
    KEY,
    MODEL,
    QUESTION,
    V1_URL,
    WEATHER_TOOL,
    call,
    call_all,
    has_city,
    server_of_the_client,
)

MASTER_KEY = "sk-of-this-run-only"
# The model is there twice: by chat completions and by Anthropic's messages.
ADDRESSES = {"overture": ("openai", V1_URL), "overture-messages": ("anthropic", BASE_URL)}


def chat(**more):
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(
        **{"model": "overture", "messages": messages, "max_tokens": 64} | more
    )


def plain(model):
    assert chat(model=model).choices[0].message.content


def streamed(model):
    assert "".join(c.choices[0].delta.content or "" for c in chat(model=model, stream=True) if c.choices)


def tools_required():
    made = chat(tools=[WEATHER_TOOL], tool_choice="required").choices[0].message.tool_calls[0]
    assert has_city(made.function.arguments)


def models():
    assert {*ADDRESSES} <= {model.id for model in client.models.list()}


def completions():
    assert client.completions.create(model="overture", prompt="Hello", max_tokens=8).choices[0].text


def responses():
    assert client.responses.create(model="overture", input="Hello!", max_output_tokens=16).output_text


if __name__ == "__main__":
    listed = [
        {
            "model_name": name,
            "litellm_params": {"model": f"{provider}/{MODEL}", "api_base": address, "api_key": KEY},
        }
        for name, (provider, address) in ADDRESSES.items()
    ]
    settings = {"LITELLM_MASTER_KEY": MASTER_KEY, "LITELLM_TELEMETRY": "False"}
    with tempfile.TemporaryDirectory() as name:
        config = Path(name, "config.yaml")
        config.write_text(json.dumps({"model_list": listed}))  # JSON is YAML
        command = ("litellm", "--config", str(config))
        with server_of_the_client(
            *command, folder=Path(name), ready_path="/health/liveliness", **settings
        ) as url:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=MASTER_KEY, max_retries=0)
            call_all()
            for model in ADDRESSES:
                call(f"chat, {model}", lambda model=model: plain(model))
                call(f"chat streamed, {model}", lambda model=model: streamed(model))
