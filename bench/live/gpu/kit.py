"""Packs what a machine with a GPU lacks that reaches no package registry: this checkout, vLLM and the packages that it needs.

    python -m bench.live.gpu.kit FOLDER        # make gpu-kit KIT=FOLDER

For a machine with Python 3.12, torch 2.11 or later for CUDA 13, transformers, triton and numba. vLLM is trimmed to what a dense model in bfloat16
with LoRA needs. Writes `part-00` and so on, of at most 60 MB each, and prints what to do over there. Takes some minutes and 4 GB of disk.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.live.shared.report import ROOT, options

VLLM = "0.32.0"
NEEDED = Path(__file__).with_name("kit.txt")
PART_BYTES = 60_000_000
GLIBC_MINORS = range(5, 40)
# Kernels of vLLM's for other kinds of models and devices: half of its wheel.
LEFT_OUT = (
    "vllm-rs",
    "third_party/deep_gemm",
    "third_party/fmha_sm100",
    "vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "_qutlass_C.abi3.so",
    "_flashmla*_C.abi3.so",
    "_flashkda_C.abi3.so",
    "_deepselect_C.abi3.so",
)
NEXT_STEPS = """
Bring the parts over into a folder of their own, say /tmp/kit, and there:

    cat /tmp/kit/part-* | xz -dc | tar -x -C /tmp
    cd /tmp/overture-kit/overture
    export PYTHONPATH=/tmp/overture-kit/site:/tmp/overture-kit/overture VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
    python3 -m pytest -q -p no:cacheprovider -m gpu tests/gpu
    python3 -m bench.live.gpu --minutes 20

Without xz: python3 -c "import glob, io, lzma, tarfile; data = b''.join(open(part, 'rb').read() for part in sorted(glob.glob('/tmp/kit/part-*')));
tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))).extractall('/tmp')"
"""


def download(folder: Path) -> None:
    """Fetch vLLM's wheel and the others by pip. Raises CalledProcessError."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "any"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation=cp", "--python-version=3.12", "--abi=cp312", "--abi=abi3", "--abi=none"]
    command += [part for name in platforms for part in ("--platform", name)]
    subprocess.run([*command, "-d", str(folder), f"vllm=={VLLM}", "-r", str(NEEDED)], check=True)


def unpack(wheels: Path, site: Path) -> None:
    """Unpack all wheels into one folder, and remove unneeded files of vLLM."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        wheel.unlink()
    for pattern in LEFT_OUT:
        for path in (site / "vllm").glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def checkout(folder: Path) -> None:
    """Copy the files of this checkout that git knows. Raises CalledProcessError."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def pack(source: Path, folder: Path, part_bytes: int = PART_BYTES) -> list[Path]:
    """Write a folder as a compressed archive in parts; return them. Raises CalledProcessError."""
    command = 'set -o pipefail; tar -C "$1" -c "$2" | xz -T0 -4 -c | split -b "$3" -d - "$4/part-"'
    words = (str(source.parent), source.name, str(part_bytes), str(folder))
    subprocess.run(["bash", "-c", command, "pack", *words], check=True)
    return sorted(folder.glob("part-*"))


def main() -> None:
    """Make the kit that the command line names."""
    parser = options(__doc__)
    parser.add_argument("folder", type=Path, help="for the parts; made if it is missing")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="overture-kit-") as scratch:
        kit = Path(scratch) / "overture-kit"
        (kit / "site").mkdir(parents=True)
        download(Path(scratch))
        unpack(Path(scratch), kit / "site")
        checkout(kit / "overture")
        parts = pack(kit, args.folder)
    for path in parts:
        print(f"{path}  {path.stat().st_size / 1e6:.0f} MB")
    print(NEXT_STEPS)


if __name__ == "__main__":
    main()
