"""The lines of a key file: which key each lets in, and which person the key belongs to. Pure, but for `read_key_file`.

    ada:sha256$SALT$HASH:operator:owner=k_…    a key of an operator, of the person who owns what stands under k_…
    bob:sha256$SALT$HASH                       a key whose owner comes from the key itself
    eve:no-key:disabled:owner=k_…              a person without a key, who is disabled
    bob:sha256$SALT$HASH:tokens-per-day=50000  a key of a person with a limit of the person's own (`person_limits.py`)

A person is an owner id. Lines with the same owner are keys of one person, so a key can be replaced and what it owned stays.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gateway.access.person_limits import FIELD_NAMES, SERVERS, PersonLimits
from gateway.errors import StartupError

KEY_PREFIX = "ov-"
SALT_BYTES = 16
ID_CHARS = (
    len(KEY_PREFIX) + 8
)  # Of a key that we made: the beginning by which its line is found. Chosen: 48 bits tell all keys apart.

_SCHEME = "sha256"
NO_KEY = "no-key"
_OWNER = r"k_[0-9a-f]{32}"
_NAME = r"[^:\s]{1,64}"
NAME_RULE = (
    "a name has 1 to 64 characters, none of them a space or a colon, and is not written like an owner id"
)
_LINE = re.compile(
    rf"(?P<name>{_NAME}):"
    rf"(?:(?P<none>{NO_KEY})|{_SCHEME}\$(?P<salt>(?:[0-9a-f]{{2}}){{1,64}})\$(?P<digest>[0-9a-f]{{64}}))"
    rf"(?P<fields>(?::(?:operator|disabled|owner={_OWNER}|(?:{'|'.join(FIELD_NAMES)})=[0-9]{{1,12}}))*)"
)
_MADE = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")  # as `gateway.access.auth.generate_key` makes them


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One line: a key as its hash, or a person without a key.

    Attributes:
        name: the person's, for people and logs.
        salt, digest: of the key; b"" for a person without one.
        is_operator: whether the key may see and change what concerns everybody.
        is_disabled: whether the key is refused.
        owner: the id of the person that the key belongs to; "" where that is `owner_of` the key, which the line does not tell.
        limits: of the person.
    """

    name: str
    salt: bytes = field(default=b"", repr=False)
    digest: bytes = field(default=b"", repr=False)
    is_operator: bool = False
    is_disabled: bool = False
    owner: str = ""
    limits: PersonLimits = SERVERS

    @property
    def id(self) -> bytes | None:
        """The characters with which the key begins; None for a line that does not say so."""
        has_id = len(self.salt) == ID_CHARS + SALT_BYTES and self.salt.startswith(KEY_PREFIX.encode())
        return self.salt[:ID_CHARS] if has_id else None

    @property
    def mark(self) -> str:
        """The part by which this line's key differs from all others: 16 hexadecimal digits of its hash; "" without a key."""
        return hashlib.sha256(self.salt + self.digest).hexdigest()[:16] if self.digest else ""

    @property
    def shown_id(self) -> str:
        """The characters by which people recognise the key: its first characters, for a line without these its mark, and without a key `no-key`."""
        return self.id.decode() if self.id is not None else self.mark or NO_KEY

    @property
    def text(self) -> str:
        """The line as it stands in the file."""
        key = f"{_SCHEME}${self.salt.hex()}${self.digest.hex()}" if self.digest else NO_KEY
        fields = ["operator"] * self.is_operator + ["disabled"] * self.is_disabled
        fields += [f"owner={self.owner}"] if self.owner else []
        fields += self.limits.fields
        return ":".join([self.name, key, *fields])

    def is_of(self, presented: bytes) -> bool:
        """Return whether this line is that of the presented key."""
        return bool(self.digest) and hmac.compare_digest(digest_of(self.salt, presented), self.digest)


def owner_of(key: str) -> str:
    """Return the owner id that a key has by itself: 128 bits of a separate hash, which is neither the key nor the hash in the key file."""
    return "k_" + hashlib.sha256(b"overture owner\0" + key_bytes(key)).hexdigest()[:32]


def key_bytes(key: str) -> bytes:
    """Return a key as it is hashed, whatever a client sent."""
    # Lone surrogates come from JSON escapes and from header bytes that are not UTF-8; such a key is wrong, and must not be a crash.
    return key.encode("utf-8", "surrogatepass")


