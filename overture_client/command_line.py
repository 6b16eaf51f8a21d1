"""Commands whose options have the values that were meant for them: the one base of all commands of `overture`."""

from __future__ import annotations

import re
from typing import Any

import click

# A word that is a flag, not the value of the one before it: such a value is joined by "=".
_FLAG = re.compile(r"--?[A-Za-z]\S*", re.DOTALL)


def is_flag(word: str) -> bool:
    """Return whether a word of a command line is a flag, as argparse tells: it begins with a dash, is no number, and has no space in it."""
    return _FLAG.fullmatch(word) is not None


def lacks_value(name: str) -> str:
    """Return what is said about a flag without its value. The word behind it is not shown, as it may be a key that begins with a dash."""
    return f"{name} lacks its value. One that begins with a dash is written with an equals sign: {name}=VALUE"


class Command(click.Command):
    """A command that refuses an option behind which another stands in its value's place.

    click takes the other for the value: `--key-file --operator` would write a file of that name, `--host --api-key KEY` open the server.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Check the line, then parse it. A line that a shell completes need not be right yet."""
        options = [each for each in self.params if isinstance(each, click.Option) and not each.is_flag]
        with_value = {name for option in options for name in option.opts}
        words = iter(() if ctx.resilient_parsing else args)
        for word in words:
            if word == "--":
                break
            if word in with_value and is_flag(next(words, "")):
                raise click.BadOptionUsage(word, lacks_value(word), ctx)
        return super().parse_args(ctx, args)


class Group(Command, click.Group):
    """A group of such commands and groups."""

    command_class: Any = Command
    group_class: Any = type
