"""Which files of `prompt_embeds` torch may see."""

import base64
import io
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_bridge.calls.prompt_embeds import embeddings_of
from engine_bridge.driver.apis.embeddings import check_embeddings
from engine_bridge.protocol.errors import InvalidRequest
from gateway.doors.api.call_size import check_call

MODEL = SimpleNamespace(enable_prompt_embeds=True, max_model_len=64, dtype=torch.float32)
PLAIN = torch.arange(12.0).reshape(3, 4)


def file(value: Any, **options: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written, **options)
    return written.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def compressed(data: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(written, "w") as after:
        for part in before.infolist():
            after.writestr(part.filename, before.read(part), zipfile.ZIP_DEFLATED)
    return written.getvalue()


def test_plain_tensors_of_floats_are_read() -> None:
    files = [file(PLAIN.to(kind)) for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64)]
    files += [file(PLAIN[None]), file(PLAIN.T)]
    check_embeddings([text(each) for each in files], MODEL)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (7, "is not base64"),
        ("no base64!", "is not base64"),
        (text(b"no archive"), "cannot be read as a file of torch.save"),
        (text(file(PLAIN, _use_new_zipfile_serialization=False)), "cannot be read as a file of torch.save"),
        (text(file(PLAIN)[:-200]), "cannot be read as a file of torch.save"),
        (text(compressed(file(PLAIN))), "is compressed"),
        (text(file(PLAIN.to_sparse())), "something else than one tensor of floats"),
        (text(file(bytearray(9))), "something else than one tensor of floats"),
        (text(file(torch.nn.Parameter(PLAIN))), "something else than one tensor of floats"),
        (text(file(torch.ones(3, 4, dtype=torch.int64))), "something else than one tensor of floats"),
        (text(file({str(number): PLAIN for number in range(999)})), "something else than one tensor"),
        (text(file([PLAIN])), "is no matrix"),
        (text(file(PLAIN[0])), "is no matrix"),
        (text(file(torch.ones(1, 4).expand(60, 4))), "repeats the same numbers"),
        (text(file(torch.ones(64, 4))), "64 tokens; the model reads at most 64"),
        (text(file(PLAIN / 0)), "are no numbers"),
        (text(file(torch.full((3, 4), 1e39, dtype=torch.float64))), "too large for this model"),
    ],
)
def test_whatever_could_become_large_or_is_no_matrix_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        check_embeddings([value], MODEL)
    assert refused.value.param == "prompt_embeds"


def test_they_are_off_by_themselves_and_count_as_prompts() -> None:
    off = SimpleNamespace(enable_prompt_embeds=False, max_model_len=64)
    with pytest.raises(InvalidRequest, match="--enable-prompt-embeds"):
        check_embeddings([text(file(PLAIN))], off)
    body = {"prompt_embeds": ["a", "b", "c"]}
    assert embeddings_of("completions", body) == ["a", "b", "c"]
    assert embeddings_of("completions", {"prompt_embeds": "a"}) == ["a"]
    assert embeddings_of("chat", body) == embeddings_of("completions", {"prompt": "a"}) == []
    with pytest.raises(InvalidRequest, match="6"):
        check_call("completions", body | {"n": 2}, max_messages=9, max_sequences=5)
