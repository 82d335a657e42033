#!/usr/bin/env bash
# opencode, `opencode run`, on Chat Completions. Usage: opencode.sh PROMPT ANSWER
set -euo pipefail
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1
export OPENCODE_DISABLE_DEFAULT_PLUGINS=1 OPENCODE_DISABLE_SHARE=1 OPENCODE_DISABLE_CLAUDE_CODE=1
export OPENCODE_DISABLE_AUTOCOMPACT=1 OPENCODE_DISABLE_PRUNE=1
# opencode installs a package for plugins beside its configuration, unless it finds there that it did so before.
mkdir -p "$XDG_CONFIG_HOME/opencode/node_modules"
echo '{"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}' > "$XDG_CONFIG_HOME/opencode/package-lock.json"
OPENCODE_CONFIG_CONTENT=$("$HARNESS_PYTHON" -I - <<'END'
import json, os

timeout_ms = int(os.environ["HARNESS_TIMEOUT_S"]) * 1000
provider = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {
        "baseURL": os.environ["RELAX_BASE_URL"] + "/v1",
        "apiKey": os.environ["RELAX_SESSION_ID"],
        "timeout": timeout_ms,
        "headerTimeout": timeout_ms,
        "chunkTimeout": timeout_ms,
    },
    "models": {"policy": {"tool_call": True, "limit": {"context": 1000000, "output": 32000}}},
}
print(json.dumps({
    "provider": {"silva": provider},
    "enabled_providers": ["silva"],
    "model": "silva/policy",
    "small_model": "silva/policy",
    "permission": "allow",
    "share": "disabled",
    "autoupdate": False,
    "snapshot": False,
}))
END
)
export OPENCODE_CONFIG_CONTENT
# Without a title opencode asks the model for one, which is a second root.
"$HARNESS_BIN/opencode" run --pure --title task --model silva/policy < "$1" > "$2"
