#!/usr/bin/env bash
# Codex, `codex exec`, on the Responses API. Usage: codex.sh PROMPT ANSWER
set -euo pipefail
export CODEX_HOME=$HOME/codex CODEX_SESSION_KEY=$RELAX_SESSION_ID
mkdir -p "$CODEX_HOME"
idle_ms=$((HARNESS_TIMEOUT_S * 1000))
cat > "$CODEX_HOME/config.toml" <<END
model = "policy"
model_provider = "silva"
model_context_window = 1000000
model_auto_compact_token_limit = 1000000
check_for_update_on_startup = false
web_search = "disabled"
sandbox_mode = "danger-full-access"
approval_policy = "never"

[model_providers.silva]
name = "Silva"
base_url = "$RELAX_BASE_URL/v1"
env_key = "CODEX_SESSION_KEY"
wire_api = "responses"
supports_websockets = false
stream_idle_timeout_ms = $idle_ms

[analytics]
enabled = false

[agents]
enabled = false

[features]
apps = false
plugins = false
remote_plugin = false
unbounded_connection_retries = false
END
"$HARNESS_BIN/codex" exec --skip-git-repo-check --ephemeral --color never --output-last-message "$2" - < "$1"
