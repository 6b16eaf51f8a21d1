"""`overture replay` on files that a policy wrote, and on others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from engine_bridge.policy.scheduling.decision_log import Recorded
from engine_bridge.policy.scheduling.policies import POLICIES
from engine_bridge.policy.scheduling.queue_policy import StepRoom, Waiting
from gateway.cli import cli, main

ROOT = Path(__file__).parents[3]
ROOM = StepRoom(free_blocks=25, num_slots=4, num_tokens=1000)


def run(path: Path) -> Result:
    return CliRunner().invoke(cli, ["replay", str(path)])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Three wait, two of them start."""
    lines: list[bytes] = []

    def write(line: bytes) -> bool:
        lines.append(line)
        return True

    policy = Recorded(POLICIES["mlq"](1000), 1000, write)
    waiting = {
        name: Waiting(
            request_id=name, arrived_s=1.0, weighted_size=0.1, size_tokens=9, num_blocks=10, duration_s=1.0
        )
        for name in "abc"
    }
    for facts in waiting.values():
        policy.arrived(facts, 2.0)
    policy.decide(waiting, {}, ROOM, 3.5)
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def test_equal_decisions_are_counted_and_end_well(recorded: Path) -> None:
    result = run(recorded)
    assert result.exit_code == 0
    assert result.output == "mlq: 1 decisions, 1 equal, 0 different\n"


def test_a_difference_is_shown_and_is_the_exit_status(recorded: Path) -> None:
    *lines, decided = recorded.read_bytes().splitlines(keepends=True)
    changed = msgspec.json.encode(msgspec.json.decode(decided) | {"starts": ["a", "c"]}) + b"\n"
    recorded.write_bytes(b"".join(lines) + changed)
    result = run(recorded)
    assert result.exit_code == 1
    assert "1 different" in result.output
    assert "line 5, at 3.500 s" in result.output
    assert "recorded  a, c\n" in result.output and "replayed  a, b\n" in result.output
    assert "squashes" not in result.output, "what is equal is not shown"


def test_other_facts_than_recorded_are_shown(recorded: Path) -> None:
    *lines, decided = recorded.read_bytes().splitlines(keepends=True)
    changed = msgspec.json.encode(msgspec.json.decode(decided) | {"waiting": {}}) + b"\n"
    recorded.write_bytes(b"".join(lines) + changed)
    result = run(recorded)
    assert result.exit_code == 1 and "'a'" in result.output


def test_a_torn_line_is_told(recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-20])
    result = run(recorded)
    assert result.exit_code == 0
    assert "0 decisions" in result.output and "Line 5 is torn" in result.output


def test_another_file_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(path)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "notes.txt: line 1: " in error and error.count("\n") == 1
    assert run(tmp_path / "none").exit_code == 2


def test_it_runs_without_the_engine(recorded: Path) -> None:
    code = (
        "import sys\nfrom gateway.cli import cli\n"
        f"cli.main(['replay', {str(recorded)!r}], standalone_mode=False)"
    )
    check = "import atexit, sys; atexit.register(lambda: print(sorted({'torch', 'vllm', 'asyncio'} & set(sys.modules))))\n"
    done = subprocess.run(
        [sys.executable, "-c", check + code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
