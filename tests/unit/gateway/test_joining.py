"""How scripts and styles of a page are joined."""

from __future__ import annotations

import pytest

from gateway.doors.pages.joining import CannotJoinError, join, version_of

PAGE = """<head>
  <link rel="icon" href="static/icon.svg">
  <link rel="stylesheet" href="static/css/one.css">
  <link rel="stylesheet" href="static/css/two.css">
  <script type="module" src="static/js/main.js"></script>
</head>
"""
TEXTS = {
    "index.html": PAGE,
    "css/one.css": "a {}",
    "css/two.css": "b {}",
    "js/main.js": "import { b as c } from './deep/b.js';\nimport lib from '../vendor/lib.js';\nimport('./later.js').then(c);\nlib();\n",
    "js/deep/b.js": "import * as a from '../a.js';\nexport const b = () => import('../later.js');\nexport class Bee { b = a; }\n",
    "js/a.js": "/** Not `import('./x.js')`. */\nexport async function one() {}\n",
    "js/later.js": "import { one } from './a.js';\nimport { more } from './more.js';\nexport const late = one + more;\n",
    "js/more.js": "export const more = 1;\n",
}


def test_a_page_loads_one_style_sheet_and_one_script_by_a_path_that_names_their_version() -> None:
    joined = join(TEXTS, "abc")
    assert joined.pages["index.html"].split() == [
        *("<head>", "<link", 'rel="icon"', 'href="static/v-abc/icon.svg">'),
        *("<link", 'rel="stylesheet"', 'href="static/v-abc/css/page-index.css">'),
        *("<script", 'type="module"', 'src="static/v-abc/js/main.js"></script>', "</head>"),
    ]
    assert joined.files["css/page-index.css"].index("a {}") < joined.files["css/page-index.css"].index("b {}")
    assert joined.files.keys() == {"css/page-index.css", "js/main.js", "js/later.js"}


def test_modules_stand_behind_what_they_need_and_libraries_before_all() -> None:
    main = join(TEXTS, "abc").files["js/main.js"]
    parts = [
        "import lib from '../vendor/lib.js';",
        "// js/a.js",
        "return { one };",
        "const a = modules['js/a.js'];",
        "const b = () => import('./later.js');",
        "return { b, Bee };",
        "const { b: c } = modules['js/deep/b.js'];",
    ]
    places = [main.index(part) for part in parts]
    assert places == sorted(places)


def test_what_is_loaded_later_does_not_bring_what_the_page_has() -> None:
    later = join(TEXTS, "abc").files["js/later.js"]
    assert "// js/more.js" in later and "// js/a.js" not in later
    assert later.endswith("export const { late } = modules['js/later.js'];\n")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"js/more.js": "export default 1;\n"}, "export default 1"),
        ({"js/more.js": "import {\n  a,\n} from 'elsewhere';\n"}, "import {"),
        ({"js/more.js": "import { b } from './nowhere.js';\n"}, "nowhere.js, which is not there"),
        ({"js/a.js": "import { b } from './deep/b.js';\nexport const one = 1;\n"}, "imports itself"),
    ],
)
def test_what_cannot_be_joined_is_said(changed: dict[str, str], said: str) -> None:
    with pytest.raises(CannotJoinError, match=said):
        join(TEXTS | changed, "abc")


def test_the_version_changes_with_a_file_or_its_name() -> None:
    versions = {version_of(files) for files in ({"a": b"b"}, {"a": b"c"}, {"b": b"b"}, {"a": b"b", "b": b""})}
    assert len(versions) == 4
