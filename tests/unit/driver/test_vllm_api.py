"""The inventory of vLLM's names, and what is said of one that has moved: by import and by source alike, on a package made for it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine_bridge.driver import vllm_api
from engine_bridge.driver.engine.engine import EngineConfig
from engine_bridge.driver.vllm_api.__main__ import main
from engine_bridge.driver.vllm_api.check import Facts, Finding, check, check_engine
from engine_bridge.driver.vllm_api.features import FEATURES, KV_TIERS, PACE, PROMOTION, Feature
from engine_bridge.driver.vllm_api.inventory import ALL
from engine_bridge.driver.vllm_api.live import Live
from engine_bridge.driver.vllm_api.report import by_feature, can_serve, lines
from engine_bridge.driver.vllm_api.source import NoSource, Source, installed
from engine_bridge.driver.vllm_api.start import features_off, without
from engine_bridge.driver.vllm_api.uses import (
    Use,
    builds,
    calls,
    implements,
    looks_up,
    overrides,
    overrides_values,
    owner,
    reads,
    replaces,
    tags,
    writes,
)
from engine_bridge.protocol.errors import SeamMoved

ROOT = Path(__file__).parents[3]
VITAL = Feature(name="all of it", without="nothing goes", settings=None)

# What a package has where nothing has moved.
ENGINE = """
    from dataclasses import dataclass
    from {package}.base import Base
    from .base import make as build

    @dataclass
    class Request:
        name: str
        priority: int = 0

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
BASE = """
    from abc import ABC, abstractmethod

    class Base(ABC):
        def __init__(self):
            self.waiting = []

        def add(self, request):
            ...

    class Queue(ABC):
        @abstractmethod
        def push(self, item): ...

        @abstractmethod
        def pop(self): ...

    def make(name, size=1):
        return Base
"""
USES = (
    reads("limit size depth room"),
    writes("waiting late"),
    tags("note"),
    builds("size, *, depth"),
    calls("step()", "step(until)", "of(request)", "sum(left, right)", "add(request)"),
    overrides("_start(request, *args, **options)"),
    overrides_values("room"),
    looks_up("step", "_start waiting"),
    looks_up("_start", "name"),
)

numbers = itertools.count()
How = Callable[..., list[str]]


@pytest.fixture(params=["source", "live"])
def problems(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> How:
    """Says what has moved in a package with these files, under a name that no other test has imported."""

    def find(
        *uses: tuple[Use, ...], name: str = "engine:Engine", engine: str = ENGINE, base: str = BASE
    ) -> list[str]:
        package = f"fakellm{next(numbers)}"
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("from .engine import Engine\n")
        for file, text in (("engine", engine), ("base", base)):
            lines = [line[4:] for line in text.replace("{package}", package).split("\n")]
            (folder / f"{file}.py").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(tmp_path)
        facts: Facts = Live() if request.param == "live" else Source(tmp_path, package)
        path = f"{package}.{name}".replace(".:", ":")
        found = check([owner(path, VITAL, *uses)], facts)
        return [str(each).removeprefix(f"{package}.") for each in found]

    return find


def test_where_nothing_has_moved_nothing_is_found(problems: How) -> None:
    assert problems(*USES) == []


def test_a_class_that_another_module_gives_on_is_the_same_class(problems: How) -> None:
    assert problems(*USES, name=":Engine") == []
    assert problems(reads("waiting"), calls("add(request)"), name="engine:Base") == []
    assert problems(calls("build(name, size)"), name="engine") == []


def test_a_missing_module_is_found(problems: How) -> None:
    (found,) = problems(reads("size"), name="engines:Engine")
    assert found.startswith("engines.Engine: ") and ("no such module" in found or "No module named" in found)


def test_a_missing_class_is_found(problems: How) -> None:
    (found,) = problems(
        reads("size"), engine=ENGINE.replace("class Engine", "class Motor"), name="engine:Engine"
    )
    assert found.startswith("engine.Engine: ")


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("self.size, self.depth =", "self.width, self.depth =", "size"),
        ("self.waiting = []", "self.queue = []", "waiting"),
        ("self.late = True", "self.later = True", "late"),
        ("limit = 3", "bound = 3", "limit"),
        ("def room", "def space", "room"),
    ],
)
def test_an_attribute_with_another_name_is_found(problems: How, old: str, new: str, name: str) -> None:
    found = problems(
        reads("limit size room"),
        writes("waiting late"),
        engine=ENGINE.replace(old, new),
        base=BASE.replace(old, new),
    )
    assert found == [f"engine.Engine.{name}: it is gone"]


