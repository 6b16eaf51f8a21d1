"""The chat page, the engine's page and the others, and the files that they are made of.

What a page loads at once is joined (`joining.py`) when it is first asked for, and again when a file under static/ has changed.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from gateway.doors.pages.joining import Joined, join, version_of
from gateway.settings.config import STATIC_DIR

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'"
)


# For the frame with a model's HTML: programs run there, without an origin, cookies, storage, windows, forms or any network. Nor can the frame
# lead elsewhere, because the page around it takes only frames from its origin.
_FRAME_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "media-src data: blob:; frame-ancestors 'self'; base-uri 'none'; form-action 'none'; webrtc 'block'; "
    "require-trusted-types-for 'script'; trusted-types default"
)
# No browser follows `webrtc 'block'` yet. Chromium 156 follows the allowlist, and ends the tab where a frame within the frame calls: sandbox.html
# lets no such frame be made, by trusted types.
_NO_CONNECTIONS = {"Connection-Allowlist": "()", "X-DNS-Prefetch-Control": "off"}
PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Always asked again, answered 304 while nothing changed: a page never runs with yesterday's scripts.
    "Cache-Control": "no-cache",
}
# For files whose path holds the hash of their content.
KEPT = "public, max-age=31536000, immutable"


_TEXTS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
_LEVEL = 9  # of gzip: each file is packed once


def page(name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return the handler of a page.

    Args:
        name: its file, such as `index.html`. A page holds no data itself: the data that it shows takes a key. The token of a sign-in link stands
            behind a `#`, so no server and no log sees it.
    """

    async def handler(request: web.Request) -> web.StreamResponse:
        """Send the page as its files are now."""
        joined = await asyncio.to_thread(_joined)
        return await _sent(request, joined.pages[name].encode(), ".html", PAGE_HEADERS)

    handler.__doc__ = f"Send the page {name}."
    return handler


async def sandbox(request: web.Request) -> web.StreamResponse:
    """Handle `GET /sandbox`: the frame in which the chat page shows HTML and SVG of an answer."""
    text = await asyncio.to_thread((STATIC_DIR / "sandbox.html").read_bytes)
    headers = PAGE_HEADERS | {"Content-Security-Policy": _FRAME_POLICY} | _NO_CONNECTIONS
    return await _sent(request, text, ".html", headers)


async def manifest(request: web.Request) -> web.StreamResponse:
    """Handle `GET /manifest.webmanifest`: what a browser installs the chat page by. At the root, where its addresses are those of the page."""
    text = await asyncio.to_thread((STATIC_DIR / "manifest.webmanifest").read_bytes)
    return await _sent(request, text, ".webmanifest", PAGE_HEADERS)


async def static_file(request: web.Request) -> web.StreamResponse:
    """Handle a file under static/, and under `static/v-<hash>/` what pages load, which browsers keep."""
    name, headers = request.match_info["path"], PAGE_HEADERS
    if name.startswith("v-"):
        joined = await asyncio.to_thread(_joined)
        version, _, name = name.removeprefix("v-").partition("/")
        # A page of an older version gets the current file, and does not keep it.
        headers = PAGE_HEADERS | ({"Cache-Control": KEPT} if version == joined.version else {})
        if (text := joined.files.get(name)) is not None:
            return await _sent(request, text.encode(), Path(name).suffix, headers)
    # In a thread: a file system may be slow, and every socket would wait with it.
    path = await asyncio.to_thread(_static_path, name)
    if path is None:
        raise web.HTTPNotFound
    if path.suffix not in _TEXTS:
        return web.FileResponse(path, headers=headers)
    return await _sent(request, await asyncio.to_thread(path.read_bytes), path.suffix, headers)


async def _sent(
    request: web.Request, text: bytes, suffix: str, headers: dict[str, str]
) -> web.StreamResponse:
    """Return a text, packed where the client unpacks it: a third of the bytes. suffix: of its name, one of `_TEXTS`."""
    packed, tag = await asyncio.to_thread(_packed, text)
    is_packed = _unpacks(request.headers.get("Accept-Encoding", ""))
    tag = f"{tag}-gz" if is_packed else tag
    headers = headers | {"Vary": "Accept-Encoding", "ETag": f'"{tag}"'}
    if any(each.value in (tag, "*") for each in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    if is_packed:
        headers["Content-Encoding"] = "gzip"
    body = packed if is_packed else text
    return web.Response(body=body, content_type=_TEXTS[suffix], charset="utf-8", headers=headers)


def _unpacks(accepted: str) -> bool:
    """Return whether a client that sends this `Accept-Encoding` takes gzip; `q=0` says that it does not."""
    for part in accepted.lower().split(","):
        name, _, weight = part.replace(" ", "").partition(";")
        if name == "gzip":
            return weight.rstrip("0.") not in ("q=", "q")
    return False


@functools.lru_cache(maxsize=256)
def _packed(text: bytes) -> tuple[bytes, str]:
    """Return a text packed by gzip, and a hash of it."""
    return gzip.compress(text, _LEVEL, mtime=0), hashlib.sha256(text).hexdigest()[:32]


def _joined() -> Joined:
    """Return the pages and the files that they load, as they are now."""
    states = ((path, path.stat()) for path in sorted(STATIC_DIR.rglob("*")) if path.is_file())
    return _joined_of(tuple((path, state.st_mtime_ns, state.st_size) for path, state in states))


@functools.lru_cache(maxsize=1)
def _joined_of(states: tuple[tuple[Path, int, int], ...]) -> Joined:
    """Return the pages made of these files. states: of each its path, when it was changed, and its size."""
    files = {path.relative_to(STATIC_DIR).as_posix(): path.read_bytes() for path, _, _ in states}
    texts = {
        name: text.decode()
        for name, text in files.items()
        if name.endswith((".html", ".js", ".css")) and not name.startswith("vendor/")
    }
    return join(texts, version_of(files))


def _static_path(name: str) -> Path | None:
    """Return the path of a static file. A path that resolves outside the folder does not exist."""
    try:
        path = (STATIC_DIR / name).resolve()
        is_ours = path.is_relative_to(STATIC_DIR.resolve()) and path.is_file()
    except (ValueError, OSError):  # a NUL, or a name that no file system takes
        return None
    return path if is_ours else None
