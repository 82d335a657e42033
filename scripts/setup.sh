#!/usr/bin/env bash
# Makes .venv in the repository root (once) and installs Silva with everything that its main job and its tests need.
# SILVA_VENV names another place for it; an existing one is brought up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${SILVA_VENV:-.venv}
python=${PYTHON:-python3}
if [ ! -x "$venv/bin/python" ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Silva needs Python 3.11 or newer; set PYTHON" >&2; exit 1; }
    "$python" -m venv "$venv"
fi
stamp=$venv/.silva-installed
if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && [ ! constraints.txt -nt "$stamp" ]; then
    exit 0
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --upgrade "pip>=24"
# torch first: on a machine without a GPU it must be the CPU build. Where pip would take a CUDA build by default, name an
# index that holds CPU builds in SILVA_TORCH_INDEX.
torch=(-c constraints.txt torch==2.13.0 ${SILVA_TORCH_INDEX:+--index-url "$SILVA_TORCH_INDEX"})
if [ ! -e /dev/nvidiactl ] && "${pip[@]}" --dry-run --report - "${torch[@]}" | grep -qi '"name": "nvidia'; then
    echo "pip would install a CUDA build of torch (several GB) on this machine without a GPU." >&2
    echo "Set SILVA_TORCH_INDEX to a package index that holds CPU builds, then run this again." >&2
    exit 1
fi
"${pip[@]}" "${torch[@]}"
"${pip[@]}" -c constraints.txt -e ".[train,agents,parquet,search,dev]"
touch "$stamp"
