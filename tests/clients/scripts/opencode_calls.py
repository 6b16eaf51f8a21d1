"""`opencode`, a coding agent, through one of its two providers: chat completions or responses. Its third argument says which."""

from __future__ import annotations

import json
from pathlib import Path

from harness import ARGUMENTS, MODEL, V1_URL, call_all, empty_home, json_lines, run_command

PROVIDERS = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai"}


def config(npm):
    models = {MODEL: {"name": "demo", "limit": {"context": 32768, "output": 256}}}
    provider = {"npm": npm, "options": {"baseURL": V1_URL, "apiKey": "none"}, "models": models}
    return {
        "autoupdate": False,
        "share": "disabled",
        "model": f"overture/{MODEL}",
        "small_model": f"overture/{MODEL}",
        "provider": {"overture": provider},
        "agent": {
            "short": {"mode": "primary", "prompt": "You are a helpful assistant.", "tools": {"*": False}}
        },
    }


def ask(*arguments):
    """The text of one answer, and what its last step says of it."""
    events = json_lines(run_command("opencode", "run", "--format=json", *arguments))
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "step_finish" and "error" not in kinds, events
    last = events[-1]["part"]
    assert last["reason"] in {"stop", "length"} and last["tokens"]["output"] > 0, last
    return "".join(event["part"]["text"] for event in events if event["type"] == "text"), last


def its_own_prompt():
    _, last = ask("Hello!")
    assert last["tokens"]["total"] > 5000, last


def short_prompt():
    text, _ = ask("--agent=short", "Hello!")
    assert text.strip()


def second_turn():
    ask("--agent=short", "Hello! My name is Ada.")
    text, last = ask("--agent=short", "--continue", "Who am I?")
    assert text.strip() and last["tokens"]["cache"]["read"] > 0, (text, last)


if __name__ == "__main__":
    with empty_home() as home:
        Path(home, "opencode.json").write_text(json.dumps(config(PROVIDERS[ARGUMENTS[0]])))
        call_all()
