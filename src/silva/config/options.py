"""Every option of Silva: one field each, with its unit, bounds and help. The flag is the field's name with dashes.

What is not built yet is listed too: whole options in `LATER`, single values in `later_choices`. Both are refused with a
sentence, never accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from silva.config.training_options import TrainingOptions
from silva.forest.profiles import PROFILES
from silva.parsers import parser_names
from silva.types.option import flag_of, opt


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(TrainingOptions):
    """All options, resolved. See each field's help; `silva train --help` prints them."""

    # run
    run_dir: str | None = opt(
        "run", "str", None, "Folder of this run's files (default: runs/<date-time>).", metavar="FOLDER"
    )
    seed: int = opt("run", "int", 1234, "Seed of everything random but the data order.", low=0)
    num_rollout: int | None = opt("run", "int", None, "Number of rollout steps in all.", low=1)
    num_epoch: int | None = opt(
        "run", "int", None, "Passes over the prompt data; the smaller of this and --num-rollout ends the run.", low=1
    )
    save_interval: int | None = opt(
        "run",
        "int",
        None,
        "Write a checkpoint every N rollout steps, and at the end (default: never); the last 2 are kept.",
        low=1,
    )
    save_hf: str | None = opt(
        "run",
        "str",
        None,
        "Folder for the final weights in Hugging Face form (default: not written).",
        metavar="FOLDER",
    )
    # model
    hf_checkpoint: str | None = opt(
        "model", "str", None, "Local Hugging Face folder with the start model and its tokenizer.", metavar="FOLDER"
    )
    dtype: str | None = opt(
        "model",
        "choice",
        None,
        "Number type of model and engine (default: float32 on CPU, bfloat16 on CUDA).",
        choices=("float32", "bfloat16"),
    )
    apply_chat_template_kwargs: dict[str, Any] = opt(
        "model", "json", {}, "JSON object of chat template arguments that every request starts from."
    )
    # gateway
    gateway_host: str = opt("gateway", "str", "127.0.0.1", "Address that the model API listens on.", metavar="HOST")
    gateway_port: int = opt(
        "gateway", "int", 0, "Port of the model API; 0 takes a free one.", low=0, high=65535, metavar="PORT"
    )
    gateway_advertised_url: str | None = opt(
        "gateway",
        "str",
        None,
        "Base URL that agents get as RELAX_BASE_URL, where they run elsewhere (default: the listening address).",
        metavar="URL",
    )
    # agent
    use_agentic_rollout: bool = opt(
        "agent", "bool", False, "Run one agent process a session (the only kind of rollout built now)."
    )
    agent_command: str | None = opt(
        "agent", "str", None, "Command of one agent session, run by `bash -c`.", metavar="COMMAND"
    )
    agent_cwd: str = opt("agent", "str", ".", "Working directory of the agent command.", metavar="FOLDER")
    agent_env: list[str] = opt(
        "agent",
        "list",
        [],
        "Variables for the agent, as NAME=VALUE ... (names that start with RELAX_ are refused).",
        metavar="NAME=VALUE",
    )
    agent_env_clear: bool = opt(
        "agent", "bool", False, "Give the agent only PATH, HOME and the like, the contract's variables and --agent-env."
    )
    agent_timeout: float = opt(
        "agent",
        "float",
        1800.0,
        "Most seconds of active time a session may take.",
        metavar="SECONDS",
        low=0,
        low_open=True,
    )
    agent_start_timeout: float | None = opt(
        "agent",
        "float",
        None,
        "Most seconds until an agent's first model request (default: --agent-timeout).",
        metavar="SECONDS",
        low=0,
        low_open=True,
    )
    agent_retries: int = opt("agent", "int", 1, "New sessions that may replace a failed one in its slot.", low=0)
    agent_max_failures: int = opt(
        "agent",
        "int",
        32,
        "Failures in a row that stop the run; a step in which every session fails stops it too.",
        low=1,
    )
    # parsers
    agentic_tool_call_parser: str = opt(
        "parsers",
        "choice",
        "none",
        "How tool calls are read from sampled text; auto: as the chat template writes them (names: docs/model-api.md).",
        choices=parser_names("tool_call"),
        metavar="NAME",
    )
    agentic_reasoning_parser: str = opt(
        "parsers",
        "choice",
        "none",
        "How reasoning is read from sampled text; auto: as the chat template writes it (names: docs/model-api.md).",
        choices=parser_names("reasoning"),
        metavar="NAME",
    )
    # capacity
    agentic_concurrency: int | None = opt(
        "capacity", "int", None, "Prompt groups that may be resident at once (default: --rollout-batch-size).", low=1
    )
    agentic_eval_concurrency: int | None = opt(
        "capacity",
        "int",
        None,
        "Eval prompt groups that may be resident at once (default: as many sessions as in training).",
        low=1,
    )
    # matching
    agentic_echo_match: str = opt(
        "matching",
        "choice",
        "lenient",
        "How an echoed assistant message is compared with what was sent; lenient forgives trimmed blanks, dropped "
        "reasoning and renamed call ids.",
        choices=("lenient", "exact"),
    )
    agentic_disconnect_grace_s: float = opt(
        "gateway",
        "float",
        30.0,
        "Seconds that a turn is kept for a repeated request after its client went away; then it ends uncommitted.",
        metavar="SECONDS",
        low=0,
    )
    agentic_sse_data_heartbeat_s: float | None = opt(
        "gateway",
        "float",
        None,
        "Seconds between heartbeats that count as data, for clients that heed no comments (default: off).",
        metavar="SECONDS",
        low=0,
        low_open=True,
    )
    agentic_responses_events: str = opt(
        "gateway",
        "choice",
        "full",
        "Events of a Responses stream: the full sequence of each item, or only its output_item.done.",
        choices=("full", "minimal"),
    )
    agentic_profiles: list[str] = opt(
        "matching",
        "list",
        ["auto"],
        f"Noise of system prompts that makes no new state: auto (what is found; default), none, {', '.join(PROFILES)}.",
        metavar="NAME",
    )
    agentic_export: str = opt(
        "matching",
        "choice",
        "strict",
        "What is exported of a session that names no context: the only leaf, else it fails; the last leaf; all leaves.",
        choices=("strict", "last", "leaves"),
    )
    agentic_shared_prefix: str = opt(
        "matching",
        "choice",
        "once",
        "How often a turn shared by several contexts is trained: once, with the mean of their credits, or in each.",
        choices=("once", "each"),
    )
    agentic_codec: str = opt(
        "matching",
        "choice",
        "proven",
        "How new messages become tokens: proven deltas, or a whole new render (a new root) each turn.",
        choices=("proven", "rerender"),
    )
    # rollout
    rollout_batch_size: int | None = opt("rollout", "int", None, "Prompts of one rollout step (required).", low=1)
    n_samples_per_prompt: int = opt("rollout", "int", 1, "Sessions of one prompt.", low=1)
    over_sampling_batch_size: int | None = opt(
        "rollout",
        "int",
        None,
        "Prompts asked for at once (default, and the only value built now: --rollout-batch-size).",
        low=1,
    )
    global_batch_size: int | None = opt(
        "rollout",
        "int",
        None,
        "Sessions of one optimizer step (default: --rollout-batch-size times --n-samples-per-prompt).",
        low=1,
    )
    rollout_temperature: float = opt("rollout", "float", 1.0, "Sampling temperature; 0 is argmax.", low=0)
    rollout_top_p: float = opt(
        "rollout", "float", 1.0, "Sampling keeps the likeliest tokens up to this mass.", low=0, high=1, low_open=True
    )
    rollout_top_k: int = opt("rollout", "int", -1, "Sampling keeps this many tokens; -1 is off.", low=-1)
    rollout_max_response_len: int | None = opt(
        "rollout", "int", None, "Most tokens of one model turn (default: what the context leaves).", low=1
    )
    rollout_max_context_len: int | None = opt(
        "rollout", "int", None, "Most tokens of a whole session context (default: the model's own limit).", low=2
    )
    rollout_stop: list[str] = opt("rollout", "list", [], "Stop strings of every turn.", metavar="TEXT")
    rollout_stop_token_ids: list[int] = opt(
        "rollout", "intlist", [], "Stop token ids of every turn, besides the model's own.", metavar="ID"
    )
    rollout_shuffle: bool = opt("rollout", "bool", False, "Shuffle the prompts of each epoch.")
    rollout_seed: int = opt("rollout", "int", 42, "Seed of the data order.", low=0)
    agentic_min_group_size: int | None = opt(
        "rollout",
        "int",
        None,
        "Sessions that must be left for a group to count (default: 2; 1 with one sample a prompt).",
        low=1,
    )
    # async
    max_staleness: int = opt(
        "async", "int", 0, "Train steps that rollout may run ahead; only 0 (wait for training) is built.", low=0
    )
    update_weights_interval: int = opt(
        "async", "int", 1, "Rollout steps between weight updates; only 1 is built.", low=1
    )
    # data
    prompt_data: str | None = opt("data", "str", None, "JSON Lines or Parquet file of prompts.", metavar="FILE")
    input_key: str = opt("data", "str", "input", "Row key of the text or message list.", metavar="KEY")
    metadata_key: str = opt("data", "str", "metadata", "Row key of the metadata object.", metavar="KEY")
    label_key: str | None = opt(
        "data", "str", None, "Row key of what only those who judge a session get, any JSON value.", metavar="KEY"
    )
    skip_bad_rows: bool = opt("data", "bool", False, "Count and drop broken rows instead of refusing the file.")
    # eval
    eval_interval: int | None = opt(
        "eval", "int", None, "Evaluate every N rollout steps, before the first and at the end (default: never).", low=1
    )
    eval_prompt_data: list[str] = opt(
        "eval", "list", [], "Pairs of a name and a JSON Lines or Parquet file.", metavar="NAME PATH"
    )
    n_samples_per_eval_prompt: int = opt("eval", "int", 1, "Sessions of one eval prompt.", low=1)
    eval_temperature: float | None = opt(
        "eval", "float", None, "Sampling temperature in eval (default: --rollout-temperature).", low=0
    )
    eval_top_p: float | None = opt(
        "eval", "float", None, "Top-p in eval (default: --rollout-top-p).", low=0, high=1, low_open=True
    )
    eval_max_response_len: int | None = opt(
        "eval", "int", None, "Most tokens of one model turn in eval (default: --rollout-max-response-len).", low=1
    )
    eval_reward_key: str | None = opt(
        "eval", "str", None, "Entry of reward objects that counts in eval (default: --reward-key).", metavar="KEY"
    )
    # reward
    custom_rm_path: str | None = opt(
        "reward",
        "str",
        None,
        "Function f(args, sample) that rewards contexts without a reward, as module.function (docs/rewards.md).",
        metavar="PATH",
    )
    group_rm: bool = opt("reward", "bool", False, "Call --custom-rm-path once for a whole group, as f(args, samples).")
    reward_key: str | None = opt(
        "reward", "str", None, "Entry of reward objects that is the reward; the others are metrics.", metavar="KEY"
    )
    reward_timeout_s: float = opt(
        "reward",
        "float",
        30.0,
        "Most seconds of one call of a function of yours.",
        metavar="SECONDS",
        low=0,
        low_open=True,
    )
    reward_max_concurrency: int = opt(
        "reward", "int", 64, "Calls of functions of yours at once; sync ones at most 4 a core.", low=1
    )
    reward_retries: int = opt(
        "reward", "int", 1, "How often a reward function that raised, hung or crashed is asked again.", low=0
    )
    reward_failure_score: float | None = opt(
        "reward",
        "float",
        None,
        "Reward where the function failed after its retries (default: the session fails).",
        low=-1e12,
        high=1e12,
    )
    agentic_custom_advantage_path: str | None = opt(
        "reward",
        "str",
        None,
        "Function f(metadata_by_slot) that gives each context its credit, as module.function (docs/credit.md).",
        metavar="PATH",
    )
    agentic_credit: str | None = opt(
        "reward",
        "choice",
        None,
        "What each of several contexts gets of its session's credit: all of it, or its share of the sampled tokens "
        "(default: several contexts are refused in training).",
        choices=("shared", "split"),
    )
    # engines
    engine: str = opt(
        "engines",
        "choice",
        "torch",
        "What samples tokens.",
        choices=("torch", "scripted", "sglang"),
        later_choices=("vllm",),
    )
    engine_url: list[str] = opt(
        "engines",
        "list",
        [],
        "Servers of --engine sglang; a session stays with one of them, another takes over after a fault.",
        metavar="URL",
    )
    engine_script: str | None = opt(
        "engines", "str", None, "JSON Lines file of answers for --engine scripted.", metavar="FILE"
    )
    engine_log: str | None = opt(
        "engines", "str", None, "JSON Lines file that gets each call of --engine scripted.", metavar="FILE"
    )
    engine_concurrency: int = opt("engines", "int", 32, "Requests that the torch engine decodes at once.", low=1)
    engine_timeout_s: float = opt(
        "engines",
        "float",
        300.0,
        "Seconds without an answer after which an engine call counts as failed.",
        metavar="SECONDS",
        low=0,
        low_open=True,
    )
    weight_sync: str = opt(
        "engines",
        "choice",
        "memory",
        "How new weights reach the engine.",
        choices=("memory",),
        later_choices=("disk", "nccl", "gloo"),
    )
    # records
    log_passrate: bool = opt(
        "reward", "bool", False, "Add pass@k to the metrics: how likely one of k sessions of a prompt has reward 1."
    )
    save_debug_rollout_data: str | None = opt(
        "records",
        "str",
        None,
        "File for each rollout's samples as JSON lines; {rollout_id} in the path stands for the step.",
        metavar="FILE",
    )
    load_debug_rollout_data: str | None = opt(
        "records",
        "str",
        None,
        "Train on the recorded samples of such files instead of running agents; needs {rollout_id} in the path too.",
        metavar="FILE",
    )
    debug_train_only: bool = opt(
        "records", "bool", False, "Start no engine, gateway or agent: what --load-debug-rollout-data does by itself."
    )
    debug_rollout_only: bool = opt(
        "records", "bool", False, "silva train: collect groups and credit as in training, but update nothing."
    )