def test_a_field_with_another_name_is_found(problems: How) -> None:
    engine = ENGINE.replace("priority: int", "urgency: int")
    found = problems(
        reads("name priority"), builds("*, name, priority"), engine=engine, name="engine:Request"
    )
    assert found == [
        "engine.Request.priority: it is gone",
        "engine.Request.__init__: it does not take priority",
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("left, right", "right, left", "its argument 1 is right, we give it left"),
        ("left, right", "left", "it takes 1 arguments by position, we give it 2"),
        ("left, right", "left, right, scale", "it also wants scale"),
        ("left, right", "left, right, scale=1, *, rest=()", None),
        ("left, right", "*numbers", None),
    ],
)
def test_a_call_that_no_longer_fits_is_found(problems: How, old: str, new: str, problem: str | None) -> None:
    found = problems(calls("sum(left, right)"), engine=ENGINE.replace(old, new, 1))
    assert found == ([f"engine.Engine.sum: {problem}"] if problem else [])


def test_an_argument_that_is_no_longer_taken_by_name_is_found(problems: How) -> None:
    found = problems(builds("size, *, depth"), engine=ENGINE.replace("*, depth=1", "*, height=1, depth_=1"))
    assert found == ["engine.Engine.__init__: it does not take depth"]


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        ("request, urgent=False, **options", None),
        ("request, urgent=False", None),
        ("request, urgent=False, stale=False, **options", "it also takes stale"),
        ("request, *, stale, **options", None),
        ("urgent=False, **options", "its argument 1 is urgent, ours request"),
        ("request=None, **options", "request may be left out, ours may not"),
        ("*requests", "it takes any others, too"),
    ],
)
def test_a_function_of_ours_that_vllm_may_call_otherwise_is_found(
    problems: How, theirs: str, problem: str | None
) -> None:
    engine = ENGINE.replace("request, urgent=False, **options", theirs)
    found = problems(overrides("_start(request, urgent=False, **options)"), engine=engine)
    assert found == ([f"engine.Engine._start: {problem}"] if problem else [])


def test_what_ours_wants_and_vllm_no_longer_gives_is_found(problems: How) -> None:
    found = problems(overrides("add(request, place)"))
    assert found == ["engine.Engine.add: it no longer takes place"]


def test_a_function_that_became_something_else_is_found(problems: How) -> None:
    engine = ENGINE.replace("def step(self, until=None):", "step = 3\n\n        def other(self):")
    assert problems(calls("step()"), engine=engine) == ["engine.Engine.step: it is no function any more"]


def test_a_function_that_no_longer_asks_for_ours_is_found(problems: How) -> None:
    found = problems(looks_up("step", "_start"), engine=ENGINE.replace("self._start(", "self._begin("))
    assert found == ["engine.Engine.step: it no longer looks up _start"]
    found = problems(looks_up("_start", "name"), engine=ENGINE.replace('"name"', '"title"'))
    assert found == ["engine.Engine._start: it no longer looks up name"]


def test_a_name_to_be_replaced_that_a_module_no_longer_has_is_found(problems: How) -> None:
    found = problems(replaces("build", "make(name, size=1)"), name="engine")
    assert found == ["engine.make: it is gone"]


def test_a_new_abstract_method_is_found(problems: How) -> None:
    assert problems(implements("push pop"), name="base:Queue") == []
    assert problems(implements("push"), name="base:Queue") == ["base.Queue: it also wants pop of a subclass"]


def test_an_object_that_takes_no_attribute_of_ours_is_found(problems: How) -> None:
    engine = ENGINE.replace("@dataclass", "@dataclass(slots=True)")
    found = problems(tags("note"), engine=engine, name="engine:Request")
    assert found == ["engine.Request.note: it takes no attribute note of ours"]


def test_a_module_that_fails_when_it_is_imported_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_llm.py").write_text("raise OSError('no GPU here\\nat all')")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = check([owner("failing_llm:Engine", VITAL, reads("size"))], Live())
    assert str(found) == "failing_llm.Engine: it cannot be imported: OSError: no GPU here"


def test_a_wheel_is_read_as_it_is(tmp_path: Path) -> None:
    wheel = tmp_path / "fakellm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("fakellm/__init__.py", "class Engine:\n    size = 1\n")
    found = check([owner("fakellm:Engine", VITAL, reads("size depth"))], Source(wheel, "fakellm"))
    assert [str(each) for each in found] == ["fakellm.Engine.depth: it is gone"]
    with pytest.raises(NoSource):
        Source(wheel, "otherllm")


def test_a_package_s_own_folder_does_as_well_as_the_one_around_it(tmp_path: Path) -> None:
    (tmp_path / "fakellm").mkdir()
    (tmp_path / "fakellm" / "__init__.py").write_text("size = 1\n")
    for place in (tmp_path, tmp_path / "fakellm"):
        assert check([owner("fakellm", VITAL, reads("size"))], Source(place, "fakellm")) == []


