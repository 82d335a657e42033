"""Field cases about a session's time and end: a real agent process, a real gateway, a clock that we move."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from gateway_serve import Json, Serve, serving, until
from manual_clock import ManualClock
from silva_command import AGENT

from silva.agent.agent_runner import AgentRunner
from silva.agent.options import AgentOptions
from silva.codec import TurnCodec
from silva.export.exporter import Exporter
from silva.export.options import ExportOptions
from silva.forest.lineage import build_samples
from silva.gateway.dialect import RETRY_HEADER
from silva.rollout.process_driver import ProcessDriver
from silva.types.clock import SystemClock
from silva.types.errors import AgentExecutionError, SessionFailure
from silva.types.rollout import ExportRecord, Mode, SessionInput

ASKS_THEN_WAITS = (
    AGENT
    + """
ask(messages)
open("asked", "w").close()
while not os.path.exists("go"): time.sleep(0.02)
give({"reward": 1.0})
"""
)
BUSY_FOR_EVER = "open('up', 'w').close()\nimport time\ntime.sleep(600)\n"
CHILD_ASKS_AFTER_THE_END = (
    AGENT
    + """
import signal
ask(messages)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("child", "w").close()
    while True:
        try:
            ask(messages)
        except HTTPError as error:
            open("told.part", "w").write(f"{error.code} {error.headers['x-should-retry']}")
            os.rename("told.part", "told")
            time.sleep(600)
        time.sleep(0.02)
while not os.path.exists("child"): time.sleep(0.02)
os._exit(0)
"""
)


STRAY_CLIENT = (
    AGENT
    + """
import subprocess
base = os.environ["RELAX_BASE_URL"] + "/v1"
os.environ.update(OPENAI_BASE_URL=base, OPENAI_API_KEY=os.environ["RELAX_SESSION_ID"])
call = "OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'hi'}])"
messages.append(ask(messages))
subprocess.run(["bash", "-c", f'python -c "from openai import OpenAI; {call}"'], check=True)
messages.append({"role": "user", "content": "next"})
ask(messages)
give({"reward": 1.0})
"""
)


@asynccontextmanager
async def driving(
    codec: TurnCodec,
    folder: Path,
    agent: str,
    *,
    clock: ManualClock | None = None,
    script: Sequence[Json] = ({"text": "ok"},),
    **options: float,
) -> AsyncIterator[tuple[Serve, Callable[..., Awaitable[list[ExportRecord]]]]]:
    """A gateway, a runner, and a function that runs the agent as session `s`."""
    (folder / "agent.py").write_text(agent)
    runner = AgentRunner(run_id=f"run-{uuid.uuid4().hex[:12]}", grace_s=3.0, sweep_s=0.05)
    async with serving(codec, list(script), open_sessions=False, clock=clock) as serve:
        await runner.start()
        driver = ProcessDriver(
            runner,
            AgentOptions(agent_command="exec python3 -I agent.py", agent_cwd=str(folder), **options),
            clock or SystemClock(),
            serve.registry.end,
            run_dir=folder / "run",
            run_id=runner.run_id,
            base_url=serve.base_url,
        )

        async def run(mode: Mode = "train") -> list[ExportRecord]:
            session = serve.registry.open("s", "g", mode)
            session.input = SessionInput(metadata={"n": 0})
            serve.opened["s"] = session
            session.open_gate()
            return await driver.run(session)

        try:
            yield serve, run
        finally:
            await runner.close()


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_proc_05_time_without_the_lease_is_not_held_against_the_agent(
    codec: TurnCodec, tmp_path: Path, mode: Mode
):
    clock = ManualClock()
    async with driving(codec, tmp_path, ASKS_THEN_WAITS, clock=clock, agent_timeout=5.0) as (serve, run):
        running = asyncio.create_task(run(mode))
        await until((tmp_path / "asked").exists)
        session = serve.session("s")
        await clock.advance(3)
        session.close_gate()
        await clock.advance(20)
        session.open_gate()
        await clock.advance(1)
        assert session.active.elapsed_s() == pytest.approx(4.0)
        (tmp_path / "go").touch()
        await running
        assert len(serve.responses("s")) == 1


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_proc_05_an_agent_that_is_busy_too_long_is_ended(codec: TurnCodec, tmp_path: Path, mode: Mode):
    clock = ManualClock()
    async with driving(codec, tmp_path, BUSY_FOR_EVER, clock=clock, agent_timeout=5.0) as (_, run):
        running = asyncio.create_task(run(mode))
        await until((tmp_path / "up").exists)
        await clock.advance(4.9)
        assert not running.done()
        await clock.advance(0.2)
        with pytest.raises(AgentExecutionError, match="5 s of active time") as caught:
            await running
        assert caught.value.reason == "agent_timeout"


async def test_proc_05_an_agent_that_never_asks_is_ended_at_its_start_limit(codec: TurnCodec, tmp_path: Path):
    clock = ManualClock()
    limits = {"agent_timeout": 100.0, "agent_start_timeout": 2.0}
    async with driving(codec, tmp_path, BUSY_FOR_EVER, clock=clock, **limits) as (_, run):
        running = asyncio.create_task(run())
        await until((tmp_path / "up").exists)
        await clock.advance(2.1)
        with pytest.raises(AgentExecutionError, match="no model request within 2 s") as caught:
            await running
        assert caught.value.reason == "agent_start_timeout"


async def test_proc_05_an_agent_that_asked_has_the_whole_time(codec: TurnCodec, tmp_path: Path):
    clock = ManualClock()
    limits = {"agent_timeout": 100.0, "agent_start_timeout": 2.0}
    async with driving(codec, tmp_path, ASKS_THEN_WAITS, clock=clock, **limits) as (_, run):
        running = asyncio.create_task(run())
        await until((tmp_path / "asked").exists)
        await clock.advance(90)
        assert not running.done()
        (tmp_path / "go").touch()
        await running


@pytest.mark.slow
async def test_proc_03_what_survives_the_agent_is_told_that_the_session_ended(codec: TurnCodec, tmp_path: Path):
    async with driving(codec, tmp_path, CHILD_ASKS_AFTER_THE_END) as (serve, run):
        try:
            await run()
        except SessionFailure as failure:
            assert failure.reason == "not_linear"  # the child may have asked again before the end
        await until((tmp_path / "told").exists)
        name, value = (part.decode() for part in RETRY_HEADER)
        assert (tmp_path / "told").read_text() == f"404 {value}" and name == "x-should-retry"
        assert not serve.session("s").open_turns


@pytest.mark.slow
async def test_tree_08_a_stray_client_of_the_agents_tool_is_named_and_never_picked_by_chance(
    codec: TurnCodec, tmp_path: Path
):
    async with driving(codec, tmp_path, STRAY_CLIENT) as (serve, run):
        with pytest.raises(SessionFailure) as caught:
            await run()
        session, (first, stray, main) = serve.session("s"), serve.responses("s")
        assert caught.value.reason == "not_linear"
        told = str(caught.value)
        assert "2 root(s)" in told and "--agentic-export" in told
        assert f"response {stray.node_id} (request {stray.request_id})" in told and str(first.request_id) in told
        assert [record.match for record in session.requests] == ["root", "root", "append"]
        (last,) = Exporter(ExportOptions(agentic_export="last")).records(session.forest, b"", "train", "s")
        assert (last.name, last.node_id) == (None, main.node_id)
        leaves = Exporter(ExportOptions(agentic_export="leaves")).records(session.forest, b"", "train", "s")
        assert [(leaf.name, leaf.node_id) for leaf in leaves] == [("leaf-0", stray.node_id), ("leaf-1", main.node_id)]


THREE_AT_ONCE = (
    AGENT
    + """
