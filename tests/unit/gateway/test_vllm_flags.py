"""vLLM's command line, as ours understands it; and docs/from-vllm.md, which says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine_bridge.settings.engine_arguments import RULED_OUT
from gateway import cli
from gateway.settings.config import SETTINGS
from gateway.settings.vllm_flags import ALWAYS, REFUSED, RENAMED, SEVERAL, FlagRefusal, translate

OWN = {setting.flag for setting in SETTINGS}
PAGE = Path(cli.__file__).parents[1] / "docs" / "from-vllm.md"
# A value of the right form for each flag that is not a switch.
VALUES = {
    "--tool-call-parser": "hermes",
    "--lora-modules": "pirate=demo/adapters/pirate",
    "--allowed-origins": '["https://a.example", "https://b.example"]',
    "--uvicorn-log-level": "warning",
    "-q": "awq",
    "--model": "demo/model",
    "--root-path": "/llm",
    "--dtype": "float32",
    "--scheduling-policy": "fcfs",
    "--speculative-config": '{"method": "ngram"}',
    "--gpu-memory-utilization": "0.5",
    "--chat-template": "demo/model/chat_template.jinja",
}
WORDS = ("--host", "--served-model-name", "--api-key", "--reasoning-parser", "--quantization")
WORDS += ("--kv-cache-dtype", "--revision", "--download-dir")
SWITCHES = ("--enforce-eager", "--trust-remote-code")
FILES = ("--ssl-certfile", "--ssl-keyfile", "--chat-template")


def rows(heading: str) -> list[tuple[list[str], list[str]]]:
    """vLLM's flags and ours, of each row of the table under a heading."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) > 3 and "`" in cells[1]:
            found.append((re.findall(r"`([^`]+)`", cells[1]), re.findall(r"`([^`]+)`", cells[2])))
    assert found
    return found


def shown(*argv: str) -> str:
    """What `overture config` says of a command line."""
    result = CliRunner().invoke(cli.cli, ["config", *argv], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_flag_of_ours_on_the_page_exists_and_takes_what_vllms_does() -> None:
    for heading in ("Flags with another name", "The same name"):
        for (theirs,), (ours,) in rows(heading):
            assert ours in OWN, ours
            value = VALUES.get(theirs, "word" if theirs in WORDS else "1")
            argv = [theirs] if theirs in SWITCHES else [theirs, value]
            if theirs in FILES:  # whose files would have to be there
                assert translate(argv, OWN) == argv
            else:
                assert f"flag {ours}\n" in shown(*argv), theirs


def test_the_page_has_every_flag_of_the_tables_and_no_other() -> None:
    renamed = {theirs: ours for (theirs,), (ours,) in rows("Flags with another name")}
    assert renamed == {**RENAMED, **SEVERAL}
    assert {flag for (flag,), _ in rows("Always so")} == ALWAYS.keys()
    refused = {flag for flags, _ in rows("Refused") for flag in flags}
    arguments = {f"--{name.replace('_', '-')}" for name in RULED_OUT}
    assert refused == REFUSED.keys() | (arguments - ALWAYS.keys())


def test_what_is_always_so_is_taken_and_what_is_refused_says_why() -> None:
    assert translate(ALWAYS, OWN) == []
    for flags, _ in rows("Refused"):
        for flag in flags:
            with pytest.raises(FlagRefusal, match=re.escape(flag)):
                translate([flag, "7"], OWN)


def test_none_of_our_own_flags_is_taken_for_vllms() -> None:
    known = {*ALWAYS, *REFUSED, *RENAMED, *SEVERAL}
    assert not known & OWN
    assert not {setting.name for setting in SETTINGS} & RULED_OUT.keys()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["m", "--max_model_len=9"], ["m", "--max-model-len=9"]),
        (
            ["--lora-modules", "a=x", "b=y", "--port", "1"],
            ["--lora-module", "a=x", "--lora-module", "b=y", "--port", "1"],
        ),
        (["--lora-modules=a=x"], ["--lora-module", "a=x"]),
        (["--allowed-origins", "https://a.example"], ["--cors-origin", "https://a.example"]),
        (["-tp", "1", "m"], ["m"]),
        (["--tensor-parallel-size=1"], []),
        (["--", "--enable-lora"], ["--", "--enable-lora"]),
        (["--something", "else"], ["--something", "else"]),
        (["--max-model-len", "32k", "m"], ["--max-model-len=32000", "m"]),
        (["--max-model-len=1.5K"], ["--max-model-len=1536"]),
        (["--max-model-len", "many"], ["--max-model-len=many"]),
        (["--allowed-methods", '["GET"]', "--port", "1"], ["--port", "1"]),
    ],
)
def test_a_line_of_vllms_becomes_one_of_ours(argv: list[str], expected: list[str]) -> None:
    assert translate(argv, OWN) == expected


def test_the_model_may_be_the_first_word() -> None:
    assert "demo/model" in shown("demo/model", "--max-num-seqs", "3")
    both = CliRunner().invoke(cli.cli, ["config", "demo/model", "--model", "other"])
    assert both.exit_code == 2 and "which model?" in both.output


def test_an_unknown_flag_is_told_the_way_for_engine_arguments() -> None:
    result = CliRunner().invoke(cli.cli, ["config", "--cpu-offload-gb", "4"])
    assert result.exit_code == 2 and "--engine-arg NAME=VALUE" in result.output
