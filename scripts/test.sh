#!/usr/bin/env bash
# Passes the tests, with all the set-up they need. Arguments go to pytest: -m 'not slow' takes less than a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export PATH="$(cd "${SILVA_VENV:-.venv}/bin" && pwd):$PATH" VIRTUAL_ENV="$(cd "${SILVA_VENV:-.venv}" && pwd)"
bash scripts/install_test_oracles.sh
# Hundreds of processes start: each file is to be compiled once, whatever this shell says of bytecode.
unset PYTHONDONTWRITEBYTECODE
# Small models on few cores: threads that spin would only take time from each other.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0
# Many tests wait for processes: one worker more than cores, and idle ones take work from busy ones.
exec python -m pytest -n "${SILVA_TEST_WORKERS:-3}" --dist worksteal "$@"
