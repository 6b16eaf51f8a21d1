"""`llm`, the command: a model of ours in its list, prompts, conversations, schemas."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from harness import MODEL, QUESTION, V1_URL, WEATHER_SCHEMA, call_all, empty_home, has_city, run_command

LLM = str(Path(sys.executable).with_name("llm"))


def run(*arguments):
    return run_command(LLM, *arguments)


def models():
    assert "overture" in run("models")


def prompt():
    assert run("-m", "overture", "--no-stream", "-o", "max_tokens", "16", "Hello!")


def prompt_streamed():
    assert run("-m", "overture", "-o", "max_tokens", "16", "Hello!")


def system_prompt():
    assert run("-m", "overture", "-s", "You are terse.", "Hello!")


def conversation():
    run("-m", "overture", "Hello! My name is Ada.")
    assert run("-c", "What is my name?")
    assert len(json.loads(run("logs", "-c", "--json"))) >= 2


def schema():
    assert has_city(run("-m", "overture", "--schema", json.dumps(WEATHER_SCHEMA), QUESTION))


def text_completion():
    assert run("-m", "overture-text", "-o", "max_tokens", "8", "Hello")


if __name__ == "__main__":
    with empty_home() as folder:
        os.environ |= {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
        chat = {"model_id": "overture", "model_name": MODEL, "api_base": V1_URL, "supports_schema": True}
        text = {"model_id": "overture-text", "model_name": MODEL, "api_base": V1_URL, "completion": True}
        # JSON is YAML.
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([chat, text]))
        call_all()
