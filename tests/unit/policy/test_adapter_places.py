"""Where adapters are over all nodes, what nodes lack, and the list that clients see."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.adapters import adapter_places
from engine_bridge.policy.adapters.adapter_places import LoadAdapter, LoadRates, Pin, Served, Unload, steps
from engine_bridge.protocol.figures import AdapterStats
from engine_bridge.protocol.node import AdapterInfo, AdapterPlace

RATES = LoadRates(disk_bytes_s=100.0, copy_bytes_s=1000.0)


def info(name: str = "a", place: AdapterPlace = "disk", **fields: object) -> AdapterInfo:
    return AdapterInfo(name, 8, **{"num_bytes": 1000, "version": "v1", "place": place} | fields)  # type: ignore[arg-type]


def stats(**fields: object) -> AdapterStats:
    plain: dict[str, object] = {"num_adapters": 1, "num_by_place": {"disk": 1}, "num_waiting": 0}
    plain |= {"host_bytes": 10, "host_capacity_bytes": 100, "cached_bytes": 1, "counts": {}, "seconds": {}}
    return AdapterStats(**plain | fields)  # type: ignore[arg-type]


def test_rates_are_what_a_node_measured_and_guesses_before() -> None:
    guessed = LoadRates(adapter_places.DISK_BYTES_S, adapter_places.COPY_BYTES_S)
    assert adapter_places.rates_of(None) == adapter_places.rates_of(stats()) == guessed
    seen = {"load_bytes:disk": 4 << 20, "slot_bytes": 8 << 20}
    measured = stats(counts=seen, seconds={"load:disk": 2.0, "layout": 0.5})
    assert adapter_places.rates_of(measured) == LoadRates(2 << 20, 16 << 20)
    few = stats(counts={"load_bytes:disk": 10}, seconds={"load:disk": 2.0})
    found = adapter_places.rates_of(few).disk_bytes_s
    assert found == guessed.disk_bytes_s, "a few bytes tell nothing of a byte's time"


def test_only_nodes_with_the_wanted_version_can_serve_it() -> None:
    nodes = [
        ("n1", {"a": info(place="slot")}, RATES),
        ("n2", {"a": info(place="host")}, RATES),
        ("n3", {"a": info(version="v0", place="slot")}, RATES),
        ("n4", {"b": info("b")}, RATES),
    ]
    assert adapter_places.loads("a", "v1", nodes) == {"n1": 0.0, "n2": 1.0}


names = st.sampled_from("abcdef")
served = st.dictionaries(names, st.builds(Served, st.sampled_from(["v1", "v2"]), st.booleans()))


def done(there: dict[str, Served], wanted: dict[str, Served], todo: list[Any]) -> dict[str, Served]:
    """What a node serves after these steps: a new version takes the pin of the old one."""
    there = dict(there)
    for step in todo:
        match step:
            case LoadAdapter(name=name):
                was_pinned = name in there and there[name].is_pinned
                there[name] = Served(wanted[name].version, was_pinned)
            case Unload(name=name):
                del there[name]
            case Pin(name=name, is_pinned=is_pinned):
                there[name] = Served(there[name].version, is_pinned)
    return there


@given(served, served)
def test_steps_bring_a_node_to_what_is_wanted(wanted: dict[str, Served], there: dict[str, Served]) -> None:
    todo = steps(wanted, there)
    after = done(there, wanted, todo)
    assert after.keys() == wanted.keys()
    assert all(after[name].version == wanted[name].version for name in wanted)
    again = done(after, wanted, steps(wanted, after))
    assert again == wanted, "a pin that came over from an old version goes the second time"
    assert steps(wanted, again) == []
    loaded = [step.name for step in todo if isinstance(step, LoadAdapter)]
    assert all(wanted[name].version != there[name].version for name in loaded if name in there)


def test_pinned_adapters_come_first_and_what_goes_goes_before() -> None:
    wanted = {"a": Served("v1"), "b": Served("v1", is_pinned=True)}
    expected = [Unload("c"), LoadAdapter("b"), Pin("b", True), LoadAdapter("a")]
    assert steps(wanted, {"c": Served("v1")}) == expected


def test_a_node_with_another_version_is_told_of_and_does_not_count_as_a_place() -> None:
    nodes = {"n1": {"a": info(version="v0", place="slot")}, "n2": {"a": info()}}
    (shown,) = adapter_places.merged([info()], nodes)
    assert (shown.version, shown.place) == ("v1", "disk")
    assert (shown.nodes, shown.other_versions) == ({"n2": "disk"}, {"n1": "v0"})


def test_figures_add_up_and_an_adapter_counts_once() -> None:
    assert adapter_places.merged_stats([], [], {}) is None
    one = stats(counts={"loads:disk": 1}, seconds={"step": 0.5})
    two = stats(counts={"loads:disk": 2, "failed": 1}, seconds={"step": 0.25, "layout": 1.0})
    total = adapter_places.merged_stats([one, two], [info(place="host")], {"late": "The disk is full."})
    assert total == stats(
        num_by_place={"host": 1},
        host_bytes=20,
        host_capacity_bytes=200,
        cached_bytes=2,
        counts={"loads:disk": 3, "failed": 1},
        seconds={"step": 0.75, "layout": 1.0},
        failed={"late": "The disk is full."},
    )
