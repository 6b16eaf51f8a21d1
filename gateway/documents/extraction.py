"""Documents as text, by libraries for each format. Runs in the helper process only: bounded by what `worker.py` sets, and by MAX_CHARS."""

from __future__ import annotations

import csv
import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator

import docx
import openpyxl
import pypdf
from docx.document import Document as WordDocument
from docx.table import Table
from lxml import etree, html

from gateway.documents.messages import Document

# Of a document's text. Chosen: a million tokens, which few models read.
MAX_CHARS = 4_000_000
# Of all files that a document packs. Chosen: six times the largest body, and far above what real ones have.
MAX_UNPACKED_BYTES = 100 << 20
MAX_PAGES = 5000  # of a PDF. Chosen: thick books have 1,500.
# Control characters, which say nothing to a reader, and take six bytes each on the way to the page. Those that end lines stay.
_UNSEEN = dict.fromkeys({*range(32), 127} - set(map(ord, "\t\n\r\v\f\x1c\x1d\x1e")))
_LINES = frozenset(
    "p div br li tr h1 h2 h3 h4 h5 h6 section article header footer pre blockquote table ul ol dl dt dd".split()
)
_SILENT = (
    "//script|//style|//noscript|//template|//head/*[not(self::title)]|//comment()|//processing-instruction()"
)


class UnreadableError(Exception):
    """A document cannot be read; the message says why, to the person who sent it."""


def extract(data: bytes, media_type: str) -> Document:
    """Return the text of a document.

    Args:
        data: the file.
        media_type: as its sender names it; it only tells HTML from CSV.

    Raises:
        UnreadableError: the file is none of these, is encrypted or damaged, has no text or too much.
    """
    kind = _kind_of(data, media_type)
    text, num_pages = _READERS[kind](data)
    text = text.translate(_UNSEEN)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines())).strip("\n")
    if not text.strip():
        raise UnreadableError(
            "The document has no text. It may consist of scanned pictures: send those as pictures."
            if kind == "pdf"
            else "The document has no text."
        )
    return Document(kind, text, num_pages)


def _kind_of(data: bytes, media_type: str) -> str:
    if b"%PDF-" in data[:1024]:
        return "pdf"
    if data.startswith(b"\xd0\xcf\x11\xe0"):
        raise UnreadableError(
            "This is an Office file of an older format, or one with a password. Save it as DOCX or XLSX without a password."
        )
    if data.startswith(b"PK"):
        return _kind_of_package(data)
    if media_type in ("text/html", "application/xhtml+xml"):
        return "html"
    if media_type in ("text/csv", "text/tab-separated-values", "text/plain") and b"\0" not in data:
        return "csv"
    raise UnreadableError("This is no document that can be read. PDF, DOCX, XLSX, HTML and CSV can.")


def _kind_of_package(data: bytes) -> str:
    """Return the kind of a document that is a ZIP archive, without unpacking it."""
    try:
        parts = zipfile.ZipFile(io.BytesIO(data)).infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise UnreadableError("The document is damaged.") from error
    if sum(part.file_size for part in parts) > MAX_UNPACKED_BYTES:
        raise UnreadableError(
            f"The document is too large when it is unpacked: more than {MAX_UNPACKED_BYTES >> 20} MiB."
        )
    names = {part.filename for part in parts}
    if "word/document.xml" in names:
        return "docx"
    if "xl/workbook.xml" in names:
        return "xlsx"
    raise UnreadableError("This archive is no document that can be read. Of archives DOCX and XLSX can.")


def _bounded(pieces: Iterable[str], joint: str) -> str:
    """Join pieces of text. Raises UnreadableError once there are more than MAX_CHARS."""
    found, num_chars = [], 0
    for piece in pieces:
        found.append(piece)
        num_chars += len(piece) + len(joint)
        if num_chars > MAX_CHARS:
            raise UnreadableError(f"The document has more than {MAX_CHARS:,} characters. Send a part of it.")
    return joint.join(found)


def _pdf(data: bytes) -> tuple[str, int | None]:
    reader = pypdf.PdfReader(io.BytesIO(data))
    try:
        # Many may be read by all, and only not changed: their password is empty.
        is_closed = reader.is_encrypted and not reader.decrypt("")
    except (pypdf.errors.DependencyError, NotImplementedError):
        is_closed = True
    if is_closed:
        raise UnreadableError("The PDF is encrypted. Save it without a password.")
    num_pages = len(reader.pages)
    if num_pages > MAX_PAGES:
        raise UnreadableError(
            f"The PDF has {num_pages:,} pages, and {MAX_PAGES:,} are read. Send a part of it."
        )
    return _bounded((page.extract_text().strip() for page in reader.pages), "\n\n"), num_pages


def _docx(data: bytes) -> tuple[str, int | None]:
    return _bounded(_blocks(docx.Document(io.BytesIO(data))), "\n\n"), None


def _blocks(document: WordDocument) -> Iterator[str]:
    """Return paragraphs and tables in their order; headings as Markdown has them."""
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            yield _table(tuple(cell.text for cell in row.cells) for row in block.rows)
        elif block.text.strip():
            style = (block.style.name if block.style is not None else "") or ""
            level = style.removeprefix("Heading ")
            is_heading = style.startswith("Heading ") and level.isdigit()
            yield f"{'#' * int(level)} {block.text}" if is_heading else block.text


def _xlsx(data: bytes) -> tuple[str, int | None]:
    book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    return _bounded(_sheets(book), "\n"), len(book.worksheets)


def _sheets(book: openpyxl.Workbook) -> Iterator[str]:
    """Yield each sheet's name, then its rows without the empty ones."""
    for sheet in book.worksheets:
        yield f"# {sheet.title}"
        for row in sheet.iter_rows(values_only=True):
            if any(value is not None for value in row):
                yield _table([tuple("" if value is None else str(value) for value in row)])
        yield ""


def _html(data: bytes) -> tuple[str, int | None]:
    root = html.document_fromstring(data)
    for element in root.xpath(_SILENT):
        element.drop_tree() if isinstance(element, html.HtmlElement) else element.getparent().remove(element)
    return _bounded(_words(root), ""), None


def _words(root: html.HtmlElement) -> Iterator[str]:
    """Return the pieces of a page's text, with the ends of lines that its elements make."""
    for event, element in etree.iterwalk(root, events=("start", "end")):
        if event == "start":
            yield ("\n" if element.tag in _LINES else "") + _spaced(element.text)
        else:
            end = "\n" if element.tag in _LINES else "\t" if element.tag in ("td", "th") else ""
            yield end + _spaced(element.tail)


def _spaced(text: str | None) -> str:
    """Return text as a browser shows its spaces."""
    if not text:
        return ""
    middle = " ".join(text.split())
    return (" " if text[0].isspace() else "") + middle + (" " if middle and text[-1].isspace() else "")


def _csv(data: bytes) -> tuple[str, int | None]:
    for encoding in ("utf-8-sig", "cp1252", "latin-1"):
        try:
            return _bounded([data.decode(encoding)], ""), None
        except UnicodeDecodeError:
            continue
    raise AssertionError("latin-1 decodes everything")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Return rows as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue().rstrip("\n")


_READERS: dict[str, Callable[[bytes], tuple[str, int | None]]] = {
    "pdf": _pdf,
    "docx": _docx,
    "xlsx": _xlsx,
    "html": _html,
    "csv": _csv,
}
