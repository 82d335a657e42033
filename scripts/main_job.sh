#!/usr/bin/env bash
# The main job: makes the start model, then trains it inside real agent processes. Arguments go to `silva train`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
python=${SILVA_VENV:-.venv}/bin/python
start=runs/shopkeeper/start
if [ ! -e "$start/train.jsonl" ]; then
    "$python" examples/shopkeeper/make_start.py --out "$start"
fi
"$(dirname "$python")/silva" train --config examples/shopkeeper/run.toml "$@"
