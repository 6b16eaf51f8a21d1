import shutil
from pathlib import Path

import pytest

from engine_bridge.adapters.contents import AdapterContents, contents_of, read_piece
from engine_bridge.adapters.copies import FOLDER_NAME, PAUSE_S, Copies
from engine_bridge.adapters.errors import AdapterRejected
from engine_bridge.adapters.store import KEEP_S, MAX_PIECE_BYTES, AdapterStore
from engine_bridge.protocol.errors import InvalidRequest, NotSupported
from tests.adapter_corpus import CONFIG_FILE, WEIGHTS_FILE, make_adapter
from tests.unit.cluster.catalog_node import MODULES, store_at
from tests.unit.engine_bridge.catalog_server import CatalogServer, Clock, put


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "source", modules=MODULES)


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


def test_what_lies_at_the_gateways_path_is_known_by_its_content(tmp_path: Path, source: Path) -> None:
    """Also by a node without a folder, which can keep nothing."""
    contents = contents_of(source, lambda path, signature: None)
    stores = store_at(tmp_path / "store"), AdapterStore(None)
    assert [store.find(contents.content_hash, str(source)) for store in stores] == [str(source)] * 2
    with pytest.raises(NotSupported):
        stores[1].begin(contents.content_hash, contents.sizes)
    files = (str(source), contents.signature)
    known = contents_of(source, lambda *asked: ("hash", 7) if asked == files else None)
    assert (known.content_hash, known.checksum) == ("hash", 7), "what is known of files is not read again"
    make_adapter(source, modules=MODULES, seed=1)
    assert stores[0].find(contents.content_hash, str(source)) == "", "another adapter lies there now"
    assert not (tmp_path / "store").exists(), "looking leaves nothing behind"


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


def test_only_an_adapters_two_files_are_let_in_by_pieces_that_follow_each_other(tmp_path: Path) -> None:
    store, name, sizes = store_at(tmp_path / "store"), "a" * 64, {CONFIG_FILE: 1, WEIGHTS_FILE: 1}
    wrong = [{CONFIG_FILE: 1, "../evil": 1}, {CONFIG_FILE: 1}, sizes | {WEIGHTS_FILE: 0}]
    wrong += [sizes | {CONFIG_FILE: 1 << 30}, sizes | {WEIGHTS_FILE: 1 << 50}]
    for named, announced in (("../../etc", sizes), *((name, each) for each in wrong)):
        with pytest.raises(InvalidRequest):
            store.begin(named, announced)
    with pytest.raises(InvalidRequest):
        store.put(name, CONFIG_FILE, 0, b"x")
    assert list(tmp_path.glob("**/*.safetensors")) == []
    store.begin(name, {CONFIG_FILE: 4, WEIGHTS_FILE: 2 * MAX_PIECE_BYTES})
    store.put(name, CONFIG_FILE, 0, b"ab")
    for offset, piece in ((0, b"ab"), (3, b"d"), (2, b"cde")):
        with pytest.raises(InvalidRequest):
            store.put(name, CONFIG_FILE, offset, piece)
    for file, piece in (("../evil", b"x"), (WEIGHTS_FILE, bytes(MAX_PIECE_BYTES + 1))):
        with pytest.raises(InvalidRequest):
            store.put(name, file, 0, piece)
    store.put(name, CONFIG_FILE, 2, b"cd")


def test_room_is_made_of_what_nobody_wants_the_longest_unused_first_or_after_a_while(tmp_path: Path) -> None:
    made = (make_adapter(tmp_path / f"source-{seed}", modules=MODULES, seed=seed) for seed in range(4))
    old, wanted, newer, last = map(contents_of, made)
    clock = Clock()

    def there() -> set[str]:
        return {path.name for path in (tmp_path / "store").iterdir()}

    store = AdapterStore(tmp_path / "store", max_bytes=3 * sum(old.sizes.values()), free_bytes=0, clock=clock)
    for contents in (old, wanted, newer):
        keep(store, contents)
        clock.now += 1
        store.find(contents.content_hash, "")
    store.keep([wanted.content_hash])
    keep(store, last)
    assert there() == {wanted.content_hash, newer.content_hash, last.content_hash}
    store.keep([each.content_hash for each in (wanted, newer, last)])
    careful = AdapterStore(tmp_path / "careful", free_bytes=1 << 60)
    for full in (store, careful):  # the second leaves the disk to others
        with pytest.raises(InvalidRequest, match="no room") as refused:
            full.begin(old.content_hash, old.sizes)
        assert refused.value.code == "no_room"
    clock.now += KEEP_S
    store.keep([wanted.content_hash])
    assert store.find(newer.content_hash, "") != "", "requests under way may need it"
    clock.now += KEEP_S + 1
    store.keep([wanted.content_hash])
    assert there() == {wanted.content_hash}


@pytest.mark.parametrize("num_pieces", [0, 1])
def test_what_came_before_a_full_disk_goes_at_once(tmp_path: Path, source: Path, num_pieces: int) -> None:
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


def hash_of(path: Path) -> str:
    return contents_of(path).content_hash


def test_a_copy_is_the_same_adapter_and_outlives_its_source(tmp_path: Path, source: Path) -> None:
    """Where none can be made it is tried again after a while."""
    clock, wanted = Clock(), hash_of(source)
    copies = Copies(tmp_path, clock)
    (tmp_path / FOLDER_NAME).write_text("this is no folder")
    copies.make(wanted, str(source), [])
    (tmp_path / FOLDER_NAME).unlink()
    copies.make(wanted, str(source), [])
    assert copies.path_of(wanted) == "", "not at once"
    clock.now += PAUSE_S
    for _ in range(2):
        copies.make(wanted, str(source), [])
        shutil.rmtree(source, ignore_errors=True)
    assert hash_of(Path(copies.path_of(wanted))) == wanted


def test_what_is_gone_or_another_or_a_gateways_is_not_copied(tmp_path: Path, source: Path) -> None:
    """Nor anything where there is no folder for copies."""
    copies, wanted, nowhere = Copies(tmp_path), hash_of(source), Copies(None)
    nowhere.make(wanted, str(source), [])
    sent = source.rename(tmp_path / wanted)
    copies.make(wanted, str(sent), [])
    sent.rename(tmp_path / "moved")  # so that it is gone from its place
    for _ in range(2):
        with pytest.raises(AdapterRejected) as refused:
            copies.make(wanted, str(source), [])
        assert refused.value.code == "changed"
        make_adapter(source, modules=MODULES, seed=1)
    assert nowhere.path_of(wanted) == copies.path_of(wanted) == ""
    assert not list(tmp_path.glob(f"{FOLDER_NAME}/*"))


def test_no_version_is_without_a_copy(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written over between the reading and the copying, it would be served, and could not be read any more."""
    server = CatalogServer(tmp_path / "state")
    record = server.load("law", source)
    server.catalog.look_after()
    assert server.copies.path_of(record.content_hash)
    put(source.parent, source.name, seed=1)
    real = shutil.copyfile

    def copyfile(path: Path, target: Path) -> None:
        real(path, target)
        if path.name == WEIGHTS_FILE:
            put(source.parent, source.name, seed=2)
            real(path, target)

    with monkeypatch.context() as patched:
        patched.setattr("engine_bridge.adapters.store.shutil.copyfile", copyfile)
        with pytest.raises(AdapterRejected) as refused:
            server.load("law", source)
    assert refused.value.code == "changed"
    assert server.catalog.current("law") == record
    newest = server.load("law", source)
    assert server.copies.path_of(newest.content_hash) and server.copies.path_of(record.content_hash)
    server.catalog.close()
