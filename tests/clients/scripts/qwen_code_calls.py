"""`qwen`, Qwen's coding agent, by chat completions: an answer where its prompt of 30,000 tokens has room, else the server's own words."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

from harness import MODEL, V1_URL, call, empty_home, run_command

SETTINGS = {
    "security": {"auth": {"selectedType": "openai"}},
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    # One prompt of this length is enough.
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
}


def context_tokens():
    with urllib.request.urlopen(f"{V1_URL}/models/{MODEL}") as reply:
        return json.load(reply)["max_model_len"]


def ask(status):
    """The last event of one question: what came of it."""
    out = run_command("qwen", "--output-format=json", "--max-session-turns=2", "Hello!", status=status)
    events, _ = json.JSONDecoder().raw_decode(out, out.index("[{"))
    return events[-1]


def answer():
    result = ask(status=0)
    assert result["subtype"] == "success" and not result["is_error"], result
    assert result["usage"]["input_tokens"] > 10_000 and result["usage"]["output_tokens"] > 0, result["usage"]


def prompt_that_is_too_long():
    result = ask(status=1)
    assert result["is_error"] and "maximum context length is 4096 tokens" in result["error"]["message"], (
        result
    )
    assert result["num_turns"] == 1, result


if __name__ == "__main__":
    with empty_home() as home:
        os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": V1_URL, "OPENAI_MODEL": MODEL}
        Path(home, ".qwen").mkdir()
        Path(home, ".qwen", "settings.json").write_text(json.dumps(SETTINGS))
        if context_tokens() > 4096:
            call("answer", answer)
        else:
            call("prompt that is too long", prompt_that_is_too_long)
