#!/usr/bin/env bash
# Bring Chromium for the browser tests. Never fails: without a browser those tests are skipped, and this says what to do.
# Its build without a window does the same for a page as the whole browser and takes half of the processor time for it.
set -euo pipefail

command -v chromium-headless-shell >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing Debian's chromium-headless-shell for the browser tests (about 70 MB to fetch)"
    export DEBIAN_FRONTEND=noninteractive
    for package in chromium-headless-shell chromium; do
        if apt-get update -qq && apt-get install -y -qq --no-install-recommends "$package" fonts-dejavu-core >/dev/null; then
            exit 0
        fi
    done
fi
for name in chromium chromium-browser; do
    command -v "$name" >/dev/null && exit 0
done
echo "No Chromium here: the browser tests will be skipped. To run them: sudo apt-get install chromium-headless-shell" >&2
