"""`overture completion`: each shell accepts its script, and what the script asks for is answered."""

import shutil
import subprocess

import pytest
from click.testing import CliRunner

from gateway import cli
from overture_client.completion_command import COMPLETE_VARIABLE


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_the_script_of_a_shell_is_in_its_language_and_asks_the_command(shell: str) -> None:
    script = CliRunner().invoke(cli.cli, ["completion", shell], prog_name="overture").output
    assert f"{COMPLETE_VARIABLE}={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, timeout=20)


def test_the_command_answers_what_the_script_asks_with_flags_of_serve() -> None:
    asked = {COMPLETE_VARIABLE: "bash_complete", "COMP_WORDS": "overture serve --kv-h", "COMP_CWORD": "2"}
    result = CliRunner().invoke(cli.cli, [], prog_name="overture", env=asked)
    assert result.output.splitlines() == ["plain,--kv-host-gib"]


def test_another_shell_is_refused_with_those_that_there_are() -> None:
    result = CliRunner().invoke(cli.cli, ["completion", "tcsh"], prog_name="overture")
    assert result.exit_code == 2
    assert "'bash', 'fish', 'zsh'" in result.output
