"""Documents as text: each format, what is wrong with some, and the bounds of the process that reads them."""

import asyncio
import io
import zipfile
from collections.abc import Callable

import aiohttp
import docx
import openpyxl
import pypdf
import pytest
import uvloop
from pypdf.generic import DictionaryObject, NameObject, StreamObject

from gateway.documents import extraction
from gateway.documents.extraction import UnreadableError, extract
from gateway.documents.reader import DocumentReader
from gateway.errors import GatewayError

from .front import Gateway

HTML = b"""<!doctype html><html><head><title>Tides</title><style>p { color: red }</style></head><body><h1>At <b>sea</b></h1>
<script>alert(1)</script><p>High  water\n at six.</p><table><tr><td>a</td><td>b</td></tr></table></body></html>"""


def pdf(*pages: str, password: str = "") -> bytes:
    """A PDF with a line of text on each page; an empty line: none."""
    writer, file = pypdf.PdfWriter(), io.BytesIO()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(300, 300)
        fonts = DictionaryObject({NameObject("/F1"): font})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        stream = StreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode() if text else b"")
        page[NameObject("/Contents")] = writer._add_object(stream)  # the library has no public way
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(file)
    return file.getvalue()


def word() -> bytes:
    """A document with a heading, a paragraph and a table."""
    file, document = io.BytesIO(), docx.Document()
    document.add_heading("Tides", 2)
    document.add_paragraph("High water at six.")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "a", "b, c"
    document.save(file)
    return file.getvalue()


def sheets() -> bytes:
    """A workbook with two sheets."""
    file, book = io.BytesIO(), openpyxl.Workbook()
    book.active.title = "First"
    book.active.append(["port", "height"])
    book.active.append(["Lisbon", 3.5])
    book.create_sheet("Second").append([None, "x"])
    book.save(file)
    return file.getvalue()


def packed(**files: bytes) -> bytes:
    """A ZIP archive; `_` of a name stands for a slash."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name.replace("_", "/") + ".xml", data)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "media_type", "kind", "text", "num_pages"),
    [
        (pdf("High water.", "Low water."), "", "pdf", "High water.\n\nLow water.", 2),
        (word(), "", "docx", '## Tides\n\nHigh water at six.\n\na,"b, c"', None),
        (sheets(), "", "xlsx", "# First\nport,height\nLisbon,3.5\n\n# Second\n,x", 2),
        (HTML, "text/html", "html", "Tides\nAt sea\n\nHigh water at six.\n\na\tb", None),
        ("a;ü\r\nb;c".encode("cp1252"), "text/csv", "csv", "a;ü\nb;c", None),
        (b"a\x01\x7f;\x1bb\tc\x08\n", "text/csv", "csv", "a;b\tc", None),
    ],
)
def test_each_format_becomes_text(
    data: bytes, media_type: str, kind: str, text: str, num_pages: int | None
) -> None:
    found = extract(data, media_type)
    assert (found.kind, found.text, found.num_pages) == (kind, text, num_pages)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: pdf("Secret.", password="x"), "encrypted"),
        (lambda: pdf("", ""), "scanned pictures"),
        (lambda: b"\xd0\xcf\x11\xe0 and more", "older format"),
        (lambda: packed(mimetype=b"x"), "no document that can be read"),
        (lambda: packed(word_document=bytes(extraction.MAX_UNPACKED_BYTES + 1)), "more than 100 MiB"),
        (lambda: b"PK\3\4 cut", "damaged"),
        (lambda: b"\0\1\2", "PDF, DOCX, XLSX, HTML and CSV can"),
        (lambda: b" \n", "has no text"),
        (lambda: b"word " * (extraction.MAX_CHARS // 5 + 1), "4,000,000 characters"),
    ],
)
def test_what_cannot_be_read_is_said(make: Callable[[], bytes], said: str) -> None:
    with pytest.raises(UnreadableError, match=said):
        extract(make(), "text/plain")


async def test_a_document_is_read_in_a_process_with_bounds() -> None:
    reader = DocumentReader(30, 512)
    assert (await reader.read(pdf("High water."), "")).text == "High water."
    with pytest.raises(GatewayError, match="encrypted") as caught:
        await reader.read(pdf("Secret.", password="x"), "")
    assert (caught.value.code, caught.value.param) == ("bad_request", "document")
    with pytest.raises(GatewayError, match="damaged"):
        await reader.read(pdf("High water.")[:200], "")
    with pytest.raises(GatewayError, match="document_s"):
        await DocumentReader(0.01, 512).read(word(), "")
    bomb = packed(word_document=b"<a>" + b"<b/>" * 5_000_000 + b"</a>")
    with pytest.raises(GatewayError, match=r"damaged|document_mib|failed"):
        await DocumentReader(30, 64).read(bomb, "")


def test_a_document_is_read_on_the_event_loop_that_servers_have() -> None:
    found = uvloop.run(DocumentReader(30, 512).read(pdf("High water."), ""))
    assert found.text == "High water."


async def test_many_documents_of_one_person_do_not_hold_up_others() -> None:
    reader, done = DocumentReader(30, 512), []

    async def read(whose: str) -> None:
        await reader.read(b"High water.", "text/plain", whose)
        done.append(whose)

    reading = [asyncio.create_task(read("ann")) for _ in range(6)]
    await asyncio.sleep(0)  # all of them are in the queue
    await asyncio.gather(read("bob"), *reading)
    assert done.index("bob") <= 4 and len(done) == 7, "behind all of them it would be one of the last two"


async def test_the_route_returns_text_of_the_body(gateway: Gateway) -> None:
    async with aiohttp.ClientSession(gateway.server.url) as http:
        async with http.post("/api/documents", data=sheets()) as reply:
            found = await reply.json()
            assert (reply.status, found["kind"], found["num_pages"]) == (200, "xlsx", 2)
        async with http.post("/api/documents", data=pdf("")) as reply:
            error = (await reply.json())["error"]
            assert (reply.status, error["code"], error["param"]) == (400, "bad_request", "document")
        async with http.post("/api/documents", data=bytes(17 << 20)) as reply:
            assert reply.status == 413
