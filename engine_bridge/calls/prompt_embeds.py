"""Prompts that are embeddings in place of text (vLLM's `prompt_embeds`): files of torch tensors, looked at before torch reads them. Pure.

torch reads a file of weights as a program of a few harmless words. Some of these make much of little: a compressed archive, a sparse tensor, an array
of any length. So a file may hold one plain tensor and nothing else.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any, Final

from engine_bridge.protocol.errors import InvalidRequest
from engine_bridge.protocol.node import Api

FIELD: Final = "prompt_embeds"
# What torch.save writes for one tensor of floats. Source: the files of torch 2.13, and torch._weights_only_unpickler.
_NAMES: Final = frozenset(
    (
        "torch._utils _rebuild_tensor_v2",
        "collections OrderedDict",
        *(f"torch {kind}Storage" for kind in ("Float", "Half", "BFloat16", "Double")),
    )
)
# Words of a program that name classes or functions in other ways, which torch.save does not use.
_FOREIGN: Final = frozenset(("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"))
# The program for one tensor has some hundred bytes. Chosen.
_MAX_PROGRAM_BYTES: Final = 4096


def embeddings_of(api: Api, body: Any) -> list[Any]:
    """Return the values of a body's `prompt_embeds`, one for each prompt; [] for a call without."""
    given = body.get(FIELD) if api == "completions" and isinstance(body, dict) else None
    if given is None:
        return []
    return given if isinstance(given, list) else [given]


def file_of(text: Any) -> bytes:
    """Return the file in a value of `prompt_embeds`. Raises InvalidRequest if it is not base64, or not a file of one plain tensor."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise unusable("is not base64") from error
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_archive(archive, len(data))
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError) as error:
        raise unusable("cannot be read as a file of torch.save") from error
    return data


def _check_archive(archive: zipfile.ZipFile, num_bytes: int) -> None:
    parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise unusable("is compressed")
    if sum(part.file_size for part in parts) > num_bytes:
        raise unusable("says that it holds more than it does")
    programs = [part for part in parts if part.filename.rpartition("/")[2] == "data.pkl"]
    if len(programs) != 1 or programs[0].file_size > _MAX_PROGRAM_BYTES:
        raise unusable("holds something else than one tensor")
    if any(name not in _NAMES for name in _names(archive.read(programs[0]))):
        raise unusable("holds something else than one tensor of floats in the usual layout")


def _names(program: bytes) -> Iterator[str]:
    """Yield what a program calls by name."""
    for word, argument, _ in pickletools.genops(program):
        if word.name == "GLOBAL":
            yield str(argument)
        elif word.name in _FOREIGN:
            yield word.name


def unusable(why: str) -> InvalidRequest:
    """Return the error for embeddings that cannot be used. why: the end of a sentence."""
    return InvalidRequest(
        f"`{FIELD}`: the value {why}. It is a tensor (tokens × hidden size) of floats, written by torch.save and encoded in base64.",
        param=FIELD,
    )
