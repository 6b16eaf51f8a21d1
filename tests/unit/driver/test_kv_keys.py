"""Keys of KV are made of what is computed, not of where its parts lie: another folder or machine makes the same ones."""

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


def keys_of(
    path: str = "/here/shout", content: str = "c1", tenant: str = "", name: str = "shout", version: int = 1
) -> list[bytes]:
    adapter = version_of(LoRARequest(name, version, path), content) if path else None
    request = Request(
        "r",
        list(TOKENS),
        SamplingParams(max_tokens=4),
        None,
        lora_request=adapter,
        cache_salt=cache_salt(tenant, content if path else "", None),
        block_hasher=hash_by_content(kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, sha256)),
    )
    assert request.lora_request is adapter, "the request itself still names its adapter"
    request.append_output_token_ids([7, 8])
    return [bytes(key) for key in request.block_hashes]


def test_an_adapter_in_another_folder_under_another_name_makes_the_same_keys() -> None:
    assert len(keys_of()) == 3
    assert keys_of() == keys_of(path="/there/copy", name="loud", version=7)


@pytest.mark.parametrize("other", [{"content": "c2"}, {"tenant": "t"}, {"path": ""}])
def test_another_content_tenant_or_no_adapter_makes_other_keys(other: dict[str, str]) -> None:
    assert not set(keys_of()) & set(keys_of(**other))


def test_where_a_model_lies_and_what_it_is_called_there_is_not_part_of_a_namespace(tmp_path: Path) -> None:
    def namespace(
        model: str = "demo", revision: str = "r", seed: str = "s", computation: str = "c"
    ) -> Namespace:
        named = {"model": model, "revision": revision, "hash_seed": seed, "computation": computation}
        kept: dict[str, Any] = {
            "dtype": "float32",
            "block_size_tokens": 32,
            "layout": "",
            "hash_algorithm": "sha256",
        }
        return Namespace(**named, **kept, shape=BlockShape(2, 64))

    assert namespace().fingerprint == namespace("renamed").fingerprint
    assert len({namespace(revision=r, seed=s).fingerprint for r in "ab" for s in "xy"}) == 4
    folder = namespace().folder_in(tmp_path)
    assert folder.name.startswith("demo-")
    folder.mkdir()
    assert namespace("renamed").folder_in(tmp_path) == folder
    assert namespace(revision="other").folder_in(tmp_path) != folder
    assert namespace(computation="other").folder_in(tmp_path) != folder
