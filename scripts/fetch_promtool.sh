#!/usr/bin/env bash
# Puts Debian's promtool and prometheus into .venv/bin, for the tests of docker/prometheus and docker/grafana. The package
# is unpacked, not installed: no daemon starts. Does nothing where both are there already; says why where they cannot be
# had.
set -euo pipefail
cd "$(dirname "$0")/.."

is_there() { command -v "$1" >/dev/null || [ -x ".venv/bin/$1" ]; }
if is_there promtool && is_there prometheus; then exit 0; fi
if ! command -v apt-get >/dev/null; then
    echo "promtool: not on PATH, and this is no Debian to take it from; its tests are skipped" >&2
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
(
    cd "$folder"
    if [ "$(id -u)" = 0 ]; then apt-get update -qq; fi
    apt-get download -qq prometheus
    dpkg-deb -x prometheus_*.deb .
)
install -m 755 "$folder/usr/bin/promtool" "$folder/usr/bin/prometheus" .venv/bin/
