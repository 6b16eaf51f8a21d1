"""What a helper process says of a document."""

from __future__ import annotations

import msgspec

# What a sender's word tells that the data do not.
TOLD_TYPES = ("text/html", "application/xhtml+xml", "text/csv", "text/tab-separated-values", "text/plain")


class Document(msgspec.Struct, frozen=True):
    """The text that was read from a document.

    Attributes:
        kind: "pdf", "docx", "xlsx", "html" or "csv".
        text: its text, whose lines end in a line feed.
        num_pages: pages of a PDF, or sheets of a spreadsheet; None for other kinds.
    """

    kind: str
    text: str
    num_pages: int | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The one message of a helper process: a document, or why it cannot be read, for its sender."""

    document: Document | None = None
    fault: str = ""
