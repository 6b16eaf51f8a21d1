"""`overture nodes`: the nodes of a running server, in a table; draining and restarting them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from overture_client.chat_command import DEFAULT_URL
from overture_client.command_line import Group

EXIT_ERROR = 1
F = Callable[..., Any]


def server_options(command: F) -> F:
    """The options that say which server, and by which key. Those of `overture nodes` itself count for what stands behind it, too."""
    key = click.option(
        "--api-key", envvar="OVERTURE_API_KEY", metavar="KEY", help="An operator's key, where there are keys."
    )
    url = click.option(
        "--url",
        envvar="OVERTURE_URL",
        metavar="URL",
        help=f"Address of the server.  [{DEFAULT_URL}]",
    )
    return url(key(command))


def _change(command: F) -> F:
    force = click.option("--force", is_flag=True, help="Also where no other node takes requests meanwhile.")
    drain = click.option(
        "--drain-timeout-s",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="How long running answers get to end.  [as the server's setting has it]",
    )
    most = click.option(
        "--timeout-s",
        type=click.FloatRange(min=1),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for one node.",
    )
    return force(drain(most(server_options(command))))


@click.group(
    cls=Group,
    invoke_without_command=True,
    epilog="""\b
Examples:
  overture nodes
  overture nodes --json --url http://10.0.0.5:8000
  overture nodes drain node-2
  overture nodes restart --all

Exit status: 0 when it is done, 1 when it is not, 2 for a mistake in the command.
""",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, as GET /v1/nodes gives it.")
@server_options
@click.pass_context
def nodes(context: click.Context, url: str | None, api_key: str | None, as_json: bool) -> None:
    """Show the nodes of a running server; drain or restart them.

    Without a command: a table. Device, host and disk say how much of the room for KV is in use; the last two are an operator's to see.
    """
    context.obj = (url, api_key)
    if context.invoked_subcommand is None:
        _run(context, None, None, lambda client, server: client.show(server, as_json=as_json))


@nodes.command()
@click.argument("node_id", metavar="ID")
@_change
@click.pass_context
def drain(context: click.Context, /, node_id: str, **options: Any) -> None:
    """Give a node no new work, and wait until what runs there has ended."""
    _change_by(context, options, lambda changes, server: changes.drain(node_id))


@nodes.command()
@click.argument("node_id", metavar="ID")
@server_options
@click.pass_context
def reopen(context: click.Context, node_id: str, url: str | None, api_key: str | None) -> None:
    """Give a drained node work again."""
    _run(
        context,
        url,
        api_key,
        lambda client, server: client.Changes(server, {}, 1.0, click.echo).reopen(node_id),
    )


@nodes.command()
@click.argument("node_id", metavar="[ID]", required=False)
@click.option(
    "--all", "everyone", is_flag=True, help="All nodes, one after the other, each when the last is back."
)
@_change
@click.pass_context
def restart(context: click.Context, /, node_id: str | None, everyone: bool, **options: Any) -> None:
    """Drain a node and start it again; wait until it is ready.

    Conversations go on: on the other nodes meanwhile, and from the node's disk afterwards.
    """
    if (node_id is None) is not everyone:
        raise click.UsageError("say which node, or --all")

    def run(changes: Any, server: Any) -> None:
        """Restart the named node, or all nodes one after the other."""
        changes.restart(
            [node_id] if node_id is not None else [each["id"] for each in server.nodes()["nodes"]]
        )

    _change_by(context, options, run)


def _change_by(context: click.Context, options: dict[str, Any], run: Callable[[Any, Any], None]) -> None:
    wanted: dict[str, Any] = {"force": options["force"]}
    if options["drain_timeout_s"] is not None:
        wanted["timeout_s"] = options["drain_timeout_s"]

    def act(client: Any, server: Any) -> None:
        """Run the change with the client's printing."""
        run(client.Changes(server, wanted, options["timeout_s"], click.echo), server)

    _run(context, options["url"], options["api_key"], act)


def _run(
    context: click.Context, url: str | None, api_key: str | None, act: Callable[[Any, Any], None]
) -> None:
    """Do it, with the options of the command or of the group; a failure is one line and exit status 1."""
    from overture_client import nodes as client

    outer_url, outer_key = context.obj
    try:
        server = client.Server(url or outer_url or DEFAULT_URL, api_key or outer_key)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--url") from error
    try:
        act(client, server)
    except client.NodesError as error:
        click.echo(f"overture nodes: {error}", err=True)
        sys.exit(EXIT_ERROR)
