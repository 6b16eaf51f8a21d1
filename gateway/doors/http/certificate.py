"""The server's TLS certificate: read at the start, and again when it has been renewed, as connections that are open keep the one that they have."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
import time
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from gateway.errors import StartupError
from gateway.file_signature import Signature, signature_of

log = logging.getLogger(__name__)

# Chosen: who renews certificates does so days before they end.
LOOK_EVERY_S = 5.0


class Certificate:
    """A certificate with its key, of two files or of one, and the TLS context that uses them."""

    def __init__(
        self,
        cert: Path,
        key: Path | None,
        *,
        ca_certs: Path | None = None,
        cert_reqs: int = ssl.CERT_NONE,
        ciphers: str | None = None,
    ) -> None:
        """Read the files. Raises StartupError for files that are no certificate with its key, and for ciphers that OpenSSL does not know.

        Args:
            cert: the certificate, with its chain.
            key: its private key; None: the first file has it, too.
            ca_certs: certificates of those who sign clients' certificates; None: nobody.
            cert_reqs: whether clients show a certificate, as `ssl.VerifyMode` numbers it.
            ciphers: OpenSSL's list of ciphers up to TLS 1.2; None: Python's defaults.

        OpenSSL asks for the passphrase of a key that has one, as with `vllm serve`: at the terminal, or without one by reading standard input. Where
        nobody can answer such a key is refused.
        """
        self._cert, self._key = cert, key
        self._ca_certs, self._cert_reqs, self._ciphers = ca_certs, ssl.VerifyMode(cert_reqs), ciphers
        self._seen, self._read_at_s = self._signatures(), 0.0
        self.context = self._newest = self._read(may_ask=_may_tell())
        self.context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, *_: object) -> int | None:
        """Give a connection that begins what was read last. A context itself is not changed: connections begin in it meanwhile.

        Returns the alert that ends the connection, or None. Where clients show certificates, a session of before is not gone on with, as who signed
        the client's may be trusted no longer: the client begins anew.
        """
        session = connection.session if self._cert_reqs and connection.session_reused else None
        if session is not None and session.time <= self._read_at_s:
            return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE
        connection.context = self._newest
        return None

    def _read(self, *, may_ask: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._cert, self._key, password=None if may_ask else self._refuse_to_ask)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(
                f"ssl_certfile and ssl_keyfile: {self._cert} is no certificate of the key {self._key or 'in it'}, or not the first of its "
                f"chain: {error}"
            ) from error
        try:
            if self._ca_certs is not None:
                context.load_verify_locations(self._ca_certs)
            if self._ciphers is not None:
                context.set_ciphers(self._ciphers)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"ssl_ca_certs and ssl_ciphers: {error}") from error
        context.verify_mode = self._cert_reqs
        return context

    def _refuse_to_ask(self) -> NoReturn:
        key = self._key or self._cert
        raise StartupError(
            f"ssl_keyfile: {key} has a passphrase, which a server without a terminal or a pipe, or one that runs, asks nobody for. "
            f"Take it off: openssl pkey -in {key} -out FILE"
        )

    def _signatures(self) -> tuple[Signature, ...]:
        return tuple(
            signature_of(path) for path in (self._cert, self._key, self._ca_certs) if path is not None
        )

    def look(self) -> bool:
        """Read the files again if they have changed, for connections from now on. Return whether that was so. This blocks.

        Raises:
            StartupError: they are no certificate with its key, as when only one of them is new yet; the one that was read before stays, and the
                next look reads them again.
        """
        found = self._signatures()
        if found == self._seen:
            return False
        self._newest, self._read_at_s = self._read(may_ask=False), time.time()
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
