"""Build both distributions as wheels: python requirements/wheels.py [FOLDER]. Without FOLDER they go to dist/.

It builds from a copy, so that what an earlier build left behind gets into no wheel and nothing is written beside the sources. setuptools
must be installed; nothing is downloaded.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The server's project needs the client's folder for its version; the client's is built from that folder alone.
SOURCES = (
    *(
        "gateway",
        "engine_bridge",
        "kvtiers",
        "overture_client",
        "static",
        "demo/model",
        "demo/adapters",
        "docs",
        "requirements",
    ),
    *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
)
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "pictures", "plots", "decisions")
PROJECTS = (".", "overture_client")


def build(target: Path) -> list[Path]:
    """Build both wheels into `target`, made if it is missing, and return them: the server's, the client's.

    Raises subprocess.CalledProcessError, whose `stderr` says why, where one cannot be built.
    """
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for source in SOURCES:
            (copy / source).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, copy / source, ignore=IGNORED)
            else:
                shutil.copy2(ROOT / source, copy / source)
        return [_wheel(copy / project, target.resolve()) for project in PROJECTS]


def _wheel(project: Path, target: Path) -> Path:
    """Build the wheel of one project by its own backend, as pip and others call it (PEP 517)."""
    code = (
        "import sys; from setuptools import build_meta; print(); print(build_meta.build_wheel(sys.argv[1]))"
    )
    target.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=project, check=True, capture_output=True, text=True
    )
    return target / done.stdout.splitlines()[-1]


if __name__ == "__main__":
    for wheel in build(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "dist"):
        print(wheel)
