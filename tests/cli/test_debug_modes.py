"""`silva train --debug-rollout-only`, and its record as the source of rollout steps."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from silva_command import AGENT, run_silva, show, write_rows, write_script

from silva.config.checks import validate
from silva.config.parse import from_values
from silva.judge.custom_advantage import CustomAdvantage
from silva.judge.group_end import GroupSettings
from silva.rollout.recorded_groups import RecordedGroups
from silva.run.metrics import rollout_metrics
from silva.types.errors import ConfigError, DatasetError, SilvaError

BY_SLOT = AGENT + (
    "slot, attempt = map(int, os.environ['RELAX_SESSION_ID'].split('-')[-3:-1])\n"
    "if n == 0 or n == 1 and slot == 2 or attempt == 0 and slot == 1: sys.exit(3)\n"
    "ask(messages); give({'reward': float(slot == 0), 'metadata': {'size': n}})\n"
)


def by_size() -> CustomAdvantage:
    """Filters the groups of row 1, and gives the others their place as credit."""

    async def credit(sessions: Any) -> object:
        if sessions[0][None]["size"] == 1:
            return None
        return [{None: float(place)} for place in range(len(sessions))]

    return CustomAdvantage(credit, failed=SilvaError)


@pytest.mark.slow
def test_rollout_as_in_training_without_an_update(tmp_path: Path, chatml_dir: Path) -> None:
    (tmp_path / "agent.py").write_text(BY_SLOT)
    write_rows(tmp_path / "rows.jsonl", 3)
    write_script(tmp_path / "script.jsonl", {"text": "hello world"})
    done = run_silva(
        *("train", "--debug-rollout-only", "--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py"),
        *("--prompt-data", "rows.jsonl", "--rollout-batch-size", 2, "--n-samples-per-prompt", 3, "--num-epoch", 1),
        *("--engine", "scripted", "--engine-script", "script.jsonl", "--hf-checkpoint", chatml_dir, "--run-dir", "run"),
        *("--save-debug-rollout-data", "dumps/{rollout_id}.jsonl", "--log-passrate"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    counts = show(tmp_path / "run")["counts"]
    assert counts["prompts"] == {"delivered": {"none": 2}, "dropped": {"all_sessions_failed": 1}}
    (line,) = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (line["rollout/num_groups"], line["rollout/num_dropped_groups"]) == (2, 1)
    assert (line["rollout/num_slots"], line["rollout/num_failed"], line["rollout/num_sessions"]) == (9, 4, 5)
    assert (line["rollout/raw_reward"], line["rollout/raw_reward_all"]) == pytest.approx((2 / 5, 2 / 9))
    assert line["rollout/passrate/pass@1"] == pytest.approx(2 / 9) and not [n for n in line if n.startswith("train/")]
    lines = [json.loads(text) for text in (tmp_path / "dumps" / "0.jsonl").read_text().splitlines()]
    credits = {(one["row"], one["slot"]): one["credit"] for one in lines if one["status"] == "exported"}
    assert credits == pytest.approx(
        {(1, 0): 0.70711, (1, 1): -0.70711, (2, 0): 1.1547, (2, 1): -0.57735, (2, 2): -0.57735}, abs=1e-5
    )
    full = next(one for one in lines if one["row"] == 2)
    assert (full["input"], full["prompt_state"], full["group_size"]) == (
        {"messages": [{"role": "user", "content": "q 2"}], "metadata": {"n": 2}},
        "delivered",
        3,
    )
    assert [message["content"] for message in full["messages"]] == ["q 2", "hello world"]

    template = str(tmp_path / "dumps" / "{rollout_id}.jsonl")
    rule = GroupSettings(mode="train", num_samples=3, min_size=2, num_retries=0)

    def recorded(num_rollout: int | None = None, credit: CustomAdvantage | None = None) -> RecordedGroups:
        return RecordedGroups(template, num_rollout=num_rollout, settings=rule, credit=credit)

    step = asyncio.run(recorded().collect(0))
    again = rollout_metrics(step, passrate=True)
    assert again == pytest.approx({name: line[name] for name in again})
    assert asyncio.run(recorded().collect(1)).groups == []
    credited = asyncio.run(recorded(credit=by_size()).collect(0))
    assert [sample.credit for group in credited.groups for sample in group.samples] == [0.0, 1.0, 2.0]
    assert sorted(group.state or "" for group in credited.ended) == ["dropped", "filtered"]
    with pytest.raises(DatasetError, match=r"1\.jsonl cannot be read"):
        asyncio.run(recorded(num_rollout=2).collect(1))


RECORDS = {"hf_checkpoint": "m", "load_debug_rollout_data": "{rollout_id}.jsonl"}


@pytest.mark.parametrize(
    ("command", "values", "part"),
    [
        ("rollout", RECORDS, "goes with silva train"),
        ("serve", {"hf_checkpoint": "m", "debug_rollout_only": True}, "goes with silva train"),
        ("train", {"hf_checkpoint": "m", "debug_train_only": True}, "needs --load-debug-rollout-data"),
        ("train", {**RECORDS, "debug_rollout_only": True}, "take one of them"),
        (
            "train",
            {**RECORDS, "load_debug_rollout_data": "x.jsonl"},
            "--load-debug-rollout-data x.jsonl: the path needs",
        ),
        ("train", {**RECORDS, "eval_interval": 1}, "--eval-interval cannot be used with --load-debug-rollout-data"),
        ("train", {**RECORDS, "save_debug_rollout_data": "{rollout_id}"}, "runs no agents; leave it out"),
        ("train", {"hf_checkpoint": "m", "debug_rollout_only": True, "save_hf": "x"}, "has no new weights"),
    ],
)
def test_modes_that_do_not_go_together_are_refused(command: str, values: dict, part: str) -> None:
    validate(from_values(RECORDS), "train")
    with pytest.raises(ConfigError, match=part):
        validate(from_values(values), command)  # pyright: ignore[reportArgumentType]
