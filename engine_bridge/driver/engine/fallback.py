"""A server starts with what its model can have: an engine that cannot have a mechanism is built without it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from engine_bridge.driver.engine.errors_text import said_by
from engine_bridge.driver.ranks.failing import RankFailed
from engine_bridge.driver.ranks.starting import RankKilled
from engine_bridge.policy.limits.model_support import CONSEQUENCES, CannotHave, Mechanism, UnusableModel
from engine_bridge.policy.limits.refusals import is_final, may_be_of_pictures, misfit, refusal_of
from engine_bridge.protocol.errors import InvalidRequest, SeamMoved
from engine_bridge.protocol.figures import LeftOut
from engine_bridge.settings.engine_arguments import named
from engine_bridge.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from engine_bridge.driver.kv.kv_tiers import KvTiers

log = logging.getLogger(__name__)

Driver = TypeVar("Driver")
# Errors that no mechanism can be blamed for: files that are missing, too little memory, another vLLM, a model that it does not know, an engine
# argument that is none, a rank that was killed.
_OTHERS = (OSError, MemoryError, SeamMoved, UnusableModel, InvalidRequest, RankKilled)
_MAX_WHY_CHARS = 300
# What vLLM's models call the function that does so.
_LOADING = "load_weights"
_TIERS: Set[Mechanism] = {"KV tiers", "prefix caching"}
"""Without one of these there are no tiers."""


class Built(NamedTuple, Generic[Driver]):
    """An engine's driver, the settings that it was built with, and what it does without, though it was wished."""

    driver: Driver
    config: EngineConfig
    left_out: tuple[LeftOut, ...]


def build_with_what_works(
    config: EngineConfig,
    tiers: KvTiers | None,
    build: Callable[[EngineConfig, KvTiers | None], Driver],
    *,
    needs_adapters: bool,
) -> Built[Driver]:
    """Return what `build` makes of these settings, or of fewer mechanisms where the model cannot have all.

    Each mechanism that is left out is said once, in the log. Tiers that are left out are switched off.

    Args:
        config: the settings that the user wishes.
        tiers: the tiers for KV; None where there are none.
        build: makes the engine, takes seconds to minutes, and leaves nothing behind when it raises.
        needs_adapters: whether the user insists on adapters, so that a server without them would be no help.

    Raises:
        CannotHave: the user insists on adapters, and the model cannot have them.
        UnusableModel: vLLM cannot serve the model, whatever is left out, and what to do is known.
        Exception: that of the first try, where nothing that can be left out helps.
    """
    known: dict[Mechanism, str] = {}
    failed: list[Exception] = []
    guesses = _guesses(
        has_tiers=tiers is not None, may_lose_adapters=config.enable_lora and not needs_adapters
    )
    guess: Set[Mechanism] = frozenset()
    while True:
        tried = _without(config, known.keys() | guess)
        loses_tiers = not tried.enable_prefix_caching or "KV tiers" in known.keys() | guess
        try:
            driver = build(tried, None if loses_tiers else tiers)
            break
        except CannotHave as error:
            new = error.reasons
            if not new.keys() - known.keys() or (needs_adapters and "adapters" in new):
                raise
            known |= new
        except Exception as error:
            _let_go(error)
            if not failed and config.max_images and may_be_of_pictures(_said(error)):
                guess = frozenset({"pictures"})
            else:
                guess = _next(guesses, guess, error)
            failed.append(error)
            if not guess:
                if (refused := _refusal(failed[0])) is not None:
                    raise refused from failed[0]
                raise failed[0] from None
            log.warning(
                "the engine cannot be built as set up and is built again without %s. The reason: %s",
                " and ".join(sorted(guess)),
                _in_short(error),
            )
    known |= _reasons(guess - known.keys(), failed)
    return Built(driver, tried, tuple(_say(known, tiers)))


