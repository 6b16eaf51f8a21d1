"""Logging, set up in one place: everything goes to stderr in one format, vLLM's and aiohttp's messages included.

At no level are keys logged, or texts that users write (prompts, drafts, answers, titles, searches, names and ids that they choose). Our code
never passes them to a logger. From other packages we drop everything that could hold them: debug messages (aiosqlite's are the statements with
all their values), the texts of exceptions (a parser quotes what it cannot read), descriptions of objects, and messages of code that reads
requests. As a last resort, anything that looks like a key is masked in the finished line. Records are cut to a length that a person reads.
"""

import contextlib
import copy
import logging
import os
import re
import sqlite3
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from engine_bridge.protocol.errors import SeamMoved
from gateway.errors import GatewayError, StartupError

_PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_PLAIN_TIME = "%Y-%m-%d %H:%M:%S"
_JSON_FIELDS = ["levelname", "name", "message"]
_JSON_NAMES = {"levelname": "level", "name": "logger"}

# Keys of ours (`ov-…`), of OpenAI's form (`sk-…`), and whatever follows "Bearer".
_KEY = re.compile(r"\b(ov-|sk-|[Bb]earer\s+)[A-Za-z0-9._~+/=-]{8,}")

# What may not stand in a line as it is: control characters (C0, DEL, C1), Unicode's line ends, and its marks that turn the direction of writing.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_ARE_OURS = ContextVar("exceptions' texts are not a request's", default=False)
_OURS = ("gateway", "engine_bridge", "kvtiers", "bench")
# Exceptions whose texts come from the system or from us, for the operator.
_SAFE = (OSError, ImportError, MemoryError, StartupError, SeamMoved)
# Parts of file names of code that reads what clients send: RuntimeErrors from there may quote it (grammars, templates).
_READERS = (
    "structured_output",
    "/entrypoints/",
    "/renderers/",
    "/tokenizers/",
    "/jinja2/",
    "/pydantic/",
    "/aiohttp/",
)

# Of code whose log calls may quote a request, too: what stands in the places of their texts is left out.
_QUOTERS = (
    *_READERS,
    "/tool_parsers/",
    "/reasoning/",
    "/vllm/parser/",
    "/vllm/multimodal/",
    "/vllm/inputs/",
    "/core/sched/",
    "/mcp/",
)
# Of a record: characters of its message and of an exception's text, lines of a traceback. Chosen: what a person reads; a log of records of any length
# fills the disk at a client's will.
MAX_MESSAGE_CHARS, MAX_ERROR_CHARS, MAX_TRACEBACK_LINES = 4096, 1024, 200
# Placeholders of `%` and of `str.format`.
_PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[-#0 +]*[\d*]*(?:\.[\d*]+)?[a-zA-Z]|\{[^{}]*\}")
# The place in a finished message from which on it may quote a request.
_QUOTED = re.compile(r"[:'\"`{\[(<].*", re.DOTALL)

# Others' loggers that tell at INFO what only a developer wants: one line per request, per file, per connection.
# `client` is a logger of mcp's, too.
_CHATTY = ("aiohttp.access", "asyncio", "client", "filelock", "httpcore", "httpx", "httpx2", "mcp", "urllib3")
# These warn a dozen times at each healthy start: of packages that CPU serving does without, of their own deprecations.
_NERVOUS = ("py.warnings", "torch", "torch._library", "transformers", "vllm")


def setup(log_format: str, level: str, *, stream: TextIO | None = None) -> None:
    """Send all log messages of this process to `stream` (default: stderr). Call it once, before vLLM is imported.

    `log_format` is "plain" or "json", `level` one of "debug", "info", "warning", "error". At "info" libraries log from "warning" up and the
    engine from "error" up; at "debug" all of them from INFO up. `VLLM_LOGGING_LEVEL`, if set, holds for vLLM's part, from INFO up.
    """
    _quiet_vllm()
    handler = _Handler(stream or sys.stderr)
    handler.addFilter(_is_fit_to_log)
    handler.setFormatter(_json_formatter() if log_format == "json" else _Plain(_PLAIN, _PLAIN_TIME))
    ours = getattr(logging, level.upper())
    root = logging.getLogger()
    # Only our own: a second call replaces the first one's, and a test runner's handlers stay.
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    # Others' debug messages are not even made.
    root.setLevel(max(ours, logging.INFO))
    for name in _OURS:
        logging.getLogger(name).setLevel(ours)
    for names, quiet in ((_CHATTY, logging.WARNING), (_NERVOUS, logging.ERROR)):
        for name in names:
            logging.getLogger(name).setLevel(logging.INFO if ours == logging.DEBUG else max(ours, quiet))
    if vllm_level := os.environ.get("VLLM_LOGGING_LEVEL"):
        logging.getLogger("vllm").setLevel(vllm_level.upper())
    logging.captureWarnings(True)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `setup` puts on the root logger."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record, its message cleaned and cut."""
        record = copy.copy(record)
        record.msg, record.args = _cut(_said(record), MAX_MESSAGE_CHARS), None
        return super().format(record)


def _said(record: logging.LogRecord) -> str:
    """Return a record's message, without the parts in which other packages may quote a request."""
    is_ours = record.name.partition(".")[0] in _OURS
    if not is_ours and any(part in record.pathname for part in _QUOTERS):
        template = str(record.msg)[:MAX_MESSAGE_CHARS]
        return _PLACEHOLDER.sub("…", template) if record.args else _QUOTED.sub("…", template)
    try:
        said = record.getMessage()
    except (TypeError, ValueError, KeyError):  # Python's own way would be to print all of its arguments
        return f"{record.msg} (what belongs into this text does not fit)"
    # asyncio describes tasks, callbacks and their arguments.
    return _without_objects(said) if record.name == "asyncio" else said


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} characters more)"


