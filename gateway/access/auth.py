"""API keys: which owner a request belongs to, decided from a key that is never kept.

A key is 256 random bits, so one SHA-256 protects it: stretching (scrypt, argon2) helps only keys that can be guessed, and would cost every
request tens of milliseconds. Each stored hash has its own salt, so that equal hashes do not show and a key that a person made up is not in a
precomputed table.

However many keys a file has, one hash finds a key in it: the salt of a line begins with the first characters of its key, by which the line is
looked up. Those characters say nothing of the 208 bits that follow them. Lines that earlier versions made have random salts alone.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from gateway.access.key_file import (
    ID_CHARS,
    KEY_PREFIX,
    SALT_BYTES,
    KeyLine,
    digest_of,
    key_bytes,
    limits_of,
    owner_of,
    read_key_file,
)
from gateway.access.person_limits import SERVERS, PersonLimits
from gateway.errors import GatewayError, StartupError

logger = logging.getLogger(__name__)

KEY_BYTES = 32  # 256 bits: out of reach of guessing, whatever the hash.
MAX_KEY_CHARS = 512  # Chosen: far above any real key, low enough that hashing a made-up one costs nothing.
# Lines without an id with which any key is compared. Chosen: 0.1 ms; for more of them see `KeyRing.authenticate`.
MAX_COMPARED = 64
MIN_KEY_CHARS = 16  # Chosen: below this a made-up key can be guessed; we warn, since the operator may be trying things out.


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key.

    owner: the person's id, which conversations, KV and budgets belong to; it stays when the key is replaced. name: for people and logs.
    weight: its share against others. is_operator: may see and change what concerns everybody (see `KeyRing.is_operator`). key: tells the person's
    keys apart; it is not the key, and "" where no keys are asked for.
    """

    owner: str
    name: str
    weight: float = 1.0
    is_operator: bool = False
    key: str = field(default="", compare=False)


LOCAL = Principal(owner="local", name="local")


def tenant_of(owner: str) -> str:
    """Return the tenant whose KV an owner's requests share: the owner itself, or "" for everybody where no keys are asked for."""
    return "" if owner == LOCAL.owner else owner


class Withdrawn(NamedTuple):
    """A key that was in use and is accepted no more. key: as `Principal.key`. is_last: its person has no other key that is accepted."""

    key: str
    owner: str
    name: str
    is_last: bool


class _Lines:
    """The lines of a key file, found by the first characters of their keys."""

    def __init__(self, entries: Iterable[KeyLine]) -> None:
        self._by_id: dict[bytes, list[KeyLine]] = {}
        self.without_id: list[KeyLine] = []
        for entry in entries:
            if not entry.digest:
                continue
            own = self.without_id if entry.id is None else self._by_id.setdefault(entry.id, [])
            own.append(entry)

    def matching(self, presented: bytes, *, with_all: bool) -> list[KeyLine]:
        """Return the line that a key matches.

        with_all: compare the key with each line without an id as well, so that the time taken does not tell which line it was.
        """
        near = self._by_id.get(presented[:ID_CHARS], [])
        return [entry for entry in near + (self.without_id if with_all else []) if entry.is_of(presented)]


