"""The key file as people: who is in it, and the changes that commands and operators make. Comments and the order of lines stay."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.access.auth import generate_key
from gateway.access.key_file import (
    NAME_RULE,
    KeyLine,
    is_blank,
    is_name,
    is_owner,
    limits_of,
    line_for,
    new_owner,
    parsed,
    read_text,
)
from gateway.access.person_limits import PersonLimits
from gateway.errors import StartupError
from gateway.sessions.connection import is_full

_FIRST_LINE = "# People and their keys; see `overture users --help`. Only hashes of keys are kept."
NEW_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Person:
    """A person of a key file.

    Attributes:
        name: of the person's first line.
        owner: the person's id; "" while only the key itself tells it.
        lines: all lines of the person, in the order of the file.
    """

    name: str
    owner: str
    lines: tuple[KeyLine, ...]

    @property
    def keys(self) -> tuple[KeyLine, ...]:
        """The lines that hold a key."""
        return tuple(line for line in self.lines if line.digest)

    @property
    def limits(self) -> PersonLimits:
        """Return the limits that an operator has set for the person."""
        return limits_of(self.lines)

    @property
    def is_operator(self) -> bool:
        """Whether some key of the person is an operator's."""
        return any(line.is_operator for line in self.lines)

    @property
    def is_disabled(self) -> bool:
        """Whether no key of the person is accepted because each is disabled."""
        return all(line.is_disabled for line in self.lines)


class RollError(StartupError):
    """A change of people that cannot be made. The message names people and keys' beginnings, and no file, so clients may see it."""


class NoOperatorLeft(RollError):
    """A change after which no key that is accepted would be an operator's."""


class NoSuchPerson(RollError):
    """The key file has no person of this name or owner id."""


