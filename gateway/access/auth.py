"""API keys: which owner a request belongs to, decided from a key that is never kept.

A key is 256 random bits, so one SHA-256 protects it: stretching (scrypt, argon2) helps only keys that can be guessed, and would cost every
request tens of milliseconds. Each stored hash has its own salt, so that equal hashes do not show and a key that a person made up is not in a
precomputed table.

However many keys a file has, one hash finds a key in it: the salt of a line begins with the first characters of its key, by which the line is
looked up. Those characters say nothing of the 208 bits that follow them. Lines that earlier versions made have random salts alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.errors import GatewayError, StartupError

logger = logging.getLogger(__name__)

KEY_PREFIX = "ov-"
KEY_BYTES = 32  # 256 bits: out of reach of guessing, whatever the hash.
SALT_BYTES = 16
MAX_KEY_CHARS = 512  # Chosen: far above any real key, low enough that hashing a made-up one costs nothing.
ID_CHARS = (
    len(KEY_PREFIX) + 8
)  # Of a key that we made: the beginning by which its line is found. Chosen: 48 bits tell all keys apart.
# Lines without an id with which any key is compared. Chosen: 0.1 ms; for more of them see `KeyRing.authenticate`.
MAX_COMPARED = 64
MIN_KEY_CHARS = 16  # Chosen: below this a made-up key can be guessed; we warn, since the operator may be trying things out.

_ENTRY = re.compile(
    r"(?P<name>[^:\s]{1,64}):(?P<scheme>[a-z0-9]+)\$(?P<salt>[0-9a-f]{2,128})\$(?P<digest>[0-9a-f]{64})"
    r"(?::(?P<role>operator))?"
)
_SCHEME = "sha256"
_MADE = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")  # as `generate_key` makes them


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key.

    owner: what sessions belong to, stable for as long as the key lives. name: for people and logs. weight: its share against others.
    is_operator: may see and change what concerns everybody (see `KeyRing.is_operator`).
    """

    owner: str
    name: str
    weight: float = 1.0
    is_operator: bool = False


LOCAL = Principal(owner="local", name="local")


def tenant_of(owner: str) -> str:
    """Return the tenant whose KV an owner's requests share: the owner itself, or "" for everybody where no keys are asked for."""
    return "" if owner == LOCAL.owner else owner


@dataclass(frozen=True, slots=True)
class _Entry:
    """One accepted key, as its hash."""

    name: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    is_operator: bool = False

    @property
    def id(self) -> bytes | None:
        """The characters with which the key begins; None for a line that does not say so."""
        has_id = len(self.salt) == ID_CHARS + SALT_BYTES and self.salt.startswith(KEY_PREFIX.encode())
        return self.salt[:ID_CHARS] if has_id else None

    def is_of(self, presented: bytes) -> bool:
        """Return whether this entry is that of the presented key."""
        return hmac.compare_digest(_digest(self.salt, presented), self.digest)


class _Lines:
    """The lines of a key file, found by the first characters of their keys."""

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self._by_id: dict[bytes, list[_Entry]] = {}
        self.without_id: list[_Entry] = []
        for entry in entries:
            own = self.without_id if entry.id is None else self._by_id.setdefault(entry.id, [])
            own.append(entry)

    def matching(self, presented: bytes, *, with_all: bool) -> list[_Entry]:
        """Return the line that a key matches.

        with_all: compare the key with each line without an id as well, so that the time taken does not tell which line it was.
        """
        near = self._by_id.get(presented[:ID_CHARS], [])
        return [entry for entry in near + (self.without_id if with_all else []) if entry.is_of(presented)]


def generate_key() -> str:
    """Return a new random key, to be shown once to the person who will use it."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def owner_of(key: str) -> str:
    """Return the owner id of a key's sessions: 128 bits of a separate hash, which is neither the key nor the hash in the key file."""
    return "k_" + hashlib.sha256(b"overture owner\0" + _bytes(key)).hexdigest()[:32]