def _reasons(guess: Set[Mechanism], failed: Sequence[Exception]) -> dict[Mechanism, str]:
    """Return why each mechanism of a guess is left out: pictures by the first error that may be of pictures, others by the first other one."""
    found: dict[Mechanism, str] = {}
    for mechanism in sorted(guess):
        is_theirs = mechanism == "pictures"
        cause = next((each for each in failed if may_be_of_pictures(_said(each)) == is_theirs), failed[0])
        found[mechanism] = f"the engine cannot be built with it ({_in_short(cause)})"
    return found


def _next(guesses: Iterator[Set[Mechanism]], guess: Set[Mechanism], error: Exception) -> Set[Mechanism]:
    """Return what to leave out after this guess and its error; nothing if that is over."""
    more = frozenset() if _is_for_the_user(error) else next(guesses, frozenset())
    # Where something else is wrong without pictures, they were one of two faults.
    return more if may_be_of_pictures(_said(error)) else more and more | (guess & {"pictures"})


def _without(config: EngineConfig, mechanisms: Set[Mechanism]) -> EngineConfig:
    if "adapters" in mechanisms:
        config = replace(config, enable_lora=False)
    if "expert parallelism" in mechanisms:
        config = replace(config, enable_expert_parallel=False)
    if "prefix caching" in mechanisms:
        config = replace(config, enable_prefix_caching=False)
    if "pictures" in mechanisms:
        config = replace(config, max_images=0)
    if "drafts" in mechanisms:
        others = tuple(pair for pair in config.engine_args if "spec_" not in next(iter(named([pair]))))
        config = replace(config, speculative_config=None, engine_args=others)
    return config


def _guesses(*, has_tiers: bool, may_lose_adapters: bool) -> Iterator[Set[Mechanism]]:
    """Yield what an engine may be built without that fails for unknown reasons, the smallest loss first."""
    adapters: Set[Mechanism] = {"adapters"} if may_lose_adapters else frozenset()
    if adapters:
        yield adapters
    reuses: list[Set[Mechanism]] = [{"KV tiers"}, {"prefix caching"}]
    for reuse in reuses[not has_tiers :]:
        yield reuse
        if adapters:
            yield adapters | reuse


def _is_for_the_user(error: Exception) -> bool:
    """Return whether an error has a cause that only the user can mend. Too little memory is said by errors of many types."""
    said = _said(error)
    kinds = error.kinds if isinstance(error, RankFailed) else frozenset()
    is_of_others = isinstance(error, _OTHERS) or bool(kinds & {kind.__name__ for kind in _OTHERS})
    return is_of_others or "memory" in said.lower() or is_final(said) or _is_of_weights(error)


def _refusal(error: Exception) -> UnusableModel | None:
    """Return an error of vLLM's as one that says what to do; None where that is not known."""
    refused = refusal_of(_said(error))
    is_vague = refused is None or isinstance(error, AssertionError)
    return misfit(_in_short(error)) if is_vague and _is_of_weights(error) else refused


def _is_of_weights(error: Exception) -> bool:
    """Return whether vLLM met an error while it put weights into their places, which is the same whatever is left out."""
    return any(frame.name == _LOADING for frame in traceback.extract_tb(error.__traceback__))


def _said(error: Exception) -> str:
    """Return an error's type and text: of a rank's error those of the rank's."""
    return str(error) if isinstance(error, RankFailed) else said_by(error)


def _in_short(error: Exception) -> str:
    return " ".join(_said(error).split())[:_MAX_WHY_CHARS]


def _say(known: dict[Mechanism, str], tiers: KvTiers | None) -> Iterator[LeftOut]:
    """Yield what is left out, and say so in the log."""
    if tiers is not None and not tiers.is_off and known.keys() & _TIERS:
        known.setdefault("KV tiers", "there is no prefix caching")
        tiers.switch_off(known["KV tiers"])
    for mechanism, why in known.items():
        if mechanism != "KV tiers":  # which have said so themselves
            log.warning("this server runs without %s, so %s: %s", mechanism, CONSEQUENCES[mechanism], why)
        yield LeftOut(mechanism, why)


def _let_go(error: BaseException | None) -> None:
    """Have an error and its causes keep their lines, and none of the memory that the failed engine had."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
