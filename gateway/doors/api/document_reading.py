"""Documents that a call brings with their data, as PDF: their text takes their places, since no model here reads them otherwise."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any

from engine_bridge.calls.documents import documents_of, put_text
from engine_bridge.calls.pictures import where
from gateway.documents.reader import DocumentReader
from gateway.errors import GatewayError

# In one call. Chosen: reading one takes a second, and those of one sender are read one after the other.
MOST_DOCUMENTS = 32
# What is text besides all of `text/`, and what of that has markup.
_TEXTS, _MARKED_UP = ("application/json", "application/xml"), ("text/html",)


async def read_documents(reader: DocumentReader, body: Any, sender: str, max_chars: int) -> None:
    """Put the text of documents in their places in a call's body, which is changed.

    Args:
        reader: reads those that are no plain text.
        body: the call's body.
        sender: whose documents are read one after the other.
        max_chars: the most characters of all texts together. A document has thousands of times its size, and stands there as often as it is named.

    Raises:
        GatewayError: `bad_request` for a document that cannot be read and for too many or too long ones, `overloaded` where none can be read now.
    """
    documents = list(documents_of(body))
    if len({document.data for document in documents}) > MOST_DOCUMENTS:
        raise GatewayError(
            "bad_request",
            f"Documents in one call: at most {MOST_DOCUMENTS}. Send the text of others.",
            param=where(body),
        )
    num_chars = 0
    for part, media_type, encoded in documents:
        try:
            data = await asyncio.to_thread(base64.b64decode, encoded)
            text = await _text_of(reader, data, media_type, sender)
            num_chars += len(text)
            if num_chars > max_chars:
                raise GatewayError(
                    "bad_request",
                    f"The documents of this call have more text than a body may have (max_body_bytes): {max_chars:,} characters. Send a part of it.",
                )
            put_text(part, text)
        except (binascii.Error, ValueError) as error:
            raise GatewayError("bad_request", "A document's data is no base64.", param=where(body)) from error
        except GatewayError as error:
            raise GatewayError(error.code, str(error), param=where(body)) from error


async def _text_of(reader: DocumentReader, data: bytes, media_type: str, sender: str) -> str:
    is_text = media_type.startswith("text/") or media_type in _TEXTS
    if is_text and media_type not in _MARKED_UP:
        return data.decode(errors="replace")
    return (await reader.read(data, media_type, sender)).text