def generate_key() -> str:
    """Return a new random key, to be shown once to the person who will use it."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def extract_key(headers: Mapping[str, str]) -> str | None:
    """Return the key that a request's headers present; None without one.

    ``Authorization: Bearer KEY`` (OpenAI clients) goes before ``x-api-key`` (Anthropic clients). headers: a mapping that ignores case, as
    aiohttp's is.
    """
    scheme, _, credentials = headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("X-Api-Key", "").strip() or None


class KeyRing:
    """The keys that this server accepts. Without any, everybody is ``local``.

    Args:
        keys, operator_keys: in plain text, from flags, environment or configuration; only their hashes are kept.
        key_file: a file of `KeyLine` lines, blank lines and ``#`` comments; it may be read again (`read`, `take_over`).
        weights: shares by the names of keys; 1 for all others.

    Raises:
        StartupError: a key is empty, or the key file cannot be read, has a malformed line or no key at all: a mistake there must not open the
            server to everybody.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        *,
        operator_keys: Iterable[str] = (),
        key_file: Path | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        salt = secrets.token_bytes(SALT_BYTES)
        self._given = [_hashed(key, salt) for key in keys]
        self._given += [replace(_hashed(key, salt), is_operator=True) for key in operator_keys]
        self._given_salt = salt
        self._key_file = key_file
        # The line by which each key was let in, by `Principal.key`, because an owner may be known only from a key.
        self._known: dict[str, KeyLine] = {}
        self._use(self.read())
        # The keys among them that the present lines have let in.
        self._let_in: set[str] = set()
        # The owners of browsers that are signed in and were seen, by `Principal.key`.
        self._browsers: dict[str, str] = {}
        if key_file is not None:
            _warn_of_readers(key_file)
        self._weights = dict(weights or {})
        unknown = self._weights.keys() - {entry.name for entry in self._entries}
        if unknown:
            logger.warning("tenant_weights: there is no key named %s", ", ".join(sorted(unknown)))

    def __repr__(self) -> str:
        return f"KeyRing(num_keys={len(self._entries)})"

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._entries

    @property
    def has_operator(self) -> bool:
        """Whether some key that is accepted is an operator's."""
        return any(entry.is_operator and _is_accepted(entry) for entry in self._entries)

    def is_operator(self, principal: Principal) -> bool:
        """Return whether this person may see and change what concerns everybody: the holder of an operator's key; without keys, everybody."""
        return self.is_open or principal.is_operator

    def authenticate(self, presented: str | None, *, may_take_long: bool = True) -> Principal:
        """Return the holder of this key (None: no key was presented).

        Args:
            presented: the key, as the client sent it.
            may_take_long: if the key file has more than MAX_COMPARED lines without an id, compare a key that was not seen yet with all of them,
                which takes a microsecond for each; otherwise such a key is wrong unless its line has an id.

        Raises:
            GatewayError: `unauthorized` for a missing or wrong key.
        """
        if self.is_open:
            return LOCAL
        if not presented:
            raise GatewayError(
                "unauthorized",
                "This server asks for an API key: send it as 'Authorization: Bearer KEY'. Commands take it by --api-key or OVERTURE_API_KEY.",
            )
        key, entry = self._find(presented, may_take_long) if len(presented) <= MAX_KEY_CHARS else ("", None)
        if entry is None:
            raise GatewayError("unauthorized", "This server does not know this API key.")
        if entry.is_disabled:
            raise GatewayError(
                "unauthorized", "This API key is disabled. The server's operator can enable it."
            )
        self._known[key] = entry
        self._let_in.add(key)
        if not entry.owner:
            self._limits[key] = entry.limits
        return self._principal(key, entry)

    def current(self, principal: Principal) -> Principal:
        """Return the principal as the keys are now. Raises GatewayError `unauthorized` if the key was withdrawn meanwhile."""
        if self.is_open:
            return principal
        if principal.key in self._browsers:
            signed_in = self.signed_in(principal.owner, principal.key)
            if signed_in is None:
                raise withdrawn()
            return signed_in
        entry = self._known.get(principal.key)
        if entry is None:
            raise withdrawn()
        return self._principal(principal.key, entry)

    def person(self, owner: str) -> Principal | None:
        """Return a person by owner id, as lines that name their owner have it; None if there is none, or the person is disabled."""
        lines = [line for line in self._by_owner.get(owner, ()) if not line.is_disabled]
        if not lines:
            return None
        weight = self._weights.get(lines[0].name, 1.0)
        return Principal(owner, lines[0].name, weight, any(line.is_operator for line in lines))

    def signed_in(self, owner: str, key: str) -> Principal | None:
        """Return the person of a browser that is signed in, as `person` does. key: tells the browser apart."""
        person = self.person(owner)
        if person is None:
            return None
        self._browsers[key] = owner
        return replace(person, key=key)

    def signed_out(self, key: str) -> None:
        """Note that a browser is signed in no more."""
        self._browsers.pop(key, None)

    def people(self) -> dict[str, str]:
        """Return the names of all people whose owner id is known, by that id: from the key file, and from keys that were used."""
        named = {owner: lines[0].name for owner, lines in self._by_owner.items()}
        return {_owner(key, entry): entry.name for key, entry in self._known.items()} | named

    def limits_of(self, owner: str) -> PersonLimits:
        """Return the limits that an operator has set for a person. It may be called from any thread."""
        return self._limits.get(owner, SERVERS)

    def owners_named(self, name: str) -> list[str]:
        """Return the owner ids of the people of this name, as far as lines name them."""
        return [owner for owner, lines in self._by_owner.items() if lines[0].name == name]

    def name_of(self, owner: str) -> str:
        """Return the name of a person by owner id; the id itself where no line names its owner so."""
        lines = self._by_owner.get(owner) or [
            line for key, line in self._known.items() if _owner(key, line) == owner
        ]
        return lines[0].name if lines else owner

    def owners_by_line(self) -> dict[str, tuple[str, str]]:
        """Return the owner and name of each line whose key was used, by `KeyLine.mark`, as far as the line itself does not name its owner."""
        return {line.mark: (key, line.name) for key, line in self._known.items() if not line.owner}

    def read(self) -> list[KeyLine]:
        """Return all keys as the file has them now, and change nothing. This reads a file: not for the event loop. Raises StartupError."""
        return self._given + (read_key_file(self._key_file) if self._key_file is not None else [])

    def take_over(self, entries: list[KeyLine]) -> frozenset[Withdrawn]:
        """Accept the entries that `read` returned from now on, and return the keys in use that are accepted no more.

        Those are keys whose line was removed or disabled, or whose line names another owner now.
        """
        kept = {(entry.salt, entry.digest): entry for entry in entries if _is_accepted(entry)}
        before, self._known = self._known, {}
        for key, entry in before.items():
            now = kept.get((entry.salt, entry.digest))
            if now is not None and _owner(key, now) == _owner(key, entry):
                self._known[key] = now
        self._use(entries)
        self._let_in = set()  # a key may stand on other lines now, as an operator's perhaps
        left = {entry.owner for entry in kept.values()} | {_owner(*known) for known in self._known.items()}
        shut_out = {key: owner for key, owner in self._browsers.items() if self.person(owner) is None}
        self._browsers = {key: owner for key, owner in self._browsers.items() if key not in shut_out}
        left |= set(self._browsers.values())
        lost = [
            (key, _owner(key, entry), entry.name) for key, entry in before.items() if key not in self._known
        ]
        lost += [(key, owner, "") for key, owner in shut_out.items()]
        return frozenset(Withdrawn(key, owner, name, owner not in left) for key, owner, name in lost)

    def changes(self, entries: list[KeyLine]) -> list[str]:
        """Return in words what the entries that `read` returned change: a name, the key's first characters, and how. No key shows."""
        before = {(line.name, line.mark or line.owner): line for line in self._entries}
        after = {(line.name, line.mark or line.owner): line for line in entries}
        found = [f"{_shown(line)} added" for place, line in after.items() if place not in before]
        found += [f"{_shown(line)} removed" for place, line in before.items() if place not in after]
        for place in before.keys() & after.keys():
            was, line = before[place], after[place]
            if was.is_disabled != line.is_disabled:
                found.append(f"{_shown(line)} {'disabled' if line.is_disabled else 'enabled'}")
            if was.is_operator != line.is_operator:
                found.append(f"{_shown(line)} {'operator' if line.is_operator else 'member'}")
            if was.limits != line.limits:
                found.append(f"{_shown(line)} limits {' '.join(line.limits.fields) or 'of the server'}")
            if was.owner != line.owner:
                found.append(f"{_shown(line)} given to {line.owner or 'the owner of its key'}")
        return sorted(found)

    def _principal(self, key: str, entry: KeyLine) -> Principal:
        weight = self._weights.get(entry.name, 1.0)
        return Principal(_owner(key, entry), entry.name, weight, entry.is_operator, key)

    def _use(self, entries: list[KeyLine]) -> None:
        """Look keys and people up in these lines from now on."""
        self._entries = entries
        self._lines = self._lines_of(entries)
        by_owner: dict[str, list[KeyLine]] = {}
        for entry in entries:
            if entry.owner:
                by_owner.setdefault(entry.owner, []).append(entry)
        self._by_owner = by_owner
        # Made before it is put in place, because the thread that stores conversations looks at it, too.
        self._limits = {key: entry.limits for key, entry in self._known.items() if not entry.owner} | {
            owner: limits_of(lines) for owner, lines in by_owner.items()
        }

    def _lines_of(self, entries: list[KeyLine]) -> _Lines:
        lines = _Lines(entry for entry in entries if entry.salt != self._given_salt)
        if len(lines.without_id) > MAX_COMPARED:
            logger.warning(
                "%d lines of the key file are of an earlier version, and a key that was not seen yet is compared with each of them: "
                "new keys (overture keys new) are found at once",
                len(lines.without_id),
            )
        return lines

    def _find(self, presented: str, may_take_long: bool) -> tuple[str, KeyLine | None]:
        """Return what tells the key apart, and the line that it matches. It compares with every plain-text key.

        Of several lines an accepted one goes before a disabled one, and an operator's before others.
        """
        own, key = owner_of(presented), key_bytes(presented)
        digest = digest_of(self._given_salt, key)
        matched = [entry for entry in self._given if hmac.compare_digest(digest, entry.digest)]
        if own in self._let_in:
            matched.append(self._known[own])
        else:
            with_all = may_take_long or len(self._lines.without_id) <= MAX_COMPARED
            matched += self._lines.matching(key, with_all=with_all)
        return own, max(matched, key=lambda entry: (not entry.is_disabled, entry.is_operator), default=None)


