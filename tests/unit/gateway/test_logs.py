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
    script = f"import logging, os, warnings\nfrom gateway.settings import logs\nlogs.setup({log_format!r}, {level!r})\n{code}"
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


# -- what users write stays out --------------------------------------------------------------------------------------

FORMATS = pytest.mark.parametrize("log_format", ["plain", "json"])
CONTROLS = "\\n\\r\\x1b[2J\\x00\\x85\\u2028\\u2029\\u202e"


@FORMATS
def test_a_field_cannot_forge_a_line_or_steer_a_terminal(log_format: str) -> None:
    code = f"logging.getLogger('gateway').info('name: %s', 'x{CONTROLS}2026-01-01 ERROR gateway: forged')"
    (line,) = log(log_format, "info", code)
    assert line.isprintable() and "forged" in line and "\\n" in line


def test_a_traceback_keeps_its_lines_and_none_of_them_can_pass_for_a_message() -> None:
    code = (
        f"def f():\n    raise OSError('x{CONTROLS}2026-01-01 ERROR gateway: forged')\n"
        "try:\n    f()\nexcept OSError:\n    logging.getLogger('gateway').exception('bad')"
    )
    first, *others = log("plain", "info", code)
    assert first.endswith("gateway: bad") and len(others) >= 4
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert "in f" in "".join(others) and "OSError: x" in others[-1]


@FORMATS
@pytest.mark.parametrize("level", ["debug", "info"])
def test_others_debug_messages_are_never_logged(log_format: str, level: str) -> None:
    code = (
        "for name in ('aiosqlite', 'sqlite3', 'aiohttp.web', 'vllm.x', ''):\n"
        "    logging.getLogger(name).debug('SECRET')\n"
        "stubborn = logging.getLogger('stubborn')\nstubborn.setLevel(1)\nstubborn.debug('SECRET')\n"
        "logging.getLogger('gateway.x').debug('ours')"
    )
    lines = log(log_format, level, code, VLLM_LOGGING_LEVEL="debug")
    assert "SECRET" not in "".join(lines)
    assert len(lines) == (1 if level == "debug" else 0)


@FORMATS
@pytest.mark.parametrize(
    "error",
    [
        "ValueError('SECRET')",
        "KeyError('SECRET')",
        "TypeError('SECRET')",
        "UnicodeEncodeError('ascii', 'SECRET', 0, 1, 'SECRET')",
        "__import__('sqlite3').OperationalError('near SECRET')",
        "__import__('gateway.errors').errors.GatewayError('bad_request', 'SECRET')",
        "__import__('engine_bridge.protocol.errors').protocol.errors.InvalidRequest('SECRET')",
        "ExceptionGroup('SECRET', [ValueError('SECRET')])",
    ],
)
def test_the_text_of_an_exception_that_may_quote_a_request_is_left_out(log_format: str, error: str) -> None:
    # In two parts: from Python 3.13 on a traceback shows the line of code itself.
    raised = error.replace("SECRET", "SEC' + 'RET")
    code = (
        f"try:\n    try:\n        raise {raised}\n    except Exception as first:\n        raise OSError('disk gone') from first\n"
        "except OSError:\n    logging.getLogger('gateway').exception('bad')"
    )
    text = "\n".join(log(log_format, "debug", code))
    kind = next(part for part in error.replace("(", ".").split(".") if part[0].isupper())
    assert "SECRET" not in text and "disk gone" in text and kind in text


def test_a_runtime_error_of_the_engine_is_told_and_one_of_a_grammar_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "structured_output"
    folder.mkdir()
    (folder / "reader.py").write_text("def read(text):\n    raise RuntimeError(text)\n")
    code = (
        f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport reader\n"
        "for run in (lambda: reader.read('SEC' + 'RET'), lambda: (_ for _ in ()).throw(RuntimeError('out of memory'))):\n"
        "    try:\n        run()\n    except RuntimeError:\n        logging.getLogger('gateway').exception('bad')"
    )
    text = "\n".join(log("plain", "info", code))
    assert "SECRET" not in text and "RuntimeError: out of memory" in text


