"""The settings of HTTPS."""

from pathlib import Path
from typing import Annotated, Literal

from engine_bridge.settings.engine_config import NonEmpty, in_server
from gateway.settings.tools import ToolSettings


class TlsSettings(ToolSettings, frozen=True, kw_only=True):
    """The settings of HTTPS, called as `vllm serve` calls them, and those of tools and of an engine."""

    ssl_certfile: Annotated[
        Path | None,
        in_server("TLS certificate (PEM, with its chain): the server speaks HTTPS and nothing else."),
    ] = None
    ssl_keyfile: Annotated[
        Path | None, in_server("Private key of that certificate (PEM); unset: the certificate's file has it.")
    ] = None
    ssl_ca_certs: Annotated[
        Path | None, in_server("Certificates (PEM) of those who sign the certificates of clients.")
    ] = None
    ssl_cert_reqs: Annotated[
        Literal[0, 1, 2],
        in_server(
            "Certificates of clients: 0 none is read, 1 one that is shown must be right, 2 all must show one."
        ),
    ] = 0
    ssl_ciphers: Annotated[
        NonEmpty | None, in_server("Ciphers up to TLS 1.2, as OpenSSL lists them; unset: Python's defaults.")
    ] = None
