"""Open WebUI's backend, as its page asks it: models, chats with and without its tools, and the small tasks that it gives a model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from harness import KEY, MODEL, V1_URL, call

START_TIMEOUT_S, REQUEST_TIMEOUT_S = 240, 120
QUESTION = [{"role": "user", "content": "Hello!"}]


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Backend:
    """Open WebUI without accounts, in a folder of its own, with our server as its only provider. Everything else has its default."""

    def __init__(self, folder, port):
        self.url = f"http://127.0.0.1:{port}"
        self.token = ""
        settings = {
            "DATA_DIR": folder,
            "OPENAI_API_BASE_URL": V1_URL,
            "OPENAI_API_KEY": KEY,
            "ENABLE_OLLAMA_API": "false",
            "WEBUI_AUTH": "false",
            "OFFLINE_MODE": "true",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            str(Path(sys.executable).with_name("open-webui")),
            "serve",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        self.log = Path(folder, "log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=os.environ | settings, stdout=log, stderr=log
            )

    def wait(self):
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"Open WebUI did not start: {self.log.read_text()[-400:]}")

    def open(self, path, body=None):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)

    def ask(self, path, body=None):
        with self.open(path, body) as reply:
            return json.loads(reply.read())

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def chat(**more):
    return {"model": MODEL, "messages": QUESTION, "stream": False} | more


def main(backend):
    def sign_in():
        backend.token = backend.ask("/api/v1/auths/signin", {"email": "", "password": ""})["token"]
        assert backend.token

    def models():
        assert MODEL in {model["id"] for model in backend.ask("/api/models")["data"]}

    def adapter():
        reply = backend.ask("/api/chat/completions", chat(model="pirate"))
        assert reply["choices"][0]["message"]["content"]

    def plain():
        reply = backend.ask("/api/chat/completions", chat())
        assert reply["choices"][0]["message"]["content"]

    def streamed():
        with backend.open("/api/chat/completions", chat(stream=True)) as reply:
            events = [line for line in reply if line.startswith(b"data: {")]
        assert any(json.loads(event[6:])["choices"][0]["delta"].get("content") for event in events)

    def with_many_tools():
        parameters = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "words " * 60}},
        }
        tools = [
            {
                "type": "function",
                "function": {"name": f"tool_{i}", "description": "does much " * 60, "parameters": parameters},
            }
            for i in range(36)
        ]
        reply = backend.ask("/api/chat/completions", chat(tools=tools, tool_choice="auto"))
        assert reply["choices"][0]["message"]["content"]

    def passed_on():
        reply = backend.ask("/openai/chat/completions", chat(max_tokens=8))
        assert reply["usage"]["completion_tokens"] <= 8

    def checked():
        assert backend.ask("/openai/verify", {"url": V1_URL, "key": KEY})["data"]

    call("sign in without accounts", sign_in)
    call("models", models)
    call("verify the connection", checked)
    call("chat", plain)
    call("chat with an adapter", adapter)
    call("chat, streamed", streamed)
    call("chat with 36 tools", with_many_tools)
    call("chat, passed on", passed_on)


def tasks(backend):
    def task(name, **more):
        body = {
            "model": MODEL,
            "messages": [*QUESTION, {"role": "assistant", "content": "Hello!"}],
            "chat_id": "local:1",
        }
        # A small model may have nothing to say here; the task is done when its answer has ended.
        reply = backend.ask(f"/api/v1/tasks/{name}/completions", body | more)
        assert reply["choices"][0]["finish_reason"] in ("stop", "length")

    call("task: title", lambda: task("title"))
    call("task: tags", lambda: task("tags"))
    call("task: follow-ups", lambda: task("follow_up"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        running = Backend(folder, free_port())
        try:
            call("start", running.wait)
            main(running)
            tasks(running)
        finally:
            running.close()
