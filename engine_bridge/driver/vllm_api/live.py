"""The names of vLLM's modules and classes, found by importing them."""

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
    """Facts about the installed vLLM, found by import. Use it only after the engine's environment is set."""

    def __init__(self) -> None:
        self._owners: dict[str, Any] = {}
        self._classes: dict[type, _Class] = {}

    def problem(self, owner: Owner) -> str | None:
        """Return why the owner cannot be imported; None: it can."""
        try:
            self._object(owner)
        except Exception as error:  # a module of vLLM may raise any error when it is imported
            return f"it cannot be imported: {type(error).__name__}: {_first_line(error)}"
        return None

    def has(self, owner: Owner, name: str) -> bool:
        """Return whether the owner has this name."""
        found = self._object(owner)
        if isinstance(found, type):
            return self._class(found).has(name)
        try:
            getattr(found, name)
        except AttributeError:
            return False
        except Exception:  # an environment variable with a useless value exists all the same
            return True
        return True

    def parameters(self, owner: Owner, name: str) -> tuple[Parameter, ...] | None:
        """Return a function's parameters without `self`. None: the name is no function."""
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
        """Return whether the owner's function `by` looks this name up."""
        code = _code_of(inspect.getattr_static(self._object(owner), by, None))
        return code is not None and any(name in names for names in _names(code))

    def abstract_names(self, owner: Owner) -> frozenset[str]:
        """Return the methods that this class leaves to its subclasses."""
        return getattr(self._object(owner), "__abstractmethods__", frozenset())

    def takes_tags(self, owner: Owner) -> bool:
        """Return whether the class's objects take attributes that it does not know."""
        return bool(self._object(owner).__dictoffset__)

    def _object(self, owner: Owner) -> Any:
        """Return the owner's module or class. Raises any error of its import."""
        if owner.path not in self._owners:
            found: Any = importlib.import_module(owner.module)
            if owner.class_name:
                found = getattr(found, owner.class_name)
            self._owners[owner.path] = found
        return self._owners[owner.path]

    def _class(self, found: type) -> _Class:
        return self._classes.setdefault(found, _Class(found))


class _Class:
    """A class whose objects' attributes are looked up."""

    def __init__(self, found: type) -> None:
        self._mro = [each for each in found.__mro__ if each is not object]

    def has(self, name: str) -> bool:
        """Return whether the class's objects have this attribute."""
        is_member = any(
            name in vars(each) or name in vars(each).get("__annotations__", {}) for each in self._mro
        )
        return is_member or name in self._set_at_first or name in self._set_later

    @cached_property
    def _set_at_first(self) -> set[str]:
        """The attributes that the constructor sets."""
        return self._set_by(lambda name: name in ("__init__", "__post_init__"))

    @cached_property
    def _set_later(self) -> set[str]:
        """The attributes that any method sets. Looked up only for names that the constructor does not set: there is more code to read."""
        return self._set_by(lambda name: True)

    def _set_by(self, is_wanted: Any) -> set[str]:
        codes = (
            _code_of(member) for each in self._mro for name, member in vars(each).items() if is_wanted(name)
        )
        return {name for code in codes if code is not None for name in _stored(code)}


def _signature(function: Any) -> tuple[Parameter, ...] | None:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # a function in C without a signature
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
    """Yield the names that a function, and the functions in it, look up, import or spell out."""
    yield code.co_names
    yield code.co_varnames
    yield tuple(constant for constant in code.co_consts if isinstance(constant, str))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _stored(code: CodeType) -> Iterator[str]:
    """Yield the attributes that a function sets. `dis` would find the same and take ten times as long."""
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