def key_file_line(name: str, key: str, *, is_operator: bool = False) -> str:
    """Return the line of a key file that lets `key` in. name: 1–64 characters without spaces or colons, else ValueError."""
    start = key[:ID_CHARS].encode() if _MADE.fullmatch(key) else b""
    salt = start + secrets.token_bytes(SALT_BYTES)
    digest = _digest(salt, _bytes(key))
    line = f"{name}:{_SCHEME}${salt.hex()}${digest.hex()}" + (":operator" if is_operator else "")
    if not _ENTRY.fullmatch(line):
        raise ValueError("a key's name has 1 to 64 characters, none of them a space or a colon")
    return line


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
        key_file: a file of `key_file_line` lines, blank lines and ``#`` comments; it may be read again (`read`, `take_over`).
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
        self._entries = self.read()
        self._lines = self._lines_of(self._entries)
        # The entry by which each owner was let in, because an owner is known only from a key; at most one for each key.
        self._known: dict[str, _Entry] = {}
        # The owners among them that the present lines have let in.
        self._let_in: set[str] = set()
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
        """Whether some key is an operator's."""
        return any(entry.is_operator for entry in self._entries)

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
                "unauthorized", "This server asks for an API key: send it as 'Authorization: Bearer KEY'."
            )
        owner, entry = self._find(presented, may_take_long) if len(presented) <= MAX_KEY_CHARS else ("", None)
        if entry is None:
            raise GatewayError("unauthorized", "This server does not know this API key.")
        self._known[owner] = entry
        self._let_in.add(owner)
        return self._principal(owner, entry)

    def current(self, principal: Principal) -> Principal:
        """Return the principal as the keys are now. Raises GatewayError `unauthorized` if the key was withdrawn meanwhile."""
        if self.is_open:
            return principal
        entry = self._known.get(principal.owner)
        if entry is None:
            raise withdrawn()
        return self._principal(principal.owner, entry)

    def read(self) -> list[_Entry]:
        """Return all keys as the file has them now, and change nothing. This reads a file: not for the event loop. Raises StartupError."""
        return self._given + (_read_key_file(self._key_file) if self._key_file is not None else [])

    def take_over(self, entries: list[_Entry]) -> frozenset[str]:
        """Accept the entries that `read` returned from now on, and return the owners whose line was removed."""
        kept = {(entry.salt, entry.digest): entry for entry in entries}
        known = {owner: kept.get((entry.salt, entry.digest)) for owner, entry in self._known.items()}
        self._entries = entries
        self._lines = self._lines_of(entries)
        self._let_in = set()  # a key may stand on other lines now, as an operator's perhaps
        self._known = {owner: entry for owner, entry in known.items() if entry is not None}
        return frozenset(known.keys() - self._known.keys())

    def _principal(self, owner: str, entry: _Entry) -> Principal:
        return Principal(owner, entry.name, self._weights.get(entry.name, 1.0), entry.is_operator)

    def _lines_of(self, entries: list[_Entry]) -> _Lines:
        lines = _Lines(entry for entry in entries if entry.salt != self._given_salt)
        if len(lines.without_id) > MAX_COMPARED:
            logger.warning(
                "%d lines of the key file are of an earlier version, and a key that was not seen yet is compared with each of them: "
                "new keys (overture keys new) are found at once",
                len(lines.without_id),
            )
        return lines

    def _find(self, presented: str, may_take_long: bool) -> tuple[str, _Entry | None]:
        """Return the owner and the entry that the key matches, an operator's before others. It compares with every plain-text key."""
        owner, key = owner_of(presented), _bytes(presented)
        digest = _digest(self._given_salt, key)
        matched = [entry for entry in self._given if hmac.compare_digest(digest, entry.digest)]
        if owner in self._let_in:
            matched.append(self._known[owner])
        else:
            with_all = may_take_long or len(self._lines.without_id) <= MAX_COMPARED
            matched += self._lines.matching(key, with_all=with_all)
        return owner, max(matched, key=lambda entry: entry.is_operator, default=None)


def withdrawn() -> GatewayError:
    """Return the error for the holder of a key that was taken away."""
    return GatewayError("unauthorized", "This API key was withdrawn.")


def _bytes(key: str) -> bytes:
    # Lone surrogates come from JSON escapes and from header bytes that are not UTF-8; such a key is wrong, and must not be a crash.
    return key.encode("utf-8", "surrogatepass")


def _digest(salt: bytes, key: bytes) -> bytes:
    return hashlib.sha256(salt + key).digest()


def _hashed(key: str, salt: bytes) -> _Entry:
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
    return _Entry(name, salt, _digest(salt, _bytes(key)))


def _read_key_file(path: Path) -> list[_Entry]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"The key file {path} cannot be read: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    entries = [
        _parse_entry(path, number, line) for number, line in numbered if line and not line.startswith("#")
    ]
    if not entries:
        raise StartupError(
            f"The key file {path} has no key in it. Add one, or leave the setting out to run without keys."
        )
    return entries


def _warn_of_readers(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH:
            logger.warning(
                "key file %s can be read by every user of this machine; run: chmod o-r %s", path, path
            )


def _parse_entry(path: Path, number: int, line: str) -> _Entry:
    # The line itself stays out of the message, because it may be a plain key.
    match = _ENTRY.fullmatch(line)
    if match is None or match["scheme"] != _SCHEME or len(match["salt"]) % 2:
        raise StartupError(
            f"The key file {path}, line {number}, is not of the form name:{_SCHEME}$salt$hash (salt and hash in hex; "
            "':operator' may follow)."
        )
    return _Entry(
        match["name"],
        bytes.fromhex(match["salt"]),
        bytes.fromhex(match["digest"]),
        is_operator=match["role"] is not None,
    )
