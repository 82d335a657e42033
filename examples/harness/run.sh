#!/usr/bin/env bash
# Runs one real client as the agent of a session: --agent-command "exec bash examples/harness/run.sh CLIENT".
# CLIENT is the name of a launcher beside this file: openai_python, anthropic_python, openai_agents, langchain_agent,
# mini_swe_agent, claude_code, codex or opencode. The clients lie where scripts/install_harness.sh put them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
harness=${SILVA_HARNESS_DIR:-$(cd "$here/../.." && pwd)/.cache/harness}
client=${1:?usage: run.sh CLIENT}
if [ ! -e "$harness/installed" ]; then
    echo "no clients in $harness; run: bash scripts/install_harness.sh" >&2
    exit 3
fi
harness=$(cd "$harness" && pwd)
export HARNESS_PYTHON=$harness/python/bin/python HARNESS_BIN=$harness/bin

# A home of its own for each session: no login, no history, no memory of earlier sessions, nothing in the home of the user.
io=$RELAX_SESSION_IO_DIR
mkdir -p "$io/home" "$io/tmp" "$io/work"
export HOME=$io/home TMPDIR=$io/tmp XDG_CONFIG_HOME=$io/home/.config XDG_DATA_HOME=$io/home/.local/share
export XDG_CACHE_HOME=$io/home/.cache XDG_STATE_HOME=$io/home/.local/state
# A trainer may hold a request for as long as an update of the model takes.
export HARNESS_TIMEOUT_S=${HARNESS_TIMEOUT_S:-9999}

cd "$io/work"
"$HARNESS_PYTHON" -I "$here/task.py" prompt > "$io/prompt.txt"
if [ -f "$here/$client.sh" ]; then
    bash "$here/$client.sh" "$io/prompt.txt" "$io/answer.txt"
elif [ -f "$here/$client.py" ]; then
    "$HARNESS_PYTHON" "$here/$client.py" "$io/prompt.txt" "$io/answer.txt"
else
    echo "no launcher $client.sh or $client.py in $here" >&2
    exit 3
fi
"$HARNESS_PYTHON" -I "$here/task.py" reward "$io/answer.txt"
