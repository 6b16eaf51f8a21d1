"""The chat page and the engine's page, and the files that they are made of."""

from __future__ import annotations

import asyncio
import functools
import gzip
from pathlib import Path

from aiohttp import web

from gateway.settings.config import STATIC_DIR

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
)


PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Always asked again, answered 304 while nothing changed: a page never runs with yesterday's scripts.
    "Cache-Control": "no-cache",
}


_TEXTS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_LEVEL = 9  # of gzip: each file is packed once


async def page(request: web.Request) -> web.StreamResponse:
    """Handle `GET /`: the chat page."""
    return await _sent(request, STATIC_DIR / "index.html")


async def engine_page(request: web.Request) -> web.StreamResponse:
    """Handle `GET /engine`: the engine room's page."""
    return await _sent(request, STATIC_DIR / "engine.html")


async def admin_page(request: web.Request) -> web.StreamResponse:
    """Handle `GET /admin`: the operators' page. The page itself says nothing; what it shows takes an operator's key."""
    return await _sent(request, STATIC_DIR / "admin.html")


async def sign_in_page(request: web.Request) -> web.StreamResponse:
    """Handle `GET /sign-in`: the page that a sign-in link opens. The link's token stands behind a `#`, so no server and no log sees it here."""
    return await _sent(request, STATIC_DIR / "sign-in.html")


async def static_file(request: web.Request) -> web.StreamResponse:
    """Handle a file under static/."""
    # In a thread: a file system may be slow, and every socket would wait with it.
    path = await asyncio.to_thread(_static_path, request.match_info["path"])
    if path is None:
        raise web.HTTPNotFound
    return await _sent(request, path)


async def _sent(request: web.Request, path: Path) -> web.StreamResponse:
    """Return a file, packed where it is a text and the client unpacks it: a third of the bytes."""
    kind = _TEXTS.get(path.suffix)
    if kind is None:
        return web.FileResponse(path, headers=PAGE_HEADERS)
    varied = PAGE_HEADERS | {"Vary": "Accept-Encoding"}
    if not _unpacks(request.headers.get("Accept-Encoding", "")):
        return web.FileResponse(path, headers=varied | {"Content-Type": kind})
    state = await asyncio.to_thread(path.stat)
    packed = await asyncio.to_thread(_packed, path, state.st_mtime_ns, state.st_size)
    tag = f"{state.st_mtime_ns:x}-{state.st_size:x}-gz"
    headers = varied | {"ETag": f'"{tag}"'}
    if any(each.value in (tag, "*") for each in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(
        body=packed, content_type=kind, charset="utf-8", headers=headers | {"Content-Encoding": "gzip"}
    )


def _unpacks(accepted: str) -> bool:
    """Return whether a client that sends this `Accept-Encoding` takes gzip; `q=0` says that it does not."""
    for part in accepted.lower().split(","):
        name, _, weight = part.replace(" ", "").partition(";")
        if name == "gzip":
            return weight.rstrip("0.") not in ("q=", "q")
    return False


@functools.lru_cache(maxsize=256)
def _packed(path: Path, changed_ns: int, num_bytes: int) -> bytes:
    """Return a file's bytes packed by gzip. changed_ns, num_bytes: of the file, whose next version is packed anew."""
    return gzip.compress(path.read_bytes(), _LEVEL, mtime=0)


def _static_path(name: str) -> Path | None:
    """Return the path of a static file. A path that resolves outside the folder does not exist."""
    try:
        path = (STATIC_DIR / name).resolve()
        is_ours = path.is_relative_to(STATIC_DIR.resolve()) and path.is_file()
    except (ValueError, OSError):  # a NUL, or a name that no file system takes
        return None
    return path if is_ours else None
