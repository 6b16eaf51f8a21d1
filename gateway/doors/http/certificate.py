"""The server's TLS certificate: read at the start, and again when it has been renewed, as connections that are open keep the one that they have."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from gateway.errors import StartupError
from gateway.file_signature import Signature, signature_of

log = logging.getLogger(__name__)

# Chosen: who renews certificates does so days before they end.
LOOK_EVERY_S = 5.0


class Certificate:
    """A certificate with its key, of two files, and the TLS context that uses them."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Read both files. Raises StartupError for files that are no certificate with its key.

        OpenSSL asks for the passphrase of a key that has one, as with `vllm serve`: at the terminal, or without one by reading standard input. Where
        nobody can answer such a key is refused.
        """
        self._cert, self._key = cert, key
        self._seen = self._signatures()
        self.context = self._newest = self._read(may_ask=_may_tell())
        self.context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, *_: object) -> None:
        """Give a connection that begins what was read last. A context itself is not changed: connections begin in it meanwhile."""
        connection.context = self._newest

    def _read(self, *, may_ask: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._cert, self._key, password=None if may_ask else self._refuse_to_ask)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(
                f"ssl_certfile and ssl_keyfile: {self._cert} is no certificate of the key {self._key}, or not the first of its "
                f"chain: {error}"
            ) from error
        return context

    def _refuse_to_ask(self) -> NoReturn:
        raise StartupError(
            f"ssl_keyfile: {self._key} has a passphrase, which a server without a terminal or a pipe, or one that runs, asks nobody for. "
            f"Take it off: openssl pkey -in {self._key} -out FILE"
        )

    def _signatures(self) -> tuple[Signature, ...]:
        return tuple(signature_of(path) for path in (self._cert, self._key))

    def look(self) -> bool:
        """Read the files again if they have changed, for connections from now on. Return whether that was so. This blocks.

        Raises:
            StartupError: they are no certificate with its key, as when only one of them is new yet; the one that was read before stays, and the
                next look reads them again.
        """
        found = self._signatures()
        if found == self._seen:
            return False
        self._newest = self._read(may_ask=False)
        self._seen = found
        return True


def _may_tell() -> bool:
    """Return whether standard input may tell a passphrase: a terminal, a file or a pipe, unlike the /dev/null of a service."""
    try:
        return os.isatty(0) or not stat.S_ISCHR(os.fstat(0).st_mode)
    except OSError:
        return False


CERTIFICATE = web.AppKey("certificate", Certificate)


async def follow_certificate(certificate: Certificate) -> None:
    """Run until cancelled: take over a renewed certificate."""
    said = ""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            if await asyncio.to_thread(certificate.look):
                log.info("the TLS certificate was read again")
                said = ""
        except StartupError as error:
            if error.message != said:
                log.error("%s The server goes on with the one that it has.", error.message)
            said = error.message
