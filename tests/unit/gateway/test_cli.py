"""The command line: what it says, and the exit codes that scripts rely on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway import cli
from gateway.settings.config import SETTINGS
from overture_client import __version__, terminal
from overture_client.chat_frames import Done, Timings, Usage

ROOT = Path(cli.__file__).parents[1]


def run(*argv: str) -> Result:
    return CliRunner().invoke(cli.cli, argv)


def run_process(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OVERTURE_")}
    command = [sys.executable, "-m", "gateway.cli", *argv]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60
    )


@pytest.mark.parametrize(
    "argv", [(), ("serve",), ("chat",), ("node",), ("keys",), ("keys", "new"), ("config",), ("version",)]
)
def test_every_command_has_help(argv: tuple[str, ...]) -> None:
    result = run(*argv, "--help")
    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")


def test_the_help_of_serve_shows_every_setting_in_its_group() -> None:
    output = run("serve", "--help").output
    for setting in SETTINGS:
        assert setting.flag in output
        assert f"{setting.group}:" in output


def test_the_help_loads_none_of_the_slow_libraries() -> None:
    code = (
        "import sys\nfrom gateway.cli import cli\n"
        "cli.main(['serve', '--help'], standalone_mode=False)\n"
        "slow = {'torch', 'vllm', 'aiohttp', 'transformers', 'numpy', 'asyncio', 'rich', 'websockets'}\n"
        "sys.exit(', '.join(slow & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_config_shows_the_settings_in_effect_and_warns() -> None:
    result = run("config", "--port", "9000", "--host", "0.0.0.0")
    assert result.exit_code == 0
    assert "flag --port" in result.stdout
    assert "no API key" in result.stderr


def test_a_wrong_setting_is_one_line_and_exit_code_2() -> None:
    done = run_process("serve", "--port", "many")
    assert done.returncode == 2
    assert done.stderr == "overture: --port: expected an integer from 0 to 65535, got 'many'\n"


def test_a_node_must_be_told_which_cluster_it_joins() -> None:
    result = run("node")
    assert result.exit_code == 2
    assert "--ray-address HOST:PORT" in result.output


def test_a_new_key_matches_its_line(tmp_path: Path) -> None:
    from gateway.access.auth import KeyRing

    result = run("keys", "new", "--name", "alice")
    key, line = result.stdout.splitlines()
    assert key not in line
    path = tmp_path / "keys.txt"
    path.write_text(line + "\n", encoding="utf-8")
    path.chmod(0o600)
    assert KeyRing(key_file=path).authenticate(key).name == "alice"


def test_a_bad_key_name_is_a_usage_error() -> None:
    result = run("keys", "new", "--name", "a:b")
    assert result.exit_code == 2
    assert "--name" in result.output


def test_the_version_names_the_engine_and_python() -> None:
    lines = run("version").output.splitlines()
    assert lines[0] == f"overture {__version__}"
    assert [line.split()[0] for line in lines] == ["overture", "vllm", "torch", "python"]


def test_chat_without_a_server_fails_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.1)
    # Port 9 is "discard": nothing listens there, and it is below those that tests take.
    assert terminal.ask_once(terminal.Options("http://127.0.0.1:9"), "hello") == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "refused" in output.err


@pytest.mark.parametrize(
    ("argv", "stdin", "expected"),
    [
        (("chat", "--url", "nonsense://x", "hello"), "", "not the address of a server"),
        (("chat",), "  \n", "nothing to ask"),
    ],
)
def test_chat_says_what_is_wrong_with_its_use(argv: tuple[str, ...], stdin: str, expected: str) -> None:
    done = run_process(*argv, stdin=stdin)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_the_summary_of_an_answer_says_what_was_measured() -> None:
    usage = Usage(prompt_tokens=120, completion_tokens=12, cached_tokens=96)
    done = Done("a", "s", finish_reason="stopped", usage=usage, timings=Timings(ttft_ms=80.4, tpot_ms=20.0))
    assert terminal.summary(done) == (
        "12 tokens · first after 80 ms · 50.0 tokens/s · 96 of 120 prompt tokens from cache · stopped"
    )
    assert terminal.summary(Done("a", "s", usage=Usage(completion_tokens=1))) == "1 token"


def test_an_operators_key_is_marked_in_its_line() -> None:
    """The line is the last; the key of an ordinary one has no mark."""
    assert run("keys", "new", "--name", "ada", "--operator").output.rstrip().endswith(":operator")
    assert "operator" not in run("keys", "new", "--name", "ada").output


def test_operator_keys_are_hidden_like_others() -> None:
    result = run("config", "--operator-key", "ov-of-the-operator")
    assert (
        result.exit_code == 0 and "1 set, hidden" in result.output and "of-the-operator" not in result.output
    )
