"""A TLS certificate that is renewed while the server runs."""

import errno
import os
import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest

from engine_bridge.cluster.trust import Trust
from gateway.doors.http.certificate import Certificate
from gateway.errors import StartupError
from tests.unit.cluster.certificates import certified

from .conftest import Gateways
from .parts import until


async def test_a_renewed_certificate_is_used_from_then_on(
    gateways: Gateways, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who renews it writes two files, one after the other. Connections that are open stay."""
    monkeypatch.setattr("gateway.doors.http.certificate.LOOK_EVERY_S", 0.02)
    caplog.set_level("INFO")
    old, new, used = (certified(tmp_path, name, "127.0.0.1") for name in ("old", "new", "used"))
    shutil.copy(old.cert, used.cert)
    shutil.copy(old.key, used.key)
    gateway = await gateways(ssl_certfile=Path(used.cert), ssl_keyfile=Path(used.key))

    def trusting(trust: Trust) -> aiohttp.ClientSession:
        known = ssl.create_default_context(cafile=trust.cert)
        return aiohttp.ClientSession(gateway.server.url, connector=aiohttp.TCPConnector(ssl=known, limit=1))

    async def is_well(session: aiohttp.ClientSession) -> bool:
        async with session.get("/healthz") as reply:
            await reply.read()
            return reply.status == 200

    async with trusting(old) as open_before:
        assert await is_well(open_before)
        shutil.copy(new.key, used.key)
        await until(lambda: "goes on with the one that it has" in caplog.text)
        async with trusting(old) as another:
            assert await is_well(another)
        shutil.copy(new.cert, used.cert)
        await until(lambda: "certificate was read again" in caplog.text)
        async with trusting(new) as another:
            assert await is_well(another)
        async with trusting(old) as another:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await is_well(another)
        assert await is_well(open_before)


def test_files_that_could_not_be_read_once_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had not changed since, so a server that had no file left to open at that moment kept the old certificate for ever."""
    used, new = certified(tmp_path, "used", "127.0.0.1"), certified(tmp_path, "new", "127.0.0.1")
    certificate = Certificate(Path(used.cert), Path(used.key))
    shutil.copy(new.cert, used.cert)
    shutil.copy(new.key, used.key)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(ssl.SSLContext, "load_cert_chain", fails)
        with pytest.raises(StartupError, match="Too many open files"):
            certificate.look()
    assert certificate.look() and not certificate.look()


def fails(*_: object) -> None:
    """Open a file when there are too many."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
