"""`codex`, OpenAI's coding agent: `codex exec` by responses, with its own long prompt and with a short one, and a second turn."""

from __future__ import annotations

from pathlib import Path

from harness import MODEL, V1_URL, call_all, empty_home, json_lines, run_command

CONFIG = f"""
model = "{MODEL}"
model_provider = "overture"
model_context_window = 32768
check_for_update_on_startup = false
web_search = "disabled"
[analytics]
enabled = false
[model_providers.overture]
name = "Overture"
base_url = "{V1_URL}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
ONCE = ["--json", "--skip-git-repo-check"]
# With these the prompt is no longer than what the demo model was trained for, so its answers make sense.
SHORT = ["-c", 'model_instructions_file="short.md"']
SHORT += [f"--disable={name}" for name in ("shell_tool", "unified_exec", "multi_agent", "apps", "plugins")]


def execute(*arguments):
    """The text of the agent's messages and the turn's usage."""
    events = json_lines(run_command("codex", "exec", *arguments))
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "turn.completed" and not {"turn.failed", "error"} & set(kinds), events
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    return "".join(texts), events[-1]["usage"]


def its_own_prompt():
    _, usage = execute(*ONCE, "Hello!")
    assert usage["input_tokens"] > 10_000 and usage["output_tokens"] > 0, usage


def its_own_prompt_again():
    _, usage = execute(*ONCE, "Good morning!")
    assert usage["cached_input_tokens"] > 10_000, usage


def short_prompt():
    text, usage = execute(*ONCE, *SHORT, "Hello!")
    assert text.strip() and usage["input_tokens"] < 4096, (text, usage)


def second_turn():
    execute(*ONCE, *SHORT, "Hello! My name is Ada.")
    text, usage = execute("resume", "--last", *ONCE, *SHORT, "Who am I?")
    assert text.strip() and usage["cached_input_tokens"] > 1000, (text, usage)


if __name__ == "__main__":
    with empty_home() as home:
        Path(home, ".codex").mkdir()
        Path(home, ".codex", "config.toml").write_text(CONFIG)
        Path(home, "short.md").write_text("You are a helpful assistant.")
        call_all()
