"""The bench for a GPU, as far as no engine is needed: which parts are played, what is made of answers, and the parts of its kit."""

from __future__ import annotations

import io
import json
import lzma
import random
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.live.gpu import __main__ as bench
from bench.live.gpu.kit import NEXT_STEPS, pack
from bench.live.gpu.parts import Found, told
from bench.live.peers.play import Answer


@pytest.fixture
def closed() -> list[str]:
    return []


def part(name: str, closed: list[str], *found: dict[str, Any], error: str = "") -> Any:
    """A part that finds these things, and then fails or not."""

    def play() -> Found:
        try:
            yield from found
            if error:
                raise RuntimeError(error)
        finally:
            closed.append(name)

    return play


def lines(captured: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, captured.splitlines())


def test_a_part_that_fails_costs_no_other_part(capsys: pytest.CaptureFixture[str], closed: list[str]) -> None:
    parts = {
        "a": part("a", closed, {"is_right": True}, error="no memory"),
        "b": part("b", closed, {"tpot_ms": 1.5}, {"is_right": False}),
        "c": part("c", closed),
    }
    found = bench.play(parts, minutes=60)
    assert found == {"wrong": ["b"], "failed": ["a"], "skipped": [], "stopped": []}
    assert closed == ["a", "b", "c"], "each has ended its engine"
    said = [(each["part"], each.get("failed", "")) for each in lines(capsys.readouterr().out)]
    assert said == [("a", ""), ("a", "RuntimeError: no memory"), ("b", ""), ("b", "")]


def test_no_part_begins_that_has_no_time_and_one_under_way_stops(
    monkeypatch: pytest.MonkeyPatch, closed: list[str]
) -> None:
    now = iter([0.0, 0.0, 0.0, 200.0, 200.0, 400.0, 400.0, 400.0])
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(now))
    parts = {"a": part("a", closed, {}, {}, {}), "b": part("b", closed, {})}
    found = bench.play(parts, minutes=5)
    assert (found["stopped"], found["skipped"], closed) == (["a"], ["b"], ["a"])


def test_without_a_gpu_it_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.shutil, "which", lambda command: None)
    monkeypatch.setattr(bench.sys, "argv", ["gpu"])
    assert bench.main() == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and "--dry" in told.err


def test_a_plays_figures() -> None:
    answers = [
        Answer(ttft_s=0.1, token_ids=[1, 2, 3], token_s=[0.1, 0.2, 0.3]),
        Answer(ttft_s=0.3, token_ids=[1, 2], token_s=[0.3, 0.5]),
        Answer(ttft_s=0.2, token_ids=[1], token_s=[0.2]),
    ]
    assert told(answers) == {"tpot_ms": 150.0, "itl_p99_ms": 200.0, "ttft_ms": 200.0, "tokens_per_s": 12.0}


def test_a_kit_is_cut_into_parts(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(2200)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "file").write_bytes(data)
    parts = pack(tmp_path / "kit", tmp_path, 1000)
    assert [path.name for path in parts] == ["part-00", "part-01", "part-02"]
    assert [path.stat().st_size for path in parts[:2]] == [1000, 1000]
    whole = lzma.decompress(b"".join(path.read_bytes() for path in parts))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        file = archive.extractfile("kit/file")
        assert file is not None and file.read() == data
    with pytest.raises(subprocess.CalledProcessError):
        pack(tmp_path / "none", tmp_path)
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in NEXT_STEPS and "bench.live.gpu" in NEXT_STEPS
