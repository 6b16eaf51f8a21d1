"""The audit log `audit.jsonl` in the data folder: who did what, when and from where. It holds no texts and no keys.

A line is one JSON object: `at` (UTC), `what` (a name of WHATS), `who` (a name; `owner` beside it where a key told it), `from` (an address, or
`command line`), and what was concerned: `whom`, `whom_owner`, `key` (as `overture keys list` shows it) or `about`.
"""

from __future__ import annotations

import asyncio
import errno
import getpass
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from gateway.access.rates import Rates

log = logging.getLogger(__name__)

NAME = "audit.jsonl"
COMMAND_LINE = "command line"
What = Literal[
    "person_added",
    "person_disabled",
    "person_enabled",
    "person_limited",
    "person_erased",
    "person_exported",
    "key_added",
    "key_replaced",
    "key_revoked",
    "keys_read",
    "link_made",
    "signed_in",
    "signed_out",
    "sign_ins_ended",
    "sign_in_refused",
    "operator_action",
]
# Refused sign-ins that are written: of one address and of all, a burst and the rate after it. Chosen: guessing must not fill the disk, and one
# line a minute still shows that guessing continues. Refusals in between are counted in the next line.
REFUSED_BURST, REFUSED_PER_S = 5, 1 / 60
REFUSED_BURST_OF_ALL, REFUSED_PER_S_OF_ALL = 100, 0.5
MAX_WAITING = 10_000  # Chosen: lines that wait for a slow disk, some MB of them.


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, rename={"place": "from"}):
    """One line. num_more: entries of the same kind that were left out before it."""

    what: What
    at: str = ""
    who: str = ""
    owner: str = ""
    place: str = ""
    whom: str = ""
    whom_owner: str = ""
    key: str = ""
    about: str = ""
    num_more: int = 0


def stamp(now: float) -> str:
    """Return a time, in seconds since the epoch, as it stands in the log."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))


def append(path: Path, entries: deque[Entry]) -> None:
    """Write entries behind the others, and take the written ones off the queue. The file is for its owner only. This blocks. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        folder, mine = path.parent.stat(), os.fstat(fd)
        if os.geteuid() == 0 and mine.st_uid != folder.st_uid:
            os.fchown(fd, folder.st_uid, folder.st_gid)  # root's command must not lock the server out
        mend = b"\n" if mine.st_size and not _ends_whole(path) else b""
        while entries:
            line = mend + msgspec.json.encode(entries[0]) + b"\n"
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            entries.popleft()
            mend = b""
    finally:
        os.close(fd)


def _ends_whole(path: Path) -> bool:
    """Return whether the last line was written to its end: not where the disk became full, or the machine went down, in its middle."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def note_command(
    data_dir: Path, what: What, *, whom: str, whom_owner: str, key: str = "", about: str = ""
) -> None:
    """Write what a command did, where there is a data folder. This blocks. A log that cannot be written is said in the log on stderr."""
    try:
        who = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        who = f"uid {os.getuid()}"
    entry = Entry(
        what=what,
        at=stamp(time.time()),
        who=who,
        place=COMMAND_LINE,
        whom=whom,
        whom_owner=whom_owner,
        key=key,
        about=about,
    )
    try:
        if data_dir.is_dir():
            append(data_dir / NAME, deque([entry]))
    except OSError as error:
        log.warning("the audit log in %s cannot be written: %s", data_dir, error.strerror)


class AuditLog:
    """The log of a running server. `note` costs nothing; `keep_writing` writes, in a thread.

    Args:
        path: the file.
        clock: seconds since the epoch.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._waiting: deque[Entry] = deque()
        self._has_more = asyncio.Event()
        self._is_writing = asyncio.Lock()
        self._refused = Rates(REFUSED_PER_S, REFUSED_BURST)
        self._refused_of_all = Rates(REFUSED_PER_S_OF_ALL, REFUSED_BURST_OF_ALL)
        self._num_left_out = 0
        self._has_failed = False

    def note(self, entry: Entry) -> None:
        """Have an entry written soon, with the time of now."""
        if len(self._waiting) >= MAX_WAITING:
            self._num_left_out += 1
            return
        entry = msgspec.structs.replace(entry, at=stamp(self._clock()), num_more=self._num_left_out)
        self._num_left_out = 0
        self._waiting.append(entry)
        self._has_more.set()

    def refused(self, address: str, about: str) -> None:
        """Note a refused sign-in from an address, unless there were too many lately; those are counted."""
        now = self._clock()
        if self._refused.wait_s(address, now) or self._refused_of_all.wait_s("", now):
            self._num_left_out += 1
            return
        self._refused.take(address, now)
        self._refused_of_all.take("", now)
        self.note(Entry(what="sign_in_refused", place=address, about=about))

    async def keep_writing(self) -> None:
        """Run until cancelled: write entries as they come."""
        while True:
            await self._has_more.wait()
            await self.write()

    async def write(self) -> None:
        """Return when all entries noted so far stand in the file, also those that another call is writing.

        Where the file cannot be written they wait for the next ones, and the server's log says so once.
        """
        async with self._is_writing:
            self._has_more.clear()
            entries, self._waiting = self._waiting, deque()
            if not entries:
                return
            try:
                await asyncio.to_thread(append, self._path, entries)
                self._has_failed = False
            except OSError as error:
                self._waiting = entries + self._waiting
                if not self._has_failed:
                    log.error("the audit log %s cannot be written: %s", self._path, error.strerror)
                self._has_failed = True
