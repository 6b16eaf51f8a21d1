"""Scripts and styles of a page joined to one file each, so that a first visit takes few requests. Pure.

The modules of `static/js` stay what they are, and are served under their own paths as they were written. What a page loads is, under a path that
holds a hash of all files (`static/v-<hash>/…`), one script for its first module with all that this imports, and one script for each module that
is imported later (`import('./menu.js')`), without what the page has by then. Each module stands in a joined script under its path, its text
unchanged but for its imports and exports.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

HASH_CHARS = 16  # chosen: 64 bits
_IMPORT = re.compile(
    r"^import (?:(?:\{ ?(?P<names>[^}]*?),? ?\}|\* as (?P<all>\w+)|(?P<default>\w+)) from )?'(?P<path>\.[^']+)';.*\n",
    re.MULTILINE,
)
_LAZY = re.compile(r"\bimport\((?P<quote>['`])(?P<path>\.[^'`]+)(?P=quote)\)")
_EXPORT = re.compile(r"^export (?P<rest>(?:async )?(?:function\*?|class|const) (?P<name>\w+))", re.MULTILINE)
_LEFT_OVER = re.compile(r"^(?:import|export)\b(?!\().*", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r'<script type="module" src="static/(?P<path>[^"]+)"')
_STYLE = re.compile(r'^ *<link rel="stylesheet" href="static/(?P<path>css/[^"]+)">\n', re.MULTILINE)
_HEAD = "// Modules of this server's pages, joined. Each is served as it was written under static/ and the path above it.\n"
_REGISTRY = "const modules = (globalThis.overtureModules ??= {});\n"


class CannotJoinError(ValueError):
    """A module is written in a way that is not understood here."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The pages and their joined files."""

    version: str
    """A hash of all files."""

    files: Mapping[str, str]
    """By path below `static/v-<version>/`: the texts that differ from the file of that path, or have none."""

    pages: Mapping[str, str]
    """By name, such as `index.html`: the pages that have styles."""


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of ours. Paths are those below static/."""

    path: str
    text: str
    imports: tuple[str, ...]
    lazy: tuple[str, ...]
    exports: tuple[str, ...]


def version_of(files: Mapping[str, bytes]) -> str:
    """Return a hash of files, by their paths and contents."""
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(hashlib.sha256(path.encode()).digest() + hashlib.sha256(files[path]).digest())
    return whole.hexdigest()[:HASH_CHARS]


def join(texts: Mapping[str, str], version: str) -> Joined:
    """Join what each page loads.

    Args:
        texts: pages, scripts and styles of ours, by their paths below static/, without those of libraries.
        version: see `version_of`.

    Raises:
        CannotJoinError: a module imports or exports in another way than the others, imports something missing, or imports itself through others.
    """
    modules = {path: _parsed(path, text) for path, text in texts.items() if path.startswith("js/")}
    pages = {path: text for path, text in texts.items() if path.endswith(".html")}
    entries = {match["path"] for text in pages.values() for match in _ENTRY.finditer(text)}
    closures = {entry: _closure(modules, entry) for entry in entries}
    files = {entry: _script(modules, entry, closures[entry], version) for entry in entries}
    for path in sorted(
        {lazy for module in modules.values() for lazy in module.lazy if lazy in modules} - entries
    ):
        there = [set(closures[entry]) for entry in entries if path in _reached(modules, entry)]
        known = reduce(set.__and__, there) if there else set()
        needed = [each for each in _closure(modules, path) if each not in known]
        files[path] = _script(modules, path, needed, version)
    shown = {}
    for name, text in pages.items():
        styles = [match["path"] for match in _STYLE.finditer(text)]
        if not styles:
            continue
        sheet = f"css/page-{name.removesuffix('.html')}.css"
        files[sheet] = "".join(f"/* static/{path} */\n{texts[path]}\n" for path in styles)
        shown[name] = _page(text, sheet, version)
    return Joined(version, files, shown)


def _page(text: str, sheet: str, version: str) -> str:
    """Return a page that loads joined files: one style sheet in the place of the first."""
    first = next(_STYLE.finditer(text)).start()
    link = f'  <link rel="stylesheet" href="static/{sheet}">\n'
    whole = text[:first] + link + _STYLE.sub("", text[first:])
    return whole.replace('="static/', f'="static/v-{version}/')


def _parsed(path: str, text: str) -> _Module:
    """Read a module's imports and exports."""
    rest = _COMMENT.sub("", _EXPORT.sub("", _IMPORT.sub("", text)))
    if left := _LEFT_OVER.search(rest):
        raise CannotJoinError(f"{path}: {left[0]}")
    imports = tuple(_resolved(path, match["path"]) for match in _IMPORT.finditer(text))
    lazy = tuple(_resolved(path, match["path"]) for match in _LAZY.finditer(_COMMENT.sub("", text)))
    return _Module(path, text, imports, lazy, tuple(match["name"] for match in _EXPORT.finditer(text)))


