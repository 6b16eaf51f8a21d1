"""No code of ours may block the event loop: a fixture that fails the test in which some does.

blockbuster makes calls that wait (files, sleep, sockets, locks, SQLite) raise where a loop runs on the same thread. Much of what
the gateway does is inside a broad `except` that would turn the error into a 500 or a line in the log, so each one is also kept and
shown at the end of the test.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from blockbuster import BlockBuster, BlockingError, blockbuster

from tests.conftest import ROOT

OURS = ("gateway", "engine_bridge")
_FOLDERS = tuple(f"{ROOT / name}/" for name in OURS)
_TESTS = f"{ROOT / 'tests'}/"
# Who may, by file and function.
ALLOWED = (
    # The settings are read before there is a loop; tests make theirs anywhere. It compares two paths.
    ("gateway/settings/config.py", ("is_demo_model",)),
    # A line of the log, to a stream that the operator chose: it is short, and the log has no order without it.
    ("logging/__init__.py", ("emit",)),
)


class Blocked:
    """Calls that blocked, with who made them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def note(self, call: str) -> None:
        ours = [
            f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack()
            if Path(frame.filename).is_relative_to(ROOT) and ".venv" not in frame.filename
        ]
        self.found.append(f"{call} from {' > '.join(ours[-4:-2])}")


@contextlib.contextmanager
def watched() -> Iterator[Blocked]:
    """Until the block ends, whatever of ours blocks a running loop gets a BlockingError, and is noted."""
    blocked = Blocked()

    class Noted(BlockingError):
        def __init__(self, call: str) -> None:
            super().__init__(call)
            blocked.note(call)

    watch = BlockBuster(list(OURS), excluded_modules=["engine_bridge.driver"])
    for function in watch.functions.values():
        function.can_block_predicate = _or_by_a_test(function.can_block_predicate)
        for file, functions in ALLOWED:
            function.can_block_in(file, functions)
    watch.activate()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blockbuster, "BlockingError", Noted)
            yield blocked
    finally:
        watch.deactivate()


def _or_by_a_test(may_block: Callable[..., bool]) -> Callable[..., bool]:
    """Also what a test does itself may block: a plain function of ours that it calls, in no coroutine of ours."""

    def may(*args: Any, **kwargs: Any) -> bool:
        return may_block(*args, **kwargs) or _is_a_tests_own()

    return may


def _is_a_tests_own() -> bool:
    frame: FrameType | None = sys._getframe(1)
    outermost: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_FOLDERS):
            outermost = frame
        frame = frame.f_back
    if outermost is None or outermost.f_code.co_flags & inspect.CO_COROUTINE:
        return False
    caller = outermost.f_back
    return caller is not None and caller.f_code.co_filename.startswith(_TESTS)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Fails the test in which code of ours blocked the event loop until the block ended."""
    with watched() as blocked:
        yield
    if blocked.found:
        pytest.fail("the event loop was blocked:\n" + "\n".join(sorted(set(blocked.found))))


@pytest.fixture(autouse=True)
def nothing_blocks() -> Iterator[None]:
    with checked():
        yield
