"""What vLLM's modules and classes are like once they are imported."""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from inspect import Parameter
from types import CodeType, ModuleType
from typing import Any

from engine_bridge.driver.vllm_api.uses import Owner

_STORE, _EXTENDED = dis.opmap["STORE_ATTR"], dis.opmap["EXTENDED_ARG"]


class Live:
    """Facts by import. Imports what is asked about, so only after the engine's environment is set."""

    def __init__(self) -> None:
        self._owners: dict[str, Any] = {}
        self._classes: dict[type, _Class] = {}

    def problem(self, owner: Owner) -> str | None:
        try:
            self._object(owner)
        except Exception as error:  # whatever a module of vLLM raises when it is imported
            return f"it cannot be imported: {type(error).__name__}: {_first_line(error)}"
        return None

    def has(self, owner: Owner, name: str) -> bool:
        found = self._object(owner)
        if isinstance(found, type):
            return self._class(found).has(name)
        try:
            getattr(found, name)
        except AttributeError:
            return False
        except Exception:  # an environment variable that says nothing useful is there all the same
            return True
        return True

    def parameters(self, owner: Owner, name: str) -> tuple[Parameter, ...] | None:
        found = self._object(owner)
        if isinstance(found, type) and name == "__init__":
            return _signature(found)
        member = inspect.getattr_static(found, name, None)
        if isinstance(found, type) and isinstance(member, classmethod | staticmethod):
            return _signature(getattr(found, name))
        if not callable(member):
            return None
        parameters = _signature(member)
        return parameters[1:] if isinstance(found, type) and parameters is not None else parameters

    def mentions(self, owner: Owner, by: str, name: str) -> bool:
        code = _code_of(inspect.getattr_static(self._object(owner), by, None))
        return code is not None and any(name in names for names in _names(code))

    def abstract_names(self, owner: Owner) -> frozenset[str]:
        return getattr(self._object(owner), "__abstractmethods__", frozenset())

    def takes_tags(self, owner: Owner) -> bool:
        return bool(self._object(owner).__dictoffset__)

    def _object(self, owner: Owner) -> Any:
        """Raises whatever keeps it from being had."""
        if owner.path not in self._owners:
            found: Any = importlib.import_module(owner.module)
            if owner.class_name:
                found = getattr(found, owner.class_name)
            self._owners[owner.path] = found
        return self._owners[owner.path]

    def _class(self, found: type) -> _Class:
        return self._classes.setdefault(found, _Class(found))


class _Class:
    """Which attributes its objects have."""

    def __init__(self, found: type) -> None:
        self._mro = [each for each in found.__mro__ if each is not object]

    def has(self, name: str) -> bool:
        is_member = any(
            name in vars(each) or name in vars(each).get("__annotations__", {}) for each in self._mro
        )
        return is_member or name in self._set_at_first or name in self._set_later

    @cached_property
    def _set_at_first(self) -> set[str]:
        """By the constructor."""
        return self._set_by(lambda name: name in ("__init__", "__post_init__"))

    @cached_property
    def _set_later(self) -> set[str]:
        """Looked at for what the constructor does not set: there is more of it to read."""
        return self._set_by(lambda name: True)

    def _set_by(self, is_wanted: Any) -> set[str]:
        codes = (
            _code_of(member) for each in self._mro for name, member in vars(each).items() if is_wanted(name)
        )
        return {name for code in codes if code is not None for name in _stored(code)}


def _signature(function: Any) -> tuple[Parameter, ...] | None:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # in C, without a word about it
        return None


def _code_of(member: Any) -> CodeType | None:
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, ModuleType) or not callable(member):
        return None
    code = getattr(inspect.unwrap(member), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _names(code: CodeType) -> Iterator[tuple[Any, ...]]:
    """What a function looks up, imports or spells out, and what the functions in it do."""
    yield code.co_names
    yield code.co_varnames
    yield tuple(constant for constant in code.co_consts if isinstance(constant, str))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _stored(code: CodeType) -> Iterator[str]:
    """Attributes that a function sets: `dis` would tell as much and take ten times as long."""
    high = 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        if operation == _EXTENDED:
            high = (high | low) << 8
            continue
        if operation == _STORE:
            yield code.co_names[high | low]
        high = 0


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
