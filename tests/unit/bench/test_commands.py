"""What the packages of tables say of themselves."""

import sys
from types import ModuleType

import pytest

from bench.emulated import __main__ as emulated
from bench.sim import __main__ as sim


@pytest.mark.parametrize(("package", "tables"), [(emulated, emulated.COMMANDS), (sim, sim.TABLES)])
def test_the_package_says_what_tables_there_are(
    package: ModuleType,
    tables: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["a package", "--help"])
    with pytest.raises(SystemExit) as left:
        package.main()
    said = capsys.readouterr().out
    assert not left.value.code and all(name in said for name in tables)
    monkeypatch.setattr(sys, "argv", ["a package", "nothing"])
    with pytest.raises(SystemExit) as left:
        package.main()
    assert left.value.code