def digest_of(salt: bytes, key: bytes) -> bytes:
    """Return the hash of a key that its line holds."""
    return hashlib.sha256(salt + key).digest()


def line_for(name: str, key: str, *, is_operator: bool = False, owner: str = "") -> KeyLine:
    """Return the line that lets a key in.

    Args:
        name: 1–64 characters without spaces or colons.
        key: as its holder will present it.
        is_operator: whether the key is an operator's.
        owner: the person that the key is for; "": a new person, whose owner id is that of the key.

    Raises:
        ValueError: the name is malformed.
    """
    start = key[:ID_CHARS].encode() if _MADE.fullmatch(key) else b""
    salt = start + secrets.token_bytes(SALT_BYTES)
    line = KeyLine(
        name,
        salt,
        digest_of(salt, key_bytes(key)),
        is_operator=is_operator,
        owner=owner or owner_of(key),
    )
    if not is_name(name):
        raise ValueError(NAME_RULE)
    return line


def key_file_line(name: str, key: str, *, is_operator: bool = False) -> str:
    """Return the text of `line_for` a new person."""
    return line_for(name, key, is_operator=is_operator).text


def parse_line(text: str) -> KeyLine | None:
    """Return the fields of a line; None for a malformed line. A field appears once at most, and a line without a key must name the owner."""
    match = _LINE.fullmatch(text)
    if match is None:
        return None
    fields = match["fields"].split(":")[1:]
    values = {name: value for name, _, value in (field.partition("=") for field in fields)}
    owner = values.get("owner", "")
    if len(values) != len(fields) or (match["none"] and not owner):
        return None
    return KeyLine(
        match["name"],
        bytes.fromhex(match["salt"] or ""),
        bytes.fromhex(match["digest"] or ""),
        is_operator="operator" in fields,
        is_disabled="disabled" in fields,
        owner=owner,
        limits=PersonLimits(
            **{name.replace("-", "_"): int(values[name]) for name in FIELD_NAMES if name in values}
        ),
    )


def limits_of(lines: Iterable[KeyLine]) -> PersonLimits:
    """Return the limits of the person of these lines: of the first line that has any."""
    return next((line.limits for line in lines if line.limits != SERVERS), SERVERS)


def is_name(text: str) -> bool:
    """Return whether a text can be a person's name: see NAME_RULE. A text that begins a comment or cannot be printed is no name."""
    is_plain = text.isprintable() and not text.startswith("#")
    return re.fullmatch(_NAME, text) is not None and is_plain and not is_owner(text)


def new_owner() -> str:
    """Return a random owner id, for a person without a key from which an id could be made."""
    return "k_" + secrets.token_hex(16)


def is_owner(text: str) -> bool:
    """Return whether a text has the form of an owner id."""
    return re.fullmatch(_OWNER, text) is not None


def is_blank(text: str) -> bool:
    """Return whether a line holds no key: it is empty, or a comment."""
    return not text.strip() or text.strip().startswith("#")


def parsed(path: Path, number: int, text: str) -> KeyLine:
    """Return what line `number` of a file says. Raises StartupError for a malformed one, without its text, which may be a plain key."""
    line = parse_line(text.strip())
    if line is None:
        raise StartupError(
            f"The key file {path}, line {number}, is not of the form name:{_SCHEME}$salt$hash (salt and hash in hex; "
            f"':operator', ':disabled', ':owner=k_…' and limits such as ':{FIELD_NAMES[0]}=60' may follow) or name:{NO_KEY}:owner=k_…."
        )
    return line


def read_text(path: Path) -> str:
    """Return a key file's text, without the mark that some editors begin it with. Raises StartupError if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig", opener=_open) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise StartupError(f"The key file {path} cannot be read: {reason}.") from error


def _open(path: str, flags: int) -> int:
    """Open a file. A pipe without a writer reads as empty, where it would keep the reader waiting for ever, and no key be withdrawn any more."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    return fd


def read_key_file(path: Path) -> list[KeyLine]:
    """Return the lines of a key file. Raises StartupError if it cannot be read, has a malformed line, or none at all."""
    texts = enumerate(read_text(path).splitlines(), 1)
    lines = [parsed(path, number, text) for number, text in texts if not is_blank(text)]
    if not lines:
        raise StartupError(
            f"The key file {path} has no key in it. Add one, or leave the setting out to run without keys."
        )
    return lines
