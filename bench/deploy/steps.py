"""What a Dockerfile says, as data: stages of steps, and which files of a folder reach the build. Pure, but for `context_files`, which lists a folder.

Knows what our Dockerfile uses, and raises on everything else, so that no step is left out by mistake.
Source: https://docs.docker.com/reference/dockerfile/ and .../build/concepts/context/#dockerignore-files.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from msgspec import Struct

KNOWN = frozenset("ARG ENV RUN WORKDIR VOLUME EXPOSE HEALTHCHECK STOPSIGNAL ENTRYPOINT CMD COPY USER".split())
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class Step(Struct, frozen=True):
    """One instruction. text: what stands behind its word, continuation lines joined."""

    word: str
    text: str


class Stage(Struct, frozen=True):
    """From one FROM to the next. base: an image, or the name of an earlier stage."""

    name: str
    base: str
    steps: tuple[Step, ...]


def instructions(dockerfile: str) -> Iterator[Step]:
    """Every instruction in order, without comments. Raises ValueError for one that is not known here."""
    joined = ""
    for line in dockerfile.splitlines():
        if not joined and (not line.strip() or line.startswith("#")):
            continue
        joined += line.removesuffix("\\").strip() + " "
        if not line.endswith("\\"):
            word, _, text = joined.strip().partition(" ")
            if word not in KNOWN | {"FROM"}:
                raise ValueError(f"{word} is not known here: teach bench/deploy/dockerfile.py what it does")
            yield Step(word, text.strip())
            joined = ""


def stages(dockerfile: str) -> dict[str, Stage]:
    """The stages by name. ARGs before the first FROM are filled into the names of images."""
    outer: dict[str, str] = {}
    found: dict[str, Stage] = {}
    name = base = ""
    steps: list[Step] = []
    for step in [*instructions(dockerfile), Step("FROM", "")]:
        if step.word == "FROM":
            if name:
                found[name] = Stage(name, base, tuple(steps))
            base, _, name = expand(step.text, outer).partition(" AS ")
            steps = []
        elif not name:
            key, _, value = step.text.partition("=")
            outer[key] = value
        else:
            steps.append(step)
    return found


def expand(text: str, values: Mapping[str, str]) -> str:
    """Fill in $NAME and ${NAME}; what has no value becomes empty, as Docker has it."""
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def assignments(text: str, values: Mapping[str, str]) -> dict[str, str]:
    """The pairs of an ENV or ARG instruction."""
    pairs = (each.partition("=") for each in shlex.split(text))
    return {key: expand(value, values) for key, _, value in pairs}


def words(text: str) -> list[str]:
    """An instruction in exec form. Raises ValueError for the shell form, which would not pass signals on."""
    if not text.startswith("["):
        raise ValueError(f"not in exec form: {text}")
    found: list[str] = json.loads(text)
    return found


def is_sent(path: str, patterns: Sequence[str]) -> bool:
    """Whether a file reaches the build: the last pattern that fits it or a folder above it decides."""
    sent = True
    parts = PurePosixPath(path).parts
    above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        if bare.startswith("**/"):
            fits = any(fnmatch.fnmatchcase(part, bare[3:]) for part in parts)
        else:
            fits = any(
                fnmatch.fnmatchcase(each, bare) and each.count("/") == bare.count("/") for each in above
            )
        if fits:
            sent = pattern.startswith("!")
    return sent


def context_files(folder: Path) -> Iterator[str]:
    """The files below `folder` that Docker would send to the build, by its .dockerignore."""
    lines = (folder / ".dockerignore").read_text().splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for top, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if each not in (".git", ".venv")]
        for name in files:
            path = (Path(top) / name).relative_to(folder).as_posix()
            if is_sent(path, patterns):
                yield path
