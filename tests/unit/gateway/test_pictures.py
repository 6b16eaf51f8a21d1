"""Pictures of messages: stored once for their owner, shown to the model as far as it reads them, and gone with the last turn that has them."""

import io
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from engine_bridge.protocol.engine_request import Picture
from gateway.errors import GatewayError
from gateway.sessions import RESTORE_WINDOW_S, PictureRoom, SessionStore
from gateway.sessions.pictures import KEEP_UNUSED_S, describe
from gateway.sessions.schema import SESSION_BYTES, TURN_BYTES

from .front import Gateway, Gateways
from .parts import KEYS, NOW, refused
from .stores import ask, end, rows_of


def image(shade: int, name: str = "PNG", **options: Any) -> bytes:
    """A small picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (shade, shade, shade)).save(file, name, **options)
    return file.getvalue()


async def put(store: SessionStore, data: bytes, owner: str = "ann", now: float = NOW) -> str:
    picture = describe(data, 1e6)
    await store.pictures.put(owner, picture, data, now)
    return picture.id


def num_stored(path: Path) -> int:
    assert rows_of(path, "SELECT count(*) FROM pictures") == rows_of(
        path, "SELECT count(*) FROM picture_data"
    )
    return rows_of(path, "SELECT count(*) FROM pictures")[0][0]


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_picture_is_known_by_its_head(name: str) -> None:
    found = describe(image(1, name), 48)
    assert (found.media_type, found.width, found.height) == (f"image/{name.lower()}", 8, 6)
    with pytest.raises(GatewayError, match="Make it smaller"):
        describe(image(1, name), 47)


def test_a_phones_jpeg_with_more_pictures_behind_it_is_a_jpeg() -> None:
    more = [Image.new("RGB", (8, 6), (2, 2, 2))]
    assert describe(image(1, "MPO", save_all=True, append_images=more), 48).media_type == "image/jpeg"


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", image(1, "TIFF")]
)
def test_what_browsers_do_not_show_is_no_picture(data: bytes) -> None:
    with pytest.raises(GatewayError, match="PNG, JPEG, WebP and GIF"):
        describe(data, 1e6)


async def test_a_message_has_pictures_of_its_owner_alone(store: SessionStore) -> None:
    first, second = await put(store, image(1)), await put(store, image(2))
    theirs = await put(store, image(3), owner="bob")
    await store.create_session("ann", session_id="s", now=NOW)
    for unknown in (theirs, "0" * 64):
        error = await refused(ask(store, "s", "t", "", pictures=[first, unknown]))
        assert (error.code, error.param) == ("not_found", "pictures")
    begun = await ask(store, "s", "t", "", pictures=[second, first, second])
    assert [each.id for each in begun.turn.pictures] == [second, first, second] and begun.title == "Picture"
    await store.record_turn("ann", "u", "t", "", answer="A", pictures=[first], makes_session=True, now=NOW)
    assert (await store.get_session("ann", "u")).title == "Picture", "of a call, too"
    assert not (await ask(store, "s", "t", "", pictures=[second, first, second])).is_new
    assert (await refused(ask(store, "s", "t", "", pictures=[first]))).code == "conflict"
    await end(store, "s", "t")
    assert (await store.get_session("ann", "s")).turns[0].pictures == begun.turn.pictures
    assert await store.pictures.read("ann", [first, theirs]) == {first: Picture("image/png", image(1))}


@pytest.mark.parametrize("room", [PictureRoom(max_pixels=3 * 48), PictureRoom(max_bytes=3 * len(image(1)))])
async def test_a_prompt_has_as_many_pictures_as_one_call_may_have(path: Path, room: PictureRoom) -> None:
    """Else a conversation with many large ones would have no more answers. Those of the question are read or refused as they are."""
    store = await SessionStore.open(path, picture_room=room)
    names = [await put(store, image(shade)) for shade in range(1, 6)]
    await store.create_session("ann", session_id="s", now=NOW)
    for turn, shown in (("a", names[:2]), ("b", names[2:4]), ("c", names[4:])):
        await ask(store, "s", turn, pictures=shown)
        await end(store, "s", turn)
    turns = (await store.get_session("ann", "s")).turns
    found, whole = await store.pictures.latest("ann", turns, 16)
    assert [[each.id for each in turn.pictures] for turn in found] == [[], names[2:4], names[4:]]
    assert set(whole) == set(names[2:])
    large = [*turns, msgspec.structs.replace(turns[0], pictures=[p for t in turns for p in t.pictures])]
    if room.max_bytes == math.inf:
        found, _ = await store.pictures.latest("ann", large, 16)
        assert [len(turn.pictures) for turn in found] == [0, 0, 0, 5], "the node says what is wrong with them"
    else:
        assert (await refused(store.pictures.latest("ann", large, 16))).code == "frame_too_large"
    await store.close()


async def test_a_picture_counts_once_and_goes_with_its_last_turn(store: SessionStore, path: Path) -> None:
    data = image(1)
    for session in ("s", "u"):
        picture = await put(store, data)
        await store.create_session("ann", session_id=session, now=NOW)
        await ask(store, session, "t", "hello", pictures=[picture])
        await end(store, session, "t", "hi")
    [(counted,)] = rows_of(path, "SELECT num_bytes FROM owners")
    assert counted == 2 * (SESSION_BYTES + TURN_BYTES + 7) + TURN_BYTES + len(data)
    gone = NOW + RESTORE_WINDOW_S + 1
    for session, num_left in (("s", 1), ("u", 0)):
        await store.delete("ann", session, NOW)
        await store.purge(NOW)
        assert num_stored(path) == 1, "it can be restored"
        await store.purge(gone)
        assert num_stored(path) == num_left
    assert rows_of(path, "SELECT num_bytes FROM owners") == [(0,)]


async def test_a_picture_that_no_message_came_for_is_kept_an_hour(store: SessionStore, path: Path) -> None:
    await put(store, image(1))
    await store.purge(NOW + KEEP_UNUSED_S)
    await put(store, image(1), now=NOW + KEEP_UNUSED_S)
    await store.purge(NOW + 2 * KEEP_UNUSED_S)
    assert num_stored(path) == 1, "it was sent again"
    await store.purge(NOW + 2 * KEEP_UNUSED_S + 1)
    assert num_stored(path) == 0


async def test_pictures_count_against_the_quota(path: Path) -> None:
    store = await SessionStore.open(path, max_bytes_of=lambda owner: 4096)
    await put(store, image(1))
    large = b"\xff" + bytes(5000)
    picture = describe(image(2), 1e6)
    error = await refused(store.pictures.put("ann", picture, large, NOW))
    assert error.code == "quota_exceeded" and num_stored(path) == 1
    await store.close()


async def send(gateway: Gateway, data: bytes, key: str | None = None) -> tuple[int, Any]:
    reply = await gateway.call("POST", "/api/pictures", data=data, key=key)
    return reply.status, reply.body


async def test_pictures_come_and_go_over_http_and_their_owner_alone_sees_them(gateways: Gateways) -> None:
    gateway = await gateways(api_keys=KEYS, max_image_mpixels=1)
    gateway.node.max_images = 2
    status, picture = await send(gateway, image(1), KEYS[0])
    assert (status, picture["width"], picture["media_type"]) == (201, 8, "image/png")
    path = f"/api/pictures/{picture['id']}"
    shown = await gateway.call("GET", path, key=KEYS[0])
    assert (shown.content, shown.headers["Content-Type"]) == (image(1), "image/png")
    assert shown.headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in shown.headers["Content-Security-Policy"]
    assert (await gateway.call("GET", path, key=KEYS[1])).status == 404
    assert (await gateway.call("GET", path)).status == 401
    status, error = await send(gateway, b"no picture", KEYS[0])
    assert (status, error["error"]["param"]) == (400, "picture")
    gateway.node.max_images = 0
    status, error = await send(gateway, image(1), KEYS[0])
    assert status == 400 and "reads no pictures" in error["error"]["message"]


async def test_the_model_sees_the_latest_pictures_as_far_as_it_reads_them(gateway: Gateway) -> None:
    """Also while the next message is typed; a conversation that has more of them goes on."""
    gateway.node.script = ["I see."]
    gateway.node.max_images = 2
    names = [(await send(gateway, image(shade)))[1]["id"] for shade in (1, 2, 3)]
    async with gateway.socket(hello={}) as socket:
        accepted = await socket.ask("a", content="Look", pictures=names[:2])
        assert (await socket.rest())[1]["type"] == "done"
        session = accepted["session_id"]
        await socket.ask("b", content="", session_id=session, pictures=names[2:])
        assert (await socket.rest())[1]["type"] == "done"
        first, second = [answer.request.messages for answer in gateway.node.answers]
        assert [each.data for each in first[0].pictures] == [image(1), image(2)]
        assert [[each.data for each in said.pictures] for said in second] == [[image(2)], [], [image(3)]]
        for pictures, words in ((names, "at most 2"), (["0" * 64], "no picture")):
            error = await socket.ask("c", content="x", session_id=session, pictures=pictures)
            assert words in error["message"]
        error = await socket.ask("c", content="", session_id=session)
        assert "needs a text or a picture" in error["message"]
    turns = (await gateway.call("GET", f"/api/sessions/{session}")).body["turns"]
    assert [[each["id"] for each in turn["pictures"]] for turn in turns] == [names[:2], names[2:]]


async def test_an_exported_conversation_brings_its_pictures_along(
    gateway: Gateway, store: SessionStore
) -> None:
    gateway.node.script = ["I see."]
    gateway.node.max_images = 1
    name = (await send(gateway, image(1)))[1]["id"]
    async with gateway.socket(hello={}) as socket:
        session = (await socket.ask("a", content="Look", pictures=[name]))["session_id"]
        assert (await socket.rest())[1]["type"] == "done"
    archive = (await gateway.call("GET", f"/api/sessions/{session}/export")).body
    assert (
        "data:image/png;base64,"
        in (await gateway.call("GET", f"/api/sessions/{session}/export?format=markdown")).body
    )
    again = (await gateway.call("POST", "/api/sessions/import", archive)).body
    assert [each["id"] for each in again["turns"][0]["pictures"]] == [name] and again["id"] != session
    archive["turns"][0]["pictures"][0]["data"] = "AAAA"
    refused = await gateway.call("POST", "/api/sessions/import", archive)
    assert refused.status == 400 and "PNG" in refused.body["error"]["message"]
