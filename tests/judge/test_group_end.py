"""The one rule for how a group ends, on samples alone: what is checked, when credit is asked for, what is left."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from contexts import context

from silva.config.parse import from_values
from silva.credit.grpo import standardised
from silva.data.prompts import Prompt
from silva.judge.credit_stage import GroupCredit
from silva.judge.custom_advantage import CustomAdvantage
from silva.judge.group_end import GroupResult, GroupSettings, Outcome, SlotEnd, checked, close_group
from silva.run.user_code import build_credit, open_user_code
from silva.types.errors import GroupEnd, SessionFailure, SilvaError
from silva.types.rollout import Samples, SessionInput

RULE = GroupSettings(mode="train", num_samples=3, min_size=2, num_retries=0, one_reward=True)
PROMPT = Prompt(
    prompt_id="train:0:0",
    dataset="train",
    epoch=0,
    row=0,
    position=0,
    input=SessionInput(metadata={"level": 3}),
    label=7,
)
CREDIT = GroupCredit(credit_of=standardised, share="shared", shared_prefix="once")


def ends(*rewards: float | None, rule: GroupSettings = RULE) -> list[SlotEnd]:
    found: list[SlotEnd] = []
    for slot, reward in enumerate(rewards):
        samples = (context(f"g-{slot}", None, [(2, 1)], reward=reward),)
        found.append(SlotEnd(slot=slot, session_id=f"g-{slot}", outcome=checked(rule, samples)))
    return found


async def close(slots: list[SlotEnd], credit: object = CREDIT, rule: GroupSettings = RULE) -> GroupResult:
    return await close_group(rule, slots, prompt=PROMPT, group_id="g", credit=credit)  # type: ignore[arg-type]


async def test_a_session_that_cannot_be_trained_leaves_and_the_rest_is_credited() -> None:
    slots = ends(1.0, None, 0.0)
    result = await close(slots)
    assert result.end is None and [one.reason for one in result.failures] == ["reward_invalid"]
    assert [sample.credit for sample in result.samples] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)
    assert slots[0].outcome.samples[0].credit == result.samples[0].credit
    assert not slots[1].outcome.retry, "another run of the agent would not help"


async def test_too_few_left_end_the_group_before_credit_is_asked_for() -> None:
    async def never(_: object) -> object:
        raise AssertionError("asked")

    result = await close(ends(1.0, None, None), CustomAdvantage(never, failed=SilvaError))
    assert result.end is not None and result.end.reason == "group_too_small"
    result = await close(ends(None, None, None))
    assert result.end is not None and result.end.reason == "all_sessions_failed"
    known = GroupEnd("group_reward_failed", "it raised")
    result = await close_group(RULE, ends(1.0, 0.0, 0.0), prompt=PROMPT, group_id="g", credit=CREDIT, end=known)
    assert result.end is known and [sample.credit for sample in result.samples] == [None] * 3


async def test_eval_groups_get_no_credit() -> None:
    rule = replace(RULE, mode="eval")
    assert [sample.credit for sample in (await close(ends(1.0, 0.0, 0.0), rule=rule)).samples] == [None] * 3


def test_without_the_trainers_settings_nothing_is_refused() -> None:
    several: Samples = (context("s", "a", [(2, 1)], reward=1.0), context("s", "b", [(3, 1)], reward=0.0))
    free = replace(RULE, one_reward=False)
    assert checked(free, several).status == "exported"
    assert checked(replace(free, one_context="say why"), several).reason == "several_contexts"
    assert checked(RULE, several).reason == "reward_invalid"
    assert checked(RULE, several, judged=False).status == "exported", "a reward may still come"


FUNCTIONS = """
def plain(metadata_by_slot):
    return [{None: 1.0} for _ in metadata_by_slot]

def scaled(metadata_by_slot, scale=2.0):
    return [{None: scale} for _ in metadata_by_slot]

def grouped(metadata_by_slot, group):
    assert group.failed_slots == {1: "agent_exit"} and group.label == 7
    return [{None: float(group.row_metadata["level"] + slot)} for slot in group.slots]

def wrong(a, b, c): ...
"""


@pytest.mark.parametrize(("name", "credits"), [("plain", [1.0, 1.0]), ("scaled", [2.0, 2.0]), ("grouped", [3.0, 5.0])])
async def test_an_advantage_function_with_a_second_parameter_gets_the_group(
    name: str, credits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    (tmp_path / "my_credit.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    config = from_values({"agentic_custom_advantage_path": f"my_credit.{name}"})
    slots = ends(1.0, None, 0.0)
    slots[1].outcome = Outcome.failed(SessionFailure("agent_exit", "3"))
    async with AsyncExitStack() as stack:
        code = await open_user_code(config, tmp_path, "run", stack)
        result = await close(slots, build_credit(config, code))
        with pytest.raises(SilvaError, match=r"called with \(metadata_by_slot\), but takes \(a, b, c\)"):
            await open_user_code(
                from_values({"agentic_custom_advantage_path": "my_credit.wrong"}), tmp_path, "r", stack
            )
    assert result.end is None and [sample.credit for sample in result.samples] == credits
