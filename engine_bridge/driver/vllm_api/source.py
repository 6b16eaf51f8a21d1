"""The names of vLLM's modules and classes, read from their source, which need not be importable here: another release, or one for a GPU."""

from __future__ import annotations

import ast
import platform
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

from engine_bridge.driver.vllm_api.signatures import field_parameter, parameters_of
from engine_bridge.driver.vllm_api.uses import Owner

Function = ast.FunctionDef | ast.AsyncFunctionDef
# The most imports that are followed from one module to the next before a name is given up. Chosen.
MAX_IMPORTS = 20


class NoSource(ValueError):
    """There is no package of this name, or it cannot be read. The message says where, or why."""


class Source:
    """Facts about a vLLM, found by reading its source.

    Args:
        place: a folder that has, or is, the package; or a wheel.
        package: the package's name.
    """

    def __init__(self, place: Path, package: str = "vllm") -> None:
        self._package = package
        self._root = _root(place, package)
        self._modules: dict[str, _Module | None] = {}
        self._classes: dict[ast.ClassDef, _Class] = {}

    def problem(self, owner: Owner) -> str | None:
        """Return why there is no such module or class; None: it exists. Raises NoSource for a source that is no Python of this version."""
        module = self.module(owner.module)
        if module is None:
            return "there is no such module"
        if owner.class_name and self._find(owner) is None:
            return "it is gone"
        return None

    def has(self, owner: Owner, name: str) -> bool:
        """Return whether the owner has this name."""
        if not owner.class_name:
            return self.find(owner.module, name) is not None
        found = self._find(owner)
        # A value that is not a class (vLLM makes it when it is asked for) says nothing about its attributes.
        return not isinstance(found, _Class) or any(name in each.attributes for each in found.mro)

    def parameters(self, owner: Owner, name: str) -> tuple[Parameter, ...] | None:
        """Return a function's parameters without `self`. None: the name is no function."""
        if not owner.class_name:
            function = self.find(owner.module, name)
            return parameters_of(function.args) if isinstance(function, Function) else None
        found = self._find(owner)
        if not isinstance(found, _Class):
            return None
        function = found.function(name)
        if function is not None:
            parameters = parameters_of(function.args)
            return parameters if "staticmethod" in _decorators(function) else parameters[1:]
        return found.fields if name == "__init__" else None

    def mentions(self, owner: Owner, by: str, name: str) -> bool:
        """Return whether the owner's function `by` holds this name."""
        found = self._find(owner) if owner.class_name else None
        function = found.function(by) if isinstance(found, _Class) else self.find(owner.module, by)
        return isinstance(function, Function) and any(name in _spelled(node) for node in ast.walk(function))

    def abstract_names(self, owner: Owner) -> frozenset[str]:
        """Return the methods that this class leaves to its subclasses."""
        found = self._find(owner)
        if not isinstance(found, _Class):
            return frozenset()
        concrete: set[str] = set()
        abstract: set[str] = set()
        for each in found.mro:
            abstract |= each.abstract - concrete
            concrete |= each.functions.keys() - each.abstract
        return frozenset(abstract)

    def takes_tags(self, owner: Owner) -> bool:
        """Return whether the class's objects take attributes that it does not know."""
        found = self._find(owner)
        return not isinstance(found, _Class) or not any(each.has_slots for each in found.mro)

    # -- names -------------------------------------------------------------------------------------------------------

    def _find(self, owner: Owner) -> Any:
        return self.find(owner.module, owner.class_name)

    def find(self, module_name: str, name: str, num_imports: int = 0) -> Any:
        """Return a class, function, module or other statement, whichever module it comes from; None if it does not exist."""
        module = self.module(module_name)
        if module is None or num_imports > MAX_IMPORTS:
            return None
        found = module.names.get(name)
        if isinstance(found, _Import):
            return self._follow(found, num_imports)
        if isinstance(found, ast.ClassDef):
            return self._classes.setdefault(found, _Class(self, module_name, found))
        if found is not None:
            return found
        for other in module.stars:
            if (through := self.find(other, name, num_imports + 1)) is not None:
                return through
        return self.module(f"{module_name}.{name}")

    def _follow(self, found: _Import, num_imports: int) -> Any:
        if found.module.split(".")[0] != self._package:
            return found  # a name of another package
        if not found.name:
            return self.module(found.module)
        return self.find(found.module, found.name, num_imports + 1)

    def module(self, name: str) -> _Module | None:
        """Return a module's parsed source, or `None` where there is no such module."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> _Module | None:
        path = self._root.joinpath(*name.split("."))
        for file, is_package in ((path / "__init__.py", True), (path.parent / f"{path.name}.py", False)):
            if file.is_file():
                return _Module(name, is_package, _parsed(file.read_text(encoding="utf-8"), name))
        return None


def _parsed(text: str, module: str) -> ast.Module:
    try:
        try:
            return ast.parse(text)
        except SystemError:
            # CPython 3.11 counts the depth of all threads' parsers together, and now and then finds another number than it left.
            return ast.parse(text)
    except SyntaxError as error:  # a later vLLM may be written for a later Python
        raise NoSource(f"{module}, line {error.lineno}, is no Python {platform.python_version()}") from error


class _Import(NamedTuple):
    """The origin of an imported name; `name` is empty for a module."""

    module: str
    name: str


class _Module:
    """The names of one file."""

    def __init__(self, name: str, is_package: bool, tree: ast.Module) -> None:
        self._package = name if is_package else name.rpartition(".")[0]
        self.names: dict[str, Any] = {}
        self.stars: list[str] = []
        for statement in _statements(tree.body):
            self._take(statement)

    def _take(self, statement: ast.stmt) -> None:
        if isinstance(statement, Function | ast.ClassDef):
            self.names[statement.name] = statement
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                self.names[alias.asname or alias.name.split(".")[0]] = _Import(alias.name, "")
        elif isinstance(statement, ast.ImportFrom):
            self._take_from(statement)
        else:
            self.names |= dict.fromkeys(_targets(statement), statement)

    def _take_from(self, statement: ast.ImportFrom) -> None:
        parts = self._package.split(".") if statement.level else []
        parts = parts[: len(parts) - statement.level + 1] if statement.level else parts
        module = ".".join([*parts, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            if alias.name == "*":
                self.stars.append(module)
            else:
                self.names[alias.asname or alias.name] = _Import(module, alias.name)


class _Class:
    """A class and its inherited members, as far as its bases belong to the package."""

    def __init__(self, source: Source, module: str, node: ast.ClassDef) -> None:
        self._source, self._module, self._node = source, module, node

    @cached_property
    def mro(self) -> list[_Class]:
        """The class and its bases, roughly in the order of resolution: nearer ones first."""
        found = [self]
        for base in self._node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                parent = self._source.find(self._module, base.id)
                found += parent.mro if isinstance(parent, _Class) else []
        return found

    @cached_property
    def functions(self) -> dict[str, Function]:
        """The methods of the class itself, by name."""
        return {each.name: each for each in _statements(self._node.body) if isinstance(each, Function)}

    @cached_property
    def attributes(self) -> set[str]:
        """The attributes of the class's objects: the class's own, and the ones that its methods set."""
        own = {name for each in _statements(self._node.body) for name in _targets(each)}
        set_later = {name for function in self.functions.values() for name in _set_on_self(function)}
        return own | self.functions.keys() | set_later

    @cached_property
    def abstract(self) -> set[str]:
        """The names of the class's own abstract methods."""
        return {name for name, each in self.functions.items() if "abstractmethod" in _decorators(each)}

    @property
    def has_slots(self) -> bool:
        """Whether the class's objects have no `__dict__`."""
        made = " ".join(ast.unparse(each) for each in (*self._node.decorator_list, *self._node.bases))
        return "__slots__" in self.attributes or "slots=True" in made or made.endswith("Struct")

    def function(self, name: str) -> Function | None:
        """Return a method of the class or its bases; None if there is none."""
        return next((each.functions[name] for each in self.mro if name in each.functions), None)

    @property
    def fields(self) -> tuple[Parameter, ...]:
        """The parameters of the constructor that a dataclass, a pydantic model or a struct makes for itself."""
        found: dict[str, Parameter] = {}
        for each in reversed(self.mro):
            for statement in each._node.body:
                if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(
                    statement.annotation
                ):
                    continue
                for name in _targets(statement):
                    found[name] = field_parameter(name, statement.value is not None)
        return tuple(found.values())


