"""Cases from the field about reward functions: through the command, and calls that hang in real workers."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from marked import marked
from silva_command import AGENT, run_silva, write_script

from silva.config.checks import validate
from silva.config.options import RunConfig
from silva.judge.user_function import UserCodeError, UserFunctionPool
from silva.run.user_code import open_user_code
from silva.store.queries import counts, open_run
from silva.types.errors import ConfigError

ALONE = """
import math, os, signal, time

def reward(args, sample):
    n = sample.metadata["n"]
    assert args.reward_key == "score" and sample.input["metadata"]["n"] == n and sample.label == {"right": n}
    assert sample.prompt_ids and sample.response_ids and sample.messages[-1]["role"] == "assistant"
    print("judged", n, sample.session_id)
    if n == 0:
        rang = []
        signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while not rang:
            time.sleep(0.001)
        return 1 + len(rang)
    if n == 1:
        raise ValueError("this answer cannot be judged")
    if n == 3:
        while True:
            pass
    if n == 5:
        time.sleep(1e6)
    if n == 6:
        return {"score": 0.25, "style": True, "note": "fine"}
    if n == 7:
        os._exit(9)
    if n == 13:
        return float(len(sample.messages[0]["content"]) - (sample.name == "leaf-0"))
    return {2: None, 4: sample.response.count("o"), 8: math.nan, 9: {"other": 1}, 10: "1", 11: True}[n]
"""


def rollout(tmp_path: Path, tokenizer: Path, code: str, agent: str, num_rows: int, *more: object):
    (tmp_path / "judge.py").write_text(code)
    (tmp_path / "agent.py").write_text(AGENT + agent)
    rows = ({"input": f"q {n}", "metadata": {"n": n}, "answer": {"right": n}} for n in range(num_rows))
    write_script(tmp_path / "rows.jsonl", *rows)
    write_script(tmp_path / "script.jsonl", {"text": "hello world"})
    return run_silva(
        "rollout",
        *("--use-agentic-rollout", "--agent-command", "exec python3 -I agent.py", "--prompt-data", "rows.jsonl"),
        *("--rollout-batch-size", num_rows, "--num-rollout", 1, "--run-dir", "run", "--label-key", "answer"),
        *("--engine", "scripted", "--engine-script", "script.jsonl", "--hf-checkpoint", tokenizer),
        *("--custom-rm-path", "judge.reward", "--reward-key", "score"),
        *more,
        cwd=tmp_path,
    )


def by_row(run_dir: Path) -> dict[int, list[dict]]:
    """The dumped contexts of each row, in the order of their slots."""
    found: dict[int, list[dict]] = {}
    for line in (run_dir / "samples" / "0.jsonl").read_text().splitlines():
        item = json.loads(line)
        found.setdefault(int(item["group_id"].split("-")[3]), []).append(item)
    return {row: sorted(items, key=lambda item: item["session_id"].rsplit("-", 3)[-3]) for row, items in found.items()}


@pytest.mark.slow
def test_rew_01_and_02_a_reward_function_fails_in_the_open_and_alone(tmp_path: Path, chatml_dir: Path) -> None:
    """Timers work in it; an error, no value, an endless loop, a sleep and a crash each fail their own session only."""
    agent = """
ask(messages)
if n == 13: ask(messages[:-1] + [{"role": "user", "content": "another question"}])
give({"metadata": {"n": n}, "reward": 7.0 if n == 12 else None})
"""
    limits = ("--reward-timeout-s", 0.7, "--reward-retries", 0)
    done = rollout(tmp_path, chatml_dir, ALONE, agent, 14, *limits, "--agentic-export", "leaves")
    assert done.returncode == 0, done.stderr
    contexts = by_row(tmp_path / "run")
    assert [(item["name"], item["reward"]) for item in contexts.pop(13)] == [("leaf-0", 3.0), ("leaf-1", 16.0)]
    rows = {row: items[0] for row, items in contexts.items()}
    good = {row: item["reward"] for row, item in rows.items() if item["status"] == "exported"}
    assert good == {0: 2.0, 4: 2.0, 6: 0.25, 11: 1.0, 12: 7.0}
    assert rows[6]["helpers"] == {"style": 1.0}
    expected = {
        1: ("reward_failed", "ValueError: this answer cannot be judged"),
        2: ("reward_invalid", "is None: judge.reward gave none"),
        3: ("reward_failed", "took more than 0.7 s"),
        5: ("reward_failed", "took more than 0.7 s"),
        7: ("reward_failed", "exit status 9"),
        8: ("reward_invalid", "is nan"),
        9: ("reward_invalid", "no entry 'score' (--reward-key)"),
        10: ("reward_invalid", "'1' (str)"),
    }
    for row, (reason, told) in expected.items():
        assert rows[row]["reason"] == reason and rows[row]["session_id"] in rows[row]["error"], row
        assert told in rows[row]["error"], rows[row]["error"]
    num_contexts = len((tmp_path / "run" / "samples" / "0.jsonl").read_text().splitlines())
    assert num_contexts == 15, "no agent ran again for a judge that failed"
    printed = (tmp_path / "run" / "user_code.log").read_text()
    assert f"judged 4 {rows[4]['session_id']}" in printed and "judged 12" not in printed and "judged" not in done.stdout


TOGETHER = """
def reward(args, samples):
    n = samples[0].metadata["n"]
    assert len({sample.group_id for sample in samples}) == 1 and [s.metadata["slot"] for s in samples] == [0, 1]
    if n == 3:
        raise RuntimeError("the judge is away")
    return {
        0: [sample.metadata["slot"] + 0.5 for sample in samples],
        1: [None, {"score": 0.75, "clear": 0.5}],
        2: [1.0],
        4: [None, float("inf")],
    }[n]
