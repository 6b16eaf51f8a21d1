from pathlib import Path

import pytest

from engine_bridge.adapters.catalog import Catalog
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.names import problem_of
from engine_bridge.adapters.registry import Registry
from gateway.nodes.wanted_adapters import WantedAdapters
from tests.unit.cluster.catalog_node import contract
from tests.unit.engine_bridge.catalog_server import put

BAD = [
    "", "x" * 201, "line\nbreak", "tab\t", " law", "law ", "\u00a0law", "nul\0", "\ud800", "\u202elaw", "\u2028", ".hidden", "..", "a/../b",
    "a/.b", "/law", "law/", "a//b", "e\u0301",
]  # fmt: skip
GOOD = ["law", "org/law", "Übung 3", "été", "law-v1.2", "100%?#&", "法律", "x" * 200]


def test_bad_names_are_refused_at_every_door_and_names_that_people_give_are_fine(tmp_path: Path) -> None:
    path, several = str(put(tmp_path, "sound")), WantedAdapters(None)
    node = Catalog(Registry(None), contract(), 1 << 30)
    several.open()
    for name in BAD:
        for door in (lambda name: node.add(name, path), lambda name: several.read(name, path, {})):
            with pytest.raises(AdapterRejected) as refused:
                door(name)
            assert refused.value.code == "bad_name"
            assert str(refused.value).isprintable() and len(str(refused.value)) < 400
    assert node.served() == [] and [name for name in GOOD if problem_of(name)] == []
