"""The bench of answer lengths: every made-up kind of data runs, and so does a file of the user's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.sim import length as bench


def result_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, dict[str, float]]:
    """What the bench says of each arm."""
    monkeypatch.setattr(sys, "argv", ["length", *arguments])
    monkeypatch.setattr(bench, "DATA", dict(bench.DATA))
    bench.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {f"{run['data']} {run['arm']}": run for run in result["runs"]}


def test_programs_with_templates_are_told_apart_and_nothing_else_tells_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = result_of(monkeypatch, capsys, "--folder", str(tmp_path), "--data", "apps")
    assert runs["apps ours + hints"]["accuracy"] > 0.5
    assert runs["apps ours, no hints"]["accuracy"] < 0.35
    assert runs["apps ours + hints"]["p90_coverage"] == pytest.approx(0.9, abs=0.03)


def test_a_file_of_requests_is_read_in_either_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    records = [
        {"prompt": "Name it", "num_tokens": 5},
        {
            "messages": [{"role": "user", "content": "Tell me a story"}],
            "answer": "word " * 300,
            "session": "s",
        },
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records * 200))
    runs = result_of(monkeypatch, capsys, "--jsonl", str(path))
    assert list(runs) == ["mine recent", "mine ours, no hints", "mine ours + hints"]
    assert runs["mine ours + hints"]["num_requests"] == 400
    assert runs["mine ours + hints"]["accuracy_2"] > 0.95
