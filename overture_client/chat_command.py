"""`overture chat`: a conversation in the terminal, or one question."""

from __future__ import annotations

import sys

import click

from overture_client.command_line import Command

# Of a server that was started without --host and --port.
DEFAULT_URL = "http://127.0.0.1:8000"


@click.command(
    cls=Command,
    epilog="""\b
In the chat: /help lists the commands, Ctrl+C stops an answer, Ctrl+D leaves.

\b
Examples:
  overture chat
  overture chat --adapter pirate "Where is the treasure?"
  git diff | overture chat --url https://chat.example.org
""",
)
@click.argument("prompt", nargs=-1)
@click.option(
    "--url", envvar="OVERTURE_URL", default=DEFAULT_URL, show_default=True, help="Address of the gateway."
)
@click.option("--adapter", metavar="NAME", help="Adapter to answer with; without it, the base model.")
@click.option("--session", metavar="ID", help="Go on with this session.")
@click.option("--api-key", envvar="OVERTURE_API_KEY", metavar="KEY", help="Key, if the gateway asks for one.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(0, 2), metavar="T", help="0: always the likeliest word.")
def chat(
    prompt: tuple[str, ...],
    url: str,
    adapter: str | None,
    session: str | None,
    api_key: str | None,
    max_tokens: int | None,
    temperature: float | None,
) -> None:
    """Chat in the terminal, or ask PROMPT and print the answer.

    Without PROMPT, and with something piped in, that is the question.
    """
    from overture_client import terminal

    try:
        options = terminal.Options(url, api_key, adapter, session, max_tokens, temperature)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--url") from error
    question = " ".join(prompt)
    if not question and sys.stdin.isatty():
        sys.exit(terminal.Terminal(options).run())
    question = question or sys.stdin.read().strip()
    if not question:
        raise click.UsageError("nothing to ask: give PROMPT, or pipe the question in")
    sys.exit(terminal.ask_once(options, question))
