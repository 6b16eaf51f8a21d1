"""Pictures of messages, each stored once for its owner under its SHA-256, as long as a turn has it.

A picture comes before the message that shows it. One that no turn has is removed: at once if a turn had it before, else after KEEP_UNUSED_S.
They lie in the session file and not in files beside it, so that a message and its pictures are stored, counted, backed up and removed as one.
"""

from __future__ import annotations

import hashlib
import io
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from PIL import Image

from engine_bridge.protocol.engine_request import Picture
from gateway.errors import GatewayError
from gateway.sessions import quota, search
from gateway.sessions.connection import Database, SqliteConnection
from gateway.sessions.records import PictureRoom, StoredPicture, Turn, with_latest_pictures
from gateway.sessions.schema import TURN_BYTES

# Chosen: a message is written and sent within an hour of the first picture that was put to it.
KEEP_UNUSED_S: Final = 3600.0
# The formats that browsers show and vLLM reads. SVG is none of them: it may hold programs.
MEDIA_TYPES: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}

_FIELDS: Final = ("id", "media_type", "width", "height", "num_bytes")
_AS_OBJECT: Final = ", ".join(f"'{name}', {name}" for name in _FIELDS)
# A turn's pictures in their order, as a JSON list; NULL for none. The inner SELECT is there for its order, which json_group_array keeps.
OF_TURN: Final = f"""(SELECT CASE WHEN count(*) THEN json_group_array(json_object({_AS_OBJECT})) END FROM (SELECT p.* FROM turn_pictures x
    JOIN pictures p ON p.row = x.picture WHERE x.seq = turns.seq ORDER BY x.place))"""


def describe(data: bytes, max_pixels: float) -> StoredPicture:
    """Return what a picture's head says of it. Takes milliseconds for each megabyte: not for the event loop.

    Raises:
        GatewayError: `bad_request` for a file that is no picture of MEDIA_TYPES, and for a picture of more pixels than are read.
    """
    try:
        with Image.open(io.BytesIO(data), formats=tuple(MEDIA_TYPES)) as image:
            media_type, (width, height) = _media_type(image), image.size
    except Image.DecompressionBombError:
        media_type, width, height = "", 1 << 31, 1
    except Exception as error:  # PIL's readers fail in many ways
        raise GatewayError(
            "bad_request",
            "This is no picture that can be read. PNG, JPEG, WebP and GIF can.",
            param="picture",
        ) from error
    if width * height > max_pixels:
        raise GatewayError(
            "bad_request",
            f"The picture has more pixels than this server reads: {max_pixels / 1e6:g} million (max_image_mpixels). Make it smaller.",
            param="picture",
        )
    return StoredPicture(hashlib.sha256(data).hexdigest(), media_type, width, height, len(data))


def _media_type(image: Image.Image) -> str:
    """Return the type of a picture's file. A JPEG with more pictures behind the first one, such as phones take, is a separate format in PIL."""
    return MEDIA_TYPES["JPEG" if image.format == "MPO" else str(image.format)]


class StoredPictures:
    """The pictures of all owners.

    Args:
        reader: reads them.
        write: runs a transaction that changes what an owner has stored.
        room: what a prompt can hold.
    """

    def __init__(
        self, reader: SqliteConnection, write: Callable[..., Awaitable[Any]], room: PictureRoom
    ) -> None:
        self._reader = reader
        self._write = write
        self._room = room

    async def put(self, owner: str, picture: StoredPicture, data: bytes, now: float) -> None:
        """Store a picture that `describe` has described, for a message that will show it. Raises GatewayError `quota_exceeded`."""
        await self._write(owner, put, owner, picture, data, now)

    async def read(self, owner: str, ids: Iterable[str]) -> dict[str, Picture]:
        """Return the owner's pictures of these ids, whole. Unknown ids are left out."""
        wanted = set(ids)
        found: dict[str, Picture] = await self._reader.transact(_read, owner, wanted) if wanted else {}
        return found

    async def latest(
        self, owner: str, turns: Sequence[Turn], max_images: int
    ) -> tuple[list[Turn], dict[str, Picture]]:
        """Return turns, oldest first, with the latest pictures that a prompt can hold, and these whole, by id.

        Raises:
            GatewayError: `frame_too_large` where those of the last turn alone are more.
        """
        most = self._room.max_bytes
        if turns and sum(each.num_bytes for each in turns[-1].pictures) > most:
            raise GatewayError(
                "frame_too_large",
                f"The pictures of this message have more than {most:,.0f} bytes together (max_body_bytes). Send fewer, or smaller ones.",
                param="pictures",
            )
        turns = with_latest_pictures(turns, max_images, self._room)
        return turns, await self.read(owner, (each.id for turn in turns for each in turn.pictures))


