#!/usr/bin/env bash
# Starts the search service, trains against it, and stops it whatever happens. From the root of the repository:
#   bash examples/search_r1/run.sh examples/search_r1/single.toml [options of silva train]
#   bash examples/search_r1/run.sh examples/search_r1/team.toml   [options of silva train]
# SEARCH_CORPUS names another corpus, SILVA_COMMAND another command than `train` (rollout, check).
set -euo pipefail
config=${1:?the configuration: examples/search_r1/single.toml or examples/search_r1/team.toml}
shift
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
service= job=
stop() {
    for process in $job $service; do
        kill "$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
    done
    rm -rf "$scratch"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Should this script be killed outright, the service notices and ends by itself.
python3 "$here/search_service.py" --corpus "${SEARCH_CORPUS:-runs/search_r1/start/corpus.jsonl}" \
    --ready-file "$scratch/url" --stop-with-parent &
service=$!
until [ -e "$scratch/url" ]; do
    kill -0 "$service" 2>/dev/null || { echo "the search service did not start" >&2; exit 1; }
    sleep 0.1
done

# In the background and waited for, so that a signal to this script ends both.
silva "${SILVA_COMMAND:-train}" --config "$config" --agent-env "SEARCH_URL=$(cat "$scratch/url")" "$@" &
job=$!
wait "$job"
