"""The scripted engine on its own: script files, limits, aborts, its log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from manual_clock import ManualClock

from silva.codec import TurnCodec
from silva.inference.scripted import ScriptedEngine, ScriptLine, read_script
from silva.types.clock import SystemClock
from silva.types.errors import ConfigError, EngineFault
from silva.types.generation import GenerateRequest, GenerateResult, SamplingParams
from silva.types.weights import MemoryWeights


def request(name: str = "r1", session: str = "s", *, limit: int = 100, stop: tuple[str, ...] = ()) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=limit, stop=stop)
    return GenerateRequest(request_id=name, session_id=session, input_ids=[1, 2], sampling=sampling)


def engine(codec: TurnCodec, *lines: dict[str, Any], **options: Any) -> ScriptedEngine:
    return ScriptedEngine(
        [ScriptLine(**line) for line in lines], codec=codec, clock=options.pop("clock", SystemClock()), **options
    )


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"text": "a", "ids": [1]}',
        '{"text": 5}',
        '{"ids": ["x"]}',
        '{"ids": [-1]}',
        '{"ids": [4294967296]}',
        '{"text": "a", "finish_reason": "done"}',
        '{"text": "a", "delay_s": -1}',
        '{"text": "a", "abort_after": -1}',
        '{"text": "a", "error": "501"}',
        '{"text": "a", "weight_version": -1}',
        '{"text": "a", "txet": "b"}',
        "[" * 10_000,
    ],
)
def test_a_bad_script_line_is_named_by_its_number(tmp_path: Path, line: str):
    path = tmp_path / "script.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_script(path)


def test_a_script_that_is_missing_or_empty_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_script(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no answer"):
        read_script(tmp_path / "empty.jsonl")


async def generate(engine: ScriptedEngine, **options: Any) -> GenerateResult:
    return await engine.generate(request(**options))


async def test_lines_go_round_per_session(codec: TurnCodec):
    scripted = engine(codec, {"text": "a"}, {"text": "b"})
    texts = [codec.decode((await generate(scripted, session=name)).ids) for name in ("x", "x", "y", "x")]
    assert texts == [text + "<|im_end|>" for text in ("a", "b", "a", "a")]
    await scripted.close_session("x")
    assert codec.decode((await generate(scripted, session="x")).ids) == "a<|im_end|>"


async def test_end_of_turn_is_added_where_an_answer_stops(codec: TurnCodec):
    end = codec.end_of_turn_id()
    for line, ends in [
        ({"text": "a"}, True),
        ({"text": "a", "finish_reason": "length"}, False),
        ({"text": "a", "append_eos": False}, False),
        ({"text": "a", "finish_reason": "length", "append_eos": True}, True),
        ({"ids": [5]}, True),
    ]:
        result = await generate(engine(codec, line))
        assert (result.ids[-1] == end) == ends
        assert result.logprobs == [-0.5] * len(result.ids)


async def test_it_obeys_the_token_limit_and_stop_strings(codec: TurnCodec):
    scripted = engine(codec, {"text": "alpha STOP beta", "logprobs": [-0.01 * n for n in range(40)]})
    result = await generate(scripted, limit=3)
    assert (len(result.ids), result.finish_reason, result.logprobs) == (3, "length", [-0.0, -0.01, -0.02])
    result = await generate(scripted, stop=("STOP",))
    assert codec.decode(result.ids).endswith("STOP")
    assert (result.finish_reason, result.matched_stop) == ("stop", "STOP")
    exact = len(codec.encode_sampled("alpha STOP beta")) + 1
    assert (await generate(scripted, limit=exact)).finish_reason == "stop"
    assert (await generate(scripted, limit=exact - 1)).finish_reason == "length"


async def test_an_abort_gives_what_was_there(codec: TurnCodec):
    clock = ManualClock()
    scripted = engine(codec, {"text": "one two three", "delay_s": 1.0, "per_token_s": 2.0}, clock=clock)
    for waited_s, num_ids in ((0.5, 0), (1.0, 0), (6.9, 2), (7.1, 3)):
        running = asyncio.create_task(generate(scripted))
        await clock.advance(waited_s)
        await scripted.abort("unknown")
        assert scripted.usage().num_running == 1
        await scripted.abort("r1")
        result = await running
        assert (len(result.ids), result.finish_reason) == (num_ids, "abort")
    assert scripted.usage().num_running == 0


async def test_the_end_of_the_engine_aborts_what_runs(codec: TurnCodec):
    scripted = engine(codec, {"error": "hang"})
    running = asyncio.create_task(generate(scripted))
    await asyncio.sleep(0)
    await scripted.close()
    assert (await asyncio.wait_for(running, 10)).finish_reason == "abort"


async def test_a_cancelled_call_frees_its_place(codec: TurnCodec):
    scripted = engine(codec, {"error": "hang"})
    running = asyncio.create_task(generate(scripted))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert scripted.usage().num_running == 0


async def test_versions_come_from_the_weights_or_the_line(codec: TurnCodec):
    scripted = engine(codec, {"text": "a"}, {"text": "a", "weight_version": 3})
    await scripted.load_weights(MemoryWeights(named={}, version=7))
    versions = [(await generate(scripted)).version_spans[0].version for _ in range(2)]
    assert versions == [7, 3] and scripted.version == 7


@pytest.mark.parametrize("line", [{"error": "500"}, {"error": "reset"}, {"error": "bad_json"}])
async def test_faults_are_engine_faults(codec: TurnCodec, line: dict[str, Any]):
    with pytest.raises(EngineFault):
        await generate(engine(codec, line))


async def test_the_log_holds_each_call_as_the_engine_saw_it(codec: TurnCodec, tmp_path: Path):
    clock = ManualClock()
    log = tmp_path / "deep" / "engine.jsonl"
    scripted = engine(codec, {"text": "a"}, {"error": "500"}, clock=clock, log_path=log)
    await scripted.start()
    await clock.advance(3)
    await generate(scripted, name="r1")
    with pytest.raises(EngineFault):
        await generate(scripted, name="r2", stop=("x",))
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    await scripted.close()
    assert set(first) == {"session_id", "request_id", "attempt", "input_ids", "sampling_params", "images", "t"}
    assert (first["session_id"], first["request_id"], first["attempt"]) == ("s", "r1", 0)
    assert (first["input_ids"], first["images"], first["t"]) == ([1, 2], [], 3.0)
    assert second["sampling_params"]["stop"] == ["x"]


async def test_a_log_that_cannot_be_written_is_a_config_error(codec: TurnCodec, tmp_path: Path):
    scripted = engine(codec, {"text": "a"}, log_path=tmp_path)
    with pytest.raises(ConfigError, match="--engine-log"):
        await scripted.start()
