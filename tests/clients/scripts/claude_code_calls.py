"""`claude`, Anthropic's coding agent, by messages: answers, whole and streamed, with its own long prompt and a short one, and a second turn."""

from __future__ import annotations

import json
import os

from harness import BASE_URL, KEY, MODEL, call_all, empty_home, json_lines, run_command

SETTINGS = {
    "ANTHROPIC_BASE_URL": BASE_URL,
    "ANTHROPIC_API_KEY": KEY,
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    # One sampled answer of the demo model in some ten does not end by itself here. The command asks again after one that was cut.
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512",
}
SHORT = ["--system-prompt=You are a helpful assistant.", "--tools="]


def ask(*arguments):
    """The answer, and how many tokens of its prompts were found in the cache and how many computed."""
    said = json.loads(run_command("claude", "--print", "--output-format=json", *arguments))
    assert said["subtype"] == "success" and not said["is_error"], said
    usage = said["usage"]
    assert usage["output_tokens"] > 0, usage
    return said["result"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]


def its_own_prompt():
    _, num_found, num_computed = ask("Hello!")
    assert num_found + num_computed > 10_000, (num_found, num_computed)


def second_turn():
    _, num_found, num_computed = ask("--continue", "Who am I?")
    assert num_found > 10_000 > num_computed, (num_found, num_computed)


def short_prompt():
    text, *_ = ask(*SHORT, "Hello!")
    assert text.strip()


def short_prompt_streamed():
    flags = ["--output-format=stream-json", "--include-partial-messages", "--verbose"]
    lines = json_lines(run_command("claude", "--print", *flags, *SHORT, "Tell me about the sea."))
    events = [line["event"] for line in lines if line["type"] == "stream_event"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")
    assert len(deltas) > 1 and lines[-1]["result"] == text.strip(), (text, lines[-1])


if __name__ == "__main__":
    with empty_home():
        os.environ |= SETTINGS
        call_all()
