"""Options: every one is checked, and what is not built is refused in words."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from silva.cli.main import build_parser, main
from silva.config.checks import eval_sets, min_group_size, validate
from silva.config.options import LATER, RunConfig
from silva.config.parse import add_options, from_values, options, resolve, write_config_file
from silva.types.errors import ConfigError


def parse(*words: str) -> RunConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    add_options(parser)
    return resolve(parser.parse_args(list(words)))


def trainable(tmp_path: Path, **more: object) -> RunConfig:
    values = {
        "hf_checkpoint": "model",
        "use_agentic_rollout": True,
        "agent_command": "true",
        "agent_cwd": str(tmp_path),
        "prompt_data": "rows.jsonl",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "num_rollout": 1,
    }
    return from_values({**values, **more})


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('lr = 0.5\nseed = 3\nagent_env = {A = "1", B = "x=y"}\n')
    config = parse("--config", str(tmp_path / "run.toml"), "--lr", "0.25")
    assert (config.lr, config.seed, config.agent_env) == (0.25, 3, ["A=1", "B=x=y"])


def test_a_list_option_may_be_given_in_parts(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('agent_env = ["OLD=1"]\n')
    words = ("--agent-env", "A=1", "B=2", "--lr", "0.5", "--agent-env", "C=3")
    assert parse("--config", str(tmp_path / "run.toml"), *words).agent_env == ["A=1", "B=2", "C=3"]
    assert parse(*words).agent_env == ["A=1", "B=2", "C=3"]


def test_resolved_options_survive_their_own_file(tmp_path: Path) -> None:
    config = parse("--lr", "3e-4", "--rollout-stop", "a", "b", "--apply-chat-template-kwargs", '{"x": [1]}')
    write_config_file(config, tmp_path / "config.toml")
    assert from_values(tomllib.loads((tmp_path / "config.toml").read_text())) == config


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--lr", "fast"], "must be a finite number of at least 0$"),
        (["--lr", "nan"], "must be a finite number"),
        (["--lr", "-1"], "at least 0"),
        (["--ref-load", "a\0b"], "in UTF-8 without NUL"),
        (["--agent-env", "A=1", "B=\udcff"], "in UTF-8 without NUL"),
        (["--eps-clip-high", "1e31"], r"is '1e31'; it must be a finite number above 0 and at most 1e\+30"),
        (["--seed", "9223372036854775808"], "a whole number of at least 0 and at most 9223372036854775807"),
        (["--rollout-batch-size", "0"], "at least 1"),
        (["--rollout-batch-size", "2.5"], "whole number"),
        (["--rollout-top-p", "0"], "above 0"),
        (["--rollout-top-p", "1.5"], "at most 1"),
        (["--engine", "vllm"], "not built"),
        (["--engine", "magic"], "one of torch, scripted"),
        (["--agentic-echo-match", "loose"], "one of lenient, exact"),
        (["--advantage-estimator", "magic"], "one of grpo, rloo"),
        (["--apply-chat-template-kwargs", "[1]"], "JSON object"),
        (["--gateway-port", "70000"], "at most 65535"),
        (["--agentic-tool-call-parser", "magic"], "one of none, auto, generic"),
        (["--agentic-tool-call-parser", "hermez"], r"'hermez' \(did you mean hermes\?\)"),
    ],
)
def test_a_wrong_value_is_refused_with_its_reason(words: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        parse(*words)
    assert words[0] in str(caught.value)


@pytest.mark.parametrize("name", sorted(LATER))
def test_options_of_later_parts_exit_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--" + name.replace("_", "-")
    value = [] if LATER[name][0] == "0" else ["1"]
    assert main(["train", flag, *value]) == 2
    assert flag in capsys.readouterr().err


def test_unknown_keys_of_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("roll_batch_size = 4\n")
    with pytest.raises(ConfigError, match="did you mean rollout_batch_size"):
        parse("--config", str(tmp_path / "run.toml"))
    (tmp_path / "run.toml").write_text("partial_rollout = true\n")
    with pytest.raises(ConfigError, match="partial rollout"):
        parse("--config", str(tmp_path / "run.toml"))
    (tmp_path / "run.toml").write_text("lr = = 3\n")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        parse("--config", str(tmp_path / "run.toml"))
    for digits, part in ((400, "--lr is 1000.*; it must be a finite number"), (5000, r"run\.toml is not valid TOML")):
        (tmp_path / "run.toml").write_text("lr = 1" + "0" * digits)
        with pytest.raises(ConfigError, match=part):
            parse("--config", str(tmp_path / "run.toml"))


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"hf_checkpoint": None}, "--hf-checkpoint is missing"),
        ({"use_agentic_rollout": False}, "--use-agentic-rollout is missing"),
        ({"agent_command": None}, "--agent-command is missing"),
        ({"agent_cwd": "/nowhere/at/all"}, "not a folder"),
        ({"prompt_data": None}, "--prompt-data is missing"),
        ({"rollout_batch_size": None}, "--rollout-batch-size is missing"),
        ({"num_rollout": None}, "--num-epoch"),
        ({"n_samples_per_prompt": 1}, "trains nothing"),
        (
            {"agentic_credit": "shared"},
            "--agentic-credit shared .* need --use-dynamic-batch-size .*--max-tokens-per-gpu",
        ),
        ({"agentic_credit": "shared", "agentic_custom_advantage_path": "m.f"}, "leave one out"),
        ({"agentic_min_group_size": 3}, "no group could count"),
        ({"global_batch_size": 3}, "does not divide the 8 sessions"),
        ({"num_steps_per_rollout": 3}, "--num-steps-per-rollout 3 does not divide the 8 sessions"),
        ({"num_steps_per_rollout": 2, "global_batch_size": 2}, "2 and --global-batch-size 2 disagree: of 8 sessions"),
        ({"use_dynamic_batch_size": True}, "needs --max-tokens-per-gpu"),
        ({"max_tokens_per_gpu": 64}, "64 does nothing without --use-dynamic-batch-size"),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "micro_batch_size": 2},
            r"\(--micro-batch-size 1 where",
        ),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 63, "rollout_max_context_len": 64},
            "--max-tokens-per-gpu 63 is less than the 64 tokens",
        ),
        ({"over_sampling_batch_size": 8}, "not built yet"),
        ({"max_staleness": 1}, "not built yet"),
        ({"update_weights_interval": 2}, "only 1 is built"),
        ({"eval_prompt_data": ["a"]}, "pairs of NAME and PATH"),
        ({"eval_prompt_data": ["a", "x", "a", "y"]}, "twice"),
        ({"eval_prompt_data": ["a:b", "x"]}, "letters"),
        ({"eval_interval": 2}, "names no file"),
        ({"eval_prompt_data": ["a", "x"]}, "never be used"),
        ({"engine": "scripted"}, "--engine-script"),
        ({"engine_log": "x"}, "--engine is torch"),
        ({"save_debug_rollout_data": "x.jsonl"}, "rollout_id"),
        ({"rollout_top_k": 0}, "no token"),
        ({"rollout_temperature": 1e-9}, "--rollout-temperature is 1e-09; it must be 0, .* or at least 0.001"),
        ({"eval_temperature": 9e-4}, "--eval-temperature is 0.0009; it must be 0"),
        (
            {"save_hf": "x/../model"},
            "--save-hf x/../model is the folder of --hf-checkpoint, which would be overwritten",
        ),
        ({"save_hf": "r", "ref_load": "r", "use_kl_loss": True}, "is the folder of --ref-load"),
        ({"rollout_max_response_len": 64, "rollout_max_context_len": 64}, "no room"),
        ({"agent_start_timeout": 10.0, "agent_timeout": 5.0}, "longer than"),
        ({"calculate_per_token_loss": True, "loss_reduction": "session_mean"}, "contradicts"),
        ({"engine_url": ["http://a:1"]}, "goes with --engine sglang"),
        ({"engine": "sglang", "engine_url": ["http://a:1"]}, "cannot be used by silva train yet"),
    ],
)
def test_impossible_combinations_are_refused(tmp_path: Path, values: dict[str, object], part: str) -> None:
    validate(trainable(tmp_path), "train")
    with pytest.raises(ConfigError, match=part):
        validate(trainable(tmp_path, **values), "train")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"engine_url": []}, "--engine-url, the address"),
        ({"engine_url": ["http://a:1", "http://a:1/"]}, "twice"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p cannot be used"),
        ({"rollout_top_k": 1}, "--rollout-top-k cannot be used"),
        ({"eval_top_p": 0.5}, "--eval-top-p cannot be used"),
        ({"rollout_temperature": 0.0, "eval_temperature": 1.0, "rollout_top_k": 5}, "--rollout-top-k cannot be used"),
        *(
            ({"engine_url": [url]}, "not an address of a server")
            for url in (
                "localhost:30000",
                "ftp://a",
                "http://",
                "http://a:0",
                "http://a:x",
                "http://a?b",
                "http://u:p@a",
            )
        ),
    ],
)
def test_servers_are_used_only_where_their_records_are_true(
    tmp_path: Path, values: dict[str, object], part: str
) -> None:
    good = {"engine": "sglang", "engine_url": ["http://127.0.0.1:30000", "https://host/engine"]}
    validate(trainable(tmp_path, **good), "rollout")
    validate(trainable(tmp_path, **good, rollout_temperature=0.0, rollout_top_p=0.9), "serve")
    with pytest.raises(ConfigError, match=part):
        validate(trainable(tmp_path, **{**good, **values}), "rollout")


def test_rows_and_steps_that_fit_are_taken(tmp_path: Path) -> None:
    dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64, "rollout_max_context_len": 64}
    validate(trainable(tmp_path, **dynamic, micro_batch_size=1), "train")
    validate(trainable(tmp_path, num_steps_per_rollout=4, global_batch_size=2), "train")


def test_credit_that_fits_is_taken(tmp_path: Path) -> None:
    dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}
    validate(trainable(tmp_path, **dynamic, agentic_credit="split", agentic_shared_prefix="each"), "train")
    custom = {"agentic_custom_advantage_path": "m.f"}
    validate(trainable(tmp_path, **custom, n_samples_per_prompt=1), "train")
    validate(trainable(tmp_path, **custom, **dynamic), "train")
    validate(trainable(tmp_path, agentic_credit="shared"), "rollout")


def test_defaults_that_depend_on_others(tmp_path: Path) -> None:
    assert min_group_size(trainable(tmp_path)) == 2
    assert min_group_size(trainable(tmp_path, n_samples_per_prompt=1)) == 1
    assert [
        item.name for item in eval_sets(trainable(tmp_path, eval_interval=1, eval_prompt_data=["a", "x", "b", "y"]))
    ] == ["a", "b"]


def test_every_option_has_help_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for name, option in options().items():
        assert option.help.endswith(".") and len(option.help) < 160, name
    with pytest.raises(SystemExit):
        build_parser().parse_args(["train", "--help"])
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in [*options(), *LATER])
    words = " ".join(shown.split())
    assert "0 picks a free one. (default: 0)" in words and "Weight decay of AdamW. (default: 0)" in words


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--agentic-tool-parser", "auto"], r"--agentic-tool-parser; did you mean --agentic-tool-call-parser\?"),
        (["--lr", "1", "stray"], r"'stray' belongs to no option \(silva train --help"),
    ],
)
def test_an_unknown_option_is_answered_with_a_close_one(
    capsys: pytest.CaptureFixture[str], words: list[str], part: str
) -> None:
    assert main(["train", *words]) == 2
    assert re.search(part, capsys.readouterr().err)


def test_what_export_and_profiles_cannot_be_is_told_at_the_start() -> None:
    fits = {
        "hf_checkpoint": "x",
        "use_agentic_rollout": True,
        "agent_command": "a",
        "prompt_data": "p",
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
        "num_rollout": 1,
    }
    validate(from_values({**fits, "agentic_export": "leaves"}), "rollout")
    validate(from_values({**fits, "agentic_export": "last"}), "train")
    with pytest.raises(ConfigError, match=r"--agentic-export leaves.*--use-dynamic-batch-size"):
        validate(from_values({**fits, "agentic_export": "leaves"}), "train")
    dynamic = {"agentic_export": "leaves", "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}
    with pytest.raises(ConfigError, match=r"--agentic-credit.*strict or last"):
        validate(from_values({**fits, **dynamic}), "train")
    validate(from_values({**fits, **dynamic, "agentic_credit": "split"}), "train")
    validate(from_values({**fits, **dynamic, "agentic_custom_advantage_path": "m.f"}), "train")
    with pytest.raises(ConfigError, match=r"--agentic-profiles: 'claude-code-billing@9'.*claude-code-billing@1"):
        validate(from_values({**fits, "agentic_profiles": ["claude-code-billing@9"]}), "serve")
