#!/usr/bin/env bash
# Bring Chromium for the browser tests. Never fails: without a browser those tests are skipped, and this says what to do.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
how="apt-get install chromium"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing Debian's chromium for the browser tests (about 100 MB to fetch)"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; then
        exit 0
    fi
    echo "chromium could not be installed, see above; later: $how" >&2
else
    echo "No Chromium here: the browser tests will be skipped. To run them: sudo $how" >&2
fi
