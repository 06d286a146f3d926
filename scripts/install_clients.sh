#!/usr/bin/env bash
# Makes .venv-clients hold other projects' clients, exactly as locked. torch, which GuideLLM imports, is .venv's.
set -euo pipefail
cd "$(dirname "$0")/.."

key="$(cat requirements/clients.txt scripts/install_clients.sh | sha256sum | cut -c1-16)"
stamp=".venv-clients/.clients-$key"
[ -e "$stamp" ] && exit 0
echo "creating .venv-clients (about 200 packages)"
.venv/bin/python -m venv --clear .venv-clients
.venv-clients/bin/python -m pip install --disable-pip-version-check --no-input --quiet --no-deps --require-hashes \
    -r requirements/clients.txt
where='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$where" >"$(.venv-clients/bin/python -c "$where")/zz_torch.pth" # last on the path
touch "$stamp"
