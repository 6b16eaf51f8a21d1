"""An engine that fails with a mechanism is built without it, and what fails for other reasons is said as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine_bridge.driver.engine.fallback import ONE_GROUP, build_with_what_works
from engine_bridge.driver.kv.kv_tiers import KvTiers, TiersConfig
from engine_bridge.protocol.errors import SeveralGroups
from engine_bridge.settings.engine_config import EngineConfig

CONFIG = EngineConfig(model="m", served_model_name="m", enable_lora=True)
NO_LORA = ValueError("OddForCausalLM does not support LoRA yet.")


def built(
    fails: Callable[[EngineConfig, KvTiers | None], Exception | None],
    config: EngineConfig = CONFIG,
    *,
    needs_adapters: bool = False,
) -> tuple[list[tuple[bool, bool, bool]], KvTiers]:
    """Return each engine that was tried, with adapters, with tiers and with one group, and the tiers."""
    tried = []
    given = KvTiers(TiersConfig(host_bytes=1 << 20, disk_bytes=0, folder=Path("unused")))

    def build(config: EngineConfig, tiers: KvTiers | None) -> str:
        tried.append((config.enable_lora, tiers is not None, ONE_GROUP in config.engine_args))
        if (error := fails(config, tiers)) is not None:
            raise error
        return "an engine"

    driver, last = build_with_what_works(config, given, build, needs_adapters=needs_adapters)
    assert driver == "an engine" and last.enable_lora == tried[-1][0]
    assert given.is_off != tried[-1][1]
    return tried, given


def test_what_works_is_built_once() -> None:
    assert built(lambda *_: None)[0] == [(True, True, False)]


def test_a_model_without_adapters_is_served_without_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tried, _ = built(lambda config, _: NO_LORA if config.enable_lora else None)
    assert tried == [(True, True, False), (False, True, False)]
    assert "built again without adapters" in caplog.text and "does not support LoRA yet" in caplog.text


def test_kinds_of_attention_become_one_where_they_can_and_else_cost_the_tiers() -> None:
    def fails(config: EngineConfig, tiers: Any) -> Exception | None:
        return SeveralGroups("2 kinds") if tiers and ONE_GROUP not in config.engine_args else None

    assert built(fails)[0] == [(True, True, False), (True, True, True)]
    recurrent = ValueError("the kinds of KV cannot be unified")
    tried, _ = built(lambda config, tiers: fails(config, tiers) or (recurrent if tiers else None))
    assert tried == [(True, True, False), (True, True, True), (True, False, False)]
    # Whoever has chosen vLLM's manager keeps it.
    wish = replace(CONFIG, engine_args=("disable_hybrid_kv_cache_manager=false",))
    assert built(fails, wish)[0] == [(True, True, False), (True, False, False)]


def test_a_model_may_lack_both() -> None:
    def fails(config: EngineConfig, tiers: Any) -> Exception | None:
        return NO_LORA if config.enable_lora else SeveralGroups("2 kinds") if tiers else None

    assert [each[:2] for each in built(fails)[0]] == [
        (True, True),
        (False, True),
        (False, True),
        (False, False),
    ]


@pytest.mark.parametrize(
    ("error", "needs_adapters"),
    [(NO_LORA, True), (OSError("no such folder"), False), (MemoryError("no room"), False)],
)
def test_named_adapters_and_other_causes_are_errors_at_once(error: Exception, needs_adapters: bool) -> None:
    num_tries = 0

    def fails(config: EngineConfig, tiers: Any) -> Exception:
        nonlocal num_tries
        num_tries += 1
        return error

    with pytest.raises(type(error), match=str(error)):
        built(fails, needs_adapters=needs_adapters)
    assert num_tries == 1


def test_what_helps_nowhere_is_the_first_error() -> None:
    errors = iter([ValueError("the cause"), ValueError("another")])
    with pytest.raises(ValueError, match="the cause"):
        built(lambda *_: next(errors))