class Roll:
    """The rows of a key file, of which each is a line or a text that holds no key.

    Args:
        rows: as they stand in the file.
        known: owners of lines that do not name theirs, by `KeyLine.mark`.
    """

    def __init__(self, rows: list[KeyLine | str], known: Mapping[str, str]) -> None:
        self.rows = rows
        self._known = known

    @property
    def text(self) -> str:
        """The text of the file."""
        return "".join((row if isinstance(row, str) else row.text) + "\n" for row in self.rows)

    def people(self) -> list[Person]:
        """Return all people in the order of their first lines. A line without a known owner counts as a separate person."""
        found: dict[str, list[KeyLine]] = {}
        for number, line in enumerate(row for row in self.rows if isinstance(row, KeyLine)):
            found.setdefault(self._owner_of(line) or f"line {number}", []).append(line)
        return [Person(lines[0].name, self._owner_of(lines[0]), tuple(lines)) for lines in found.values()]

    def _owner_of(self, line: KeyLine) -> str:
        return line.owner or self._known.get(line.mark, "")

    def find(self, named: str) -> Person:
        """Return the person of this name or owner id. Raises NoSuchPerson; RollError if there is more than one."""
        people = [person for person in self.people() if person.owner == named]
        return people[0] if people else self.find_by_name(named)

    def find_by_name(self, name: str) -> Person:
        """Return the person of this name, for names that somebody else gives: owner ids lead to nobody. Raises as `find`."""
        people = [person for person in self.people() if person.name == name]
        if not people:
            raise NoSuchPerson(f"There is no person named {name!r} in the key file.")
        if len(people) > 1:
            ids = ", ".join(person.owner or "one whose owner is not known yet" for person in people)
            raise RollError(f"{len(people)} people are named {name!r}. Give the owner id instead: {ids}.")
        return people[0]

    def find_or_gone(self, named: str) -> Person:
        """Return a person as `find` does, or one without lines for an owner id that the file does not name. Raises as `find`."""
        try:
            return self.find(named)
        except NoSuchPerson:
            if not is_owner(named):
                raise
            return Person(named, named, ())

    @property
    def has_operator(self) -> bool:
        """Whether some key that is accepted is an operator's."""
        lines = (row for row in self.rows if isinstance(row, KeyLine))
        return any(line.is_operator and line.digest and not line.is_disabled for line in lines)

    def add_person(self, name: str, *, is_operator: bool) -> str:
        """Add a person with a first key, and return the key. Raises RollError for a name that is taken or malformed."""
        if any(person.name == name for person in self.people()):
            raise RollError(
                f"There is a person named {name!r} already. For another key of theirs: overture keys new --name {name} --key-file FILE"
            )
        key = generate_key()
        self.rows.append(_line_for(name, key, is_operator=is_operator, owner=""))
        return key

    def add_without_key(self, name: str) -> Person:
        """Add a member without a key, whom somebody else signs in, and return the person. Raises RollError for a malformed name."""
        line = KeyLine(name, owner=new_owner())
        if not is_name(name):
            raise RollError(f"{name!r} cannot be a name: {NAME_RULE}.")
        self.rows.append(line)
        return self.find(line.owner)

    def add_key(self, person: Person) -> str:
        """Add another key of a person whose owner is known, and return it. Raises RollError."""
        key = generate_key()
        line = self._new_line(person, key)
        place = max(self.rows.index(line) for line in person.lines)
        self.rows.insert(place + 1, line)
        self._drop_empty(person)
        return key

    def replace_key(self, person: Person, old: KeyLine | None) -> str:
        """Put a new key in the place of an old one (None: of the person's only one), and return it. Raises RollError."""
        old = old or _only_key(person)
        key = generate_key()
        self._swap(old, replace(self._new_line(person, key), is_operator=old.is_operator))
        return key

    def revoke(self, person: Person, lines: tuple[KeyLine, ...]) -> None:
        """Remove keys of a person. A person without any key left stays in the file.

        Where only the key itself tells the owner, its line is disabled instead, so that the old key can still say later whose it was.
        """
        if lines and len(lines) == len(person.lines):
            first = lines[0]
            if person.owner:
                last = replace(
                    first, salt=b"", digest=b"", owner=person.owner, is_operator=person.is_operator
                )
            else:
                last = replace(first, is_disabled=True)
            self._swap(first, last)
            lines = lines[1:]
        for line in lines:
            self.rows.remove(line)

    def name_owner(self, person: Person) -> Person:
        """Let all lines of a person name the owner, and return the person. Raises RollError where the owner is not known."""
        owner = _owner_of(person)
        for line in person.lines:
            self._swap(line, replace(line, owner=owner))
        return self.find(owner)

    def set_disabled(self, person: Person, is_disabled: bool) -> None:
        """Disable or enable all lines of a person."""
        for line in person.lines:
            self._swap(line, replace(line, is_disabled=is_disabled))

    def set_limits(self, person: Person, limits: PersonLimits) -> None:
        """Give a person these limits, and no others."""
        for line in person.lines:
            self._swap(line, replace(line, limits=limits))

    def shut_out(self, person: Person) -> Person:
        """Disable a person who is about to be erased, and let the lines name the owner, as what else tells it is erased, too.

        A person who is gone already stays so.
        """
        if person.lines:
            self.set_disabled(self.name_owner(person), True)
        return self.find_or_gone(person.owner)

    def remove(self, person: Person) -> None:
        """Remove a person with all keys, those among them that came since the person was read."""
        self.rows = [
            row
            for row in self.rows
            if isinstance(row, str) or (row not in person.lines and self._owner_of(row) != person.owner)
        ]

    def _new_line(self, person: Person, key: str) -> KeyLine:
        line = _line_for(person.name, key, is_operator=person.is_operator, owner=_owner_of(person))
        return replace(line, is_disabled=person.is_disabled, limits=person.limits)

    def _drop_empty(self, person: Person) -> None:
        for line in person.lines:
            if not line.digest:
                self.rows.remove(line)

    def _swap(self, old: KeyLine, new: KeyLine) -> None:
        self.rows[self.rows.index(old)] = new


@contextlib.contextmanager
def keeping_an_operator(roll: Roll) -> Iterator[None]:
    """Refuse what is done to people within the context if it takes the last operator's key. Raises NoOperatorLeft."""
    had_operator = roll.has_operator
    yield
    if had_operator and not roll.has_operator:
        raise NoOperatorLeft("This would leave no operator's key. Give another person one first.")


