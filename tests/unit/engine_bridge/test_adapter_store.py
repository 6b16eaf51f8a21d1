"""A node's own adapters: whole or not there, within their bounds, and what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_bridge.adapters.contents import AdapterContents, contents_of, read_piece
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.files import content_hash, inspect, read
from engine_bridge.adapters.store import KEEP_S, MAX_PIECE_BYTES, AdapterStore
from engine_bridge.protocol.errors import InvalidRequest, NotSupported
from tests.adapter_corpus import BAD, CONFIG_FILE, WEIGHTS_FILE, make_adapter
from tests.unit.cluster.catalog_node import MODULES, contract, store_at


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "source", modules=MODULES)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def send(store: AdapterStore, contents: AdapterContents) -> None:
    """All of it, but for the end."""
    store.begin(contents.content_hash, contents.sizes)
    for name, size in contents.sizes.items():
        for offset in range(0, size, MAX_PIECE_BYTES):
            piece = read_piece(contents.path, name, offset, MAX_PIECE_BYTES)
            store.put(contents.content_hash, name, offset, piece)


def keep(store: AdapterStore, contents: AdapterContents) -> Path:
    send(store, contents)
    return Path(store.finish(contents.content_hash))


# -- contents ----------------------------------------------------------------------------------------------------------


def test_contents_are_told_without_a_model_as_a_node_tells_them_with_one(source: Path) -> None:
    files = inspect(source, contract())
    buffer = memoryview(bytearray(files.num_bytes))
    checksum = read(files, buffer)
    contents = contents_of(source)
    assert contents.content_hash == content_hash(files, buffer)
    assert (contents.checksum, contents.signature, contents.rank) == (checksum, files.signature, files.rank)
    assert (contents.num_bytes, contents.base_model) == (files.num_bytes, files.base_model)
    assert contents.target_modules == files.target_modules == ("q_proj",)


def test_what_is_known_of_files_is_not_read_again(source: Path) -> None:
    asked: list[tuple[str, str]] = []

    def known(path: str, signature: str) -> tuple[str, int]:
        asked.append((path, signature))
        return "hash", 7

    contents = contents_of(source, known)
    assert (contents.content_hash, contents.checksum) == ("hash", 7)
    assert asked == [(str(source), contents.signature)]


@pytest.mark.parametrize(
    "name",
    ["missing_path", "file_not_folder", "empty_folder", "bad_json", "no_weights", "pickle_only", "truncated"],
)
def test_what_is_no_adapter_is_refused_as_a_node_refuses_it(tmp_path: Path, name: str) -> None:
    code = BAD[name](tmp_path / "bad", MODULES, 64)
    with pytest.raises(AdapterRejected) as refused:
        contents_of(tmp_path / "bad")
    assert refused.value.code == code


# -- the store ---------------------------------------------------------------------------------------------------------


def test_what_was_sent_is_the_same_adapter(tmp_path: Path, source: Path) -> None:
    contents = contents_of(source)
    store = store_at(tmp_path / "store")
    kept = keep(store, contents)
    assert contents_of(kept).content_hash == contents.content_hash
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (kept / name).read_bytes() == (source / name).read_bytes()
    assert store_at(tmp_path / "store").find(contents.content_hash, "/nowhere") == str(kept)


def test_what_lies_at_the_gateways_path_is_taken_from_there_by_its_content_alone(
    tmp_path: Path, source: Path
) -> None:
    store = store_at(tmp_path / "store")
    wanted = contents_of(source).content_hash
    assert store.find(wanted, str(source)) == str(source)
    make_adapter(source, modules=MODULES, seed=1)
    assert store.find(wanted, str(source)) == "", "another adapter lies there now"
    assert not (tmp_path / "store").exists(), "looking leaves nothing behind"


@pytest.mark.parametrize("is_config", [False, True])
def test_damaged_on_the_way_it_is_not_kept(tmp_path: Path, source: Path, is_config: bool) -> None:
    contents = contents_of(source)
    path = source / (CONFIG_FILE if is_config else WEIGHTS_FILE)
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    store = store_at(tmp_path / "store")
    send(store, contents)
    assert store.finish(contents.content_hash) == ""
    assert list((tmp_path / "store").iterdir()) == []


def test_cut_short_it_is_not_kept_and_after_a_start_it_goes(tmp_path: Path, source: Path) -> None:
    contents = contents_of(source)
    store = store_at(tmp_path / "store")
    store.begin(contents.content_hash, contents.sizes)
    store.put(contents.content_hash, CONFIG_FILE, 0, read_piece(source, CONFIG_FILE, 0, MAX_PIECE_BYTES))
    (left,) = (tmp_path / "store").iterdir()
    assert store.find(contents.content_hash, "/nowhere") == ""
    again = store_at(tmp_path / "store")
    assert again.find(contents.content_hash, "/nowhere") == ""
    assert not left.exists()
    with pytest.raises(InvalidRequest):
        again.finish(contents.content_hash)


def test_what_went_bad_on_the_disk_is_asked_for_again(tmp_path: Path, source: Path) -> None:
    contents = contents_of(source)
    kept = keep(store_at(tmp_path / "store"), contents)
    with (kept / WEIGHTS_FILE).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    store = store_at(tmp_path / "store")
    assert store.find(contents.content_hash, "/nowhere") == ""
    assert not kept.exists()
    assert keep(store, contents) == kept


@pytest.mark.parametrize(
    ("content_hash", "sizes"),
    [
        ("../../etc", {CONFIG_FILE: 1, WEIGHTS_FILE: 1}),
        ("a" * 64, {CONFIG_FILE: 1, "../evil": 1}),
        ("a" * 64, {CONFIG_FILE: 1}),
        ("a" * 64, {CONFIG_FILE: 1, WEIGHTS_FILE: 0}),
        ("a" * 64, {CONFIG_FILE: 1 << 30, WEIGHTS_FILE: 1}),
        ("a" * 64, {CONFIG_FILE: 1, WEIGHTS_FILE: 1 << 50}),
    ],
)
def test_nothing_but_an_adapters_two_files_is_let_in(
    tmp_path: Path, content_hash: str, sizes: dict[str, int]
) -> None:
    store = store_at(tmp_path / "store")
    with pytest.raises(InvalidRequest):
        store.begin(content_hash, sizes)
    assert list(tmp_path.glob("**/*.safetensors")) == []


def test_pieces_follow_each_other_up_to_what_was_announced(tmp_path: Path) -> None:
    store = store_at(tmp_path / "store")
    name = "a" * 64
    with pytest.raises(InvalidRequest):
        store.put(name, CONFIG_FILE, 0, b"x")
    store.begin(name, {CONFIG_FILE: 4, WEIGHTS_FILE: 2 * MAX_PIECE_BYTES})
    store.put(name, CONFIG_FILE, 0, b"ab")
    for file, offset, piece in (
        (CONFIG_FILE, 0, b"ab"),
        (CONFIG_FILE, 3, b"d"),
        (CONFIG_FILE, 2, b"cde"),
        ("../evil", 0, b"x"),
        (WEIGHTS_FILE, 0, bytes(MAX_PIECE_BYTES + 1)),
    ):
        with pytest.raises(InvalidRequest):
            store.put(name, file, offset, piece)
    store.put(name, CONFIG_FILE, 2, b"cd")


def test_without_a_folder_adapters_are_found_and_not_kept(source: Path) -> None:
    store, contents = AdapterStore(None), contents_of(source)
    assert store.find(contents.content_hash, str(source)) == str(source)
    with pytest.raises(NotSupported):
        store.begin(contents.content_hash, contents.sizes)


# -- its bounds --------------------------------------------------------------------------------------------------------


def versions(tmp_path: Path, num: int) -> list[AdapterContents]:
    return [
        contents_of(make_adapter(tmp_path / f"source-{seed}", modules=MODULES, seed=seed))
        for seed in range(num)
    ]


def test_room_is_made_of_what_nobody_wants_the_longest_unused_first(tmp_path: Path) -> None:
    old, wanted, newer, last = versions(tmp_path, 4)
    clock = Clock()
    room = 3 * sum(old.sizes.values())
    store = AdapterStore(tmp_path / "store", max_bytes=room, free_bytes=0, clock=clock)
    for contents in (old, wanted, newer):
        keep(store, contents)
        clock.now += 1
        store.find(contents.content_hash, "")
    store.keep([wanted.content_hash])
    keep(store, last)
    there = {path.name for path in (tmp_path / "store").iterdir()}
    assert there == {wanted.content_hash, newer.content_hash, last.content_hash}
    store.keep([each.content_hash for each in (wanted, newer, last)])
    with pytest.raises(InvalidRequest, match="no room"):
        store.begin(old.content_hash, old.sizes)
    assert {path.name for path in (tmp_path / "store").iterdir()} == there


def test_what_nobody_wants_any_more_goes_after_a_while(tmp_path: Path) -> None:
    unloaded, wanted = versions(tmp_path, 2)
    clock = Clock()
    store = AdapterStore(tmp_path / "store", free_bytes=0, clock=clock)
    keep(store, unloaded)
    keep(store, wanted)
    hashes = [wanted.content_hash]
    store.keep([*hashes, unloaded.content_hash])
    clock.now += KEEP_S
    store.keep(hashes)
    assert store.find(unloaded.content_hash, "") != "", "requests under way may need it"
    clock.now += KEEP_S + 1
    store.keep(hashes)
    assert {path.name for path in (tmp_path / "store").iterdir()} == set(hashes)


def test_the_disk_is_not_filled_for_others(tmp_path: Path, source: Path) -> None:
    contents = contents_of(source)
    store = AdapterStore(tmp_path / "store", free_bytes=1 << 60)
    with pytest.raises(InvalidRequest, match="no room") as refused:
        store.begin(contents.content_hash, contents.sizes)
    assert refused.value.code == "no_room"


@pytest.mark.parametrize("num_pieces", [0, 1])
def test_what_came_of_one_that_finds_the_disk_full_goes_at_once(
    tmp_path: Path, source: Path, num_pieces: int
) -> None:
    contents = contents_of(source)
    store = store_at(tmp_path / "store")
    store.begin(contents.content_hash, contents.sizes)
    (coming,) = (tmp_path / "store").iterdir()
    name = (CONFIG_FILE, WEIGHTS_FILE)[num_pieces]
    if num_pieces:
        piece = read_piece(source, CONFIG_FILE, 0, MAX_PIECE_BYTES)
        store.put(contents.content_hash, CONFIG_FILE, 0, piece)
    (coming / name).symlink_to("/dev/full")
    with pytest.raises(InvalidRequest) as refused:
        store.put(contents.content_hash, name, 0, b"piece")
    assert refused.value.code == "no_room"
    assert list((tmp_path / "store").iterdir()) == []
    assert keep(store, contents).is_dir(), "there is room again"
