from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from engine_bridge.driver.kv.kv_keys import cache_salt, hash_by_content, version_of
from kvtiers.keys import BlockShape, Namespace

BLOCK_TOKENS = 4
TOKENS = list(range(10))


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As an engine does it when it is built; what it was before is put back."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    kv_cache_utils.init_none_hash(sha256)
    yield


def keys_of(path="/here/shout", content="c1", tenant="", name="shout", version=1) -> list[bytes]:
    adapter = version_of(LoRARequest(name, version, path), content) if path else None
    salt = cache_salt(tenant, content if path else "", None)
    hasher = hash_by_content(kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, sha256))
    tied = {"lora_request": adapter, "cache_salt": salt, "block_hasher": hasher}
    request = Request("r", list(TOKENS), SamplingParams(max_tokens=4), None, **tied)
    assert request.lora_request is adapter, "the request itself still names its adapter"
    request.append_output_token_ids([7, 8])
    return [bytes(key) for key in request.block_hashes]


def test_keys_are_of_an_adapters_content_and_of_a_tenant_not_of_names_and_folders() -> None:
    assert len(keys_of()) == 3
    assert keys_of() == keys_of(path="/there/copy", name="loud", version=7)
    for other in ({"content": "c2"}, {"tenant": "t"}, {"path": ""}):
        assert not set(keys_of()) & set(keys_of(**other))
    # Each part is kept apart by itself, and what reads alike when the parts are joined is not alike.
    parts = (
        ("ab", "", None),
        ("a", "b", None),
        ("a", "", "b"),
        ("", "ab", None),
        ("", "a", "b"),
        ("", "", None),
    )
    assert len({cache_salt(*each) for each in parts}) == len(parts)


def test_where_a_model_lies_and_what_it_is_called_there_is_not_part_of_a_namespace(tmp_path: Path) -> None:
    def namespace(model: str = "demo", revision: str = "r", seed: str = "s", computation: str = "c") -> Any:
        named = {"model": model, "revision": revision, "hash_seed": seed, "computation": computation}
        kept = {"block_size_tokens": 32, "layout": "", "hash_algorithm": "sha256", "shape": BlockShape(2, 64)}
        return Namespace(**named, **kept, dtype="float32")

    assert namespace().fingerprint == namespace("renamed").fingerprint
    assert len({namespace(revision=r, seed=s).fingerprint for r in "ab" for s in "xy"}) == 4
    folder = namespace().folder_in(tmp_path)
    assert folder.name.startswith("demo-")
    folder.mkdir()
    assert namespace("renamed").folder_in(tmp_path) == folder
    assert namespace(revision="other").folder_in(tmp_path) != folder
    assert namespace(computation="other").folder_in(tmp_path) != folder
