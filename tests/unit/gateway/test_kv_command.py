"""`overture kv` on real stores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from click.testing import CliRunner, Result

from gateway.cli import cli, main
from kvtiers.io.disk_log import DiskLog
from kvtiers.io.records import ALIGNMENT_BYTES
from kvtiers.keys import BlockKey, BlockShape

SHAPE = BlockShape(2, 1024)
ABOUT = b'{"model": "a-model", "block_size_tokens": 32}'


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["kv", *arguments])


@contextmanager
def held_store(root: Path, num_blocks: int) -> Iterator[None]:
    """A store of so many blocks, open within the block."""
    with asyncio.Runner() as runner:
        folder = root / "a-model-0123"
        log = runner.run(
            DiskLog.open(folder, "0123", SHAPE, 1 << 20, segment_bytes=3 * ALIGNMENT_BYTES, describe=ABOUT)
        )
        for number in range(num_blocks):
            key = BlockKey(bytes([number]) * 32)
            assert runner.run(log.append([key], lambda block, layer: memoryview(bytes(1024))))
        yield
        runner.run(log.close())


def test_show_says_whose_kv_is_how_large(tmp_path: Path) -> None:
    with held_store(tmp_path, 5):
        shown = run("show", "--kv-dir", str(tmp_path))
    assert shown.exit_code == 0
    assert "a-model\n" in shown.output
    assert "5 blocks of 32 tokens" in shown.output
    (line,) = run("show", "--json", "--kv-dir", str(tmp_path)).output.splitlines()
    about = json.loads(line)
    assert about["num_blocks"] == 5
    assert about["namespace"]["model"] == "a-model"
    assert about["bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("segment-*"))


def test_prune_deletes_the_oldest_down_to_a_size(tmp_path: Path) -> None:
    with held_store(tmp_path, 6):
        pass
    before = json.loads(run("show", "--json", "--kv-dir", str(tmp_path)).output)
    assert before["num_segments"] == 3
    pruned = run("prune", "--max-gib", str((4 * ALIGNMENT_BYTES) / (1 << 30)), "--kv-dir", str(tmp_path))
    assert pruned.exit_code == 0 and "2 files" in pruned.output
    assert json.loads(run("show", "--json", "--kv-dir", str(tmp_path)).output)["num_blocks"] == 2
    assert "1 files" in run("prune", "--all", "--kv-dir", str(tmp_path)).output
    assert json.loads(run("show", "--json", "--kv-dir", str(tmp_path)).output)["bytes"] == 0


def test_nothing_is_deleted_that_is_young_or_not_named(tmp_path: Path) -> None:
    with held_store(tmp_path, 2):
        pass
    assert "Deleted 0 B" in run("prune", "--older-than-days", "1", "--kv-dir", str(tmp_path)).output
    refused = run("prune", "--kv-dir", str(tmp_path))
    assert refused.exit_code == 2 and "--max-gib" in refused.output
    assert json.loads(run("show", "--json", "--kv-dir", str(tmp_path)).output)["num_blocks"] == 2


def test_a_folder_without_kv_is_no_error(tmp_path: Path) -> None:
    assert "No KV is stored" in run("show", "--kv-dir", str(tmp_path / "none")).output
    assert "No KV is stored" in run("prune", "--all", "--kv-dir", str(tmp_path / "none")).output


def test_a_store_in_use_is_not_pruned(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    with held_store(tmp_path, 2):
        try:
            main(["kv", "prune", "--all", "--kv-dir", str(tmp_path)])
        except SystemExit as ended:
            assert ended.code == 2
    assert "stop the server" in capsys.readouterr().err
    assert json.loads(run("show", "--json", "--kv-dir", str(tmp_path)).output)["num_blocks"] == 2