def key_named(person: Person, key_id: str) -> KeyLine:
    """Return the line of a person's key by its id, as `KeyLine.shown_id` gives it. Raises RollError if there is none, or more than one."""
    found = [line for line in person.keys if line.shown_id == key_id]
    if len(found) != 1:
        known = ", ".join(line.shown_id for line in person.keys) or "none"
        raise RollError(f"{person.name} has no key {key_id!r}. The keys of {person.name}: {known}.")
    return found[0]


def _only_key(person: Person) -> KeyLine:
    if len(person.lines) != 1:
        known = ", ".join(line.shown_id for line in person.keys)
        raise RollError(
            f"{person.name} has {len(person.keys)} keys. Say which one with --key: {known or 'none'}."
        )
    return person.lines[0]


def _owner_of(person: Person) -> str:
    if not person.owner:
        raise RollError(
            f"The owner id of {person.name} is not known: the line in the key file was made by an earlier version, and the key was not "
            "used since this version came. Let the key be used once, or give it: overture keys replace --old-key."
        )
    return person.owner


def _line_for(name: str, key: str, *, is_operator: bool, owner: str) -> KeyLine:
    try:
        return line_for(name, key, is_operator=is_operator, owner=owner)
    except ValueError as error:
        raise RollError(f"{name!r} cannot be a name: {error}.") from error


# -- the file ----------------------------------------------------------------------------------------------------------


def read_roll(path: Path, known: Mapping[str, str]) -> Roll:
    """Return what a key file holds. Raises StartupError if it cannot be read or has a malformed line."""
    texts = enumerate(read_text(path).splitlines(), 1)
    rows = [text if is_blank(text) else parsed(path, number, text) for number, text in texts]
    return Roll(rows, known)


@contextlib.contextmanager
def changing(
    path: Path,
    known: Mapping[str, str],
    *,
    makes: bool = False,
    make_room: Callable[[], bool] = lambda: False,
) -> Iterator[Roll]:
    """Hold a key file locked, and write it when the context ends without an error.

    The file is replaced as a whole, so a server that follows it never reads half of it. It keeps its owner and its mode, less what all others may do.

    Args:
        path: the key file.
        known: see `Roll`.
        makes: make the file, for its owner only, if it does not exist.
        make_room: called when the disk is full; returns whether another try is worth it.

    Raises:
        StartupError: the file cannot be read or written, or it has a malformed line.
    """
    path = path.resolve()
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise StartupError(
            f"The folder of the key file {path} cannot be opened: {error.strerror}."
        ) from error
    try:
        # The folder is locked and not the file, because the file is replaced.
        fcntl.flock(folder, fcntl.LOCK_EX)
        is_new = makes and not path.exists()
        roll = Roll([_FIRST_LINE], known) if is_new else read_roll(path, known)
        before = "" if is_new else roll.text
        yield roll
        if roll.text != before:
            _check_not_empty(roll)
            _write(path, roll.text, make_room)
            os.fsync(folder)
    finally:
        os.close(folder)


def _check_not_empty(roll: Roll) -> None:
    if not roll.people():
        raise RollError(
            "Nobody would be left in the key file, and the server does not take an empty one. Add somebody first."
        )


def _write(path: Path, text: str, make_room: Callable[[], bool]) -> None:
    try:
        try:
            _replace(path, text)
        except OSError as error:
            if not is_full(error) or not make_room():
                raise
            _replace(path, text)
    except OSError as error:
        raise StartupError(
            f"The key file {path} cannot be written: {error.strerror}. It is as it was."
        ) from error


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()  # of a command that was killed
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, NEW_FILE_MODE)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            _take_rights(path, file.fileno())
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _take_rights(path: Path, fd: int) -> None:
    """Give a file the owner and the mode of the file that it will replace, so that the server can still read it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        folder = path.parent.stat()
        if os.geteuid() == 0:  # root's command makes it for the folder's owner
            os.fchown(fd, folder.st_uid, folder.st_gid)
        return
    mine = os.fstat(fd)
    if (status.st_uid, status.st_gid) != (mine.st_uid, mine.st_gid):
        os.fchown(fd, status.st_uid, status.st_gid)
    os.fchmod(fd, stat.S_IMODE(status.st_mode) & ~stat.S_IRWXO)
