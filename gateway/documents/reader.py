"""Starts a helper process for each document, and ends it when its time is over."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections import OrderedDict
from contextlib import suppress
from weakref import WeakValueDictionary

import msgspec

from gateway.documents.messages import TOLD_TYPES, Document, Outcome
from gateway.errors import GatewayError

# Characters of documents that are remembered, and those that each takes besides its text. Chosen: an agent sends what it has read with each of its
# calls, and reading it takes a second.
MAX_REMEMBERED_CHARS, OWN_CHARS = 8_000_000, 1000
AT_ONCE = 2  # chosen: documents are rare, and cores are for answers


class DocumentReader:
    """Reads documents, a few at a time.

    Args:
        timeout_s: seconds that one may take, the start of its process included.
        memory_mib: memory for one, in MiB.
    """

    def __init__(self, timeout_s: float, memory_mib: int) -> None:
        self._timeout_s = timeout_s
        self._memory_mib = memory_mib
        self._turns = asyncio.Semaphore(AT_ONCE)
        # Of each sender, while documents of it are read or wait.
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # By sender, digest and media type: nobody learns from a reader's haste what others have sent.
        self._read: OrderedDict[tuple[str, bytes, str], Document] = OrderedDict()
        self._num_chars = 0

    async def read(self, data: bytes, media_type: str, sender: str = "") -> Document:
        """Return the text of a document.

        Args:
            data: the file.
            media_type: as its sender names it.
            sender: whose documents are read one after the other, so that many of one sender do not hold up others'.

        Raises:
            GatewayError: `bad_request` with the document's fault, `overloaded` where no process can be started.
        """
        media_type = media_type if media_type in TOLD_TYPES else ""
        key = sender, hashlib.sha256(data).digest(), media_type
        own = self._turns_of.setdefault(sender, asyncio.Semaphore(1))
        async with own:
            if (known := self._read.get(key)) is not None:
                self._read.move_to_end(key)
                return known
            async with self._turns:
                output = await self._ask(data, media_type)
        try:
            found = msgspec.json.decode(output, type=Outcome)
        except (
            msgspec.DecodeError
        ) as error:  # it ended before it was done: by the system, for its memory, or by a crash
            raise _refusal("The document could not be read: reading it failed.") from error
        if found.document is None:
            raise _refusal(found.fault)
        self._remember(key, found.document)
        return found.document

    def _remember(self, key: tuple[str, bytes, str], document: Document) -> None:
        self._read[key] = document
        self._num_chars += len(document.text) + OWN_CHARS
        while self._num_chars > MAX_REMEMBERED_CHARS:
            _, oldest = self._read.popitem(last=False)
            self._num_chars -= len(oldest.text) + OWN_CHARS

    def forget(self, sender: str) -> None:
        """Forget what was read for a sender."""
        for key in [key for key in self._read if key[0] == sender]:
            self._num_chars -= len(self._read.pop(key).text) + OWN_CHARS

    async def _ask(self, data: bytes, media_type: str) -> bytes:
        """Return what a new helper process says of a document. Raises GatewayError."""
        limits = (str(self._memory_mib), str(self._timeout_s))
        # No secret of the server's environment goes along; a thread more for arithmetic would only take memory.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.documents.worker", media_type, *limits),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            raise GatewayError("overloaded", "No document can be read now. Try again in a moment.") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                output, _ = await process.communicate(data)
            return output
        except TimeoutError as error:
            raise _refusal(
                f"Reading the document takes longer than {self._timeout_s:g} s (document_s). Send a part of it."
            ) from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _refusal(message: str) -> GatewayError:
    return GatewayError("bad_request", message, param="document")