def put(conn: Database, owner: str, picture: StoredPicture, data: bytes, now: float) -> None:
    """Store a picture; see `StoredPictures.put`."""
    keeper = search.make_owner(conn, owner).row
    sql = "UPDATE pictures SET given_at = ?, is_used = 0 WHERE owner = ? AND id = ?"
    if conn.execute(sql, (now, keeper, picture.id)).rowcount:
        return
    quota.check(conn, owner, TURN_BYTES + len(data), now)
    sql = f"INSERT INTO pictures (owner, given_at, {', '.join(_FIELDS)}) VALUES (?, ?, ?, ?, ?, ?, ?)"
    columns = (picture.id, picture.media_type, picture.width, picture.height, picture.num_bytes)
    row = conn.execute(sql, (keeper, now, *columns)).lastrowid
    conn.execute("INSERT INTO picture_data (picture, data) VALUES (?, ?)", (row, data))


def attach(conn: sqlite3.Connection, owner: str, seq: int, ids: Sequence[str]) -> None:
    """Let a turn that was just stored have the owner's pictures of these ids, in this order. Raises GatewayError `not_found`."""
    for place, name in enumerate(ids):
        sql = """UPDATE pictures SET is_used = 1 WHERE owner = (SELECT row FROM owners WHERE name = ?) AND id = ? RETURNING row"""
        found = conn.execute(sql, (owner, name)).fetchall()
        if not found:
            raise GatewayError(
                "not_found",
                f"There is no picture {name[:64]!r} here, or no longer: send it again (POST /api/pictures).",
                param="pictures",
            )
        conn.execute(
            "INSERT INTO turn_pictures (seq, place, picture) VALUES (?, ?, ?)", (seq, place, found[0][0])
        )


def of_turn(conn: sqlite3.Connection, seq: int) -> list[Picture]:
    """Return a turn's pictures, whole, in their order."""
    sql = """SELECT p.media_type, d.data FROM turn_pictures x JOIN pictures p ON p.row = x.picture JOIN picture_data d ON d.picture = p.row
        WHERE x.seq = ? ORDER BY x.place"""
    return [Picture(*columns) for columns in conn.execute(sql, (seq,))]


def _read(conn: sqlite3.Connection, owner: str, ids: Iterable[str]) -> dict[str, Picture]:
    sql = """SELECT p.media_type, d.data FROM pictures p JOIN picture_data d ON d.picture = p.row
        WHERE p.owner = (SELECT row FROM owners WHERE name = ?) AND p.id = ?"""
    found = ((name, conn.execute(sql, (owner, name)).fetchone()) for name in ids)
    return {name: Picture(*columns) for name, columns in found if columns is not None}


def purge_one(conn: sqlite3.Connection, now: float) -> bool:
    """Remove one picture that no turn has, and return whether there was one. One of the future, whose clock was put back since, counts as of now."""
    conn.execute("UPDATE pictures SET given_at = ? WHERE given_at > ?", (now, now))
    sql = """DELETE FROM pictures WHERE row = (SELECT row FROM pictures p WHERE (is_used OR given_at < ?)
        AND NOT EXISTS (SELECT 1 FROM turn_pictures x WHERE x.picture = p.row) LIMIT 1)"""
    return conn.execute(sql, (now - KEEP_UNUSED_S,)).rowcount > 0
