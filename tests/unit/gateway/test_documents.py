"""Documents as text: each format, what is wrong with some, and the bounds of the process that reads them."""

import asyncio
import base64
import copy
import io
import zipfile
from collections.abc import Callable
from typing import Any

import docx
import msgspec
import openpyxl
import pypdf
import pytest
import uvloop
from pypdf.generic import DictionaryObject, NameObject, StreamObject

from gateway.documents import extraction
from gateway.documents.extraction import UnreadableError, extract
from gateway.documents.messages import Outcome
from gateway.documents.reader import OWN_CHARS, DocumentReader
from gateway.doors.api.document_reading import MOST_DOCUMENTS, read_documents
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


class Reader(DocumentReader):
    """Reads in this process what a helper process would, whose start takes half a second of a core."""

    def __init__(self) -> None:
        super().__init__(30, 512)

    async def _ask(self, data: bytes, media_type: str) -> bytes:
        await asyncio.sleep(0)
        try:
            return msgspec.json.encode(Outcome(extract(data, media_type)))
        except UnreadableError as error:
            return msgspec.json.encode(Outcome(fault=str(error)))


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
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop), (
        "which starts processes in its own way, on servers"
    )
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


async def test_the_text_of_a_calls_documents_is_bounded_however_often_it_names_one() -> None:
    """A file of a few kilobytes may have millions of characters, and stand in a body a thousand times."""
    reader, named = Reader(), {"type": "file", "file": {"file_data": PDF}}
    await read_documents(reader, asked(*[named] * 5), "ann", 5 * len("High water."))
    with pytest.raises(GatewayError, match="max_body_bytes") as caught:
        await read_documents(reader, asked(*[named] * 6), "ann", 5 * len("High water."))
    assert (caught.value.code, caught.value.param) == ("bad_request", "messages")


@pytest.mark.parametrize("media_type", ["text/html; charset=utf-8", " TEXT/HTML", "text/html"])
async def test_a_documents_type_counts_in_any_spelling(media_type: str) -> None:
    body = asked(block(base64.b64encode(HTML).decode(), media_type))
    await read_documents(Reader(), body, "ann", MAX_CHARS)
    assert "<p>" not in body["messages"][0]["content"][0]["source"]["data"]


async def test_a_document_that_comes_again_is_read_once_and_little_is_remembered_of_many_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.documents.reader.MAX_REMEMBERED_CHARS", 2 * OWN_CHARS + 100)
    reader = Reader()
    first = await reader.read(b"a", "text/plain", "ann")
    for data in (b"b", b"c"):
        await reader.read(data, "text/plain", "ann")
    assert await reader.read(b"a", "text/plain", "ann") is not first
    whole = await reader.read(pdf("High water."), "x" * 1_000_000 + "\0", "ann")
    assert await reader.read(pdf("High water."), "", "ann") is whole, (
        "what names no kind of text counts for nothing"
    )
    others = await reader.read(pdf("High water."), "", "bob")
    assert others is not whole, "nor is bob told that ann has sent it"
    reader.forget("ann")
    assert await reader.read(pdf("High water."), "", "bob") is others
    assert await reader.read(pdf("High water."), "", "ann") is not whole
    reader.forget("ann")
    kept = [await reader.read(data, "text/plain", "ann") for data in (b"b", b"c")]
    again = [await reader.read(data, "text/plain", "ann") for data in (b"b", b"c")]
    assert [each is before for each, before in zip(again, kept, strict=True)] == [True, True]


async def test_many_documents_of_one_person_do_not_hold_up_others() -> None:
    reader, done = Reader(), []

    async def read(whose: str, number: int = 0) -> None:
        await reader.read(b"High water %d." % number, "text/plain", whose)
        done.append(whose)

    reading = [asyncio.create_task(read("ann", number)) for number in range(6)]
    await asyncio.sleep(0)  # all of them are in the queue
    await asyncio.gather(read("bob"), *reading)
    assert done.index("bob") <= 4 and len(done) == 7, "behind all of them it would be one of the last two"


async def test_the_route_returns_text_of_the_body(gateway: Gateway) -> None:
    reply = await gateway.call("POST", "/api/documents", data=sheets())
    assert (reply.status, reply.body["kind"], reply.body["num_pages"]) == (200, "xlsx", 2)
    reply = await gateway.call("POST", "/api/documents", data=pdf(""))
    error = reply.body["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "bad_request", "document")
    assert (await gateway.call("POST", "/api/documents", data=bytes(17 << 20))).status == 413


PDF = base64.b64encode(pdf("High water.")).decode()
MAX_CHARS = 1 << 20
AS_URL = f"data:application/pdf;base64,{PDF}"


def block(data: str, media_type: str = "application/pdf") -> dict[str, Any]:
    """A document in the form of Anthropic's API."""
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "document", "title": "Tides", "source": source}


def asked(*parts: Any, field: str = "messages") -> dict[str, Any]:
    return {field: [{"role": "user", "content": [copy.deepcopy(part) for part in parts]}]}


async def test_documents_in_calls_become_text_in_the_form_of_each_api() -> None:
    reader = Reader()
    file = {"type": "file", "file": {"filename": "tides.pdf", "file_data": AS_URL}}
    chat = asked(file)
    await read_documents(reader, chat, "ann", MAX_CHARS)
    assert chat == asked({"type": "text", "text": "tides.pdf\nHigh water."})
    result = {
        "type": "function_call_output",
        "call_id": "x",
        "output": [{"type": "input_file", "file_data": PDF}],
    }
    respond: Any = {"input": [result, {"role": "user", "content": "Well?"}]}
    await read_documents(reader, respond, "ann", MAX_CHARS)
    assert respond["input"][0]["output"] == [{"type": "input_text", "text": "High water."}]
    plain = block(base64.b64encode("ä".encode()).decode(), "text/plain")
    message = asked({"type": "tool_result", "tool_use_id": "x", "content": [block(PDF)]}, plain)
    await read_documents(reader, message, "ann", MAX_CHARS)
    read = [{"type": "text", "media_type": "text/plain", "data": text} for text in ("High water.", "ä")]
    results, other = message["messages"][0]["content"]
    assert [results["content"][0]["source"], other["source"]] == read and other["title"] == "Tides"


async def test_what_is_no_document_stays_and_what_cannot_be_read_names_its_field() -> None:
    reader = Reader()
    for body in (
        {"prompt": "Hello"},
        asked({"type": "file", "file": {"file_id": "f"}}),
        asked({"type": "input_file", "file_url": "https://a.example/b.pdf"}, field="input"),
        asked({"type": "document", "source": {"type": "text", "data": "x"}}, {"type": "file", "file": None}),
    ):
        before = copy.deepcopy(body)
        await read_documents(reader, body, "ann", MAX_CHARS)
        assert body == before
    scanned = base64.b64encode(pdf("")).decode()
    for part, said in ((block(scanned), "scanned"), (block("A"), "base64"), (block(""), "no document")):
        with pytest.raises(GatewayError, match=said) as caught:
            await read_documents(reader, asked(part), "ann", MAX_CHARS)
        assert (caught.value.code, caught.value.param) == ("bad_request", "messages")
    many = [block(base64.b64encode(str(number).encode()).decode()) for number in range(MOST_DOCUMENTS + 1)]
    with pytest.raises(GatewayError, match="at most"):
        await read_documents(reader, asked(*many), "ann", MAX_CHARS)
