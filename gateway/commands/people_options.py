"""What `overture users` and `overture keys` share: where the key file and the data folder are, and how people are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

import click

from gateway.errors import StartupError
from gateway.settings.config import Config
from gateway.settings.sources import load_config

F = Callable[..., Any]


def place_options(command: F) -> F:
    """The options that say where the key file and the data folder are. The command gets them as a `Place`, named `place`."""

    @wraps(command)
    def with_place(key_file: str | None, data_dir: str | None, config_file: str | None, **given: Any) -> Any:
        """Run the command at its place."""
        return command(place=Place(key_file, data_dir, config_file), **given)

    key_file = click.option(
        "--key-file",
        metavar="FILE",
        help="The server's key file.  [api_key_file of the settings, as `overture config` shows it]",
    )
    data_dir = click.option(
        "--data-dir",
        metavar="PATH",
        help="The server's data folder.  [data_dir of the settings]",
    )
    config = click.option(
        "--config", "config_file", metavar="FILE", help="Config file (TOML).  [overture.toml, if there]"
    )
    return key_file(data_dir(config(with_place)))


def last_operator_option(command: F) -> F:
    """The option of commands that may take the last operator's key."""
    return click.option(
        "--last-operator", is_flag=True, help="Do it even where no operator's key is left after it."
    )(command)


class Place:
    """The key file and the data folder that a command works on, from its options or from the server's settings.

    The settings are read when they are asked for, which raises ConfigError. names_file: whether an option names the key file.
    """

    def __init__(self, key_file: str | None, data_dir: str | None, config_file: str | None) -> None:
        self._flags, self._config_file = {"data_dir": data_dir, "api_key_file": key_file}, config_file
        self.names_file = key_file is not None

    @cached_property
    def config(self) -> Config:
        """The server's settings with these options."""
        # `users add` and `restore` are about to make the key file.
        return load_config(self._flags, config_file=self._config_file, needs_key_file=False)

    @property
    def data_dir(self) -> Path:
        """The server's data folder."""
        return self.config.data_dir

    @property
    def given_file(self) -> Path | None:
        """The key file, if one is named."""
        return self.config.api_key_file

    @property
    def key_file(self) -> Path:
        """The key file. Raises StartupError where none is named."""
        if self.given_file is None:
            raise StartupError(
                "Which key file? Name it with --key-file, OVERTURE_API_KEY_FILE or api_key_file in overture.toml."
            )
        return self.given_file

    def roll(self) -> Any:
        """Return the people of the key file, to look at. Raises StartupError."""
        from gateway.people.ledger import known_owners
        from gateway.people.roll import read_roll

        return read_roll(self.key_file, known_owners(self.data_dir))

    def changing(self, *, makes: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which the people of the key file may be changed. Raises StartupError."""
        from gateway.people.estate import reserve_in
        from gateway.people.ledger import known_owners
        from gateway.people.roll import changing

        make_room = reserve_in(self.data_dir).give_some
        return changing(self.key_file, known_owners(self.data_dir), makes=makes, make_room=make_room)

    @contextmanager
    def shutting_out(self, takes_last_operator: bool) -> Iterator[Any]:
        """Return a context as `changing` does, in which the last operator's key is taken only where that is said. Raises StartupError."""
        from gateway.people.roll import NoOperatorLeft, keeping_an_operator

        try:
            with self.changing() as roll, nullcontext() if takes_last_operator else keeping_an_operator(roll):
                yield roll
        except NoOperatorLeft as error:
            raise StartupError(
                "This would leave no operator's key, so nobody could use /admin or read /metrics; nothing was changed. Add another operator "
                f"first: overture users add NAME --operator --key-file {self.key_file}. Or say --last-operator: the command above, on "
                "this machine, lets an operator in again later."
            ) from error

    def note(self, what: Any, person: Any, key: str = "", about: str = "") -> None:
        """Write a change to the audit log."""
        from gateway.people.audit import note_command

        note_command(self.data_dir, what, whom=person.name, whom_owner=person.owner, key=key, about=about)


def show_key(key: str, name: str) -> None:
    """Print a new key, which is shown once: the key alone on stdout."""
    click.echo(f"Key for {name} (shown only now):", err=True)
    click.echo(key)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows under their heads, in columns."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def role_of(is_operator: bool) -> str:
    """Return a role in words."""
    return "operator" if is_operator else "member"


def state_of(is_disabled: bool) -> str:
    """Return a state in words."""
    return "disabled" if is_disabled else "active"
