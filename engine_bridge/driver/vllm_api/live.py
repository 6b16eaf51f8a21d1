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
    """A module or class that was imported, and the names that it and a class's objects have."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self._mro = [each for each in found.__mro__ if each is not object] if isinstance(found, type) else []

    @classmethod
    def of(cls, owner: Owner) -> Live:
        """Import an owner. Raises any error of its import."""
        module = importlib.import_module(owner.module)
        return cls(getattr(module, owner.class_name) if owner.class_name else module)

    def has(self, name: str) -> bool:
        """Return whether the module, the class or the class's objects have this name."""
        if self._mro:
            is_member = any(
                name in vars(each) or name in vars(each).get("__annotations__", {}) for each in self._mro
            )
            return is_member or name in self._set_at_first or name in self._set_later
        try:
            getattr(self._found, name)
        except AttributeError:
            return False
        except Exception:  # an environment variable with a useless value exists all the same
            return True
        return True

    def parameters(self, name: str) -> tuple[Parameter, ...] | None:
        """Return a function's parameters without `self`. None: the name is no function."""
        if self._mro and name == "__init__":
            return _signature(self._found)
        member = inspect.getattr_static(self._found, name, None)
        if self._mro and isinstance(member, classmethod | staticmethod):
            return _signature(getattr(self._found, name))
        parameters = _signature(member) if callable(member) else None
        return parameters[1:] if self._mro and parameters is not None else parameters

    def mentions(self, by: str, name: str) -> bool:
        """Return whether the function `by` looks this name up."""
        code = _code_of(inspect.getattr_static(self._found, by, None))
        return code is not None and any(name in names for names in _names(code))

    def abstract_names(self) -> frozenset[str]:
        """Return the methods that this class leaves to its subclasses."""
        return getattr(self._found, "__abstractmethods__", frozenset())

    def takes_tags(self) -> bool:
        """Return whether the class's objects take attributes that it does not know."""
        return bool(self._found.__dictoffset__)

    @cached_property
    def _set_at_first(self) -> set[str]:
        """The attributes that the constructor sets."""
        return self._set_by({"__init__", "__post_init__"})

    @cached_property
    def _set_later(self) -> set[str]:
        """The attributes that any method sets. Looked up only for names that the constructor does not set: there is more code to read."""
        return self._set_by({name for each in self._mro for name in vars(each)})

    def _set_by(self, methods: set[str]) -> set[str]:
        codes = (_code_of(vars(each)[name]) for each in self._mro for name in methods & vars(each).keys())
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
