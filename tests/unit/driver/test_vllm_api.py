import gc
import itertools
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine_bridge.driver import vllm_api
from engine_bridge.driver.engine.building import load_vllm
from engine_bridge.driver.engine.engine import EngineConfig
from engine_bridge.driver.vllm_api.check import Finding, check, check_engine
from engine_bridge.driver.vllm_api.features import ENGINE, FEATURES, PACE, PROMOTION, TEXT_ALONE, Feature
from engine_bridge.driver.vllm_api.inventory import ALL
from engine_bridge.driver.vllm_api.start import features_off, without
from engine_bridge.driver.vllm_api.uses import owners
from engine_bridge.protocol.errors import SeamMoved

ROOT = Path(__file__).parents[3]

# What a package has where nothing has moved.
SOURCE = """
from abc import ABC, abstractmethod
from dataclasses import dataclass

@dataclass
class Request:
    name: str
    priority: int = 0

class Base(ABC):
    def __init__(self):
        self.waiting = []

    def add(self, request): ...

class Queue(ABC):
    @abstractmethod
    def push(self, item): ...

    @abstractmethod
    def pop(self): ...

def make(name, size=1):
    return Base

class Engine(Base):
    limit = 3

    def __init__(self, size, *, depth=1):
        super().__init__()
        self.size, self.depth = size, depth

    @property
    def room(self):
        return self.size

    @classmethod
    def of(cls, request):
        return cls(request)

    @staticmethod
    def sum(left, right):
        return left + right

    def step(self, until=None):
        self.late = True
        return [self._start(each, urgent=False) for each in self.waiting]

    def _start(self, request, urgent=False, **options):
        return getattr(request, "name", None)
"""
USES = """:Engine ENGINE
    read limit size depth room
    write waiting late
    tag note
    call __init__(size, *, depth) step() step(until) of(request) sum(left, right) add(request)
    override _start(request, *args, **options) room
    look up in step: _start waiting
    look up in _start: name"""

numbers = itertools.count()
Problems = Callable[..., list[str]]


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """Says what has moved in a package, under a name that no other test has imported."""

    def find(uses: str, *changes: tuple[str, str]) -> list[str]:
        name = f"fakellm{next(numbers)}"
        source = SOURCE
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return [str(each).removeprefix(f"{name}.") for each in check(owners(name + uses))]

    return find


CALL, OURS = ":Engine ENGINE\n    call sum(left, right)", ":Engine ENGINE\n    override _start({})"
REQUEST = ":Request ENGINE\n    read name priority\n    call __init__(*, name, priority)"
PUSH, TAG = ":Queue ENGINE\n    implement push", ":Request ENGINE\n    tag note"
OTHER = ":Engine ENGINE\n    override add(request, place)"
STEP, MAKE = ":Engine ENGINE\n    call step()", " ENGINE\n    replace Engine make(name, size=1)"

# The uses, what changes in the package, and what is found.
CASES = r"""
# where nothing has moved
USES | | | nothing
MAKE + "\n    call make(name, size)" | | | nothing
PUSH + " pop" | | | nothing
PUSH + "\n    override pop()" | | | nothing
":Queue ENGINE\n    override push(item)" | | | Queue: it also wants pop of a subclass
# attributes, fields, functions
USES | self.size, self.depth = | self.width, self.depth = | Engine.size: it is gone
USES | self.late = True | self.later = True | Engine.late: it is gone
USES | limit = 3 | bound = 3 | Engine.limit: it is gone
REQUEST | priority: int | urgency: int | Request.priority: it is gone; Request.__init__: it does not take priority
STEP | def step(self, until=None): | step = 3\n    def other(self): | Engine.step: it is no function any more
MAKE | def make( | def made( | make: it is gone
PUSH | @abstractmethod\n    def pop | def top(self): ...\n    @abstractmethod\n    def pop | Queue: it also wants pop of a subclass
TAG | @dataclass | @dataclass(slots=True) | Request.note: it takes no attribute note of ours
# names that vLLM's functions look up
USES | self._start( | self._begin( | Engine.step: it no longer looks up _start
USES | "name" | "title" | Engine._start: it no longer looks up name
# our calls of its functions
CALL | left, right | right, left | Engine.sum: its argument 1 is right, we give it left
CALL | left, right | left | Engine.sum: it takes 1 arguments by position, we give it 2
CALL | left, right | left, right, scale | Engine.sum: it also wants scale
CALL | left, right | left, right, scale=1, *, rest=() | nothing
CALL | left, right | *numbers | nothing
USES | *, depth=1 | *, height=1, depth_=1 | Engine.__init__: it does not take depth
# its calls of our functions
OURS | **options | **others | nothing
OURS | , urgent=False, **options | , urgent=False | nothing
OURS | urgent=False, ** | urgent=False, stale=False, ** | Engine._start: it also takes stale
OURS | request, urgent=False | request, *, stale | nothing
OURS | request, urgent=False | urgent=False | Engine._start: its argument 1 is urgent, ours request
OURS | request, urgent=False | request=None | Engine._start: request may be left out, ours may not
OURS | request, urgent=False, **options | *requests | Engine._start: it takes any others, too
OTHER | limit = 3 | limit = 4 | Engine.add: it no longer takes place
"""


