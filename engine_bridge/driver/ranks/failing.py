"""Why a rank cannot start: its process tells the engine's, which would else hear that a rank has ended, and not why."""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from engine_bridge.driver.engine.errors_text import said_by

TELL = "OVERTURE_RANKS_TELL"
"""The variable that has the path where ranks write why they cannot start."""
_NAME = "overture-ranks-told"
# Of a rank's stack, in the engine's log. Chosen.
_MAX_STACK_CHARS = 20_000

Returned = TypeVar("Returned")


class RankFailed(RuntimeError):
    """A rank could not start. The text is what its error says, as `said_by` has it, and the note is the rank's stack.

    Args:
        kinds: the names of the error's classes.
    """

    def __init__(self, said: str, kinds: frozenset[str] = frozenset()) -> None:
        super().__init__(said)
        self.kinds = kinds


class Notes:
    """A file without a name, in which ranks write why they cannot start. `close` it."""

    def __init__(self) -> None:
        self._file = os.memfd_create(_NAME)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def first(self) -> RankFailed | None:
        """Return what the first rank has written; None where none has. The others may have failed as they lost the first."""
        size = os.fstat(self._file).st_size
        lines = os.pread(self._file, size, 0).splitlines()
        if not lines:
            return None
        told = json.loads(lines[0])
        failed = RankFailed(told["said"], frozenset(told["kinds"]))
        failed.add_note(told["stack"])
        return failed

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def telling(method: Callable[..., Returned]) -> Callable[..., Returned]:
    """Have an error of this method, by which a rank starts, end the rank once the engine's process is told of it.

    vLLM would log its stack for each rank and each try to start. Where the engine's process cannot be told, it does.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Returned:
        """Call the method."""
        try:
            return method(*args, **kwargs)
        except Exception as error:
            if not _is_told(error):
                raise
            raise SystemExit(1) from error

    return call


def _is_told(error: Exception) -> bool:
    """Tell the engine's process of an error. Returns whether that has worked."""
    told = {
        "said": said_by(error),
        "kinds": [kind.__name__ for kind in type(error).__mro__],
        "stack": "".join(traceback.format_exception(error))[-_MAX_STACK_CHARS:],
    }
    with suppress(OSError, KeyError):
        notes = os.open(os.environ[TELL], os.O_WRONLY | os.O_APPEND)
        try:
            if not os.readlink(f"/proc/self/fd/{notes}").startswith(f"/memfd:{_NAME}"):
                return False  # the engine's process has let go of it, and has another file under that number
            line = json.dumps(told).encode() + b"\n"
            return os.write(notes, line) == len(line)
        finally:
            os.close(notes)
    return False
