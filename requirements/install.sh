#!/usr/bin/env bash
# Make .venv and install the runtime list in it. Called by the Makefile: install.sh cpu|cuda STAMP
# Safe to run again after a failure or an interrupt: it goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."

device=$1 stamp=$2
venv=.venv
log=$venv/pip.log
torch=2.13.0
torchvision=0.28.0
torch_index=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "$*"; }
die() { printf '\nSet-up failed: %s\n' "$*" >&2; exit 1; }

# What pip says goes to the log; its errors are shown.
# --no-compile: only what is imported gets compiled, at the first start; that saves half a minute here.
pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile --progress-bar off "$@" >"$log" 2>&1 ||
        { grep -E '^ *(ERROR|error)' "$log" | tail -n 5 >&2; return 1; }
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11, 3.12 or 3.13 is needed, and python3 is $(python3 --version 2>&1 || true).
Install one of them (Debian: apt-get install python3 python3-venv) or name it: make serve PYTHON=/path/to/python3.12"
}

make_venv() {
    local python
    python=$(find_python)
    # A venv for the other device has another engine in the same place, so it is made anew.
    if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.device" 2>/dev/null)" = "$device" ]; then
        return
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python has no venv module. Debian and Ubuntu: apt-get install python3-venv"
    say "[1/4] creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || die "$python -m venv failed, see above."
    echo "$device" >"$venv/.device"
}

install_torch() {
    local log=$venv/pip-torch.log
    # A local wheel (pip's find-links) has this very version; elsewhere PyTorch's own index has it. Whose file that is differs, so it has no
    # hash in the list: the index is asked over TLS.
    pip_install --no-deps --only-binary :all: "torch==$torch+cpu" 2>/dev/null ||
        pip_install --no-deps --only-binary :all: --index-url "$torch_index" "torch==$torch+cpu" ||
        die "torch $torch+cpu cannot be installed. Is $torch_index reachable from here? pip's whole output is in $log."
}

# Models of families that read pictures need it, for text, too. PyTorch's own index has the build for its CPU torch. Where that cannot be had, the usual
# build serves as well once its operators are declared, which reading pictures does not use. Without either, other models serve.
install_torchvision() {
    local log=$venv/pip-torchvision.log site
    pip_install --no-deps --only-binary :all: --retries 1 --index-url "$torch_index" "torchvision==$torchvision" 2>/dev/null ||
        pip_install --no-deps --only-binary :all: "torchvision==$torchvision" ||
        { say "      without torchvision $torchvision: models that read pictures cannot be served ($log says why)"; return; }
    "$venv/bin/python" -c 'import torchvision' 2>/dev/null && return
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp requirements/torchvision_operators.py "$site/_torchvision_operators.py"
    echo 'import _torchvision_operators' >"$site/_torchvision_operators.pth"
}

install_cpu() {
    [ "$(uname -s)" = Linux ] || die "vLLM's CPU build is for Linux (x86_64 or aarch64). Use a Linux machine, WSL or a container."
    say "[2/4] installing torch $torch, CPU build (200 MB to fetch, a minute or so)"
    say "[3/4] installing vLLM for CPU and $(grep -c == requirements/cpu.txt) packages beside it (400 MB to fetch, a minute or two)"
    # Side by side: unpacking keeps a core busy, and neither needs the other while it is installed.
    local failed=
    { install_torch && install_torchvision; } &
    pip_install --no-deps --only-binary :all: --require-hashes -r requirements/cpu.txt || failed=yes
    wait "$!" || exit 1
    [ -z "$failed" ] ||
        die "a package of requirements/cpu.txt cannot be installed; pip's whole output is in $log. Run the same make again to go on."
}

install_cuda() {
    say "[2/4] the CUDA build brings its own torch"
    say "[3/4] installing vLLM for CUDA (several GB to fetch, ten minutes or so)"
    pip_install -r requirements/cuda.txt ||
        die "a package of requirements/cuda.txt cannot be installed; pip's whole output is in $log. Run the same make again to go on."
}

make_venv
"install_$device"
say "[4/4] installing the overture command"
pip_install --no-deps --no-build-isolation --editable ./overture_client --editable . || die "this project cannot be installed. pip's whole output is in $log."
rm -f "$venv"/.runtime-*
touch "$stamp"
say "Set-up done in $SECONDS s."
