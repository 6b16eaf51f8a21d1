"""OpenID Connect: a browser is sent to a provider, and comes back with a code that is worth a signed word of who signed in there.

Sources: OpenID Connect Core 1.0 §3.1 (code flow), Discovery 1.0, RFC 7636 (PKCE), RFC 9207 (`iss` of a reply). The tokens are read by PyJWT.

Nothing is kept between the two requests of a browser: state, nonce and PKCE's verifier all follow from one secret in its cookie.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import aiohttp
import jwt

from gateway.errors import GatewayError, StartupError
from gateway.settings.config import Config
from gateway.settings.sources import is_tls_or_local

WELL_KNOWN = "/.well-known/openid-configuration"
SCOPES = "openid email profile"
SECRET_BYTES = 32
MAX_COOKIE_CHARS = 64
TIMEOUT_S = 10.0  # Of one request to the provider. Chosen: a person waits for it.
MAX_REPLY_BYTES = 1 << 20  # Chosen: far above any provider's keys.
KEEP_METADATA_S = 3600.0
LEEWAY_S = 60  # Between the provider's clock and ours. Chosen.
# Signatures with a private key only: with others a client's own secret, or none, would do.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class Attempt(NamedTuple):
    """One browser's attempt to sign in; all of it follows from `secret`, which only its cookie holds."""

    secret: str

    @property
    def state(self) -> str:
        """Return the value that ties the provider's reply to this browser."""
        return self._derived(b"state")

    @property
    def nonce(self) -> str:
        """Return the value that ties the token to this attempt."""
        return self._derived(b"nonce")

    @property
    def verifier(self) -> str:
        """PKCE's `code_verifier`: who sees the code alone cannot use it."""
        return self._derived(b"verifier")

    @property
    def challenge(self) -> str:
        """PKCE's `code_challenge`, of the method S256."""
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def _derived(self, what: bytes) -> str:
        return hmac.new(self.secret.encode("utf-8", "surrogatepass"), what, hashlib.sha256).hexdigest()


