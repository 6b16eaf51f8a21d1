"""Logging, set up in one place: everything goes to stderr in one format, vLLM's and aiohttp's messages included.

What is never logged: keys and what users write (prompts, drafts, answers). Code keeps to that by not passing them to a logger; as a net
below it, anything that looks like a key is masked in the finished line.
"""

import logging
import os
import re
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import TextIO

_PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_PLAIN_TIME = "%Y-%m-%d %H:%M:%S"
_JSON_FIELDS = ["levelname", "name", "message"]
_JSON_NAMES = {"levelname": "level", "name": "logger"}

# Keys of ours (`ov-…`), of OpenAI's form (`sk-…`), and whatever follows "Bearer".
_KEY = re.compile(r"\b(ov-|sk-|[Bb]earer\s+)[A-Za-z0-9._~+/=-]{8,}")

# Others' loggers that tell at INFO what only a developer wants: one line per request, per file, per connection.
_CHATTY = ("aiohttp.access", "asyncio", "filelock", "httpcore", "httpx", "httpx2", "urllib3")
# These warn a dozen times at each healthy start: of packages that CPU serving does without, of their own deprecations.
_NERVOUS = ("py.warnings", "torch", "torch._library", "transformers", "vllm")


def setup(log_format: str, level: str, *, stream: TextIO | None = None) -> None:
    """Send all log messages of this process to `stream` (default: stderr). Call it once, before vLLM is imported.

    `log_format` is "plain" or "json", `level` one of "debug", "info", "warning", "error". At "info" libraries speak from
    "warning" up and the engine's from "error" up; at "debug" all of them from INFO up. `VLLM_LOGGING_LEVEL`, if set,
    holds for vLLM's part.
    """
    _quiet_vllm()
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(_json_formatter() if log_format == "json" else _Plain(_PLAIN, _PLAIN_TIME))
    ours = getattr(logging, level.upper())
    root = logging.getLogger()
    # Only our own: a second call replaces the first one's, and a test runner's handlers stay.
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(ours)
    for names, quiet in ((_CHATTY, logging.WARNING), (_NERVOUS, logging.ERROR)):
        for name in names:
            logging.getLogger(name).setLevel(logging.INFO if ours == logging.DEBUG else max(ours, quiet))
    if vllm_level := os.environ.get("VLLM_LOGGING_LEVEL"):
        logging.getLogger("vllm").setLevel(vllm_level.upper())
    logging.captureWarnings(True)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `setup` puts on the root logger."""


def _quiet_vllm() -> None:
    """Keep vLLM from adding its own handler, so that its messages come to ours. An operator's own vLLM log config stays."""
    # vLLM refuses to start with both VLLM_CONFIGURE_LOGGING=0 and a config file.
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


def _masked(line: str) -> str:
    return _KEY.sub(r"\1***", line)


class _Plain(logging.Formatter):
    """One readable line a message; a traceback follows on its own lines."""

    def format(self, record: logging.LogRecord) -> str:
        return _masked(super().format(record))


def _json_formatter() -> logging.Formatter:
    # Imported here: plain logging does without the package.
    from pythonjsonlogger.json import JsonFormatter

    class Json(JsonFormatter):
        """One JSON object a line: time (UTC, ISO 8601), level, logger, message, `exc_info` and what `extra` brought."""

        def add_fields(
            self,
            log_data: MutableMapping[str, object],
            record: logging.LogRecord,
            message_dict: MutableMapping[str, object],
        ) -> None:
            log_data["time"] = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            super().add_fields(log_data, record, message_dict)  # type: ignore[arg-type]

        def format(self, record: logging.LogRecord) -> str:
            return _masked(super().format(record))

    return Json(_JSON_FIELDS, rename_fields=_JSON_NAMES)
