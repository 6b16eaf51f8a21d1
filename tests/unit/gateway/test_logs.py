"""The log's two formats: one record a line, of which no text of a request and no key is a part."""

import io
import json
import logging

import pytest

from gateway.settings import logs

FORMATS = pytest.mark.parametrize("log_format", ["plain", "json"])
CONTROLS = "\\n\\r\\x1b[2J\\x00\\x85\\u2028\\u2029\\u202e"


def log(log_format: str, level: str, code: str) -> list[str]:
    """The lines that `code` logs where logging is set up so and nothing else listens."""
    root, stream = logging.getLogger(), io.StringIO()
    level_before = root.level
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(root, "handlers", [])
            patch.setattr(root.manager, "loggerDict", {})
            patch.setenv("VLLM_CONFIGURE_LOGGING", "0")
            patch.setenv("VLLM_LOGGING_LEVEL", "debug")
            logs.setup(log_format, level, stream=stream)
            exec(code, {"logging": logging})
    finally:
        logging.captureWarnings(False)
        root.setLevel(level_before)
    return stream.getvalue().splitlines()


def test_a_json_line_keeps_extras_and_tracebacks_in_one_object() -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.getLogger('gateway.x').exception('bad', extra={'turn': 7})"
    (line,) = log("json", "info", code)
    entry = json.loads(line)
    shown = (entry["level"], entry["logger"], entry["message"], entry["turn"])
    assert shown == ("ERROR", "gateway.x", "bad", 7)
    assert "ZeroDivisionError" in entry["exc_info"]
    assert entry["time"].endswith("+00:00")


@FORMATS
def test_a_field_cannot_show_a_key_forge_a_line_or_steer_a_terminal(log_format: str) -> None:
    said = f"Bearer abcdefgh123 and ov-AAAABBBBCCCC{CONTROLS}2026-01-01 ERROR gateway: forged"
    (line,) = log(log_format, "info", f"logging.getLogger('gateway').info('name: %s', '{said}')")
    assert line.isprintable() and "forged" in line and "\\n" in line
    assert "abcdefgh123" not in line and "AAAABBBBCCCC" not in line


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
    lines = log(log_format, level, code)
    assert "SECRET" not in "".join(lines)
    assert len(lines) == (1 if level == "debug" else 0)


@FORMATS
@pytest.mark.parametrize(
    "error",
    [
        "ValueError('SECRET')",
        "KeyError('SECRET')",
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


def test_asyncio_does_not_describe_tasks_and_their_arguments() -> None:
    code = (
        "import asyncio, gc\n"
        "async def fail(text): raise ValueError(text)\n"
        "async def main():\n    task = asyncio.ensure_future(fail('SEC' + 'RET'))\n    await asyncio.sleep(0)\n    del task\n    gc.collect()\n"
        "asyncio.run(main())"
    )
    text = "\n".join(log("plain", "debug", code))
    assert "never retrieved" in text and "ValueError" in text and "SECRET" not in text


@pytest.mark.parametrize(
    ("call", "left"),
    [
        ("log.error('Error with model %s', 'x' * 10_000_000)", "Error with model …"),
        ("log.error('Rejected %s for request %s.', [1, 2], 'xyz')", "for request …."),
        ("log.error(f'Failed to read: {dict(x=1)}')", "Failed to read…"),
        ("log.error('Both %(x)s and %(y)5.2f', dict(x='xyz', y=1.5))", "Both … and …"),
    ],
)
@pytest.mark.parametrize(
    "path", ["vllm/entrypoints/x.py", "vllm/v1/core/sched/x.py", "vllm/tool_parsers/x.py"]
)
def test_code_that_reads_requests_quotes_none_of_them(path: str, call: str, left: str) -> None:
    library = f"import logging\nlog = logging.getLogger('vllm.x')\n{call}"
    (line,) = log("plain", "info", f"exec(compile({library!r}, '/site-packages/{path}', 'exec'))")
    assert "xyz" not in line and "xxx" not in line and "[1" not in line and "'x'" not in line
    assert left in line


@FORMATS
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