class OidcProvider:
    """The provider that the settings name.

    Args:
        issuer: its address, as its tokens name it.
        client_id, client_secret: of this server there; "" for a client that has no secret.
        claim: which of a token's claims is the person's name.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        issuer: str,
        client_id: str,
        client_secret: str = "",
        claim: str = "email",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.issuer, self._client_id, self._client_secret, self._claim = (
            issuer,
            client_id,
            client_secret,
            claim,
        )
        self._clock = clock
        self._metadata: dict[str, Any] = {}
        self._metadata_since_s = 0.0

    @staticmethod
    def of(config: Config) -> OidcProvider | None:
        """Return the provider of the settings; None where they name none. This reads a file. Raises StartupError."""
        if not config.oidc_issuer:
            return None
        secret = ""
        if config.oidc_client_secret_file is not None:
            try:
                secret = config.oidc_client_secret_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise StartupError(f"oidc_client_secret_file cannot be read: {error}") from error
        return OidcProvider(config.oidc_issuer, config.oidc_client_id, secret, config.oidc_claim)

    @staticmethod
    def begin() -> Attempt:
        """Return a new attempt."""
        return Attempt(secrets.token_urlsafe(SECRET_BYTES))

    async def address(self, attempt: Attempt, redirect_uri: str) -> str:
        """Return the address to which a browser goes to sign in. Raises GatewayError `overloaded` where the provider cannot be asked."""
        metadata = await self._known()
        asked = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": redirect_uri,
            "scope": SCOPES,
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": attempt.challenge,
            "code_challenge_method": "S256",
        }
        start = metadata["authorization_endpoint"]
        return f"{start}{'&' if '?' in start else '?'}{urlencode(asked)}"

    async def person(self, attempt: Attempt, reply: Mapping[str, str], redirect_uri: str) -> str:
        """Return the name of the person who signed in.

        Args:
            attempt: of the browser's cookie.
            reply: the query with which the provider sent the browser back.
            redirect_uri: as `address` had it.

        Raises:
            GatewayError: `unauthorized` for a reply that is not this browser's, that is an error, or whose token does not hold; `overloaded` where
                the provider cannot be asked.
        """
        if not hmac.compare_digest(
            reply.get("state", "").encode("utf-8", "surrogatepass"), attempt.state.encode()
        ):
            raise _refused("This sign-in was begun elsewhere, or too long ago. Begin again.")
        if reply.get("iss", self.issuer) != self.issuer:
            raise _refused("The reply is of another provider.")
        if "error" in reply:
            raise _refused(f"The provider did not sign you in ({reply['error'][:100]}).")
        if not reply.get("code"):
            raise _refused("The provider sent no code.")
        metadata = await self._known()
        tokens = await self._exchanged(metadata, reply["code"], attempt, redirect_uri)
        token = tokens.get("id_token")
        if not isinstance(token, str):
            raise _refused("The provider sent no token of who you are.")
        keys = await self._asked("GET", metadata["jwks_uri"])
        try:
            claims = self._checked(token, keys, attempt.nonce)
        except (jwt.PyJWTError, ValueError) as error:
            raise _refused("The provider's word of who you are does not hold.") from error
        return self._name_in(claims)

    def _checked(self, token: str, keys: dict[str, Any], nonce: str) -> dict[str, Any]:
        """Return the claims of a token. Source: OpenID Connect Core §3.1.3.7. Raises PyJWTError, ValueError."""
        found = [key for key in jwt.PyJWKSet.from_dict(keys).keys if key.public_key_use in (None, "sig")]
        key_id = jwt.get_unverified_header(token).get("kid")
        if key_id is not None:
            found = [key for key in found if key.key_id == key_id]
        if len(found) != 1:
            raise ValueError("the provider has no key of this token")
        claims: dict[str, Any] = jwt.decode(
            token,
            found[0],
            algorithms=ALGORITHMS,
            audience=self._client_id,
            issuer=self.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iat", "iss", "aud", "sub"]},
        )
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode("utf-8", "replace"), nonce.encode()):
            raise ValueError("the token is of another attempt")
        is_for_many = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if claims.get("azp", None if is_for_many else self._client_id) != self._client_id:
            raise ValueError("the token was made for another client")
        return claims

    def _name_in(self, claims: Mapping[str, Any]) -> str:
        name = claims.get(self._claim)
        if not isinstance(name, str) or not name:
            raise _refused(f"The provider did not say your {self._claim}.")
        # Anybody can give an address at some providers. AWS Cognito writes the word as a string.
        if self._claim == "email" and claims.get("email_verified") not in (True, "true"):
            raise _refused("The provider has not verified your address.")
        return name

    async def _exchanged(
        self, metadata: Mapping[str, Any], code: str, attempt: Attempt, redirect_uri: str
    ) -> dict[str, Any]:
        sent = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": attempt.verifier,
        }
        headers = {}
        methods = metadata.get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
        if self._client_secret and "client_secret_basic" in methods:
            # RFC 6749 §2.3.1: both parts are form-encoded first.
            pair = f"{quote(self._client_id, safe='')}:{quote(self._client_secret, safe='')}"
            headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        else:
            sent["client_id"] = self._client_id
            if self._client_secret:
                sent["client_secret"] = self._client_secret
        return await self._asked("POST", metadata["token_endpoint"], sent, headers)

    async def _known(self) -> dict[str, Any]:
        """Return what the provider says of itself. Raises GatewayError `overloaded`."""
        if self._metadata and self._clock() - self._metadata_since_s < KEEP_METADATA_S:
            return self._metadata
        found = await self._asked("GET", self.issuer.rstrip("/") + WELL_KNOWN)
        places = [found.get(name) for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")]
        if found.get("issuer") != self.issuer or not all(
            isinstance(place, str) and is_tls_or_local(place) for place in places
        ):
            why = "its discovery document is of another issuer, or names places without TLS"
            raise _unreachable() from ValueError(why)
        self._metadata, self._metadata_since_s = found, self._clock()
        return found

    async def _asked(
        self,
        method: str,
        url: str,
        form: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the JSON object that the provider answers. Raises GatewayError `unauthorized` where it refuses a code, else `overloaded`."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.request(method, url, data=form, headers=headers, allow_redirects=False) as reply,
            ):
                if form is not None and reply.status in (400, 401):
                    raise _refused("The provider refused the code, or this server's client id and secret.")
                body = bytearray()
                async for piece in reply.content.iter_any():
                    body += piece
                    if len(body) > MAX_REPLY_BYTES:
                        raise ValueError("the reply is too long")
                found = json.loads(bytes(body))
                if reply.status != 200 or not isinstance(found, dict):
                    raise ValueError(f"it answered {reply.status}")
                return found
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _unreachable() from error


def _refused(message: str) -> GatewayError:
    return GatewayError("unauthorized", message)


def _unreachable() -> GatewayError:
    return GatewayError("overloaded", "The sign-in provider cannot be asked now. The server's log says why.")