import asyncio

async def branch(n):
    history = [{"role": "user", "content": f"count to {n}"}]
    history.append(await asyncio.to_thread(ask, history))
    return {"name": f"branch {n}", "messages": history, "reward": float(history[-1]["content"]), "metadata": {"n": n}}

async def main():
    return await asyncio.gather(*(branch(n) for n in range(3)))

with open(os.environ["RELAX_OUTPUT_JSON"], "w") as file:
    file.write("".join(json.dumps(record) + "\\n" for record in asyncio.run(main())))
"""
)


async def test_rew_06_the_reward_of_a_record_goes_to_its_context_however_the_calls_were_timed(
    codec: TurnCodec, tmp_path: Path
):
    """The engine answers the call that came first at last, so calls end in another order than they began in."""
    script = [{"text": str(n), "delay_s": 0.2 * (2 - n)} for n in range(3)]
    async with driving(codec, tmp_path, THREE_AT_ONCE, script=script) as (serve, run):
        records = await run()
        assert [(record.name, record.metadata) for record in records] == [(f"branch {n}", {"n": n}) for n in range(3)]
        assert sorted(record.reward or 0 for record in records) == [0.0, 1.0, 2.0]
        forest = serve.forest("s")
        samples = build_samples(forest, records, session_id="s", group_id="g")
        for n, (record, sample) in enumerate(zip(records, samples, strict=True)):
            assert [node.kind for node in forest.nodes[record.node_id].path()] == ["root", "observation", "response"]
            text = codec.decode(sample.token_ids)
            assert f"count to {n}" in text and text.count("count to") == 1
            sampled = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
            assert float(codec.decode(sampled).removesuffix("<|im_end|>")) == sample.reward == record.reward
