"""The content of adapter_config.json, checked before anything relies on it.

Source: PEFT 0.17 `LoraConfig`, and vLLM 0.32 `lora/peft_helper.py`, which reads the same file later.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from engine_bridge.adapters.errors import AdapterRejected, quoted

CONFIG_FILE: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 1 << 20  # Chosen: PEFT writes 1 KB, 100 KB with a rank_pattern for every module.
MAX_PHRASE_CHARS: Final = 500  # vLLM's own explanations of unsupported options fit.
MAX_PHRASES: Final = 5
# Chosen; they bound the time that the patterns of a hostile file can take.
MAX_PATTERN_CHARS: Final = 200
MAX_REGEX_PATTERNS: Final = 32

CheckConfig = Callable[[dict[str, Any]], tuple[str, ...]]

_PLAIN_NAME = re.compile(r"[\w.-]+", re.ASCII)
# What a regular expression among the patterns may be made of. Python's can take exponential time, in our loader and in vLLM's: so no
# groups within groups or with a quantifier, and at most two places that match in several ways (10⁵ steps on a long name).
_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.|\.[*+]|\\d\+?|\[[\w-]+\]\+?|\((?:\?:)?[\w.|\\-]+\))+\$?", re.ASCII)
_AMBIGUOUS = re.compile(r"(?<!\\)\.[*+]|\]\+|\(")
_MAX_AMBIGUOUS = 2
_MAX_REPEATS = 4


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8 without doubled keys at any depth. Raises ValueError with a phrase for a message."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"it has the key {quoted(key)} twice")
        result[key] = value
    return result


def parse_config(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the configuration, and the same in canonical form (sorted keys, nothing dropped). Raises AdapterRejected."""
    try:
        config = parse_object(raw)
        canonical = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise bad_config(f"it cannot be read as JSON ({str(error)[:200]}).") from error
    return config, canonical


def check_config(config: dict[str, Any], max_rank: int, engine_check: CheckConfig) -> None:
    """Raise AdapterRejected unless everything in `config` is well formed, supported and within `max_rank`.

    engine_check: names, as phrases, further options that the engine does not support.
    """
    _check_fields(config)
    phrases = unsupported_options(config)
    if not phrases:
        try:
            phrases = engine_check(config)
        except (ValueError, TypeError, RecursionError) as error:
            raise bad_config(f"the engine cannot read it ({str(error)[:MAX_PHRASE_CHARS]}).") from error
    if phrases:
        texts = [phrase[:MAX_PHRASE_CHARS].rstrip(".") for phrase in phrases[:MAX_PHRASES]]
        raise AdapterRejected(
            f"This adapter uses what is not supported: {'; '.join(texts)}.", code="unsupported_option"
        )
    rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 0)
    if rank > max_rank:
        raise AdapterRejected(
            f"The adapter's rank {quoted(rank)} is more than this server's limit, {max_rank}. Start it with a larger max_lora_rank.",
            code="rank_too_large",
        )


def _check_fields(config: dict[str, Any]) -> None:
    for name in ("r", "lora_alpha", "target_modules"):
        if name not in config:
            raise bad_config(f"it has no '{name}'. PEFT's save_pretrained writes it.")
    if not _is_rank(config["r"]):
        raise bad_config(f"'r' must be a positive whole number, not {quoted(config['r'])}.")
    if not _is_finite(config["lora_alpha"]):
        raise bad_config(f"'lora_alpha' must be a finite number, not {quoted(config['lora_alpha'])}.")
    if not _is_target(config["target_modules"]):
        raise bad_config("'target_modules' must be a list of names, or one text.")
    _check_pattern(config, "rank_pattern", _is_rank, "positive whole numbers")
    _check_pattern(config, "alpha_pattern", _is_finite, "finite numbers")


