"""Every block of commands in README and docs that can run here runs, as it is printed, against a server with the demo model. `make docs-check`."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.app import Server
from tests.conftest import ROOT
from tests.docs_blocks import Block, blocks, pages

PRINTED_URL = "http://127.0.0.1:8000"
# Chosen: the slowest, `overture doctor`, takes ten seconds on an idle machine.
PATIENCE_S = 240.0


def runnable() -> list[Path]:
    return [page for page in pages() if any(_is_run(block) for block in blocks(page))]


def _is_run(block: Block) -> bool:
    return bool(block.language) and not block.why_not


def run(command: list[str], text: str, folder: Path) -> str:
    """What is wrong with commands that are read from stdin; "" for nothing."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OVERTURE_")}
    environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environ |= {"HOME": str(folder)}
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, cwd=folder, env=environ, timeout=PATIENCE_S
    )
    return "" if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("page", runnable(), ids=lambda page: page.relative_to(ROOT).as_posix())
async def test_the_commands_of_a_page_run_as_printed(server: Server, page: Path, tmp_path: Path) -> None:
    """Those of a page run in one folder, in their order; its Python is one program. The folder has of a checkout what commands name."""
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    mine = [block for block in blocks(page) if _is_run(block)]
    for block in (each for each in mine if each.language == "bash"):
        text = block.text.replace(PRINTED_URL, server.url)
        problem = await asyncio.to_thread(run, ["bash", "-euo", "pipefail"], text, tmp_path)
        assert not problem, f"{block.place}\n{problem}"
    program = "\n".join(block.text for block in mine if block.language == "python")
    if program:
        problem = await asyncio.to_thread(
            run, [sys.executable, "-"], program.replace(PRINTED_URL, server.url), tmp_path
        )
        assert not problem, f"{page}\n{problem}"
