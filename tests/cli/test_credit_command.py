"""`silva train` on several contexts of a session: credit by a function of the user, through real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from silva_command import AGENT, run_silva, show, write_rows, write_script

from silva.store.queries import load_samples, open_run

FORKS = (
    AGENT
    + """
slot = int(os.environ["RELAX_SESSION_ID"].rsplit("-", 3)[1])
messages.append(ask(messages))
for text in ("left", "right"):
    ask([*messages, {"role": "user", "content": text}])
give({"metadata": {"n": n, "slot": slot}})
"""
)
CREDIT = """
def advantage_func(metadata_by_slot):
    n = metadata_by_slot[0]["leaf-0"]["n"]
    assert [item["leaf-1"]["slot"] for item in metadata_by_slot] == [0, 1]
    if n == 0:
        return None
    if n == 1:
        raise RuntimeError("no credit today")
    if n == 2:
        return [{"leaf-0": 1.0, "leaf-1": "much"}, {"leaf-0": 0, "leaf-1": 0}]
    return [{"leaf-0": 1.0, "leaf-1": -1}, {"leaf-1": [0.5, 2], "leaf-0": True}]
"""


def trained_contexts(run_dir: Path) -> dict[str, list[tuple[Any, ...]]]:
    """(credit, credits of responses, trained tokens) of each context, by slot."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    with open_run(run_dir) as conn:
        rows = conn.execute(
            "SELECT session_id, slot FROM sessions JOIN groups USING (group_id) JOIN prompts USING (prompt_id) "
            "WHERE state = 'trained' ORDER BY slot"
        ).fetchall()
        for session_id, slot in rows:
            for s in load_samples(conn, session_id):
                found.setdefault(f"{slot} {s.name}", []).append((s.credit, s.response_credits, s.num_trainable))
    return found


@pytest.mark.slow
def test_contexts_are_trained_with_the_credit_that_a_function_gives_them(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "agent.py").write_text(FORKS)
    (tmp_path / "my_credit.py").write_text(CREDIT)
    write_rows(tmp_path / "rows.jsonl", 6)
    write_script(tmp_path / "script.jsonl", {"text": "hello world"})
    command = (
        *(
            "train",
            "--use-agentic-rollout",
            "--agent-command",
            "exec python3 -I agent.py",
            "--hf-checkpoint",
            model_dir,
        ),
        *("--prompt-data", "rows.jsonl", "--rollout-batch-size", 3, "--n-samples-per-prompt", 2, "--num-rollout", 1),
        *("--engine", "scripted", "--engine-script", "script.jsonl", "--run-dir", "run", "--agentic-export", "leaves"),
        *("--agentic-custom-advantage-path", "my_credit.advantage_func", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", 512),
    )
    done = run_silva(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    prompts = show(tmp_path / "run")["counts"]["prompts"]
    assert prompts == {
        "trained": {"none": 3},
        "filtered": {"custom_advantage_none": 1},
        "dropped": {"custom_advantage_failed": 1, "custom_advantage_invalid": 1},
    }
    log = (tmp_path / "run" / "run.log").read_text()
    assert "RuntimeError: no credit today" in log and "context 'leaf-1' is 'much' (str): it must be a number" in log
    contexts = trained_contexts(tmp_path / "run")
    turn = contexts["0 leaf-1"][0][2]
    assert contexts == {
        "0 leaf-0": [(1.0, (0.0, 1.0), 2 * turn)] * 3,
        "0 leaf-1": [(-1.0, (0.0, -1.0), turn)] * 3,
        "1 leaf-0": [(1.0, (0.75, 1.0), 2 * turn)] * 3,
        "1 leaf-1": [(1.25, (0.75, 2.0), turn)] * 3,
    }
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (line["rollout/num_sessions"], line["rollout/shared_responses"]) == (6, 6)
    assert line["train/grad_norm"] > 0 and "rollout/raw_reward" not in line
