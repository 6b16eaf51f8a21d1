"""The log's two formats. Set up in a fresh interpreter each time, since it changes the whole process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def log(log_format: str, level: str, code: str, **environ: str) -> list[str]:
    """The lines on stderr after `code` ran with logging set up."""
    script = f"import logging, os, warnings\nfrom gateway import logs\nlogs.setup({log_format!r}, {level!r})\n{code}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean | environ,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_plain_line_has_time_level_and_logger() -> None:
    (line,) = log("plain", "info", "logging.getLogger('gateway.x').info('hello %s', 'there')")
    assert line.endswith("INFO    gateway.x: hello there")


def test_a_json_line_keeps_extras_and_tracebacks_in_one_object() -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.getLogger('gateway.x').exception('bad', extra={'turn': 7})"
    (line,) = log("json", "info", code)
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"], entry["turn"]) == (
        "ERROR",
        "gateway.x",
        "bad",
        7,
    )
    assert "ZeroDivisionError" in entry["exc_info"]
    assert entry["time"].endswith("+00:00")


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_keys_are_masked_even_if_somebody_logs_them(log_format: str) -> None:
    (line,) = log(log_format, "info", "logging.warning('Bearer abcdefgh123 and ov-AAAABBBBCCCC')")
    assert "abcdefgh123" not in line and "AAAABBBBCCCC" not in line


@pytest.mark.parametrize(("library", "num_quiet"), [("httpx", 2), ("vllm.engine", 1)])
def test_libraries_say_little_unless_debugging(library: str, num_quiet: int) -> None:
    code = "\n".join(f"logging.getLogger({library!r}).{level}('x')" for level in ("info", "warning", "error"))
    assert len(log("plain", "info", code)) == num_quiet
    assert len(log("plain", "debug", code)) == 3


def test_the_level_of_vllm_can_be_set_apart() -> None:
    assert (
        len(log("plain", "info", "logging.getLogger('vllm.engine').info('x')", VLLM_LOGGING_LEVEL="info"))
        == 1
    )


def test_vllm_is_kept_from_adding_its_own_handler_unless_it_has_its_own_config() -> None:
    code = "logging.warning(os.environ.get('VLLM_CONFIGURE_LOGGING'))"
    assert log("plain", "info", code)[0].endswith("root: 0")
    assert log("plain", "info", code, VLLM_LOGGING_CONFIG_PATH="x.json")[0].endswith("root: None")


def test_python_warnings_go_to_the_log() -> None:
    assert "py.warnings" in log("plain", "debug", "warnings.warn('old')")[0]


def test_a_second_setup_replaces_the_first() -> None:
    assert len(log("plain", "info", "logs.setup('plain', 'info'); logging.warning('once')")) == 1
