"""Measured times of one model on one machine, and their file. `engine_bridge/driver/profiling/` measures.

A profile is for one `ProfileSubject` and named by its fingerprint: another device, other weights, another number of threads or another
release of vLLM each take a profile of their own. Nothing in it is needed to serve; without one, costs are learned from real steps alone.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from engine_bridge.policy.costs.costs import Link, StepGrid, StepTable
from kvtiers.io.files import read_regular, write_whole

log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 2
# The least error that a table is credited with. Chosen, as in StepTable.
MIN_ERROR: Final = 0.02


class ProfileSubject(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts that must be equal for measured times to hold.

    model: a folder's last part, or the name on a hub. revision: of a folder, a digest of its files (`kvtiers.weights.folder_revision`). device: name
    of the processor or GPU. num_threads: of a step; 0 on a GPU, and on several ranks, of which each has its own. num_ranks: devices that the model is
    split over.
    """

    model: str
    revision: str
    dtype: str
    device: str
    num_threads: int
    vllm_version: str
    block_size_tokens: int
    num_ranks: int = 1

    @property
    def fingerprint(self) -> str:
        """Name of the profile's file: readable in front, unique behind."""
        digest = hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()
        readable = "".join(c if c.isalnum() or c in "-_." else "-" for c in self.model)
        return f"{readable[:40]}-{digest[:16]}"


class StepProfile(Struct, frozen=True, kw_only=True):
    """Step times as a table, and how good it is.

    error: mean relative, of the table on held-out points. repeatability: mean relative deviation of equal steps from their median, None where none
    was repeated: the machine's share of the error. See `predict/steps.py` for how errors are counted.
    """

    grid: StepGrid
    error: float
    repeatability: float | None
    num_samples: int
    num_held_out: int

    def table(self) -> StepTable:
        """A new table, which learns from real steps from here on."""
        table = StepTable(self.grid)
        table.usual_error = max(self.error, MIN_ERROR)
        return table


class CopyProfile(Struct, frozen=True, kw_only=True):
    """Copies of KV blocks between device and host.

    swap_error: mean relative error of the link on held-out sizes, out and in. repeatability: of equal copies, as in StepProfile. ceiling_bytes_per_s:
    of one plain copy of a stretch of memory between the same two places; None where it was not measured.
    """

    link: Link
    swap_error: float
    repeatability: float
    ceiling_bytes_per_s: float | None = None


class DiskProfile(Struct, frozen=True, kw_only=True):
    """Through the disk tier's own files. is_direct: whether writes went past the page cache. num_bytes: written, and read once each."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    is_direct: bool
    num_bytes: int


class LinearCost(Struct, frozen=True, kw_only=True):
    """Seconds = a · x + b. r2: share of the variance that this explains; 1 where nothing varies."""

    a: float
    b: float
    r2: float


class AdapterProfile(Struct, frozen=True, kw_only=True):
    """Costs of adapters, as measured.

    load_bytes_per_s: from disk to host memory, checked and laid out. What adapters add to a decode step stands in both forms of CaraServe §5 (B4).
    bgmv: x is the number of requests times the largest rank among them. mbgmv: x is the sum of their ranks.
    """

    load_bytes_per_s: float
    bgmv: LinearCost | None = None
    mbgmv: LinearCost | None = None
    num_steps: int = 0


class MachineProfile(Struct, frozen=True, kw_only=True):
    """A model on a device. created_at: Unix seconds. seconds: of the measuring. None for parts that were left out; `notes` say why."""

    subject: ProfileSubject
    created_at: float
    seconds: float
    steps: StepProfile
    copies: CopyProfile | None = None
    disk: DiskProfile | None = None
    adapters: AdapterProfile | None = None
    notes: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        """The subject's fingerprint."""
        return self.subject.fingerprint

    @property
    def summary(self) -> str:
        """The profile in a line of the log."""
        day = time.strftime("%Y-%m-%d", time.localtime(self.created_at))
        return f"a profile of {day}, within {self.steps.error:.1%} of what was held out"

    @property
    def adapter_speeds(self) -> dict[str, float]:
        """The measured speeds of an adapter's ways, by the names of `core.adapter_worth.Worth`."""
        speeds = {}
        if self.adapters is not None:
            speeds["load_bytes_per_s"] = self.adapters.load_bytes_per_s
        if self.copies is not None:
            speeds["copy_bytes_per_s"] = self.copies.link.h2d_bytes_per_s
        return speeds

    def save(self, folder: Path) -> Path:
        """Write the profile in place of an older one of its subject: a reader sees the old one or this one. Returns its path. Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path_of(folder, self.fingerprint)
        write_whole(path, msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        return path

    @classmethod
    def load(cls, folder: Path, fingerprint: str) -> MachineProfile | None:
        """Load the profile of this name; None, with the reason in the log, if it is missing, damaged, or of another format or subject."""
        path = path_of(folder, fingerprint)
        try:
            data = read_regular(path)
        except FileNotFoundError:
            log.info("no profile of this model on this machine yet; `overture profile` measures one")
            return None
        except OSError as error:
            log.warning("the profile %s cannot be read: %s", path.name, error.strerror)
            return None
        try:
            return _decoded(data, fingerprint)
        except (msgspec.DecodeError, ValueError) as error:
            log.warning(
                "the profile %s is of no use (%s); `overture profile` measures anew", path.name, error
            )
            return None


class _Head(Struct):
    format_version: int = 0


def path_of(folder: Path, fingerprint: str) -> Path:
    """Return the path of the profile with this fingerprint."""
    return folder / f"{fingerprint}.json"


def _decoded(data: bytes, fingerprint: str) -> MachineProfile:
    """Decode a profile. Raises ValueError, or msgspec's DecodeError, for an unusable one."""
    version = msgspec.json.decode(data, type=_Head).format_version
    if version != FORMAT_VERSION:
        raise ValueError(f"its format is {version}, not {FORMAT_VERSION}")
    profile = msgspec.json.decode(data, type=MachineProfile)
    if profile.fingerprint != fingerprint:
        raise ValueError("it is of another model or device")
    StepTable(profile.steps.grid)  # raises ValueError for axes or times that cannot be
    rates = []
    if profile.copies is not None:
        link = profile.copies.link
        rates += [link.d2h_bytes_per_s, link.h2d_bytes_per_s]
    if profile.disk is not None:
        rates += [profile.disk.write_bytes_per_s, profile.disk.read_bytes_per_s]
    if profile.adapters is not None:
        rates.append(profile.adapters.load_bytes_per_s)
    if not all(0 < rate < math.inf for rate in rates):
        raise ValueError("it has speeds that cannot be")
    return profile