def _root(place: Path, package: str) -> Any:
    """Return the folder that has the package's folder: a Path, or a path in a wheel. Raises NoSource."""
    if place.is_file() and zipfile.is_zipfile(place):
        wheel = zipfile.Path(place)
        if (wheel / package / "__init__.py").is_file():
            return wheel
    for root in (place, place.parent):
        if (root / package / "__init__.py").is_file() and (root == place or place.name == package):
            return root
    raise NoSource(f"there is no {package}/__init__.py in {place}")


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, also the statements under `if`, `try` and `with`."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for name in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, name, ()):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
        else:
            yield statement


def _targets(statement: ast.stmt) -> Iterator[str]:
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    for target in targets:
        for node in ast.walk(target) if isinstance(target, ast.expr) else ():
            if isinstance(node, ast.Name):
                yield node.id


def _set_on_self(function: Function) -> Iterator[str]:
    arguments = [*function.args.posonlyargs, *function.args.args]
    self_name = arguments[0].arg if arguments else None
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Store()) if name == self_name:
                yield attribute


def _decorators(function: Function) -> str:
    return " ".join(ast.unparse(each) for each in function.decorator_list)


def _spelled(node: ast.AST) -> tuple[Any, ...]:
    """Return the names, attributes, imports and texts in one place of a function."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, ast.alias):
        return (node.name, node.asname)
    return (node.value,) if isinstance(node, ast.Constant) else ()


@cache
def installed(package: str = "vllm") -> Path | None:
    """Return the installed package's folder, without importing it; None if there is none."""
    from importlib.util import find_spec

    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
