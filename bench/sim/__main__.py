"""The papers' tables in virtual time.

python -m bench.sim TABLE [options]
python -m bench.sim TABLE --help
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench.sim import caraserve, symphony

TABLES: dict[str, Callable[[Sequence[str]], None]] = {
    "caraserve": caraserve.main,
    "symphony": symphony.main,
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TABLES:
        print(__doc__)
        print("tables:", ", ".join(TABLES))
        raise SystemExit(name not in ("", "-h", "--help"))
    TABLES[name](sys.argv[2:])


if __name__ == "__main__":
    main()
