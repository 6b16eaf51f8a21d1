"""`overture replay`: the decisions of a log, made again and compared."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from engine_bridge.policy.scheduling.decision_log import BadLog, Difference, Replay
from engine_bridge.policy.scheduling.decision_log import replay as replay_lines
from engine_bridge.policy.scheduling.queue_policy import Decision
from gateway.errors import StartupError

EXIT_DIFFERENT = 1
MAX_SHOWN = 12  # Chosen: ids of a decision that fit a few lines.


@click.command(
    epilog="""\b
`overture serve --decision-log FILE` records. The log holds ids of requests and
tenants, sizes and times; no prompt, no answer.

\b
Exit status: 0 all decisions are equal, 1 some differ, 2 the file is no such log.

\b
Example:
  overture serve --scheduling-policy mlq --decision-log decisions.jsonl
  overture replay decisions.jsonl
"""
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def replay(file: Path) -> None:
    """Make the decisions of a log again, and compare.

    FILE is what `--decision-log` wrote. The policy is made anew and told the same, so every decision should come out
    the same; one that does not shows where a change of the code changes who starts.
    """
    try:
        with file.open("rb") as lines:
            result = replay_lines(lines)
    except BadLog as error:
        raise StartupError(f"{file}: {error}") from error
    except OSError as error:
        raise StartupError(f"{file} cannot be read: {error.strerror}") from error
    _tell(result)
    sys.exit(EXIT_DIFFERENT if result.num_different else 0)


def _tell(result: Replay) -> None:
    num_equal = result.num_decisions - result.num_different
    click.echo(
        f"{result.policy}: {result.num_decisions} decisions, {num_equal} equal, {result.num_different} different"
    )
    if result.is_torn:
        click.echo(f"Line {result.num_lines + 1} is torn, as after a crash; the replay ends before it.")
    if result.first_difference is not None:
        _show(result.first_difference)


def _show(difference: Difference) -> None:
    click.echo(f"The first difference is in line {difference.line}, at {difference.now:.3f} s:")
    if difference.replayed is None:
        click.echo(f"  the replay decides of other requests: {difference.problem}")
        return
    recorded, replayed = _as_words(difference.recorded), _as_words(difference.replayed)
    for name, words in recorded.items():
        if words != replayed[name]:
            click.echo(f"  {name}\n    recorded  {words}\n    replayed  {replayed[name]}")


def _as_words(decision: Decision) -> dict[str, str]:
    return {
        "starts": _joined(decision.request_ids),
        "waits because": _joined(f"{name}: {why}" for name, why in sorted(decision.deferred.items())),
        "passes": _joined(f"{name} passes {head}" for name, head in sorted(decision.bypassed.items())),
        "squashes": _joined(decision.squash),
        "all others wait because": decision.otherwise,
    }


def _joined(words: Iterable[str]) -> str:
    shown = list(words)
    more = f", and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return (", ".join(shown[:MAX_SHOWN]) or "-") + more
