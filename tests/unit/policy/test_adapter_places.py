"""Where adapters are over all nodes, what nodes lack, and the list that clients see."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.policy.adapters import adapter_places
from engine_bridge.policy.adapters.adapter_places import LoadAdapter, LoadRates, Pin, Served, Unload, steps
from engine_bridge.protocol.node import AdapterInfo, AdapterPlace

RATES = LoadRates(disk_bytes_s=100.0, copy_bytes_s=1000.0)


def info(name: str = "a", place: AdapterPlace = "disk", **fields: object) -> AdapterInfo:
    return AdapterInfo(name, 8, **{"num_bytes": 1000, "version": "v1", "place": place} | fields)  # type: ignore[arg-type]


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
