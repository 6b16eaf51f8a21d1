import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine_bridge.policy.costs.costs import Link, StepGrid
from engine_bridge.settings import profile
from engine_bridge.settings.profile import LinearCost, MachineProfile, ProfileSubject, path_of

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
