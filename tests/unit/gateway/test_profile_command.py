"""`overture profile` as the operator sees it, before and after the engine."""

from __future__ import annotations

import io
from pathlib import Path

from click.testing import CliRunner

from engine_bridge.predict.steps import Candidate
from gateway.cli import cli
from gateway.commands.profile_command import ProgressBar, best_of_each
from gateway.settings.config import Config


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_help_says_what_is_measured_and_takes_the_servers_settings() -> None:
    output = CliRunner().invoke(cli, ["profile", "--help"]).output
    assert "--seconds" in output and "--max-num-seqs" in output and "copies of KV" in output


def test_a_time_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(cli, ["profile", "--seconds", "0"])
    assert result.exit_code == 2 and "--seconds" in result.output


def test_profiles_are_kept_in_the_data_folder(tmp_path: Path) -> None:
    assert Config(data_dir=tmp_path).profile_dir == tmp_path / "profiles"


def test_without_a_terminal_each_part_is_a_line() -> None:
    out = io.StringIO()
    with ProgressBar(out) as progress:
        progress.stage("warming up")
        for share in (0.0, 0.1, 0.2):
            progress(f"steps: {share}", share, 100 * (1 - share))
        progress("copies: 1 block", 0.9, 10)
    assert out.getvalue().splitlines() == [
        "warming up",
        "  0%, 100 s left: steps: 0.0",
        " 90%, 10 s left: copies: 1 block",
    ]


def test_on_a_terminal_a_bar_says_how_far_it_is_and_goes_in_the_end() -> None:
    out = Terminal()
    with ProgressBar(out) as progress:
        progress("steps: 64 tokens", 0.5, 60)
    shown = out.getvalue()
    assert "█" * 12 + "░" * 12 in shown and "60 s left  steps: 64 tokens" in shown
    assert shown.endswith("\r\x1b[2K") and "\n" not in shown


def test_of_each_regressor_the_best_degree_is_shown() -> None:
    ranked = (Candidate("tree", 3, 0.2, 0.1), Candidate("ridge", 2, 0.2, 0.2), Candidate("tree", 1, 0.3, 0.3))
    assert best_of_each(ranked) == [ranked[0], ranked[1]]
