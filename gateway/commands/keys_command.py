"""`overture keys`: the keys of people, made, replaced and withdrawn in the server's key file."""

from __future__ import annotations

import json
from typing import Any

import click

from gateway.commands.people_options import (
    Place,
    last_operator_option,
    place_options,
    role_of,
    show_key,
    state_of,
    table,
)
from gateway.errors import StartupError
from overture_client.command_line import Group

key_option = click.option(
    "--key", "key_id", metavar="ID", help="Which of the person's keys, as `overture keys list` shows it."
)


@click.group(
    cls=Group,
    epilog="""\b
Examples:
  overture keys new --name ada
  overture keys list --key-file keys
  overture keys replace ada --key-file keys
  overture keys revoke ada --key ov-3kT9cQxA --key-file keys

A server that runs follows its key file within two seconds.
""",
)
def keys() -> None:
    """Make, list, replace and withdraw API keys.

    Keys belong to people (`overture users`): what a person has stays when a key is replaced.
    """


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a key, for scripts.")
@place_options
def list_keys(as_json: bool, place: Place) -> None:
    """Show the keys of the key file by their first characters, and whose they are."""
    roll = place.roll()
    rows = [(person, line) for person in roll.people() for line in person.keys]
    if as_json:
        for person, line in rows:
            shown = {"key": line.shown_id, "name": line.name, "role": role_of(line.is_operator)}
            state = {"state": state_of(line.is_disabled), "owner": person.owner or None}
            click.echo(json.dumps(shown | state))
        return
    head = ("KEY", "NAME", "ROLE", "STATE", "OWNER")
    table(
        head,
        [
            (
                line.shown_id,
                line.name,
                role_of(line.is_operator),
                state_of(line.is_disabled),
                person.owner or "?",
            )
            for person, line in rows
        ],
    )


@keys.command()
@click.option(
    "--name", default="key", show_default=True, metavar="NAME", help="Whom the key is for; shown in logs."
)
@click.option(
    "--operator",
    is_flag=True,
    help="It may also read /metrics and change adapters, which concerns everybody.",
)
@place_options
def new(name: str, operator: bool, place: Place) -> None:
    """Make a key, and the line for the server's key file.

    The key itself is shown here once and kept nowhere. Add the line to a file, and name the file with
    `overture serve --api-key-file FILE`.

    With --key-file the key becomes another key of the person NAME in that file, with the person's role.
    """
    if place.names_file:
        if operator:
            raise click.UsageError(
                "a further key has its person's role: --operator does not go with --key-file"
            )
        _add_to_file(name, place)
        return
    from gateway.access.auth import generate_key
    from gateway.access.key_file import key_file_line

    key = generate_key()
    try:
        line = key_file_line(name, key, is_operator=operator)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--name") from error
    click.echo("Key, for the client (shown only now):", err=True)
    click.echo(key)
    click.echo("Line for the server's key file:", err=True)
    click.echo(line)


def _add_to_file(name: str, place: Place) -> None:
    from gateway.access.key_file import ID_CHARS

    with place.changing() as roll:
        person = roll.find(name)
        key = roll.add_key(person)
    place.note("key_added", person, key[:ID_CHARS])
    show_key(key, person.name)


@keys.command()
@click.argument("name")
@key_option
@click.option(
    "--old-key",
    is_flag=True,
    help="Ask for the old key: for a line of an earlier version whose key was not used since.",
)
@place_options
def replace(name: str, key_id: str | None, old_key: bool, place: Place) -> None:
    """Make a new key in the place of an old one, which stops working.

    NAME is a person's name or owner id. Conversations, KV and budgets stay.
    """
    from gateway.access.key_file import ID_CHARS
    from gateway.people.roll import key_named

    given = click.prompt("Old key", hide_input=True, err=True) if old_key else None
    with place.changing() as roll:
        person = roll.find(name) if given is None else _person_of_key(roll, name, given)
        old = key_named(person, key_id) if key_id is not None else None
        key = roll.replace_key(person, old)
    place.note("key_replaced", person, key[:ID_CHARS])
    show_key(key, person.name)


def _person_of_key(roll: Any, name: str, key: str) -> Any:
    """Return the person of this name with the line that a key matches, and the owner that the key tells. Raises StartupError."""
    from gateway.access.key_file import key_bytes, owner_of
    from gateway.people.roll import Person

    presented = key_bytes(key)
    for person in roll.people():
        if name in (person.name, person.owner):
            for line in person.keys:
                if line.is_of(presented):
                    return Person(person.name, line.owner or owner_of(key), (line,))
    raise StartupError(f"This is no key of {name!r}.")


@keys.command()
@click.argument("name")
@key_option
@click.option("--all", "everything", is_flag=True, help="All keys of the person.")
@last_operator_option
@place_options
def revoke(name: str, key_id: str | None, everything: bool, last_operator: bool, place: Place) -> None:
    """Withdraw a key. The person and what the person has stay.

    NAME is a person's name or owner id. `overture keys new --name NAME --key-file FILE` makes another key later.
    """
    from gateway.people.roll import key_named

    if (key_id is not None) and everything:
        raise click.UsageError("one key, or --all?")
    with place.shutting_out(last_operator) as roll:
        person = roll.find(name)
        if key_id is not None:
            lines = (key_named(person, key_id),)
        elif everything or len(person.keys) == 1:
            lines = person.keys
        else:
            known = ", ".join(line.shown_id for line in person.keys) or "none"
            raise StartupError(
                f"{person.name} has {len(person.keys)} keys. Say which with --key, or --all: {known}."
            )
        roll.revoke(person, lines)
    for line in lines:
        place.note("key_revoked", person, line.shown_id)
        click.echo(f"Withdrawn: {line.shown_id} of {person.name}.")
