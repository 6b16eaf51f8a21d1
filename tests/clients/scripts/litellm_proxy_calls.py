"""`litellm` as a proxy in front of Overture, asked as an OpenAI server is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import openai
from harness import BASE_URL, KEY, MODEL, QUESTION, V1_URL, WEATHER_TOOL, call, has_city

MASTER_KEY = "sk-of-this-run-only"
READY_TIMEOUT_S = 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def proxy():
    """The address of a proxy that has the model twice: by chat completions and by Anthropic's messages."""
    models = [
        {
            "model_name": "overture",
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": V1_URL, "api_key": KEY},
        },
        {
            "model_name": "overture-messages",
            "litellm_params": {"model": f"anthropic/{MODEL}", "api_base": BASE_URL, "api_key": KEY},
        },
    ]
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
        config = Path(folder, "config.yaml")
        config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
        port = free_port()
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=log,
            env=os.environ | {"LITELLM_MASTER_KEY": MASTER_KEY, "LITELLM_TELEMETRY": "False"},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process, Path(folder, "log"))
            yield url
        finally:
            process.terminate()
            process.wait()


def wait_ready(url, process, log):
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the proxy did not start: {log.read_text(errors='replace')[-1500:]}")


def main(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=MASTER_KEY, max_retries=0)

    def chat(**more):
        messages = [{"role": "user", "content": QUESTION}]
        return client.chat.completions.create(
            **{"model": "overture", "messages": messages, "max_tokens": 64} | more
        )

    def plain(model):
        assert chat(model=model).choices[0].message.content

    def streamed(model):
        assert "".join(c.choices[0].delta.content or "" for c in chat(model=model, stream=True) if c.choices)

    def tools():
        made = chat(tools=[WEATHER_TOOL], tool_choice="required").choices[0].message.tool_calls[0]
        assert has_city(made.function.arguments)

    def models():
        assert {"overture", "overture-messages"} <= {model.id for model in client.models.list()}

    def completion():
        assert client.completions.create(model="overture", prompt="Hello", max_tokens=8).choices[0].text

    def response():
        assert client.responses.create(model="overture", input="Hello!", max_output_tokens=16).output_text

    call("models", models)
    call("chat", lambda: plain("overture"))
    call("chat streamed", lambda: streamed("overture"))
    call("chat by messages", lambda: plain("overture-messages"))
    call("chat by messages, streamed", lambda: streamed("overture-messages"))
    call("tools, required", tools)
    call("completions", completion)
    call("responses", response)


if __name__ == "__main__":
    with proxy() as proxy_url:
        main(proxy_url)
