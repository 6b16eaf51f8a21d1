"""The `overture` command of an environment. Both distributions share it, so that neither overwrites the other's script.

Where the server is installed, its command runs, which knows `overture chat` as well. Elsewhere the client's own commands are offered.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import click

from overture_client import __version__
from overture_client.chat_command import chat
from overture_client.command_line import Group
from overture_client.completion_command import completion

# The group of entry points in which the server's distribution names its command (pyproject.toml).
SERVER_GROUP = "overture.command"


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 116},
    epilog="""\b
Talk to it              overture chat
Ask one thing           overture chat "What is a sonnet?"

\b
The server and its commands are in another package: pip install "overture-gateway[cpu]"
""",
)
@click.version_option(__version__, prog_name="overture", message="%(prog)s %(version)s")
def cli() -> None:
    """Overture's client: talk to an Overture server."""


cli.add_command(chat)
cli.add_command(completion)


def main() -> None:
    """Run the server's command where the server is installed, else the client's."""
    for server in entry_points(group=SERVER_GROUP):
        server.load()()
        return
    cli.main(prog_name="overture")
