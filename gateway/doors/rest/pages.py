"""The chat page and the engine's page, and the files that they are made of."""

from __future__ import annotations

import asyncio
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


async def page(request: web.Request) -> web.FileResponse:
    """Handle `GET /`: the chat page."""
    return web.FileResponse(STATIC_DIR / "index.html", headers=PAGE_HEADERS)


async def engine_page(request: web.Request) -> web.FileResponse:
    """Handle `GET /engine`: the engine room's page."""
    return web.FileResponse(STATIC_DIR / "engine.html", headers=PAGE_HEADERS)


async def admin_page(request: web.Request) -> web.FileResponse:
    """Handle `GET /admin`: the operators' page. The page itself says nothing; what it shows takes an operator's key."""
    return web.FileResponse(STATIC_DIR / "admin.html", headers=PAGE_HEADERS)


async def sign_in_page(request: web.Request) -> web.FileResponse:
    """Handle `GET /sign-in`: the page that a sign-in link opens. The link's token stands behind a `#`, so no server and no log sees it here."""
    return web.FileResponse(STATIC_DIR / "sign-in.html", headers=PAGE_HEADERS)


async def static_file(request: web.Request) -> web.FileResponse:
    """Handle a file under static/."""
    # In a thread: a file system may be slow, and every socket would wait with it.
    path = await asyncio.to_thread(_static_path, request.match_info["path"])
    if path is None:
        raise web.HTTPNotFound
    headers = PAGE_HEADERS | ({"Content-Type": "text/javascript"} if path.suffix == ".js" else {})
    return web.FileResponse(path, headers=headers)


def _static_path(name: str) -> Path | None:
    """Return the path of a static file. A path that resolves outside the folder does not exist."""
    try:
        path = (STATIC_DIR / name).resolve()
        is_ours = path.is_relative_to(STATIC_DIR.resolve()) and path.is_file()
    except (ValueError, OSError):  # a NUL, or a name that no file system takes
        return None
    return path if is_ours else None
