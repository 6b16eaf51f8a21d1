"""What the page makes of texts that nobody would write: each block is shown, at worst as plain text, and in bounded work."""

from __future__ import annotations

import json

import pytest

SHOW = """
const { AnswerView, loadMarkdown } = await import('/js/answer.js');
await loadMarkdown();
const view = new AnswerView();
document.body.replaceChildren(view.element);
const began = performance.now();
"""
# A page that is stuck takes minutes; this is room for a busy machine, no measurement.
STUCK_MS = 60_000

NASTY = {
    "quotes": "> " * 3000 + "x",
    "bullets": "- " * 3000 + "x",
    "numbers": "1. " * 3000 + "x",
    "quotes that grow": "\n".join("> " * depth + "x" for depth in range(1, 200)),
    "lists that grow": "\n".join("  " * depth + "- x" for depth in range(120)),
    "emphasis": "**a " * 5000,
    "nested emphasis": "*a **b " * 200 + "x" + "** *" * 200,
    "stars": "*" * 50_000,
    "brackets": "[" * 40_000,
    "images": "![" * 20_000,
    "links": "[a](" * 10_000,
    "nested links": "[" * 2000 + "](x)" * 2000,
    "dollars": "$a " * 15_000,
    "parentheses of TeX": "\\(" * 20_000,
    "braces of TeX": "$" + "{" * 4000 + "}" * 4000 + "$",
    "many formulas": " ".join(f"$x_{{{number}}}$" for number in range(3000)),
    "a displayed formula without an end": "$$" + "a" * 45_000,
    "a line of a megabyte": "word " * 200_000,
    "a word of a megabyte": "a" * 1_000_000,
    "code of half a megabyte": "```python\n" + "x = 1\n" * 80_000 + "```",
    "a fence without an end": "````python\n" + "print(1)\n" * 3000,
    "fences that do not match": "```\n~~~\n````\n~~~~\n" * 500,
    "many short paragraphs": "Some words.\n\n" * 6000,
    "a table of thousands of columns": "|a" * 4000 + "|\n" + "|-" * 4000 + "|\n" + "|b|\n" * 300,
    "a table of thousands of rows": "|a|b|c|\n|-|-|-|\n" + "|1|\n" * 9000,
    "tags": "<div><b>" * 5000,
    "tags in a line": "<a " * 15_000,
    "tildes": "~a " * 15_000,
    "backticks": " a ".join("`" * number for number in range(1, 300)),
    "addresses": "a@b." * 10_000,
    "definitions": "[a]: b\n" * 7000,
}


def shown(page, text: str, *, step: int = 0) -> dict:
    """What the page shows of an answer; step: it comes in pieces of so many characters."""
    script = """([text, step]) => { const at = step || text.length;
        for (let end = at; end < text.length; end += at) view.show(text.slice(0, end), false);
        view.show(text, true);
        return { text: view.element.textContent, ms: performance.now() - began, num: view.element.querySelectorAll('*').length,
          first: view.element.querySelector('h3')?.textContent, last: view.element.querySelector('.block:last-child > :last-child').textContent,
          plain: view.element.querySelectorAll('.plain').length }; }"""
    return page.evaluate(f"async (given) => {{ {SHOW} return ({script})(given); }}", [text, step])


@pytest.mark.parametrize("name", NASTY)
def test_no_text_breaks_an_answer(bare_page, name: str) -> None:
    """What stands before and behind it is rendered, whole or as it comes."""
    for step in (0, 1 + len(NASTY[name]) // 8):
        text = f"# First\n\n{NASTY[name]}"
        if name not in ("a fence without an end", "fences that do not match"):
            text += "\n\nThe **last** words."
        result = shown(bare_page, text, step=step)
        assert result["first"] == "First"
        assert "The last words." in result["last"] or not text.endswith("words.")
        assert result["ms"] < STUCK_MS
        assert result["num"] < 120_000


@pytest.mark.parametrize(
    "text",
    [
        "a\0b",
        "\ud800 alone",
        "a \udc00\ud800 b",
        "\u202eabc\u202c",
        "\u05e9\u05dc\u05d5\u05dd abc",
        "\ufeff\u200b",
    ],
)
def test_odd_characters_are_shown(bare_page, text: str) -> None:
    result = bare_page.evaluate(
        f"async () => {{ {SHOW} view.show({json.dumps(text)} + ' **end**', true); return view.element.querySelector('strong').textContent; }}"
    )
    assert result == "end"


def test_a_block_that_is_nested_too_deeply_is_plain_text_and_the_others_are_not(bare_page) -> None:
    deep = "> " * 3000 + "x"
    result = shown(bare_page, f"# First\n\n{deep}\n\n- one\n- two")
    assert result["plain"] == 1
    assert deep in result["text"]
    assert result["last"].split() == ["one", "two"]
    assert shown(bare_page, "> " * 10 + "x")["plain"] == 0


def test_a_long_file_in_an_answer_is_one_block_of_code(bare_page) -> None:
    code = "x = [1, 2]\n\n# *no* heading\n" * 4000
    for step in (0, 30_000):
        result = bare_page.evaluate(
            f"async ([text, step]) => {{ {SHOW} for (let end = step || text.length; end < text.length; end += step)"
            " view.show(text.slice(0, end), false); view.show(text, true);"
            " return [...view.element.querySelectorAll('pre')].map((pre) => pre.textContent); }",
            [f"Here:\n\n```python\n{code}```\n\nThat **is** it.", step],
        )
        assert result == [code]


def test_an_error_in_rendering_is_one_blocks(bare_page) -> None:
    """Whatever its cause is."""
    result = bare_page.evaluate(
        f"""async () => {{ {SHOW}
        const sanitizer = (await import('/vendor/dompurify/purify.es.js')).default;
        const sanitize = sanitizer.sanitize;
        sanitizer.sanitize = (html, ...rest) => {{ if (html.includes('bad')) throw new Error('x'); return sanitize(html, ...rest); }};
        try {{ view.show('# One\\n\\nbad **block**\\n\\nThe **end**.', true); }} finally {{ sanitizer.sanitize = sanitize; }}
        return [view.element.textContent.split(/\\n/).join(''), view.element.querySelectorAll('strong').length]; }}"""
    )
    assert result == ["Onebad **block**The end.", 1]
