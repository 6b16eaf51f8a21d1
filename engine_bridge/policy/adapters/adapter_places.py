"""Where adapters are, over all nodes: which nodes can serve one and how soon, what each lacks, and the one list that clients see. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from engine_bridge.protocol.figures import AdapterStats
from engine_bridge.protocol.node import AdapterInfo, AdapterPlace

# Speeds of a node that has not loaded an adapter yet. Chosen: a middling disk, and memory as one thread copies it.
DISK_BYTES_S = 1e9
COPY_BYTES_S = 5e9
# The time of a smaller transfer depends more on the file than on its bytes. Chosen.
MIN_MEASURED_BYTES = 1 << 20
_NEAREST: tuple[AdapterPlace, ...] = ("slot", "host", "cached", "disk")


class LoadRates(Struct, frozen=True):
    """Bytes per second from disk into host memory, and from there into a slot."""

    disk_bytes_s: float = DISK_BYTES_S
    copy_bytes_s: float = COPY_BYTES_S


def rates_of(stats: AdapterStats | None) -> LoadRates:
    """Return the speeds that a node has measured so far; the assumed ones until then."""
    if stats is None:
        return LoadRates()
    counts, seconds = stats.counts, stats.seconds
    return LoadRates(
        _rate(counts.get("load_bytes:disk", 0), seconds.get("load:disk", 0.0), DISK_BYTES_S),
        _rate(counts.get("slot_bytes", 0), seconds.get("layout", 0.0), COPY_BYTES_S),
    )


def _rate(num_bytes: int, seconds: float, otherwise: float) -> float:
    return num_bytes / seconds if num_bytes >= MIN_MEASURED_BYTES and seconds > 0 else otherwise


def load_s(info: AdapterInfo, rates: LoadRates) -> float:
    """Return the seconds to bring the adapter into a slot of its node.

    From memory that KV lends it is copied no slower than from the host.
    """
    if info.place == "slot":
        return 0.0
    from_disk_s = info.num_bytes / rates.disk_bytes_s if info.place == "disk" else 0.0
    return from_disk_s + info.num_bytes / rates.copy_bytes_s


class AdapterAt(NamedTuple):
    """An adapter as routing sees it. load_s: by node, the seconds to load it there, from `loads`."""

    rank: int
    load_s: Mapping[str, float]


def loads(
    name: str, version: str, nodes: Iterable[tuple[str, Mapping[str, AdapterInfo], LoadRates]]
) -> dict[str, float]:
    """Return `Ask.adapter_load_s`: by node, the seconds to load this version, for the nodes that can serve it.

    An ask for an adapter has `usual_load_s=None`: other nodes cannot serve it. nodes: of each its name, the adapters that it serves, and its speeds;
    one that serves another version is left out.
    """
    found = ((node_id, served.get(name), rates) for node_id, served, rates in nodes)
    return {
        node_id: load_s(info, rates)
        for node_id, info, rates in found
        if info is not None and info.version == version
    }


# -- keeping nodes in step ---------------------------------------------------------------------------------------------


class Served(Struct, frozen=True):
    """The version of an adapter that is served or is to be served."""

    version: str
    is_pinned: bool = False


class LoadAdapter(Struct, frozen=True):
    """Load this adapter. If the node serves another version of it, that one is replaced."""

    name: str


class Unload(Struct, frozen=True):
    """Unload this adapter."""

    name: str


class Pin(Struct, frozen=True):
    """Pin this adapter, or unpin it."""

    name: str
    is_pinned: bool


Step = LoadAdapter | Unload | Pin


def steps(wanted: Mapping[str, Served], there: Mapping[str, Served]) -> list[Step]:
    """Return the steps that make a node serve the wanted adapters.

    Steps that take no memory are first, then loads, pinned adapters before others, each followed by its pin.
    """
    unloads = [Unload(name) for name in there if name not in wanted]
    pins: list[Step] = []
    missing = []
    for name, served in wanted.items():
        old = there.get(name)
        if old is None or old.version != served.version:
            missing.append(name)
        elif old.is_pinned != served.is_pinned:
            pins.append(Pin(name, served.is_pinned))
    missing.sort(key=lambda name: not wanted[name].is_pinned)
    more = [step for name in missing for step in (LoadAdapter(name), *_pin(name, wanted[name]))]
    return [*unloads, *pins, *more]


def _pin(name: str, served: Served) -> tuple[Step, ...]:
    return (Pin(name, True),) if served.is_pinned else ()


# -- the one list ------------------------------------------------------------------------------------------------------


def merged(
    listed: Sequence[AdapterInfo], nodes: Mapping[str, Mapping[str, AdapterInfo]]
) -> list[AdapterInfo]:
    """Return all adapters by name, each with its nearest place, its place on each node, and the uses of all nodes together.

    listed: the adapters that should be served; their rank, bytes, version and pin are the ones returned. nodes: the adapters that each running node
    serves. A node that serves another version of a name is listed under `other_versions`.
    """
    return [
        _merged(
            info, [(node_id, served[info.name]) for node_id, served in nodes.items() if info.name in served]
        )
        for info in sorted(listed, key=lambda info: info.name)
    ]


def _merged(listed: AdapterInfo, found: list[tuple[str, AdapterInfo]]) -> AdapterInfo:
    places = {node_id: info.place for node_id, info in found if info.version == listed.version}
    used_at = [info.last_used_at for _, info in found if info.last_used_at is not None]
    return replace(
        listed,
        place=min(places.values(), key=_NEAREST.index, default="disk"),
        num_uses=sum(info.num_uses for _, info in found),
        last_used_at=max(used_at, default=None),
        nodes=places,
        other_versions={node_id: info.version for node_id, info in found if node_id not in places},
    )


def merged_stats(
    stats: Sequence[AdapterStats], adapters: Sequence[AdapterInfo], failed: Mapping[str, str]
) -> AdapterStats | None:
    """Return all nodes' figures together; None where no node has any.

    adapters: from `merged`, each counted once by its nearest place. failed: for adapters that the gateway found and no node serves, the reason.
    """
    if not stats:
        return None
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for each in stats:
        counts.update(each.counts)
        seconds |= {key: seconds.get(key, 0.0) + value for key, value in each.seconds.items()}
    return AdapterStats(
        num_adapters=len(adapters),
        num_by_place=dict(Counter[str](info.place for info in adapters)),
        host_bytes=sum(each.host_bytes for each in stats),
        host_capacity_bytes=sum(each.host_capacity_bytes for each in stats),
        cached_bytes=sum(each.cached_bytes for each in stats),
        num_waiting=sum(each.num_waiting for each in stats),
        counts=dict(counts),
        seconds=seconds,
        failed=dict(failed),
    )
