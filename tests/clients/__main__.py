"""Clients that others wrote, against a real server with the demo model.

    python -m tests.clients [--only NAME …] [--keep] [--url URL]      (or: make clients ARGS='--only openai')

Each client runs in an environment of its own, made on first use under $XDG_CACHE_HOME/overture/clients from the exact versions in
requirements/clients (10 GiB for all, and 6 GiB have to be free before each). Clients for Node are installed by npm, and bring a Node of
their own. One server serves most of them, and one with a longer context serves those with very long prompts. A client's script makes the
calls that its users make and checks the answers; for the frameworks that Overture has hooks for, the hook's example and its tests run, too.

A run of all clients writes the table in docs/clients.md. Failed calls are printed with their error and the first lines of the traceback. The last
line is JSON: `clients` that made calls, `calls` made, `failed` among them. The exit status is 1 where a call failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.live.shared.report import ROOT, Progress, options
from tests.clients import table
from tests.clients.catalog import CLIENTS, Client
from tests.clients.environments import NotInstalled, cache_folder, environment_of, remove_others
from tests.clients.running import Outcome, Result, run_hook, run_script
from tests.clients.server import MODEL, Servers

PAGE = ROOT / "docs" / "clients.md"


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", choices=names, help=f"only these of: {', '.join(names)}"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave environments that no list asks for any more (they are removed otherwise)",
    )
    parser.add_argument("--url", metavar="URL", help="use the server at this address instead of starting any")
    return parser.parse_args()


def run_client(client: Client, folder: Path, url: str, progress: Progress) -> Result:
    """Make the client's environment and its calls. What cannot be installed is one failed call."""
    result = Result(client)
    try:
        environment = environment_of(client, folder, progress.say)
        result.version = environment.version_of(client.package)
        result.calls += run_script(environment, url, MODEL)
        if client.hook:
            result.calls += run_hook(environment, url, MODEL)
    except NotInstalled as error:
        result.calls.append(Outcome("install", str(error)))
    progress.say(f"{client.name} {result.version}: {len(result.calls)} calls, {len(result.failed)} failed")
    return result


def summary(results: Sequence[Result]) -> dict[str, int]:
    """What the last line says."""
    return {
        "clients": sum(bool(result.version) for result in results),
        "calls": sum(len(result.calls) for result in results),
        "failed": sum(len(result.failed) for result in results),
    }


def main() -> None:
    args, progress, folder = arguments(), Progress(), cache_folder()
    wanted = [client for client in CLIENTS if not args.only or client.name in args.only]
    with Servers(args.url, progress.say) as servers:
        results = [run_client(client, folder, servers.url_for(client), progress) for client in wanted]
    print("\n".join([*table.failures(results), "", *table.rows(results)]))
    if not args.only:
        table.write(PAGE, results)
    if not args.keep:
        remove_others(folder, {client.environment for client in CLIENTS})
    found = summary(results)
    print(json.dumps(found))
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
