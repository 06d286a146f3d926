#!/usr/bin/env bash
# Puts the JSON Schema Test Suite into .venv, for tests/fuzz. It comes out of the source archive of jsonschema, at the
# version and hash that requirements/dev.txt locks. pip asks an archive's build backend for metadata before it keeps the
# archive, so that backend comes from a lock too; nothing of either is installed. Does nothing where the suite is there.
set -euo pipefail
cd "$(dirname "$0")/.."

suite=.venv/share/schema-suite
lock=$(grep -A 3 '^jsonschema==' requirements/dev.txt | sed -n '1,/[^\\]$/p')
if [ -e "$suite/lock" ] && [ "$(cat "$suite/lock")" = "$lock" ]; then exit 0; fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
printf '%s\n' "$lock" >"$folder/archive.txt"
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install --no-deps --require-hashes --only-binary :all: --target "$folder/backend" \
    -r requirements/schema-suite.txt
PYTHONPATH="$folder/backend" "${pip[@]}" download --no-deps --require-hashes --no-binary :all: --no-build-isolation \
    -r "$folder/archive.txt" -d "$folder"
mkdir "$folder/whole"
tar -xzf "$folder"/jsonschema-*.tar.gz -C "$folder/whole" --strip-components=1
rm -rf "$suite"
mkdir -p "$suite"
cp -r "$folder"/whole/json/{LICENSE,tests,remotes} "$suite/"
printf '%s\n' "$lock" >"$suite/lock" # last: an interrupted copy is made again