# -- a built engine ----------------------------------------------------------------------------------------------------


class Part:
    size = 1


class Built:
    """As far as its parts are looked for."""

    def __init__(self) -> None:
        self.inner = Part()


def test_a_built_engine_s_own_objects_are_looked_at() -> None:
    there = owner("fakellm:Part", VITAL, reads("size depth"), at="inner")
    elsewhere = owner("fakellm:Other", VITAL, reads("size"), at="inner.other")
    assert [str(each) for each in check_engine([there, elsewhere], Built())] == [
        "fakellm.Part.depth: the engine's own has none",
        "fakellm.Other: the engine has none at inner.other",
    ]


# -- what becomes of it ------------------------------------------------------------------------------------------------


def moved(feature: Feature) -> Finding:
    return Finding("vllm.v1.core:Scheduler", "threshold", "it is gone", feature)


def test_what_can_be_done_without_is_off_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    off = features_off([moved(PACE), moved(PROMOTION)], "cpu")
    assert off == {PACE, PROMOTION}
    assert "vllm.v1.core.Scheduler.threshold: it is gone. Without short steps" in caplog.text
    assert without(EngineConfig(model="m", served_model_name="m"), off).max_step_ms == 0


def test_without_what_is_vital_nothing_is_served() -> None:
    with pytest.raises(SeamMoved, match=r"vllm\.v1\.core\.Scheduler\.threshold"):
        features_off([moved(PACE), moved(VITAL)], "cpu")


def test_what_another_device_or_only_a_bench_needs_is_nobody_s_loss() -> None:
    on_cuda = msgspec.structs.replace(VITAL, device="cuda")
    in_benches = msgspec.structs.replace(VITAL, at_start=False)
    assert features_off([moved(on_cuda), moved(in_benches)], "cpu") == frozenset()
    with pytest.raises(SeamMoved):
        features_off([moved(on_cuda)], "cuda")


def test_every_setting_that_turns_a_feature_off_is_one_of_an_engine() -> None:
    config = EngineConfig(model="m", served_model_name="m")
    assert without(config, FEATURES) != config


def test_a_report_has_a_line_for_each_feature_and_one_for_each_name_that_moved() -> None:
    reports = by_feature(ALL, [moved(KV_TIERS)])
    (line,) = (each for each in lines(reports) if each.startswith("KV tiers  "))
    assert line.endswith("1 moved")
    assert can_serve(reports, "cpu")
    assert not can_serve(by_feature(ALL, [moved(FEATURES[0])]), "cpu")


# -- the inventory and the installed vLLM ------------------------------------------------------------------------------


def test_the_installed_vllm_has_every_name_by_its_source() -> None:
    place = installed()
    assert place is not None
    assert [str(each) for each in check(ALL, Source(place))] == []


def test_the_installed_vllm_has_every_name_by_import() -> None:
    assert [str(each) for each in check(ALL, Live())] == []


def test_each_name_leads_to_one_place_in_vllm() -> None:
    places: dict[str, set[str]] = {}
    for each in ALL:
        if each.class_name:
            places.setdefault(each.class_name, set()).add(each.module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_name_is_vllm_s_own_and_one_that_is_not_in_the_inventory_is_not_given() -> None:
    from vllm.v1.request import RequestStatus

    assert vllm_api.RequestStatus is RequestStatus
    with pytest.raises(ImportError):
        from engine_bridge.driver.vllm_api import NoSuchName  # noqa: F401


def test_the_inventory_and_its_check_load_nothing_of_the_engine() -> None:
    code = (
        "import sys, engine_bridge.driver.vllm_api.start, engine_bridge.driver.vllm_api.source;"
        "print(*{'vllm', 'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "")


def test_the_command_says_what_a_source_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    assert main(["--source", str(tmp_path), "--json"]) == 1
    (engine, *_) = json.loads(capsys.readouterr().out)
    assert engine["feature"] == "the engine" and engine["is_vital"]
    assert {"name": "vllm.v1.engine.llm_engine.LLMEngine", "problem": "there is no such module"} in engine[
        "moved"
    ]
    with pytest.raises(SystemExit, match="2"):
        main(["--source", str(tmp_path / "nowhere")])


def test_a_source_for_a_later_python_is_said_to_be_one_and_not_taken_for_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm" / "v1" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "v1" / "engine" / "llm_engine.py").write_text("a = 1\nin future\n")
    with pytest.raises(SystemExit, match="2"):
        main(["--source", str(tmp_path), "--json"])
    assert "vllm.v1.engine.llm_engine, line 2, is no Python 3." in capsys.readouterr().err