@FORMATS
def test_asyncio_does_not_describe_tasks_and_their_arguments(log_format: str) -> None:
    code = (
        "import asyncio, gc\n"
        "async def fail(text): raise ValueError(text)\n"
        "async def main():\n    task = asyncio.ensure_future(fail('SEC' + 'RET'))\n    await asyncio.sleep(0)\n    del task\n    gc.collect()\n"
        "asyncio.run(main())"
    )
    text = "\n".join(log(log_format, "debug", code))
    assert "never retrieved" in text and "ValueError" in text and "SECRET" not in text


def others(path: str, logger: str, call: str) -> str:
    """Code that logs as a file of a library's would."""
    library = f"import logging\nlog = logging.getLogger({logger!r})\n{call}"
    return f"exec(compile({library!r}, '/site-packages/{path}', 'exec'))"


@pytest.mark.parametrize("log_format", ["plain", "json"])
@pytest.mark.parametrize(
    ("call", "left"),
    [
        ("log.error('Error with model %s', 'x' * 10_000_000)", "Error with model …"),
        (
            "log.error('Unexpected: grammar rejected tokens %s for request %s.', [1, 2], 'xyz')",
            "for request ….",
        ),
        ("log.error(f'Failed to read: {dict(x=1)}')", "Failed to read…"),
        ("log.error('Both %(x)s and %(y)5.2f', dict(x='xyz', y=1.5))", "Both … and …"),
    ],
)
@pytest.mark.parametrize(
    ("path", "logger"),
    [
        ("vllm/entrypoints/openai/serving.py", "vllm.entrypoints.openai.serving"),
        ("vllm/v1/core/sched/scheduler.py", "vllm.v1.core.sched.scheduler"),
        ("vllm/tool_parsers/any.py", "vllm.tool_parsers.any"),
    ],
)
def test_code_that_reads_requests_quotes_none_of_them(
    log_format: str, path: str, logger: str, call: str, left: str
) -> None:
    (line,) = log(log_format, "info", others(path, logger, call))
    assert "xyz" not in line and "xxx" not in line and "[1" not in line and "'x'" not in line
    assert left.encode("ascii", "backslashreplace").decode() in line or left in line


def test_what_others_say_of_themselves_is_kept() -> None:
    call = "log.error('cannot load %s: %d tensors', '/models/x', 3)"
    (line,) = log("plain", "info", others("vllm/model_executor/loader.py", "vllm.loader", call))
    assert line.endswith("cannot load /models/x: 3 tensors")


@pytest.mark.parametrize("log_format", ["plain", "json"])
@pytest.mark.parametrize(
    "code",
    [
        "logging.getLogger('gateway').error('x' * 10_000_000)",
        "logging.getLogger('other').error('%s', 'x' * 10_000_000)",
        "try:\n    raise OSError('x' * 10_000_000)\nexcept OSError:\n    logging.exception('bad')",
        "def a(n):\n    return b(n - 1) if n else 1 / 0\ndef b(n):\n    return a(n - 1) if n else 1 / 0\n"
        "try:\n    a(900)\nexcept ZeroDivisionError:\n    logging.exception('bad')",
        "logging.warning('x', stack_info=True)",
        "logging.getLogger('other').error('%d of these', 'x' * 10_000_000)",
    ],
    ids=["ours", "others", "exception", "traceback", "stack", "misfit"],
)
def test_no_record_is_longer_than_a_person_reads(log_format: str, code: str) -> None:
    lines = log(log_format, "info", code)
    assert 1 <= len(lines) <= 220
    assert sum(len(line) for line in lines) < 40_000


def test_the_ends_of_a_long_traceback_are_kept() -> None:
    code = (
        "def a(n):\n    return b(n - 1) if n else 1 / 0\ndef b(n):\n    return a(n - 1) if n else 1 / 0\n"
        "try:\n    a(900)\nexcept ZeroDivisionError:\n    logging.exception('bad')"
    )
    lines = log("plain", "info", code)
    assert "Traceback" in lines[1] and "ZeroDivisionError" in lines[-1]
    assert any("lines more" in line for line in lines)
