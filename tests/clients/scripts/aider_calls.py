"""`aider`, a coding agent, by chat completions: answers, streamed and whole, and what it says of a prompt that is too long."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from harness import MODEL, V1_URL, call_all, empty_home, run_command

FLAGS = f"""--model=openai/{MODEL} --no-git --yes-always --no-check-update --analytics-disable --no-show-model-warnings --no-pretty
--no-show-release-notes --no-gitignore --edit-format=ask --map-tokens=0 --no-detect-urls --no-suggest-shell-commands
--model-settings-file=settings.yml --no-fancy-input""".split()


def ask(*arguments, message="Hello!"):
    """The answer: what stands between aider's own first lines and its count of tokens."""
    out = run_command("aider", *FLAGS, *arguments, "--message", message)
    found = re.search(
        r"^Repo-map: disabled\n(?:Added .*?\n)?(.*)^Tokens: \S+ sent, \S+ received",
        out,
        re.DOTALL | re.MULTILINE,
    )
    assert found and "Error" not in out, out
    return found[1].strip()


def streamed():
    assert ask("--stream")


def whole():
    assert ask("--no-stream")


def edit():
    """A file and the format in which aider asks for whole files: the demo model changes nothing, but the turn ends well."""
    Path("hello.py").write_text("print('hello')\n")
    assert ask("--no-stream", "--edit-format=whole", "hello.py", message="Say good day instead.")


def prompt_that_is_too_long():
    Path("words.txt").write_text("word " * 6000)
    out = run_command("aider", *FLAGS, "--read=words.txt", "--message=Hello!")
    assert "has hit a token limit!" in out, out


if __name__ == "__main__":
    with empty_home() as home:
        os.environ |= {"OPENAI_API_KEY": "none", "OPENAI_API_BASE": V1_URL}
        settings = [{"name": f"openai/{MODEL}", "extra_params": {"max_tokens": 64}}]
        Path(home, "settings.yml").write_text(json.dumps(settings))  # JSON is YAML
        # Aider knows the model's limits from a table that it would fetch from the network once a day.
        limits = {"max_input_tokens": 4096, "max_output_tokens": 64}
        known = {f"openai/{MODEL}": limits | {"litellm_provider": "openai", "mode": "chat"}}
        Path(home, ".aider", "caches").mkdir(parents=True)
        Path(home, ".aider", "caches", "model_prices_and_context_window.json").write_text(json.dumps(known))
        call_all()
