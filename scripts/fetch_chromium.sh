#!/usr/bin/env bash
# Puts Debian's Chromium into .venv/chromium, for the tests of the web page. The packages are unpacked, not installed,
# so no root is needed where apt's lists are there. Does nothing where Chromium is there already; says why where it
# cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD/.venv/chromium
if command -v chromium >/dev/null || [ -x "$root/chromium" ]; then exit 0; fi
if ! command -v apt-get >/dev/null; then
    echo "chromium: not on PATH, and this is no Debian to take it from; its tests are skipped" >&2
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
(
    cd "$folder"
    if [ "$(id -u)" = 0 ]; then apt-get update -qq; fi
    # Chromium and what it needs that is not installed here.
    apt-get install --simulate -qq --no-install-recommends chromium fonts-dejavu-core |
        awk '$1 == "Inst" {print $2}' | xargs apt-get download -qq -o APT::Sandbox::User=root
    mkdir unpacked
    for package in *.deb; do dpkg-deb -x "$package" unpacked; done
)
mkdir -p "$root"
cp -a "$folder/unpacked/." "$root/"
# The fonts and libraries beside it take the place of the system's.
cat >"$root/fonts.conf" <<CONF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>$root/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>$root/font-cache</cachedir>
  <match target="pattern"><edit name="family" mode="append" binding="weak"><string>DejaVu Sans</string></edit></match>
  <alias><family>system-ui</family><prefer><family>DejaVu Sans</family></prefer></alias>
  <alias><family>ui-monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
  <alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
CONF
libraries=$(find "$root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
cat >"$root/chromium" <<RUN
#!/bin/sh
export LD_LIBRARY_PATH="$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}" FONTCONFIG_FILE="$root/fonts.conf"
exec "$root/usr/lib/chromium/chromium" "\$@"
RUN
chmod 755 "$root/chromium"
