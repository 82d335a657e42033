"""Dumps read back: what was written, and a sentence for everything else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_records import begin, exported, failed, forest, joined

from silva.judge.group_end import GroupSettings
from silva.rollout.recorded_groups import RecordedGroups
from silva.store.dumps import write_rollout_dump
from silva.store.ledger import RunLedger
from silva.store.loads import read_rollout_dump
from silva.store.queries import load_samples, open_run
from silva.types.errors import DatasetError
from silva.types.rollout import TrainingSample


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, list[TrainingSample]]:
    """A dump with two contexts, a retry, a filtered group and an eval session; and the contexts as the ledger has
    them.
    """
    run_dir = tmp_path / "run"
    with RunLedger(run_dir) as ledger:
        group = begin(ledger, 1, n=2)
        ids = {"session_id": f"{group}-s0", "group_id": group}
        samples = [
            joined(forest(), 4, name="main", metadata={"who": "né"}, helpers={"x": 0.1}, reward=1 / 3, **ids),
            joined(forest(), 6, name="side", reward=None, truncated=True, **ids),
        ]
        ledger.end_session(exported(f"{group}-s0", group, samples=samples, output=b'{"reward": 1}'))
        ledger.set_credits([replace(samples[0], credit=0.75)])
        ledger.end_session(failed(f"{group}-s1", group))
        ledger.start_session(f"{group}-s1b", group_id=group, slot=1, try_index=1)
        ledger.end_session(failed(f"{group}-s1b", group, "agent_timeout"))
        ledger.end_prompts(["train:0:1"], "trained", train_step=0)
        begin(ledger, 0)
        ledger.end_session(exported("train-g0-s0", "train-g0"))
        ledger.end_prompts(["train:0:0"], "filtered", reason="all_equal", train_step=0)
        begin(ledger, 0, mode="eval")
        ledger.end_session(exported("eval-g0-s0", "eval-g0", mode="eval"))
        ledger.flush()
        with open_run(run_dir) as conn:
            path = write_rollout_dump(f"{tmp_path}/{{rollout_id}}.jsonl", 0, conn)
            return path, load_samples(conn, f"{group}-s0")


def test_groups_come_back_as_the_ledger_has_them(recorded: tuple[Path, list[TrainingSample]]) -> None:
    path, samples = recorded
    filtered, trained = read_rollout_dump(path)
    assert (filtered.prompt_state, filtered.prompt_reason) == ("filtered", "all_equal")
    assert (trained.prompt.prompt_id, trained.prompt_state, trained.mode) == ("train:0:1", "trained", "train")
    kept, lost = trained.slots()
    assert (lost.status, lost.reason, lost.try_index) == ("failed", "agent_timeout", 1)
    assert [context.sample for context in kept.contexts] == [replace(sample, credit=None) for sample in samples]
    assert kept.contexts[0].messages == [{"role": "user", "content": f"m{at}"} for at in (1, 2, 3, 4)]
    line = json.loads(path.read_text().splitlines()[0])
    assert (line["output"], line["output_len"], line["tools"]) == ('{"reward": 1}', 13, [{"type": "function"}])
    assert [group.mode for group in read_rollout_dump(path, mode="eval")] == ["eval"]


def test_of_a_prompt_that_was_run_again_the_last_try_counts(recorded: tuple[Path, list[TrainingSample]]) -> None:
    path, _ = recorded
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    earlier = [
        line | {"group_id": "old", "session_id": f"old-{line['session_id']}"}
        for line in lines
        if line["group_id"] == "train-g1"
    ]
    later = [line | {"attempt": 1} if line["group_id"] == "train-g1" else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*later, *earlier]))
    assert [group.group_id for group in read_rollout_dump(path)] == ["train-g0", "train-g1"]


WRONG: list[tuple[str, Any, str]] = [
    ("token_ids", [1.5] * 12, r"token_ids\[0\] is 1.5; it must be a whole number"),
    ("token_ids", [1] * 7, "7 ids, but mask"),
    ("loss_mask", [2] * 12, r"loss_mask\[0\] is 2; it must be 0 or 1"),
    ("loss_mask", "1", "loss_mask is '1'; it must be a list"),
    ("logprobs", ["NaN"] * 12, r"logprobs\[0\] is 'NaN'; it must be a finite number"),
    ("logprobs", [-3.5e38] * 12, r"logprobs\[0\] is -3.5e\+38; a log-prob lies between -3.4e\+38 and 0"),
    ("logprobs", [0.5] * 12, r"logprobs\[0\] is 0.5; a log-prob lies"),
    ("weight_spans", [[0, 12]], "must be a list of three"),
    ("weight_spans", [[0, 9, 1]], "span"),
    ("weight_spans", [[0, 11, -1]], "none of them names the weights"),
    ("prompt_len", 9, "prompt_len is 9; loss_mask is 1 before it"),
    ("responses", [], "no token was sampled"),
    ("prompt_len", 0, "prompt_len 0 of"),
    ("reward", True, "reward is True; it must be a number or null"),
    ("helpers", {"x": "y"}, "its values must be numbers"),
    ("group_id", None, "group_id is None; it must be a text"),
    ("position", -1, "position is -1"),
    ("truncated", 1, "truncated is 1; it must be true or false"),
]


@pytest.mark.parametrize(("field", "value", "part"), WRONG)
def test_a_wrong_field_is_named_with_its_file_line_and_value(
    recorded: tuple[Path, list[TrainingSample]], field: str, value: object, part: str
) -> None:
    path, _ = recorded
    first, second, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, json.dumps(json.loads(second) | {field: value}), *others]))
    with pytest.raises(DatasetError, match=part) as caught:
        read_rollout_dump(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({}, r"name is 'main'; this context of session train-g1-s0 stands in line 1 already"),
    ({"name": "third", "slot": 1}, "slot is 1; in line 1, of the same session train-g1-s0, it is 0"),
    ({"session_id": "new", "group_size": 3}, "group_size is 3; in line 1, of the same group train-g1, it is 2"),
    ({"session_id": "new"}, r"session_id is 'new'; line 1 has train-g1-s0 as try 0 of slot 0"),
    ({"session_id": "new", "slot": 2}, "slot is 2; group_size is 2"),
    ({"group_id": "g2", "name": "third"}, "group_id is 'g2'; in line 1, of the same session"),
    (
        {"session_id": "new", "slot": 1, "try_index": 2, "status": "done"},
        "status is 'done'; it must be one of",
    ),
    (
        {"session_id": "new", "group_id": "new", "prompt_state": "ok"},
        "prompt_state is 'ok'; it must be one of",
    ),
    ({"name": "third", "metadata": {"x": [math.nan]}}, "metadata is .*; its numbers must be finite"),
]


@pytest.mark.parametrize(("changes", "part"), CONTRADICTIONS)
def test_a_line_that_contradicts_an_earlier_one_is_refused(
    recorded: tuple[Path, list[TrainingSample]], changes: dict[str, Any], part: str
) -> None:
    path, _ = recorded
    lines = path.read_text().splitlines()
    path.write_text("\n\n".join([*lines, json.dumps(json.loads(lines[0]) | changes)]))
    with pytest.raises(DatasetError, match=rf"line {2 * len(lines) + 1}: {part}"):
        read_rollout_dump(path)


async def test_half_a_group_is_not_trained(recorded: tuple[Path, list[TrainingSample]]) -> None:
    path, _ = recorded
    path.write_text("".join(line for line in path.open() if json.loads(line)["slot"] == 0))
    with pytest.raises(DatasetError, match="lines of 1 of the 2 slots of group train-g1: the file is not whole"):
        settings = GroupSettings(mode="train", num_samples=2, min_size=1, num_retries=0)
        await RecordedGroups(f"{path.parent}/{{rollout_id}}.jsonl", num_rollout=1, settings=settings).collect(0)


def test_what_is_no_dump_is_refused(recorded: tuple[Path, list[TrainingSample]]) -> None:
    path, _ = recorded
    document = json.loads(path.read_text().splitlines()[0])
    del document["responses"]
    for text, part in (
        (json.dumps(document), "no 'responses'; a dump of this version"),
        ("[1]", "must be a JSON object, this is list"),
        ('{"mode": ', "line 1: not valid JSON"),
        ("[" * 100_000, "line 1: not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(DatasetError, match=part):
            read_rollout_dump(path)
    path.unlink()
    with pytest.raises(DatasetError, match="cannot be read"):
        read_rollout_dump(path)
