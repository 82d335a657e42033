#!/usr/bin/env bash
# Installs the real agent clients that examples/harness launches, at exact versions, and prints these: the Python ones
# into a virtual environment of their own, the npm ones into a folder, their programs linked into one. All of it lies in
# .cache/harness (git-ignored, 2 GB); SILVA_HARNESS_DIR names another place. Takes a few minutes; running it again does
# nothing.
#
#   PYTHON=python3 scripts/install_harness.sh [--force]
set -euo pipefail
cd "$(dirname "$0")/.."
pins=$PWD/examples/harness
out=${SILVA_HARNESS_DIR:-.cache/harness}
python=${PYTHON:-python3}
wanted=$(cat "$pins/requirements.txt" "$pins/constraints.txt" "$pins/package.json" scripts/install_harness.sh | cksum)
if [ "${1:-}" = "--force" ]; then
    rm -rf "$out"
fi
mkdir -p "$out/bin"
out=$(cd "$out" && pwd)

# The program of an npm package stands in the package for this platform. Where a platform has several (with and without
# newer CPU instructions), the first that runs is taken.
link_program() {
    local name=$1 candidate
    shift
    for candidate in "$@"; do
        if [ -x "$candidate" ] && HOME="$out/home" "$candidate" --version > /dev/null 2>&1; then
            ln -sfn "$candidate" "$out/bin/$name"
            return
        fi
    done
    echo "no program of $name in $out/node runs on this machine" >&2
    exit 1
}

if [ "$(cat "$out/installed" 2> /dev/null || true)" != "$wanted" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python 3.11 or newer; set PYTHON" >&2; exit 1; }
    [ -x "$out/python/bin/python" ] || "$python" -m venv "$out/python"
    "$out/python/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: \
        -r "$pins/requirements.txt" -c "$pins/constraints.txt"
    mkdir -p "$out/node" "$out/home"
    cp "$pins/package.json" "$out/node/package.json"
    # Install scripts only copy or download programs; the packages for this platform hold them already.
    npm --prefix "$out/node" install --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel error
    modules=$out/node/node_modules
    link_program claude "$modules"/@anthropic-ai/claude-code-*/claude
    link_program codex "$modules"/@openai/codex-*/vendor/*/bin/codex
    link_program opencode "$modules"/opencode-*[^e]/bin/opencode "$modules"/opencode-*-baseline/bin/opencode
    echo "$wanted" > "$out/installed"
fi

echo "clients in $out:"
"$out/python/bin/python" -I - "$pins/requirements.txt" << 'END'
import sys
from importlib.metadata import version

for line in open(sys.argv[1]):
    name = line.partition("==")[0].strip()
    print(f"  {name} {version(name)}")
END
for name in claude codex opencode; do
    echo "  $name $(HOME="$out/home" "$out/bin/$name" --version 2> /dev/null | tail -1)"
done
