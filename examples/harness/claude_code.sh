#!/usr/bin/env bash
# Claude Code, printing mode, on the Messages API. Usage: claude_code.sh PROMPT ANSWER
set -euo pipefail
export CLAUDE_CONFIG_DIR=$HOME/claude
export ANTHROPIC_BASE_URL=$RELAX_BASE_URL ANTHROPIC_AUTH_TOKEN=$RELAX_SESSION_ID
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1 DISABLE_TELEMETRY=1 DISABLE_ERROR_REPORTING=1
export CLAUDE_CODE_ATTRIBUTION_HEADER=0         # else the system prompt begins with a changing line
export CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1 DISABLE_PROMPT_CACHING=1
export DISABLE_COMPACT=1 DISABLE_AUTO_COMPACT=1 # a compacted history is a new root
export CLAUDE_CODE_DISABLE_BACKGROUND_TASKS=1
wait_ms=$((HARNESS_TIMEOUT_S * 1000))
export API_TIMEOUT_MS=$wait_ms CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS=$wait_ms
export CLAUDE_STREAM_IDLE_TIMEOUT_MS=$wait_ms CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS=$wait_ms
export IS_SANDBOX=1                             # lets root skip the permission questions
"$HARNESS_BIN/claude" --print --model policy --output-format text \
    --dangerously-skip-permissions --strict-mcp-config --no-session-persistence --setting-sources "" \
    --settings '{"attribution": {"commit": "", "pr": ""}}' --disable-slash-commands --tools Bash < "$1" > "$2"
