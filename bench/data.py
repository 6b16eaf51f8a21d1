"""Recorded traffic, read from beside the project if it is there: data are not copied into the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "shared/data"
AZURE = FOLDER / "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.zst"
MOONCAKE = FOLDER / "mooncake/conversation_trace.jsonl.zst"
MT_BENCH = FOLDER / "sharegpt_multiturn/mtbench101.jsonl.zst"
OPEN_ASSISTANT = FOLDER / "sharegpt_multiturn/oasst_en_100_tree.jsonl.zst"


def are_recorded(*paths: Path) -> bool:
    """Return whether all of these files are there. Print the missing ones: made-up data in their place, if any, gives other figures."""
    missing = [path for path in paths if not path.exists()]
    for path in missing:
        print(
            f"{path.name} is not there: what is drawn in its place, if anything, gives other figures",
            file=sys.stderr,
        )
    return not missing


def lines_of(path: Path) -> list[str]:
    """Return a file's lines, packed by zstd or not."""
    if path.suffix != ".zst":
        return path.read_text().splitlines()
    done = subprocess.run(["zstd", "-dcq", path], check=True, capture_output=True)
    return done.stdout.decode().splitlines()
