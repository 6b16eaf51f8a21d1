"""What vLLM is allowed to read as media: pictures that a call brings along, of a bounded size."""

from __future__ import annotations

import base64
import binascii
import io
import traceback
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from engine_bridge.calls.pictures import LARGEST_IN_A_CALL
from engine_bridge.driver.vllm_api import (
    MEDIA_CONNECTOR_REGISTRY,
    MediaConnector,
    open_image,
)
from engine_bridge.protocol.errors import InvalidRequest

GIVEN: Final = "given"
"""The value of VLLM_MEDIA_CONNECTOR by which vLLM finds the class below."""
PICTURE_MESSAGE: Final = "A picture cannot be read: it is damaged, or too narrow for this model."
# Where errors of reading a picture are raised.
_READERS = (
    "PIL.",
    "vllm.multimodal.media.",
    "vllm.multimodal.image",
    "transformers.image_",
    "transformers.models.",
)


@MEDIA_CONNECTOR_REGISTRY.register(GIVEN)
class GivenMedia(MediaConnector):
    """Reads what a call brings along. vLLM would fetch from any host, this machine among them, and unpickle what a client calls an embedding."""

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Decode a `data:` URL. Raises InvalidRequest for any other."""
        return super().load_from_url(_given(url), media_io, fetch_timeout=fetch_timeout)

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Decode a `data:` URL in a thread. Raises InvalidRequest for any other."""
        return await super().load_from_url_async(_given(url), media_io, fetch_timeout=fetch_timeout)

    def fetch_image_embedding(self, data: str) -> NoReturn:
        """Raise InvalidRequest."""
        raise InvalidRequest("This server takes no embeddings.")

    async def fetch_image_embedding_async(self, data: str) -> NoReturn:
        """Raise InvalidRequest."""
        self.fetch_image_embedding(data)

    fetch_audio_embedding = fetch_image_embedding
    fetch_audio_embedding_async = fetch_image_embedding_async


def _given(url: str) -> str:
    if url[:5].lower() != "data:":
        raise InvalidRequest("This server reads media that come with the call alone.")
    return url


def check_sizes(urls: Sequence[str], param: str) -> None:
    """Read how large pictures (`data:` URLs) are, from their heads. Takes milliseconds for each megabyte: not for the event loop.

    param: the field in which they were sent. Raises InvalidRequest for what is no picture, and for pictures of more pixels than are read.
    """
    from engine_bridge.driver.vllm_api import VLLM_MAX_IMAGE_PIXELS  # read from the environment

    total = 0
    for number, url in enumerate(urls, start=1):
        head, _, data = url.partition(",")
        if not head.endswith(";base64"):
            raise InvalidRequest(
                f"Picture {number} is not in base64: `data:image/png;base64,…`.", param=param
            )
        try:
            width, height = open_image(io.BytesIO(base64.b64decode(data, validate=True))).size
        except binascii.Error as error:
            raise InvalidRequest(f"Picture {number} is no base64: {error}.", param=param) from None
        except Exception as error:  # PIL's readers fail in many ways
            is_bomb = type(error).__name__ == "DecompressionBombError"
            why = (
                "has too many pixels (max_image_mpixels)"
                if is_bomb
                else "cannot be read. PNG, JPEG, WebP and GIF can"
            )
            text = f"Picture {number} {why}."
            raise InvalidRequest(text, param=param) from error
        if width * height > VLLM_MAX_IMAGE_PIXELS:
            raise InvalidRequest(
                f"Picture {number} has {width:,} × {height:,} pixels; this server reads {VLLM_MAX_IMAGE_PIXELS / 1e6:g} million (max_image_mpixels).",
                param=param,
            )
        total += width * height
    if total > LARGEST_IN_A_CALL * VLLM_MAX_IMAGE_PIXELS:
        most = LARGEST_IN_A_CALL * VLLM_MAX_IMAGE_PIXELS / 1e6
        raise InvalidRequest(
            f"The pictures have {total / 1e6:,.0f} million pixels together; this server reads {most:g} million in one call "
            f"({LARGEST_IN_A_CALL} × max_image_mpixels).",
            param=param,
        )


def is_of_a_picture(error: BaseException) -> bool:
    """Return whether an error was raised while a picture was read: it says something about the picture, not about our code."""
    each: BaseException | None = error
    while each is not None:
        frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(each.__traceback__))
        if any(name.startswith(_READERS) for name in frames):
            return True
        each = each.__cause__ or each.__context__
    return False