@pytest.mark.parametrize("case", [line for line in CASES.strip().splitlines() if not line.startswith("#")])
def test_what_has_moved_is_found(problems: Problems, case: str) -> None:
    uses, old, new, found = (part.strip() for part in case.split("|"))
    given = eval(uses).replace("{}", "request, urgent=False, **options")
    changes = [(old.replace("\\n", "\n"), new.replace("\\n", "\n"))] if old else []
    assert "; ".join(problems(given, *changes)) == found.removesuffix("nothing")


def test_what_cannot_be_imported_is_a_finding_for_each_feature_that_needs_it(
    problems: Problems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone, again) = problems(":Motor ENGINE\n    read size\n    PACE: read depth")
    assert gone == again and gone.startswith("Motor: it cannot be imported: AttributeError")
    (tmp_path / "failing_llm.py").write_text("raise OSError('no GPU here\\nat all')")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = check(owners("failing_llm:Engine ENGINE"))
    assert str(found) == "failing_llm.Engine: it cannot be imported: OSError: no GPU here"


@pytest.mark.parametrize("line", ["a b c", "a.b:C ENGINE\n    reads size", "a.b:C ENGINE\n    look up size"])
def test_a_line_of_the_inventory_that_cannot_be_read_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"no (owner|use) of names"):
        owners(line)


def test_a_built_engine_s_own_objects_are_looked_at() -> None:
    built = SimpleNamespace(inner=SimpleNamespace(size=1))
    text = "llm:Part ENGINE at inner\n    read size depth\nllm:Other ENGINE at inner.other\n    read size"
    assert [str(each) for each in check_engine(owners(text), built)] == [
        "llm.Part.depth: the engine's own has none",
        "llm.Other: the engine has none at inner.other",
    ]


def moved(feature: Feature) -> Finding:
    return Finding("vllm.v1.core:Scheduler", "threshold", "it is gone", feature)


def test_what_can_be_done_without_is_off_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    off = features_off([moved(PACE), moved(PROMOTION)], "cpu")
    assert off == {PACE, PROMOTION}
    assert "vllm.v1.core.Scheduler.threshold: it is gone. Without short steps" in caplog.text
    config = EngineConfig(model="m", served_model_name="m")
    assert without(config, off).max_step_ms == 0
    assert without(config, FEATURES) != config  # every setting is one of an engine
    with pytest.raises(SeamMoved, match=r"vllm\.v1\.core\.Scheduler\.threshold"):
        features_off([moved(PACE), moved(ENGINE)], "cpu")
    on_gpus = msgspec.structs.replace(ENGINE, device="cuda")
    for another in (on_gpus, msgspec.structs.replace(ENGINE, at_start=False)):
        assert features_off([moved(another)], "cpu") == frozenset(), "nobody's loss"
    with pytest.raises(SeamMoved):
        features_off([moved(on_gpus)], "cuda")


@pytest.mark.parametrize("was_on", [False, True])
def test_the_collector_rests_while_vllm_is_imported(monkeypatch: pytest.MonkeyPatch, was_on: bool) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    monkeypatch.setattr(vllm_api, "__getattr__", lambda name: gc.isenabled())
    (gc.enable if was_on else gc.disable)()
    try:
        assert load_vllm.__wrapped__() is False
        assert (gc.isenabled(), frozen) == (was_on, [False] * was_on)
    finally:
        gc.enable()


def test_the_installed_vllm_has_every_name_in_one_place() -> None:
    from vllm.v1.request import RequestStatus

    assert [str(each) for each in check(ALL)] == []
    places: dict[str, set[str]] = {}
    for each in ALL:
        if each.class_name:
            places.setdefault(each.class_name, set()).add(each.module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    assert vllm_api.RequestStatus is RequestStatus
    with pytest.raises(ImportError):
        from engine_bridge.driver.vllm_api import NoSuchName  # noqa: F401


def test_what_concerns_models_with_pictures_alone_costs_no_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has renamed this function before."""
    from vllm.config import VllmConfig

    monkeypatch.delattr(VllmConfig, "_resolve_mm_embedding_inputs")
    assert features_off(check(ALL), "cpu") == {TEXT_ALONE}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    where = {"cwd": ROOT, "env": os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **where)


def test_the_inventory_and_its_check_load_nothing_of_the_engine() -> None:
    loaded = "{'vllm', 'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = run("-c", f"import sys, engine_bridge.driver.vllm_api.start; print(*{loaded})")
    assert (done.returncode, done.stdout.strip()) == (0, "")


def test_the_command_says_what_another_vllm_lacks(tmp_path: Path) -> None:
    """Of a wheel; tests/integration/test_doctor.py asks about a folder."""
    wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm/__init__.py", "__version__ = '1.0'\n")
    done = run("-m", "engine_bridge.driver.vllm_api", "--source", str(wheel))
    engine, *others = json.loads(done.stdout)
    assert (done.returncode, engine["feature"], engine["is_vital"]) == (1, "the engine", True)
    assert "No module named 'vllm.v1'" in engine["moved"][0]["problem"]
    tiers = next(each for each in others if each["feature"] == "KV tiers")
    assert "vllm" not in [each["name"] for each in tiers["moved"]]  # its version is there
    assert run("-m", "engine_bridge.driver.vllm_api", "--source", str(tmp_path / "nowhere")).returncode == 2