def _resolved(path: str, other: str) -> str:
    """Return the path below static/ of what a module names relative to itself."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), other))


def _closure(modules: Mapping[str, _Module], start: str) -> list[str]:
    """Return the paths of a module and of all modules that it imports when it is loaded, each behind the modules that it imports itself."""
    found: list[str] = []
    ahead: list[str] = []

    def visit(path: str) -> None:
        """Add a module behind the modules that it imports. Raises CannotJoinError."""
        if path in ahead:
            raise CannotJoinError(f"{path} imports itself: {' → '.join([*ahead, path])}")
        if path in found:
            return
        if path not in modules:
            raise CannotJoinError(f"{ahead[-1] if ahead else 'a page'} imports {path}, which is not there")
        ahead.append(path)
        for other in modules[path].imports:
            if not _is_library(other):
                visit(other)
        ahead.pop()
        found.append(path)

    visit(start)
    return found


def _reached(modules: Mapping[str, _Module], start: str) -> set[str]:
    """Return all modules that are loaded with this one or later."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        path = ahead.pop()
        if path not in found and path in modules:
            found.add(path)
            ahead += (*modules[path].imports, *modules[path].lazy)
    return found


def _is_library(path: str) -> bool:
    """Return whether a path belongs to a library, which pages load as a separate file."""
    return path.startswith("vendor/")


def _script(modules: Mapping[str, _Module], path: str, needed: Iterable[str], version: str) -> str:
    """Return the joined script of a module: the modules that it needs, then its own exports."""
    libraries: dict[str, None] = {}
    parts = [_defined(modules[each], posixpath.dirname(path), libraries, version) for each in needed]
    exports = modules[path].exports
    offered = f"export const {{ {', '.join(exports)} }} = modules['{path}'];\n" if exports else ""
    return "".join((_HEAD, *libraries, _REGISTRY, *parts, offered))


def _defined(module: _Module, folder: str, libraries: dict[str, None], version: str) -> str:
    """Return a module as a part of a joined script in a folder; adds the imports of libraries, which stand before all parts."""

    def from_there(path: str) -> str:
        """Return the path of an imported module as the folder of the joined script sees it."""
        found = posixpath.relpath(_resolved(module.path, path), folder)
        return found if found.startswith(".") else f"./{found}"

    def bound(match: re.Match[str]) -> str:
        """Return what takes the place of an import statement."""
        path = _resolved(module.path, match["path"])
        if _is_library(path):
            libraries[match[0].replace(match["path"], from_there(match["path"]))] = None
            return ""
        names = match["all"] or f"{{ {match['names'].replace(' as ', ': ')} }}"
        return f"const {names} = modules['{path}'];\n"

    text = _IMPORT.sub(bound, module.text)
    text = _LAZY.sub(
        lambda match: f"import({match['quote']}{from_there(match['path'])}{match['quote']})", text
    )
    text = _EXPORT.sub(lambda match: match["rest"], text).replace("'static/", f"'static/v-{version}/")
    offered = ", ".join(module.exports)
    return (
        f"\n// {module.path}\nmodules['{module.path}'] ??= (() => {{\n{text}return {{ {offered} }};\n}})();\n"
    )
