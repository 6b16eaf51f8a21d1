"""`overture users`: the people of a server, who own conversations, KV and budgets through their keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from msgspec import structs

from gateway.access.person_limits import MAX_LIMIT, NAMES
from gateway.commands.nodes_command import server_options
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
from overture_client.chat_command import DEFAULT_URL
from overture_client.command_line import Group

SERVERS_OWN = "server"


@click.group(
    cls=Group,
    epilog="""\b
Examples:
  overture users add ada --key-file keys
  overture users list --key-file keys
  overture users disable ada --key-file keys
  overture users limit ada --tokens-per-day 100000 --key-file keys
  overture users export ada --to ada.zip --key-file keys
  overture users delete ada --key-file keys

A server that runs follows its key file within two seconds.
""",
)
def users() -> None:
    """Add, list, limit, disable, export and delete the people who may use a server.

    People stand in the server's key file, a text file with one line for each key: NAME, a hash of the key, and whose it is.
    """


@users.command()
@click.argument("name")
@click.option("--operator", is_flag=True, help="May see and change what concerns everybody.")
@place_options
def add(name: str, operator: bool, place: Place) -> None:
    """Add a person with a first key, which is shown here once and kept nowhere.

    The key file is made if it does not exist.
    """
    from gateway.access.key_file import ID_CHARS

    with place.changing(makes=True) as roll:
        key = roll.add_person(name, is_operator=operator)
        person = roll.find(name)
    place.note("person_added", person, key[:ID_CHARS])
    show_key(key, name)


@users.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a person, for scripts.")
@place_options
def list_users(as_json: bool, place: Place) -> None:
    """Show the people of the key file: role, state, number of keys, owner id.

    The owner id is what conversations belong to. It is "?" for a line of an earlier version whose key was not used since.
    """
    people = place.roll().people()
    if as_json:
        for person in people:
            click.echo(json.dumps(_as_json(person)))
        return
    rows = [
        (
            each.name,
            role_of(each.is_operator),
            state_of(each.is_disabled),
            str(len(each.keys)),
            each.owner or "?",
        )
        for each in people
    ]
    table(("NAME", "ROLE", "STATE", "KEYS", "OWNER"), rows)


def _as_json(person: Any) -> dict[str, Any]:
    return {
        "name": person.name,
        "role": role_of(person.is_operator),
        "state": state_of(person.is_disabled),
        "num_keys": len(person.keys),
        "owner": person.owner or None,
        "limits": structs.asdict(person.limits),
    }


@users.command()
@click.argument("name")
@last_operator_option
@place_options
def disable(name: str, last_operator: bool, place: Place) -> None:
    """Refuse all keys of a person, and end what is open with them. The person's data stays."""
    with place.shutting_out(last_operator) as roll:
        person = roll.find(name)
        roll.set_disabled(person, True)
    place.note("person_disabled", person)
    click.echo(f"{person.name} is {state_of(True)}.")


@users.command()
@click.argument("name")
@place_options
def enable(name: str, place: Place) -> None:
    """Accept the keys of a person who was disabled again."""
    with place.changing() as roll:
        person = roll.find(name)
        roll.set_disabled(person, False)
    place.note("person_enabled", person)
    click.echo(f"{person.name} is {state_of(False)}.")


def _limit_value(text: str) -> int | str:
    """Return the number that an option gives, or "server" as it is. Raises BadParameter."""
    if text == SERVERS_OWN:
        return text
    if text.isascii() and text.isdecimal() and int(text) <= MAX_LIMIT:
        return int(text)
    raise click.BadParameter(f"expected a whole number up to {MAX_LIMIT}, or {SERVERS_OWN!r}, got {text!r}")


def _limit_option(name: str, what: str) -> Callable[[Any], Any]:
    return click.option(f"--{name.replace('_', '-')}", name, type=_limit_value, metavar="N", help=what)


@users.command()
@click.argument("name")
@_limit_option("requests_per_min", "API calls and chat messages a minute.")
@_limit_option("concurrent_requests", "API calls and chat messages at once.")
@_limit_option("stored_mib", "What conversations may take, in MiB.")
@_limit_option("tokens_per_day", "Tokens of prompts and answers a UTC day.")
@place_options
def limit(name: str, place: Place, **given: int | str | None) -> None:
    """Set what one person may ask for and store; without options, show it.

    N is a number, 0 for no limit, or `server` for the limit that the server's settings give everybody.
    """
    changes = {
        each: None if value == SERVERS_OWN else value for each, value in given.items() if value is not None
    }
    if changes:
        with place.changing() as roll:
            person = roll.find(name)
            limits = structs.replace(person.limits, **changes)
            roll.set_limits(person, limits)
        place.note("person_limited", person, about=" ".join(limits.fields) or "limits of the server")
    else:
        limits = place.roll().find(name).limits
    rows = [(each.replace("_", "-"), _shown(getattr(limits, each))) for each in NAMES]
    table(("LIMIT", "VALUE"), rows)


