"""Whether a GPU's answers are right: the first part of `python -m bench.live.gpu`, which takes some minutes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


def test_answers_are_the_same_cold_and_warm_from_every_tier_and_after_a_rebuild() -> None:
    command = [sys.executable, "-m", "bench.live.gpu", "--only", "correct,hybrid", "--minutes", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