"""


@pytest.mark.slow
def test_a_group_function_judges_all_sessions_of_a_prompt_at_once(tmp_path: Path, chatml_dir: Path) -> None:
    agent = """
slot = int(os.environ["RELAX_SESSION_ID"].rsplit("-", 3)[1])
ask(messages)
give({"metadata": {"n": n, "slot": slot}, "reward": 7.0 if n < 3 else None})
"""
    done = rollout(tmp_path, chatml_dir, TOGETHER, agent, 5, "--n-samples-per-prompt", 2, "--group-rm")
    assert done.returncode == 0, done.stderr
    rows = by_row(tmp_path / "run")
    assert [item["reward"] for item in rows[0]] == [0.5, 1.5]
    assert [(item["reward"], item["helpers"]) for item in rows[1]] == [(7.0, {}), (0.75, {"clear": 0.5})]
    assert [item["reason"] for item in rows[4]] == ["reward_missing", "reward_invalid"]
    with open_run(tmp_path / "run") as conn:
        prompts = counts(conn)["prompts"]
        told = json.loads(conn.execute("SELECT input FROM prompts WHERE row = 1").fetchone()[0])
    assert told == {"messages": [{"role": "user", "content": "q 1"}], "metadata": {"n": 1}, "label": {"right": 1}}
    assert prompts == {
        "delivered": {"none": 2},
        "dropped": {"group_reward_failed": 1, "group_reward_invalid": 1, "all_sessions_failed": 1},
    }
    log = (tmp_path / "run" / "run.log").read_text()
    assert "returned 1 values for 2 contexts of 2 sessions" in log and log.count("RuntimeError: the judge is away") == 2
    assert "judge.reward, asked again" in log
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["rollout/rewards_overwritten"] == 3
    assert (metrics["rollout/num_slots"], metrics["rollout/num_failed"]) == (10, 2)
    assert metrics["reward/latency_s/max"] > 0


HANGS = """
import asyncio, os, time

async def score(args, sample):
    if sample == 3:
        await asyncio.sleep(0.01)
        while True:
            pass
    if sample == 5:
        time.sleep(1e6)
    if sample == 7:
        await asyncio.Event().wait()
    await asyncio.sleep(0.05)
    return sample

def stuck(args, sample):
    time.sleep(0 if sample else 1e6)
    return os.getpid()
"""


@pytest.mark.slow
async def test_rew_02_async_calls_that_hang_or_block_fail_alone_and_slots_come_back(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(HANGS)
    marker = f"run-{tmp_path.name}-code"
    async with UserFunctionPool(
        log_path=tmp_path / "log", marker=marker, folder=tmp_path, max_concurrency=8, timeout_s=0.6, cancel_grace_s=0.2
    ) as pool:
        score = await pool.check("judge.score", "--custom-rm-path", ("args", "sample"))
        results = await asyncio.gather(*(score(None, n) for n in range(8)), return_exceptions=True)
        assert [n for n, value in enumerate(results) if value == n] == [0, 1, 2, 4, 6]
        for n in (3, 5, 7):
            assert isinstance(results[n], UserCodeError) and results[n].reason == "timeout"
        assert await asyncio.gather(*(score(None, 0) for _ in range(8))) == [0] * 8

    # A caller that waited for the end of the call would wait for ten minutes here.
    async with UserFunctionPool(
        log_path=tmp_path / "log", marker=marker, folder=tmp_path, max_concurrency=2, timeout_s=600, cancel_grace_s=0.2
    ) as pool:
        score = await pool.check("judge.score", "--custom-rm-path", ("args", "sample"))
        stuck = await pool.check("judge.stuck", "--custom-rm-path", ("args", "sample"))
        for function, sample in ((stuck, 0), (score, 7), (score, 5)):
            waiting = [asyncio.create_task(function(None, sample)) for _ in range(3)]
            await asyncio.sleep(0.1)
            for task in waiting:
                task.cancel()
            done = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(value, asyncio.CancelledError) for value in done)
            assert await stuck(None, 1) and await score(None, 2) == 2
    assert marked(marker) == []


async def test_a_reward_function_that_cannot_be_loaded_stops_the_start(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "judge.py").write_text("def reward(args): return 1\n")
    monkeypatch.chdir(tmp_path)
    config = RunConfig(custom_rm_path="judge.reward", group_rm=True)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"^--custom-rm-path judge.reward: it is called with \(args, samples\)"):
            await open_user_code(config, tmp_path, "run-x", stack)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"group_rm": True}, "--group-rm needs --custom-rm-path"),
        ({"reward_failure_score": 0.0}, "--reward-failure-score needs --custom-rm-path"),
        ({"custom_rm_path": "a.b", "group_rm": True, "reward_failure_score": 0.0}, "cannot be used with --group-rm"),
    ],
)
def test_reward_options_that_cannot_work_together_are_refused(flags, told, chatml_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input": "q"}\n')
    config = RunConfig(
        use_agentic_rollout=True,
        agent_command="true",
        prompt_data=str(tmp_path / "rows.jsonl"),
        rollout_batch_size=1,
        hf_checkpoint=str(chatml_dir),
        **flags,
    )
    with pytest.raises(ConfigError, match=told):
        validate(config, "rollout")
