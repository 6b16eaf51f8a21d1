"""A server starts with what its model can have: an engine that fails with a mechanism which can be left out is built again without it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from engine_bridge.protocol.errors import SeamMoved, SeveralGroups
from engine_bridge.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers

log = logging.getLogger(__name__)

Driver = TypeVar("Driver")
ONE_GROUP = "disable_hybrid_kv_cache_manager=true"
"""vLLM's argument with which sliding windows and full attention keep their KV alike, in one group of blocks."""
# Errors that no mechanism can be blamed for: files that are missing, too little memory, another vLLM.
_OTHERS = (OSError, MemoryError, SeamMoved)
_MAX_WHY_CHARS = 300


def build_with_what_works(
    config: EngineConfig,
    tiers: KvTiers | None,
    build: Callable[[EngineConfig, KvTiers | None], Driver],
    *,
    needs_adapters: bool,
) -> tuple[Driver, EngineConfig]:
    """Return what `build` makes of these settings, or of fewer mechanisms where it fails with them, and the settings that it was made of.

    Each mechanism that is left out is said once, in the log. Tiers that are left out are switched off.

    Args:
        config: the settings that the user wishes.
        tiers: the tiers for KV; None where there are none.
        build: makes the engine, takes seconds to minutes, and leaves nothing behind when it raises.
        needs_adapters: whether the user has named adapters, so that a server without them would be no help.

    Raises:
        Exception: that of the first try, where nothing that can be left out helps.
    """
    first: Exception | None = None
    is_unified = False
    wishes_groups = any(each.split("=")[0] == ONE_GROUP.split("=")[0] for each in config.engine_args)
    while True:
        try:
            return build(config, tiers), config
        except Exception as error:
            _let_go(error)
            first = first or error
            has_several, failed = isinstance(error, SeveralGroups), error
        if tiers is not None and has_several and not (is_unified or wishes_groups):
            is_unified, how = True, "with KV of all tokens in layers with a window, which the KV tiers need"
            config = replace(config, engine_args=(*config.engine_args, ONE_GROUP))
        elif tiers is not None and (has_several or is_unified):
            how = "without KV tiers"
            tiers.switch_off("the engine cannot be built with them")
            tiers = None
            if is_unified:
                config = replace(config, engine_args=config.engine_args[:-1])
        elif config.enable_lora and not needs_adapters and not isinstance(failed, _OTHERS):
            how = "without adapters"
            config = replace(config, enable_lora=False)
        else:
            raise first
        why = " ".join(f"{type(failed).__name__}: {failed}".split())[:_MAX_WHY_CHARS]
        log.warning("the engine cannot be built as set up and is built again %s. The reason: %s", how, why)


def _let_go(error: BaseException | None) -> None:
    """Have an error and its causes keep their lines, and none of the memory that the failed engine had."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
