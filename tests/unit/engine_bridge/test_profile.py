import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine_bridge.core.adapters.adapter_worth import Worth
from engine_bridge.driver.kv.kv_tiers import RATED_BYTES, KvTiers, TiersConfig
from engine_bridge.policy.costs.costs import Link, StepGrid
from engine_bridge.settings import profile
from engine_bridge.settings.profile import LinearCost, MachineProfile, ProfileSubject, path_of
from kvtiers.io.io_thread import IoThread
from kvtiers.keys import BlockShape
from kvtiers.policy.eviction import ByValue
from kvtiers.store import KvStore

SUBJECT = ProfileSubject(
    model="some model/7B", revision="abc", dtype="float32", device="a processor", num_threads=2, vllm_version="0.32.0", block_size_tokens=32
)  # fmt: skip
AXES = {"num_prefill_tokens": (0, 1, 512), "num_decodes": (0, 1, 8), "num_context_tokens": (0, 1000)}
GRID = StepGrid(**AXES, seconds=tuple(0.001 * number for number in range(18)))
LINK = Link(d2h_bytes_per_s=8e9, h2d_bytes_per_s=7e9, setup_s=1e-4)
COSTS = {"bgmv": LinearCost(a=1e-6, b=1e-4, r2=0.97), "mbgmv": LinearCost(a=2e-6, b=1e-4, r2=0.99)}
PROFILE = MachineProfile(
    subject=SUBJECT,
    created_at=1.7e9,
    seconds=120.5,
    steps=profile.StepProfile(grid=GRID, error=0.04, repeatability=0.02, num_samples=300, num_held_out=60),
    copies=profile.CopyProfile(link=LINK, swap_error=0.03, repeatability=0.02),
    disk=profile.DiskProfile(write_bytes_per_s=1e9, read_bytes_per_s=2e9, is_direct=True, num_bytes=1 << 28),
    adapters=profile.AdapterProfile(load_bytes_per_s=5e8, **COSTS),
    notes=("a note",),
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "profiles"
    path = PROFILE.save(folder)
    assert MachineProfile.load(folder, PROFILE.fingerprint) == PROFILE
    assert list(folder.iterdir()) == [path]
    assert path.stat().st_mode & 0o077 == 0 and path.name.startswith("some-model-7B-")
    assert len(replace(SUBJECT, model="m" * 500).fingerprint) < 100
    later = replace(PROFILE, created_at=1.8e9)
    assert later.save(folder) == path and MachineProfile.load(folder, PROFILE.fingerprint) == later
    broken = replace(PROFILE, notes=(object(),))
    with pytest.raises((TypeError, msgspec.MsgspecError)):
        broken.save(folder)
    assert MachineProfile.load(folder, PROFILE.fingerprint) == later and list(folder.iterdir()) == [path]


@pytest.mark.parametrize("field", ProfileSubject.__struct_fields__)
def test_every_part_of_the_subject_makes_another_profile(field: str, tmp_path: Path) -> None:
    PROFILE.save(tmp_path)
    value = getattr(SUBJECT, field)
    other = replace(SUBJECT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.fingerprint != SUBJECT.fingerprint
    assert MachineProfile.load(tmp_path, other.fingerprint) is None


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        fields = json.loads(data)
        change(fields)
        return json.dumps(fields).encode()

    return apply


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "nothing in it": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "not JSON": lambda data: b"\x00" + data,
    "not an object": lambda data: b"[]",
    "another format": changed(lambda fields: fields.update(format_version=1)),
    "no format": changed(lambda fields: fields.pop("format_version")),
    "no steps": changed(lambda fields: fields.pop("steps")),
    "a time too few": changed(lambda fields: fields["steps"]["grid"]["seconds"].pop()),
    "axes that fall": changed(lambda fields: fields["steps"]["grid"]["num_decodes"].reverse()),
    "a time that is no number": changed(lambda fields: fields["steps"]["grid"].update(seconds=["a"] * 18)),
    "a speed of nothing": changed(lambda fields: fields["copies"]["link"].update(d2h_bytes_per_s=0)),
    "a disk that goes backwards": changed(lambda fields: fields["disk"].update(read_bytes_per_s=-1.0)),
    "another subject": changed(lambda fields: fields["subject"].update(revision="def")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_profile_is_none(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = PROFILE.save(tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert MachineProfile.load(tmp_path, PROFILE.fingerprint) is None
    assert "is of no use" in caplog.text


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "said"),
    [(os.mkdir, "cannot be read"), (os.mkfifo, "cannot be read"), (str, "`overture profile` measures one")],
)
def test_what_cannot_be_read_or_is_not_there_is_none_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], object], said: str
) -> None:
    make(path_of(tmp_path, "a"))
    with caplog.at_level(logging.INFO):
        assert MachineProfile.load(tmp_path, "a") is None
    assert said in caplog.text


def test_the_table_foretells_and_knows_its_error() -> None:
    table = PROFILE.steps.table()
    assert table.step_s(0, 1, 0) == pytest.approx(0.002)
    assert table.usual_error == PROFILE.steps.error == 0.04
    assert PROFILE.link is not None and PROFILE.link.out_s(8_000_000) == pytest.approx(1.1e-3)
    assert "2023" in PROFILE.summary and "4.0%" in PROFILE.summary


def test_its_speeds_are_what_costs_are_predicted_by_until_copies_and_disks_are_seen_at_work() -> None:
    tiers = KvTiers(TiersConfig(host_bytes=1 << 20))
    io = IoThread()
    tiers.store = KvStore(BlockShape(2, 4096), 1 << 20, io, None, ByValue())
    try:
        tiers.use_profile(PROFILE)
        assert tiers.host_bytes_per_s() == pytest.approx(RATED_BYTES / (RATED_BYTES / 7e9 + 1e-4))
        assert tiers.store.disk_bytes_per_s() == 2e9
        worth = Worth("lru", **PROFILE.adapter_speeds)
        assert (worth.disk_rate.at(0.0), worth.copy_rate.at(0.0)) == (5e8, 7e9)
        bare = replace(PROFILE, adapters=None, copies=None)
        assert Worth("lru", **bare.adapter_speeds).copy_rate.value is None
    finally:
        tiers.close()
        io.close()
