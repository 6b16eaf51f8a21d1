"""`overture backup` and `overture restore`: all that a server keeps, copied while it runs, and put into its place on a new machine."""

from __future__ import annotations

from pathlib import Path

import click

from gateway.commands.people_options import Place, place_options
from overture_client.command_line import Command

FOLDER = click.Path(path_type=Path)


@click.command(cls=Command)
@click.argument("folder", type=FOLDER)
@place_options
def backup(folder: Path, place: Place) -> None:
    """Copy conversations, people, keys and the audit log into a new FOLDER. The server may be running.

    KV, measurements and models are left out: they are computed or fetched again.
    """
    from gateway.people.backup import back_up

    contents = back_up(place.data_dir, place.given_file, folder)
    click.echo(f"Backed up into {folder}: {', '.join(contents.files)}.")


@click.command(cls=Command)
@click.argument("folder", type=FOLDER)
@place_options
def restore(folder: Path, place: Place) -> None:
    """Put the backup in FOLDER where a server finds it: data folder and key file. Nothing that is there is overwritten.

    Restore with the version of Overture that made the backup, or a newer one.
    """
    from gateway.people.backup import restore as put_back

    contents = put_back(folder, place.data_dir, place.given_file)
    click.echo(f"Restored into {place.data_dir}: {', '.join(contents.files)}.")