def _check_pattern(config: dict[str, Any], field: str, is_valid: Callable[[Any], bool], what: str) -> None:
    entries = config.get(field)
    if entries is None:
        return
    if not isinstance(entries, dict) or not all(map(is_valid, entries.values())):
        raise bad_config(f"'{field}' must map module names to {what}.")
    regexes = [key for key in entries if not _PLAIN_NAME.fullmatch(key)]
    unsafe = next((key for key in regexes if not _is_bounded(key)), None)
    if unsafe is not None:
        raise AdapterRejected(
            f"The pattern {quoted(unsafe)} in '{field}' is too complicated. Use plain module names.",
            code="unsupported_option",
        )
    if len(regexes) > MAX_REGEX_PATTERNS:
        raise AdapterRejected(
            f"'{field}' has {len(regexes)} regular expressions, {MAX_REGEX_PATTERNS} at most are taken. Use plain module names.",
            code="unsupported_option",
        )


def _is_bounded(pattern: str) -> bool:
    """Return whether a pattern compiles, and a match against any module's name ends soon."""
    if len(pattern) > MAX_PATTERN_CHARS or not _PATTERN.fullmatch(pattern):
        return False
    if len(_AMBIGUOUS.findall(pattern)) > _MAX_AMBIGUOUS or pattern.count("+") > _MAX_REPEATS:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def unsupported_options(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the adapter's options that no part of the server supports, as phrases."""
    phrases = []
    if config.get("peft_type", "LORA") != "LORA":
        phrases.append(f"peft_type {quoted(config['peft_type'])} (only LORA is)")
    if config.get("use_dora"):
        phrases.append("DoRA (use_dora)")
    if config.get("bias", "none") != "none":
        phrases.append(f"trained biases (bias {quoted(config['bias'])})")
    if config.get("lora_bias"):
        phrases.append("biases in the adapter (lora_bias)")
    if config.get("modules_to_save"):
        phrases.append("whole trained modules (modules_to_save)")
    return tuple(phrases)


def ranks_of(rank: int, pattern: Mapping[str, int] | None) -> Callable[[str], int]:
    r"""Return a function that returns the rank of a module, by its name in the checkpoint without `base_model.model.`.

    Source: PEFT `get_pattern_key`, `re.match(rf"(.*\\.)?({key})$", module)`, the first key that matches wins. Departs in that the dots of
    a plain name match dots only, which makes it one look-up per part of the name where PEFT tries a thousand keys on a thousand modules.

    Args:
        rank: for modules that no key matches.
        pattern: checked by `check_config` before.
    """
    plain: dict[str, tuple[float, int]] = {}
    regexes: list[tuple[int, re.Pattern[str], int]] = []
    for place, (key, value) in enumerate((pattern or {}).items()):
        if _PLAIN_NAME.fullmatch(key):
            plain[key] = (place, value)
        else:
            regexes.append((place, re.compile(rf"(.*\.)?({key})$"), value))

    def rank_of(module: str) -> int:
        """Return the rank of one module."""
        parts = module.split(".")
        tails = (".".join(parts[start:]) for start in range(len(parts))) if plain else ()
        place, found = min((plain[tail] for tail in tails if tail in plain), default=(math.inf, rank))
        for regex_place, regex, value in regexes:
            if regex_place < place and regex.match(module):
                return value
        return found

    return rank_of


def plain_scales(config: dict[str, Any]) -> Callable[[str], float]:
    """Return the scale of every module's product, for configurations without patterns. Source: PEFT `LoraLayer.update_layer`."""
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return lambda module: float(scale)


def bad_config(text: str) -> AdapterRejected:
    """Make the error for an unusable configuration; `text` ends the sentence that says why."""
    return AdapterRejected(f"The adapter's {CONFIG_FILE} is not valid: {text}", code="bad_config")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the floats
        return False


def _is_target(value: Any) -> bool:
    """Return whether PEFT could have written this: a list, one regular expression, or null when only parameters were trained. The tensors count."""
    if isinstance(value, list):
        return all(isinstance(name, str) for name in value)
    return value is None or isinstance(value, str)