def _shown(limit: int | None) -> str:
    return "the server's" if limit is None else f"{limit:,}" if limit else "none"


@users.command()
@click.argument("name")
@click.option(
    "--to", required=True, type=click.Path(path_type=Path), metavar="FILE", help="A zip file to make."
)
@place_options
def export(name: str, to: Path, place: Place) -> None:
    """Write all conversations of a person, and the usage of each day, into a zip file.

    Each conversation is a JSON file, as the page exports it. A server may be running.
    """
    from gateway.people.estate import export_to

    person = place.roll().find(name)
    num = export_to(to, place.data_dir, _owner(person), person.name)
    place.note("person_exported", person)
    click.echo(f"{num} conversations of {person.name} are in {to}.")


@users.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@last_operator_option
@server_options
@place_options
def delete(
    name: str, yes: bool, last_operator: bool, url: str | None, api_key: str | None, place: Place
) -> None:
    """Remove a person from the key file, and erase conversations, usage and stored KV for ever.

    A server that runs holds the files, so it erases the person itself, for an operator's key. What is stopped half-way goes on when the
    command is given again. NAME may be the owner id of somebody who is no longer in the key file.
    """
    from gateway.people.estate import check_no_server
    from gateway.sessions.database import StoreInUse

    roll = place.roll()
    person = roll.find_or_gone(name)
    if roll.people() == [person]:
        raise StartupError(
            f"{person.name} is the last person in the key file, and the server does not take an empty one. Add somebody first."
        )
    if not yes:
        click.confirm(f"Erase {person.name} ({_owner(person)}) and all conversations for ever?", abort=True)
    try:
        check_no_server(place.data_dir)
    except StoreInUse as error:
        if api_key is None:
            raise StartupError(
                f"A server runs over {place.data_dir}, and only it can erase what it holds. Give it an operator's key: "
                f"OVERTURE_API_KEY=KEY overture users delete {name} (--url, if it is not at {DEFAULT_URL}). Or stop it."
            ) from error
        num_sessions, num_kv_blocks = _erased_by_server(url or DEFAULT_URL, api_key, _owner(person))
    else:
        num_sessions, num_kv_blocks = _erased_here(place, person, last_operator)
    click.echo(f"Erased {person.name}: {num_sessions} conversations, {num_kv_blocks} blocks of KV on disk.")


def _erased_here(place: Place, person: Any, takes_last_operator: bool) -> tuple[int, int]:
    """Erase a person while no server runs, and return the numbers of conversations and blocks of KV. Raises StartupError."""
    from gateway.people.estate import erase_person

    owner, kv_dir = _owner(person), place.config.kv_dir
    assert kv_dir is not None  # filled in by Config
    # First out, then erased, then gone from the file: whatever ends this early leaves somebody who is listed and not let in.
    with place.shutting_out(takes_last_operator) as roll:
        roll.shut_out(roll.find_or_gone(owner))
    erased = erase_person(place.data_dir, kv_dir, owner, _tell_left)
    with place.changing() as roll:
        roll.remove(roll.find_or_gone(owner))
    place.note("person_erased", person)
    return erased


def _erased_by_server(url: str, api_key: str, owner: str) -> tuple[int, int]:
    """Have the running server erase a person, and return the numbers of conversations and blocks of KV. Raises StartupError."""
    from overture_client.nodes import NodesError, Server

    try:
        server = Server(url, api_key)
        while "num_left_sessions" in (reply := server.erase_person(owner)):
            _tell_left(reply["num_left_sessions"])
    except (NodesError, ValueError) as error:
        raise StartupError(f"The server did not erase the person: {error}") from error
    return reply["num_sessions"], reply["num_kv_blocks"]


def _tell_left(num_sessions: int) -> None:
    click.echo(f"Erasing: conversations left: {num_sessions:,}", err=True)


def _owner(person: Any) -> str:
    """Return a person's owner id. Raises StartupError while it is not known."""
    if not person.owner:
        raise StartupError(
            f"The owner id of {person.name} is not known: the line in the key file was made by an earlier version, and the key was not "
            "used since. Let the key be used once, or run: overture keys replace --old-key."
        )
    return str(person.owner)
