"""Recorded traffic, read from beside the project, where somebody has put it: data are not copied into the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "shared/data"
AZURE = FOLDER / "azure_llm_2023/AzureLLMInferenceTrace_conv.csv.zst"
MOONCAKE = FOLDER / "mooncake/conversation_trace.jsonl.zst"
MT_BENCH = FOLDER / "sharegpt_multiturn/mtbench101.jsonl.zst"
OASST = FOLDER / "sharegpt_multiturn/oasst_en_100_tree.jsonl.zst"


def lines_of(path: Path) -> list[str]:
    """A file's lines, packed by zstd or not."""
    if path.suffix != ".zst":
        return path.read_text().splitlines()
    done = subprocess.run(["zstd", "-dcq", path], check=True, capture_output=True)
    return done.stdout.decode().splitlines()
