"""Several contexts of a session on their way through a group: a real gateway and ledger, turns over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway_serve import Serve, serving

from silva.codec import TurnCodec
from silva.config.checks import one_context_reason
from silva.config.parse import from_values
from silva.data.prompts import Prompt
from silva.judge.custom_advantage import CustomAdvantage
from silva.judge.group_end import GroupResult, GroupSettings
from silva.judge.options import RewardOptions
from silva.judge.rewards import Rewards
from silva.rollout.failure_budget import FailureBudget
from silva.rollout.group_driver import EachSession
from silva.rollout.group_runner import GroupRunner
from silva.rollout.recorded_groups import RecordedGroups
from silva.store.dumps import write_rollout_dump
from silva.store.ledger import RunLedger
from silva.store.queries import counts, load_samples, open_run
from silva.turns.session import Session
from silva.types.clock import SystemClock
from silva.types.errors import SessionFailure, SilvaError
from silva.types.rollout import ExportRecord, SessionInput

GIVES_CREDIT = {"agentic_credit": "shared", "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}


class Forks:
    """An agent that asks once and then twice more about the answer, and exports both branches with its slot's rewards;
    without any it fails.
    """

    def __init__(self, serve: Serve, rewards: Sequence[tuple[float | None, ...]]):
        self.serve = serve
        self.rewards = rewards
        self.num_runs = 0

    async def run(self, session: Session) -> list[ExportRecord]:
        self.num_runs += 1
        session_id, slot = session.session_id, session.slot
        if not self.rewards[slot]:
            raise SessionFailure("agent_exit", "it broke")
        history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        history.append(await self.serve.message(session_id, history))
        for text in ("a", "b"):
            await self.serve.message(session_id, [*history, {"role": "user", "content": text}])
        ends = [node.node_id for node in session.forest.nodes if node.kind == "response"][1:]
        return [
            ExportRecord(name=name, node_id=node_id, reward=reward, metadata={"slot": slot})
            for name, node_id, reward in zip(("main", "helper"), ends, self.rewards[slot], strict=True)
        ]


async def run_group(
    codec: TurnCodec,
    run_dir: Path,
    rewards: Sequence[tuple[float | None, ...]],
    credit: CustomAdvantage | None = None,
    **settings: Any,
) -> tuple[GroupResult, Forks]:
    async with serving(codec, [{"text": "hello world"}]) as serve:
        with RunLedger(run_dir, clock=SystemClock()) as ledger:
            driver = Forks(serve, rewards)
            runner = GroupRunner(
                registry=serve.registry,
                driver=EachSession(driver),
                leases=serve.leases,
                ledger=ledger,
                budget=FailureBudget(99),
                rewards=Rewards(
                    RewardOptions(agentic_custom_advantage_path=None if credit is None else "m.f"),
                    function=None,
                    decode=codec.decode,
                ),
                credit=credit,
            )
            source = SessionInput(messages=[{"role": "user", "content": "hi"}])
            prompt = Prompt(prompt_id="train:0:0", dataset="train", epoch=0, row=0, position=0, input=source)
            mode = settings.get("mode", "train")
            ledger.issue_prompt(prompt.prompt_id, dataset="train", epoch=0, row=0, position=0, mode=mode)
            plan = {"mode": "train", "min_size": 1, "num_retries": 1, **settings}
            result = await runner.run(prompt, GroupSettings(num_samples=len(rewards), **plan), start_step=0)
            if result.end is None and mode == "train":
                ledger.set_credits(result.samples)
                ledger.end_prompts([prompt.prompt_id], "delivered", train_step=0)
            ledger.flush()
    return result, driver


async def test_several_contexts_without_credit_fail_their_session_and_name_the_options(
    codec: TurnCodec, tmp_path: Path
) -> None:
    reason = one_context_reason(from_values({}))
    result, driver = await run_group(codec, tmp_path, [(1.0, None)], one_context=reason)
    assert driver.num_runs == 1, "the options would refuse another run as well"
    (failure,) = result.failures
    assert (failure.reason, result.end and result.end.reason) == ("several_contexts", "all_sessions_failed")
    for flag in (
        *("--agentic-custom-advantage-path", "--agentic-credit", "--use-dynamic-batch-size", "--max-tokens-per-gpu"),
    ):
        assert flag in failure.message
    assert "exported 2 contexts" in failure.message
    credited_only = one_context_reason(from_values({"agentic_credit": "split"}))
    assert credited_only is not None and "--agentic-credit" not in credited_only and "--use-dynamic" in credited_only
    assert one_context_reason(from_values(GIVES_CREDIT)) is None


async def test_rewards_that_disagree_cost_their_session_and_no_other_run_of_its_agent(
    codec: TurnCodec, tmp_path: Path
) -> None:
    rewards = [(1.0, 0.0), (None, 0.5), (0.5, 0.5)]
    result, driver = await run_group(codec, tmp_path, rewards, one_reward=True)
    (failure,) = result.failures
    assert failure.reason == "reward_invalid" and "context main has the reward 1.0" in failure.message
    assert result.end is None and len({s.session_id for s in result.samples}) == 2 and driver.num_runs == 3
    with open_run(tmp_path) as conn:
        assert counts(conn)["sessions"] == {"exported": {"none": 2}, "failed": {"reward_invalid": 1}}


async def test_a_custom_advantage_gets_the_sessions_that_are_left_in_the_order_of_their_slots(
    codec: TurnCodec, tmp_path: Path
) -> None:
    seen: list[Any] = []

    async def advantage(metadata_by_slot: list[Any]) -> object:
        seen.extend([item["main"]["slot"] for item in metadata_by_slot])
        metadata_by_slot[0]["main"].clear()
        return [{"helper": 2.0, "main": 1.0} for _ in metadata_by_slot]

    credit = CustomAdvantage(advantage, failed=SilvaError)
    result, _ = await run_group(codec, tmp_path, [(None, None), (), (None, None)], credit)
    assert seen == [0, 2]
    assert [(s.name, s.credit) for s in result.samples] == [("main", 1.0), ("helper", 2.0)] * 2
    with open_run(tmp_path) as conn:
        kept = [load_samples(conn, session_id) for session_id in dict.fromkeys(s.session_id for s in result.samples)]
    assert [[(s.credit, s.response_credits) for s in session] for session in kept] == [
        [(1.0, (1.5, 1.0)), (2.0, (1.5, 2.0))]
    ] * 2
    assert kept[0][0].metadata == {"slot": 0}
    with open_run(tmp_path) as conn:
        write_rollout_dump(f"{tmp_path}/{{rollout_id}}.jsonl", 0, conn)
    for shared_prefix, trained in (("once", [(1, 1), (0, 1)] * 2), ("each", [(1, 1), (1, 1)] * 2)):
        recorded = RecordedGroups(
            f"{tmp_path}/{{rollout_id}}.jsonl",
            num_rollout=1,
            settings=GroupSettings(mode="train", num_samples=3, min_size=1, num_retries=0, shared_prefix=shared_prefix),
            credit=credit,
        )
        ((group,),) = [(await recorded.collect(0)).groups]
        masks = [tuple(s.loss_mask[span.start] for span in s.responses) for s in group.samples]
        assert masks == trained


async def test_eval_takes_several_contexts_and_asks_for_no_credit(codec: TurnCodec, tmp_path: Path) -> None:
    async def advantage(_: object) -> object:
        raise AssertionError("never asked")

    credit = CustomAdvantage(advantage, failed=SilvaError)
    result, _ = await run_group(codec, tmp_path, [(1.0, None)], credit, mode="eval")
    assert result.end is None and [(s.name, s.credit) for s in result.samples] == [("main", None), ("helper", None)]
