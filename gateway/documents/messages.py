"""What a helper process says of a document."""

from __future__ import annotations

import msgspec


class Document(msgspec.Struct, frozen=True):
    """What a document says.

    Attributes:
        kind: "pdf", "docx", "xlsx", "html" or "csv".
        text: its text, whose lines end in a line feed.
        num_pages: pages of a PDF, sheets of a spreadsheet; None for what has none.
    """

    kind: str
    text: str
    num_pages: int | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The one message of a helper process: a document, or why it cannot be read, for its sender."""

    document: Document | None = None
    fault: str = ""