def _fewer(lines: list[str]) -> list[str]:
    """Shorten a traceback to its first and last lines."""
    num_left_out = len(lines) - MAX_TRACEBACK_LINES
    if num_left_out <= 0:
        return lines
    half = MAX_TRACEBACK_LINES // 2
    return [*lines[:half], f"… ({num_left_out:,} lines more)", *lines[-half:]]


def _is_fit_to_log(record: logging.LogRecord) -> bool:
    """Return whether a record may be logged: debug messages of other packages may not, even if a library has set its own level."""
    return record.levelno >= logging.INFO or record.name.partition(".")[0] in _OURS


def _quiet_vllm() -> None:
    """Keep vLLM from adding its own handler, so that its messages come to ours. An operator's own vLLM log config stays."""
    # vLLM refuses to start with both VLLM_CONFIGURE_LOGGING=0 and a config file.
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


def _without_objects(text: str) -> str:
    """Remove everything from the first "<" to the last ">", because descriptions of objects contain others."""
    before, _, rest = text.partition("<")
    _, end, after = rest.rpartition(">")
    return f"{before}<…>{after}" if end else text


def _masked(line: str) -> str:
    return _KEY.sub(r"\1***", line)


def _escaped(text: str) -> str:
    """Return the text on one line: characters that end lines, control terminals or change the direction of writing are spelled out."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def texts_are_ours() -> Iterator[None]:
    """Let records of this context have the texts of all exceptions: they are of the engine's start, and quote no request."""
    token = _ARE_OURS.set(True)
    try:
        yield
    finally:
        _ARE_OURS.reset(token)


def _told(error: BaseException) -> str:
    """Return what may be logged of an exception: its kind, and its text if that comes from the system, the engine or the operator."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(error, sqlite3.Error):
        return f"{name}: {getattr(error, 'sqlite_errorname', 'no error of SQLite itself')}"
    if isinstance(error, GatewayError) and not isinstance(error, StartupError):
        return f"{name}: {error.code}"
    is_safe = (
        _ARE_OURS.get()
        or isinstance(error, _SAFE)
        or (isinstance(error, RuntimeError) and not _reads_requests(error))
    )
    return (
        f"{name}: {_escaped(_cut(str(error), MAX_ERROR_CHARS))}"
        if is_safe
        else f"{name} (its text may quote a request: not logged)"
    )


def _reads_requests(error: BaseException) -> bool:
    """Return whether the record is of code that parses requests, and may quote one."""
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(part in name for name in frames for part in _READERS)


def _traceback(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Yield the lines of a traceback as Python prints them, with `_told` in place of the texts."""
    seen.add(id(error))
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None and id(earlier) not in seen:
        yield from _traceback(earlier, seen)
        yield "It led to:" if error.__cause__ is not None else "While this was handled:"
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):"
        for entry in traceback.format_tb(error.__traceback__):
            yield from entry.splitlines()
    yield _told(error)
    for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        if id(part) not in seen:
            yield from (f"  {line}" for line in _traceback(part, seen))


class _TextFree(logging.Formatter):
    """Formats exceptions without their texts; see `_told`."""

    def formatException(self, ei: Any) -> str:
        """Format a traceback without texts; only the error for a client's mistake."""
        # For a client's mistake the place in aiohttp is of no use. Compared by name, since logging is set up before aiohttp is loaded.
        if type(ei[1]).__module__ == "aiohttp.http_exceptions":
            return _told(ei[1])
        return "\n".join(_fewer(list(_traceback(ei[1], set())))) if ei[1] is not None else ""

    def formatStack(self, stack_info: str) -> str:
        """Format a stack, shortened."""
        return "\n".join(_fewer(stack_info.split("\n")))


class _Plain(_TextFree):
    """One readable line a message.

    A traceback follows on its own lines, indented, so that it cannot pass for a message.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, with its traceback below."""
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [_escaped(self.formatMessage(record).rstrip())]
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        if record.stack_info:
            lines += self.formatStack(record.stack_info).split("\n")
        return _masked("\n    ".join(lines))


def _json_formatter() -> logging.Formatter:
    # Imported here: plain logging does without the package.
    from pythonjsonlogger.json import JsonFormatter

    class Json(_TextFree, JsonFormatter):
        """One JSON object a line: time (UTC, ISO 8601), level, logger, message, `exc_info` and what `extra` brought."""

        def add_fields(
            self,
            log_data: MutableMapping[str, object],
            record: logging.LogRecord,
            message_dict: MutableMapping[str, object],
        ) -> None:
            """Add the time in UTC."""
            log_data["time"] = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            super().add_fields(log_data, record, message_dict)  # type: ignore[arg-type]

        def format(self, record: logging.LogRecord) -> str:
            """Format a record as JSON, with keys masked."""
            return _masked(super().format(record))

    return Json(_JSON_FIELDS, rename_fields=_JSON_NAMES)
