"""`overture profile` on the real engine: complete, rising, found by the next engine, and nothing left behind.

Runs before the shared engine starts (conftest).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from engine_bridge.driver.engine.engine import VllmDriver
from engine_bridge.driver.profiling.machine import measure, profiling_config
from engine_bridge.settings.engine_config import EngineConfig
from engine_bridge.settings.profile import MachineProfile
from gateway import cli
from gateway.app import engine_config
from tests.integration.conftest import demo_config, logging_kept

SECONDS = 3.0
# Small bounds: in so little time a few dozen steps are to cover them.
LIMITS = {"max_num_seqs": 8, "max_model_len": 512, "max_loras": 2, "max_lora_rank": 32}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture(scope="module")
def printed(data_dir: Path) -> Result:
    """What the command says of the demo model, in this process, which has imported vLLM."""
    limits = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    command = ["profile", "--json", "--seconds", str(SECONDS), "--data-dir", str(data_dir), *limits]
    with logging_kept():
        return CliRunner().invoke(cli.cli, command)


@pytest.fixture(scope="module")
def config(data_dir: Path) -> EngineConfig:
    return engine_config(demo_config(data_dir, **LIMITS))


@pytest.fixture(scope="module")
def driver(config: EngineConfig, printed: Result) -> Iterator[VllmDriver]:
    """The next engine with the same settings, without tiers."""
    driver = VllmDriver(replace(config, kv_host_gib=0.0, kv_disk_gib=0.0, adapters_in_kv=False))
    yield driver
    driver.close()


def test_the_command_measures_everything_and_says_so(printed: Result) -> None:
    assert printed.exit_code == 0, printed.stderr
    line: dict[str, Any] = json.loads(printed.stdout.splitlines()[-1])
    assert not [note for note in line["notes"] if "not measured" in note]
    # How far off the table is depends on what else the machine does.
    assert 0 < line["steps"]["error"] < math.inf and line["steps"]["num_held_out"] > 0
    assert line["steps"]["num_samples"] >= 60 and line["steps"]["repeatability"] > 0
    link = line["copies"]["link"]
    assert link["d2h_bytes_per_s"] > 0 and link["h2d_bytes_per_s"] > 0
    assert line["copies"]["ceiling_bytes_per_s"] > 0
    assert line["disk"]["read_bytes_per_s"] > 0 and line["disk"]["write_bytes_per_s"] > 0
    assert line["adapters"]["load_bytes_per_s"] > 0 and line["adapters"]["num_steps"] > 0
    assert {"a", "b", "r2"} == set(line["adapters"]["bgmv"]) == set(line["adapters"]["mbgmv"])
    for words in (
        "step times",
        "copies of KV blocks",
        "disk",
        "adapters",
        "of a plain copy's",
        line["fingerprint"],
    ):
        assert words in printed.stdout
    for part in ("disk:", "adapters:", "steps:", "copies:", "fitting:"):
        assert part in printed.stderr


def test_nothing_but_the_profile_is_left_behind(data_dir: Path, printed: Result) -> None:
    found = sorted(str(path.relative_to(data_dir)) for path in data_dir.rglob("*"))
    fingerprint = json.loads(printed.stdout.splitlines()[-1])["fingerprint"]
    assert found == ["profiles", f"profiles/{fingerprint}.json"]


def test_an_engine_with_the_same_settings_finds_it_and_its_table_rises(driver: VllmDriver) -> None:
    table = driver.profile.steps.table()
    # Steps that are nearly alike may be measured alike; no step is shorter than a smaller one.
    assert 0 < table.step_s(16, 0, 0) <= table.step_s(400, 0, 0)
    for low, high in (((0, 1, 64), (0, 8, 3000)), ((16, 1, 64), (400, 7, 3000))):
        assert 0 < table.step_s(*low) < table.step_s(*high)
    assert len(set(table.grid().seconds)) > 10


def test_an_interrupted_run_keeps_nothing(config: EngineConfig, driver: VllmDriver, tmp_path: Path) -> None:
    """Interrupted while adapters, the disk's records and requests are there. After it the engine still serves."""
    seen: list[str] = []

    def interrupt(what: str, share_done: float, left_s: float) -> None:
        seen.extend(str(path.name) for path in tmp_path.rglob("*"))
        if what.startswith("adapters: decoding"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(driver, profiling_config(config), tmp_path / "profiles", 0.1, interrupt)
    assert {"adapters", "disk", "log"} <= set(seen), "it wrote nothing, so this test could not fail"
    assert list((tmp_path / "profiles").iterdir()) == []
    assert driver.report.stats().num_running == driver.report.stats().num_waiting == 0


def test_the_profile_is_of_this_model_alone(data_dir: Path, driver: VllmDriver) -> None:
    assert MachineProfile.load(data_dir / "profiles", driver.profile.fingerprint) == driver.profile
    other = replace(driver.profile.subject, revision="of other weights")
    assert MachineProfile.load(data_dir / "profiles", other.fingerprint) is None
