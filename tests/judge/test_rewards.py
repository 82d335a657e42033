"""Who gives a session its reward, under each setting; the function runs in a real worker."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from spans import responses_of

from silva.judge.options import RewardOptions
from silva.judge.rewards import Rewards
from silva.judge.user_function import UserFunctionPool
from silva.types.errors import GroupEnd, SessionFailure
from silva.types.generation import VersionSpan
from silva.types.rollout import TrainingSample

CODE = """
from pathlib import Path

def asked(what):
    with open("asked", "a") as file:
        file.write(what + "\\n")

def length(args, sample):
    asked(sample.name)
    return {"score": len(sample.response_ids), "eval_score": 9, "tone": 0.5}

def second_time(args, sample):
    asked(sample.name)
    if len(Path("asked").read_text().split()) < 2:
        raise OSError("the judge is busy")
    return 1

def never(args, sample):
    raise OSError("the judge is away")

def text(args, samples):
    return "0" * len(samples)
"""


def sample(name: str, reward: float | None = None) -> TrainingSample:
    return TrainingSample(
        session_id="s",
        group_id="g",
        name=name,
        node_id=0,
        prompt_len=1,
        token_ids=[1, 2, 3],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -1.0, -1.0],
        kept_mass=[1.0] * 3,
        version_spans=(VersionSpan(start=0, length=1, version=-1), VersionSpan(start=1, length=2, version=0)),
        responses=responses_of([0, 1, 1]),
        reward=reward,
    )


def session(mode: str = "train", output: bytes | None = None):
    """What the stage reads of a session: a conversation without messages."""
    node = SimpleNamespace(path=list)
    forest = SimpleNamespace(nodes=[node])
    return SimpleNamespace(
        session_id="s", group_id="g", slot=0, mode=mode, label=None, input=None, forest=forest, output=output
    )


def stage(function, **more) -> Rewards:
    options = RewardOptions(**{"reward_key": "score", "eval_reward_key": "eval_score", "reward_retries": 0, **more})
    return Rewards(options, function=function, decode=lambda ids: str(list(ids)))


@pytest.fixture
async def pool(tmp_path: Path):
    (tmp_path / "judge.py").write_text(CODE)
    async with UserFunctionPool(log_path=tmp_path / "log", marker=f"run-{tmp_path.name}", folder=tmp_path) as pool:
        yield pool


async def test_who_is_asked_and_whose_word_counts(pool: UserFunctionPool, tmp_path: Path):
    length = await pool.check("judge.length", "--x", ("args", "sample"))
    mixed = (sample("a"), sample("b", 5.0), sample("c"))
    judged = await stage(length).judge_session(session(), mixed)
    assert [(item.name, item.reward, item.helpers) for item in judged] == [
        ("a", 2.0, {"eval_score": 9.0, "tone": 0.5}),
        ("b", 5.0, {}),
        ("c", 2.0, {"eval_score": 9.0, "tone": 0.5}),
    ]
    assert (await stage(length).judge_session(session("eval"), mixed))[0].reward == 9.0
    (tmp_path / "asked").unlink()
    shared = stage(length, agentic_credit="shared")
    assert await shared.judge_session(session(), mixed) == mixed
    once = await shared.judge_session(session(), (sample("a"), sample("b")))
    assert [item.reward for item in once] == [2.0, None]
    assert (tmp_path / "asked").read_text() == "a\n"


async def test_without_a_function_a_reward_is_needed_unless_credit_comes_from_elsewhere():
    given = (sample("a"), sample("b", 0.0))
    assert await stage(None).judge_session(session(), given) == given
    with pytest.raises(SessionFailure, match="no reward function is configured") as caught:
        await stage(None).judge_session(session(), given[:1])
    assert caught.value.reason == "reward_missing"
    assert await stage(None, agentic_custom_advantage_path="m.f").judge_session(session(), given[:1]) == given[:1]


async def test_a_missing_reward_is_told_by_what_the_agent_wrote_instead():
    record = b'{"name": "a", "messages": [1], "reward": null}\n'
    for output, told in (
        (None, r"the agent wrote no output, and no reward function .*; let the agent write"),
        (b' {"score": 1, "metadata": {}}', r"holds no reward \(it holds 'score'\), and no reward"),
        (b'{"reward": null}', "the output of the agent holds no reward, and"),
        (record, r"no record of the agent \('a'\) holds a reward, .*; let the agent write \"reward\": NUMBER into one"),
        (record * 3000, r"no record of the agent \('a'\)"),  # too long to be read once more
    ):
        with pytest.raises(SessionFailure, match=told) as caught:
            await stage(None).judge_session(session(output=output), (sample("a"),))
        assert caught.value.reason == "reward_missing"


async def test_a_failed_judge_is_asked_again_and_then_the_policy_applies(pool: UserFunctionPool):
    second = await pool.check("judge.second_time", "--x", ("args", "sample"))
    rewards = stage(second, reward_retries=1)
    assert (await rewards.judge_session(session(), (sample("a"),)))[0].reward == 1.0
    assert rewards.take_numbers()["reward/latency_s/max"] > 0 and rewards.take_numbers() == {}
    never = await pool.check("judge.never", "--x", ("args", "sample"))
    with pytest.raises(SessionFailure, match=r"session s, context a: judge\.never raised OSError: the judge") as caught:
        await stage(never).judge_session(session(), (sample("a"),))
    assert caught.value.reason == "reward_failed"
    assert (await stage(never, reward_failure_score=-1.0).judge_session(session(), (sample("a"),)))[0].reward == -1.0


async def test_a_group_value_that_is_no_list_ends_the_group(pool: UserFunctionPool):
    text = await pool.check("judge.text", "--x", ("args", "samples"))
    with pytest.raises(GroupEnd, match="returned a str for 2 contexts of 2 sessions") as caught:
        await stage(text, group_rm=True).judge_group([(session(), (sample("a"),)), (session(), (sample("a"),))], {})
    assert (caught.value.reason, caught.value.state) == ("group_reward_invalid", "dropped")