def _owner(key: str, entry: KeyLine) -> str:
    """Return the owner of a key, which is `Principal.key`, on this line."""
    return entry.owner or key


def _shown(line: KeyLine) -> str:
    return f"{line.name} {line.shown_id}"


def _is_accepted(entry: KeyLine) -> bool:
    return bool(entry.digest) and not entry.is_disabled


def withdrawn() -> GatewayError:
    """Return the error for the holder of a key that was taken away."""
    return GatewayError("unauthorized", "This API key was withdrawn.")


def _hashed(key: str, salt: bytes) -> KeyLine:
    """Return the entry of a key given in plain text; its name comes from its owner id, so that it does not depend on the order of flags."""
    key = key.strip()
    if not key:
        raise StartupError("An API key is empty. Give a key, or leave the setting out to run without keys.")
    if len(key) > MAX_KEY_CHARS:
        raise StartupError(f"An API key is longer than {MAX_KEY_CHARS} characters.")
    name = f"key-{owner_of(key)[2:10]}"
    if len(key) < MIN_KEY_CHARS:
        logger.warning(
            "API key %s has only %d characters and can be guessed; make a random one instead", name, len(key)
        )
    return KeyLine(name, salt, digest_of(salt, key_bytes(key)))


def _warn_of_readers(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH:
            logger.warning(
                "key file %s can be read by every user of this machine; run: chmod o-r %s", path, path
            )
