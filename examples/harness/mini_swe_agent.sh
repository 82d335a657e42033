#!/usr/bin/env bash
# mini-swe-agent: the `mini` command on LiteLLM's Chat Completions client. Usage: mini_swe_agent.sh PROMPT ANSWER
set -euo pipefail
export MSWEA_GLOBAL_CONFIG_DIR=$HOME/mini MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1
export MSWEA_COST_TRACKING=ignore_errors      # the model has no price
export MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=1 # the SDK below retries, and says so
export LITELLM_LOCAL_MODEL_COST_MAP=True      # else LiteLLM fetches a price list
"$HARNESS_PYTHON" -m minisweagent.run.mini --yolo --exit-immediately --cost-limit 0 --task "$(cat "$1")" \
    --model openai/policy --output "$HOME/trajectory.json" \
    -c mini.yaml \
    -c model.model_kwargs.api_base="$RELAX_BASE_URL/v1" \
    -c model.model_kwargs.api_key="$RELAX_SESSION_ID" \
    -c model.model_kwargs.timeout="$HARNESS_TIMEOUT_S" \
    -c model.model_kwargs.max_retries=2
"$HARNESS_PYTHON" -I -c '
import json, sys
info = json.load(open(sys.argv[1]))["info"]
open(sys.argv[2], "w").write(info["submission"])
' "$HOME/trajectory.json" "$2"
