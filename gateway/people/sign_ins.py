"""Signing in without a key: a link that an operator sends is good once, and gives a browser a cookie that stands for the person.

Links and cookies are 256 random bits. Only their hashes are kept, in memory and in the data folder, so they outlive a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from gateway.access.auth import KeyRing, Principal, Withdrawn
from gateway.errors import GatewayError
from gateway.people.ledger import Ledger
from gateway.sessions.connection import file_error

_T = TypeVar("_T")

COOKIE = "overture_session"
TOKEN_BYTES = 32
MAX_TOKEN_CHARS = 64
LINK_LASTS_S = 86_400.0  # Chosen: a person reads a message within a day.
SESSION_LASTS_S = 30 * 86_400.0  # Chosen: a browser in daily use is signed in anew once a month.
MAX_SESSIONS = 50  # Of one person; the oldest ends for a new one. Chosen: far above anybody's browsers.


class SignedIn(NamedTuple):
    """A browser that is signed in. expires_s: seconds since the epoch."""

    owner: str
    expires_s: float


class SignIns:
    """Links and browsers that are signed in. `principal` looks at memory alone; what changes something writes to the file, in a thread.

    Args:
        ledger: the file.
        keys: say which people there are.
        clock: seconds since the epoch.
    """

    def __init__(self, ledger: Ledger, keys: KeyRing, clock: Callable[[], float] = time.time) -> None:
        self._ledger, self._keys, self._clock = ledger, keys, clock
        # By the hash of the cookie, the oldest first.
        self._sessions: dict[str, SignedIn] = {}
        # Ended, but their open connections are not, so far.
        self._ended: list[Withdrawn] = []
        # Ended, but still in the file.
        self._unwritten: set[str] = set()

    @staticmethod
    async def open(ledger: Ledger, keys: KeyRing) -> SignIns:
        """Make the sign-ins that the file has. Raises GatewayError `storage_failed`."""
        sign_ins = SignIns(ledger, keys)
        await sign_ins.load()
        return sign_ins

    async def load(self) -> None:
        """Take over the browsers that were signed in before a restart. Raises GatewayError `storage_failed`."""
        rows = await _stored(self._ledger.browsers, self._clock())
        self._sessions = {mark: SignedIn(owner, expires_s) for mark, owner, expires_s in rows}

    def principal(self, cookie: str | None) -> Principal | None:
        """Return the person whose browser presents this cookie; None for a missing, unknown or expired cookie, or without such a person."""
        if not cookie or len(cookie) > MAX_TOKEN_CHARS or self._keys.is_open:
            return None
        mark = _mark(cookie)
        session = self._sessions.get(mark)
        if session is None or session.expires_s <= self._clock():
            return None
        return self._keys.signed_in(session.owner, _key(mark))

    async def make_link(self, owner: str) -> tuple[str, float]:
        """Return the token of a new link for a person, and until when it is good. Raises GatewayError `storage_failed`."""
        token, expires_s = secrets.token_urlsafe(TOKEN_BYTES), self._clock() + LINK_LASTS_S
        await _stored(self._ledger.add_link, _mark(token), owner, expires_s)
        return token, expires_s

    async def sign_in(self, token: str) -> tuple[str, Principal]:
        """Use up a link, and return the cookie for the browser and the person signed in.

        Raises GatewayError `unauthorized` for a link that is unknown, used or too old, or whose person was disabled; `storage_failed`.
        """
        refused = GatewayError(
            "unauthorized", "This link was used already, or is too old. Ask for another one."
        )
        if len(token) > MAX_TOKEN_CHARS:
            raise refused
        owner = await _stored(self._ledger.take_link, _mark(token), self._clock())
        if owner is None or self._keys.person(owner) is None:
            raise refused
        return await self.begin(owner)

    async def begin(self, owner: str) -> tuple[str, Principal]:
        """Return the cookie for a new browser of a person, and the person signed in.

        Raises GatewayError `unauthorized` for a disabled or removed person, `storage_failed`.
        """
        refused = GatewayError("unauthorized", "You may not sign in: the server's operator has disabled you.")
        if self._keys.person(owner) is None:
            raise refused
        cookie, expires_s = secrets.token_urlsafe(TOKEN_BYTES), self._clock() + SESSION_LASTS_S
        mark = _mark(cookie)
        own = [other for other, session in self._sessions.items() if session.owner == owner]
        await _stored(self._ledger.add_browser, mark, owner, expires_s)
        for oldest in own[: max(len(own) - MAX_SESSIONS + 1, 0)]:
            self._ended.append(self._withdrawn(oldest, owner))
            await self._drop(oldest)
        self._sessions[mark] = SignedIn(owner, expires_s)
        principal = self._keys.signed_in(owner, _key(mark))
        if principal is None:
            raise refused
        return cookie, principal

    async def sign_out(self, cookie: str) -> Withdrawn | None:
        """End a browser's sign-in, and return it, because the caller must end its open connections; None for an unknown cookie."""
        mark = _mark(cookie)
        session = self._sessions.get(mark)
        if session is None:
            return None
        await self._drop(mark)
        return self._withdrawn(mark, session.owner)

    def take_ended(self) -> list[Withdrawn]:
        """Return, once each, the sign-ins that have lasted their time or made room for newer ones, as `sign_out` does."""
        now = self._clock()
        for mark, session in [each for each in self._sessions.items() if each[1].expires_s <= now]:
            del self._sessions[mark]
            self._keys.signed_out(_key(mark))
            self._ended.append(self._withdrawn(mark, session.owner))
        ended, self._ended = self._ended, []
        return ended

    async def purge(self) -> None:
        """Remove links and browsers whose time is over from the file. Raises GatewayError `storage_failed`."""
        await self._write_ends()
        await _stored(self._ledger.drop_old, self._clock())

    async def forget(self, owner: str) -> list[Withdrawn]:
        """End all sign-ins and links of a person, and return the sign-ins, as `sign_out` does. Raises GatewayError `storage_failed`."""
        await _stored(
            self._ledger.drop_sign_ins, owner
        )  # first: where it fails, all is as it was, and may be asked again
        own = [mark for mark, session in self._sessions.items() if session.owner == owner]
        for mark in own:
            del self._sessions[mark]
            self._keys.signed_out(_key(mark))
        return [Withdrawn(_key(mark), owner, "", is_last=False) for mark in own]

    def _withdrawn(self, mark: str, owner: str) -> Withdrawn:
        person = self._keys.person(owner)
        return Withdrawn(_key(mark), owner, person.name if person else "", is_last=False)

    async def _drop(self, mark: str) -> None:
        """End a sign-in at once. Where the file cannot be written now, on a full disk, a purge takes it out of there."""
        self._sessions.pop(mark, None)
        self._keys.signed_out(_key(mark))
        self._unwritten.add(mark)
        with contextlib.suppress(GatewayError):
            await self._write_ends()

    async def _write_ends(self) -> None:
        for mark in list(self._unwritten):
            await _stored(self._ledger.drop_browser, mark)
            self._unwritten.discard(mark)


def _mark(token: str) -> str:
    return hashlib.sha256(b"overture sign-in\0" + token.encode("utf-8", "surrogatepass")).hexdigest()


def _key(mark: str) -> str:
    """Return the `Principal.key` of a browser that is signed in."""
    return f"browser {mark[:32]}"


async def _stored(work: Callable[..., _T], *args: Any) -> _T:
    try:
        return await asyncio.to_thread(work, *args)
    except sqlite3.Error as error:
        message = "Signing in does not work now. The server's log says why."
        raise file_error("sign-ins", error, message) from error
