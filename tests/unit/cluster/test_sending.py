import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_bridge.adapters.contents import contents_of
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.store import MAX_PIECE_BYTES
from engine_bridge.cluster import wire
from engine_bridge.cluster.sending import bring
from engine_bridge.protocol.errors import EngineUnavailable, InvalidRequest
from tests.adapter_corpus import WEIGHTS_FILE, make_adapter
from tests.unit.cluster.catalog_node import PATIENCE_S, CatalogNode, FarStore, answer_of, connected, store_at

# Weights of two megabytes and a half: three pieces.
WIDE = {"model.layers.0.self_attn.q_proj": (40_000, 40_000)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_adapter(tmp_path_factory.mktemp("source") / "wide", modules=WIDE, rank=16)
    assert 2 * MAX_PIECE_BYTES < (folder / WEIGHTS_FILE).stat().st_size < 3 * MAX_PIECE_BYTES
    return folder


class Tamper:
    """Lets bytes through until so many have passed, then changes or cuts once; times: how often."""

    def __init__(self, after_bytes: int, change: Callable[[bytes], bytes | None], times: int = 1) -> None:
        self._after_bytes, self._change, self._times = after_bytes, change, times
        self.num_bytes = 0

    def __call__(self, data: bytes) -> bytes | None:
        self.num_bytes += len(data)
        # Within a piece: the frame that it comes in is whole.
        is_inside = len(data) == 1 << 16 and b"put" not in data
        if self._times and is_inside and self.num_bytes > self._after_bytes:
            self._times -= 1
            self._after_bytes = self.num_bytes + 2 * MAX_PIECE_BYTES
            return self._change(data)
        return data


def flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[1000] ^= 1
    return bytes(changed)


async def test_a_node_that_lacks_an_adapter_is_sent_it_in_pieces(tmp_path: Path, source: Path) -> None:
    contents, frames, num_answers = contents_of(source), Tamper(1 << 60, bytes), 0
    async with connected(CatalogNode(), FarStore(tmp_path / "s", free_bytes=0), through=frames) as (node, _):
        bringing = asyncio.create_task(bring(node, contents))
        while not bringing.done():
            assert await answer_of(node) == "hello"
            num_answers += 1
        path, sent = await bringing, frames.num_bytes
        assert contents_of(Path(path)).content_hash == contents.content_hash
        assert sent > contents.num_bytes and num_answers > 1, "answers go on between the pieces"
        assert await bring(node, contents) == path
        assert frames.num_bytes - sent < 1000, "it is there: nothing is sent again"


async def test_damaged_once_it_is_sent_again_and_damaged_always_refused(tmp_path: Path, source: Path) -> None:
    contents = contents_of(source)
    for times in (1, 100):
        damage = Tamper(MAX_PIECE_BYTES, flipped, times)
        store = FarStore(tmp_path / str(times), free_bytes=0)
        async with connected(CatalogNode(), store, through=damage) as (node, _):
            if times == 1:
                assert contents_of(Path(await bring(node, contents))).content_hash == contents.content_hash
                assert damage.num_bytes > 2 * contents.num_bytes
                continue
            with pytest.raises(AdapterRejected, match="changed while they were sent"):
                await bring(node, contents)
            assert list((tmp_path / str(times)).iterdir()) == []


async def test_changed_or_gone_before_it_is_sent_it_is_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "source", modules=WIDE)
    contents = contents_of(folder)
    make_adapter(folder, modules=WIDE, seed=1)
    async with connected(CatalogNode(), FarStore(tmp_path / "s", free_bytes=0)) as (node, _):
        with pytest.raises(AdapterRejected, match="changed while they were sent"):
            await bring(node, contents)
        folder.rename(tmp_path / "moved")
        with pytest.raises(AdapterRejected, match="no longer where it was loaded from"):
            await bring(node, contents)


async def test_cut_off_in_the_middle_nothing_is_taken_for_whole(tmp_path: Path, source: Path) -> None:
    contents = contents_of(source)
    store = FarStore(tmp_path / "s", free_bytes=0)
    cut = Tamper(2 * MAX_PIECE_BYTES, lambda _: None)
    async with connected(CatalogNode(), store, through=cut) as (node, _):
        with pytest.raises(EngineUnavailable):
            await asyncio.wait_for(bring(node, contents), PATIENCE_S)
    (left,) = (tmp_path / "s").iterdir()
    assert left.name.startswith("incoming-")
    assert (left / WEIGHTS_FILE).stat().st_size < contents.sizes[WEIGHTS_FILE]
    async with connected(CatalogNode(), store) as (node, _):
        path = await bring(node, contents)
    assert contents_of(Path(path)).content_hash == contents.content_hash
    assert [path.name for path in (tmp_path / "s").iterdir()] == [contents.content_hash]


async def test_hostile_words_about_adapters_end_a_connection_or_are_refused(tmp_path: Path) -> None:
    store = store_at(tmp_path / "s")
    async with connected(CatalogNode(), store) as (node, link):
        with pytest.raises(InvalidRequest):
            await node.store("begin", "../../x", {"a": 1})
        with pytest.raises(InvalidRequest):
            await node.store("put", "a" * 64, "../../x", 0, b"x")
        with pytest.raises(EngineUnavailable):
            await link.call("put", 1, 2)
        assert not link.is_up
    assert wire.STORE_METHODS.keys() <= wire.METHODS.keys()
    assert not (tmp_path / "s").exists()
