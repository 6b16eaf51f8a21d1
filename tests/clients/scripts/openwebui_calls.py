"""Open WebUI's backend, as its page asks it: models, chats with and without its tools, and the small tasks that it gives a model.

It runs without accounts, in a folder of its own, with our server as its only provider. Everything else has its default.
"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from harness import KEY, MODEL, V1_URL, call, call_all, server_of_the_client

REQUEST_TIMEOUT_S = 120
QUESTION = [{"role": "user", "content": "Hello!"}]
headers = {"Content-Type": "application/json"}


def open_url(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(backend + path, data, headers)
    return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)


def ask(path, body=None):
    with open_url(path, body) as reply:
        return json.loads(reply.read())


def sign_in_without_accounts():
    token = ask("/api/v1/auths/signin", {"email": "", "password": ""})["token"]
    assert token
    headers["Authorization"] = f"Bearer {token}"


def models():
    assert MODEL in {model["id"] for model in ask("/api/models")["data"]}


def verify_the_connection():
    assert ask("/openai/verify", {"url": V1_URL, "key": KEY})["data"]


def body_of(**more):
    return {"model": MODEL, "messages": QUESTION, "stream": False} | more


def content(**more):
    return ask("/api/chat/completions", body_of(**more))["choices"][0]["message"]["content"]


def chat():
    assert content()


def chat_with_an_adapter():
    assert content(model="pirate")


def chat_streamed():
    with open_url("/api/chat/completions", body_of(stream=True)) as reply:
        events = [line for line in reply if line.startswith(b"data: {")]
    assert any(json.loads(event[6:])["choices"][0]["delta"].get("content") for event in events)


def chat_with_36_tools():
    properties = {"query": {"type": "string", "description": "words " * 60}}
    described = {"description": "does much " * 60, "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": {"name": f"tool_{at}"} | described} for at in range(36)]
    assert content(tools=tools, tool_choice="auto")


def chat_passed_on():
    reply = ask("/openai/chat/completions", body_of(max_tokens=8))
    assert reply["usage"]["completion_tokens"] <= 8


def task(name):
    messages = [*QUESTION, {"role": "assistant", "content": "Hello!"}]
    body = {"model": MODEL, "messages": messages, "chat_id": "local:1"}
    # A small model may have nothing to say here; the task is done when its answer has ended.
    reply = ask(f"/api/v1/tasks/{name}/completions", body)
    assert reply["choices"][0]["finish_reason"] in ("stop", "length")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        settings = {
            "DATA_DIR": name,
            "OPENAI_API_BASE_URL": V1_URL,
            "OPENAI_API_KEY": KEY,
            "ENABLE_OLLAMA_API": "false",
            "WEBUI_AUTH": "false",
            "OFFLINE_MODE": "true",
            "HF_HUB_OFFLINE": "1",
        }
        command = ("open-webui", "serve")
        server = server_of_the_client(*command, folder=Path(name), ready_path="/health", **settings)
        backend = call("start", lambda: stack.enter_context(server))
        call_all()
        for which in ("title", "tags", "follow_up"):
            call(f"task: {which}", lambda which=which: task(which))
