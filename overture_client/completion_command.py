"""`overture completion`: the script that makes a shell complete the command's words."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from overture_client.command_line import Command

# click's `BashComplete.source` first starts bash to look at its version; `ShellComplete.source` only fills in the template.
_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "fish": FishComplete, "zsh": ZshComplete}
# The variable that click reads in the process that a shell starts for each completion; click derives it from the program's name.
COMPLETE_VARIABLE = "_OVERTURE_COMPLETE"


@click.command(
    cls=Command,
    epilog="""\b
Where the script goes:
  bash  overture completion bash > ~/.local/share/bash-completion/completions/overture
  zsh   overture completion zsh > ~/.zfunc/_overture    (with ~/.zfunc in fpath)
  fish  overture completion fish > ~/.config/fish/completions/overture.fish

Make the folder first if it is missing, then open a new shell.
""",
)
@click.argument("shell", type=click.Choice(sorted(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes commands and flags in SHELL."""
    cli = context.find_root().command
    click.echo(ShellComplete.source(_SHELLS[shell](cli, {}, "overture", COMPLETE_VARIABLE)))