LATER: Mapping[str, tuple[str, str]] = {
    # name: (argparse nargs, what it belongs to)
    "agentic_prelaunch": ("0", "prelaunch"),
    "external_slots": ("1", "the capacity check"),
    "agentic_session_lifecycle": ("0", "KV scheduling"),
    "agentic_program_admission": ("0", "KV scheduling"),
    "agentic_admission_headroom": ("1", "KV scheduling"),
    "agentic_admission_pressure_threshold": ("1", "KV scheduling"),
    "agentic_admission_expected_decode_cap": ("1", "KV scheduling"),
    "agentic_admission_max_wait_s": ("1", "KV scheduling"),
    "agentic_admission_scope": ("1", "KV scheduling"),
    "dynamic_sampling_filter_path": ("1", "group filters"),
    "partial_rollout": ("0", "partial rollout"),
    "partial_rollout_max_aborted_count": ("1", "partial rollout"),
    "fully_async": ("0", "fully async training"),
    "max_sample_staleness": ("1", "asynchronous rollout"),
    "mask_offpolicy_in_partial_rollout": ("0", "partial rollout"),
    "tool_key": ("1", "dataset tools"),
    "multimodal_keys": ("1", "images"),
    "tensorboard": ("0", "metric writers"),
    "wandb_project": ("1", "metric writers"),
    "ray": ("0", "clusters"),
    "num_gateway_shards": ("1", "clusters"),
    "num_train_workers": ("1", "clusters"),
}
"""Options whose part is not built: how many values the flag takes, and what it belongs to."""


def later_sentence(name: str) -> str:
    """Why an option of `LATER` is refused."""
    return f"{flag_of(name)} belongs to {LATER[name][1]}, which this version of Silva does not have yet; leave it out"
