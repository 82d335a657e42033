"""An agent loop in the process of the trainer: ids in, ids out, no messages and no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from char_codec import CharCodec
from manual_clock import ManualClock

from silva.forest.lineage import build_samples, exported_leaves
from silva.forest.session_forest import SessionForest
from silva.inference.scripted import ScriptedEngine, ScriptLine
from silva.turns.engine_client import EngineClient
from silva.turns.session import Session
from silva.types.generation import GenerateRequest, GenerateResult, SamplingParams
from silva.types.rollout import ExportRecord, Samples

QUESTION, TOOL_OUTPUT = [101, 102, 103], [201, 202]


class CountingLoop:
    """Three turns; after each but the last a tool answers with two ids."""

    def __init__(self, client: EngineClient, sampling: SamplingParams):
        self._client = client
        self._sampling = sampling

    async def run(self, session: Session) -> Samples:
        forest, node, observation = session.forest, None, QUESTION
        for turn in range(3):
            generation = await self._client.sample(
                session,
                request_id=f"{session.session_id}-{turn}",
                prompt_ids=[*(node.path_ids() if node else ()), *observation],
                sampling=self._sampling,
            )
            node = forest.append_tokens(
                node, observation, generation.result, request_id=f"turn {turn}", num_aborts=generation.num_aborts
            )
            observation = [*TOOL_OUTPUT, turn]
        (leaf,) = exported_leaves(forest, "strict")
        record = ExportRecord(name=None, node_id=leaf.node_id, reward=1.0)
        return build_samples(forest, [record], session_id=session.session_id, group_id=session.group_id)


class Recorder(ScriptedEngine):
    """The scripted engine, which keeps what it read and what it returned."""

    def __init__(self, lines: Sequence[ScriptLine], clock: ManualClock):
        super().__init__(lines, codec=CharCodec(), clock=clock)
        self.calls: list[tuple[list[int], GenerateResult]] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        self.calls.append((list(request.input_ids), result))
        return result


async def test_three_turns_of_ids_become_the_sample_that_the_engine_saw() -> None:
    clock = ManualClock()
    script = [
        ScriptLine(ids=[1, 2, 3], logprobs=[-0.1, -0.2, -0.3], append_eos=False, weight_version=4),
        ScriptLine(ids=[4, 5], logprobs=[-0.4, -0.5], append_eos=False, abort_after=1, weight_version=4),
        ScriptLine(ids=[6], logprobs=[-0.6], append_eos=False, weight_version=5),  # goes on with the aborted turn
        ScriptLine(ids=[7, 8], logprobs=[-0.7, -0.8], append_eos=False, weight_version=5),
    ]
    engine = Recorder(script, clock)
    client = EngineClient(engine, clock, timeout_s=10.0, retry_delays_s=())
    session = Session(session_id="s", group_id="g", mode="train", clock=clock, forest=SessionForest())
    session.open_gate()

    (sample,) = await CountingLoop(client, SamplingParams(max_new_tokens=8)).run(session)

    prompts, results = zip(*engine.calls, strict=True)
    assert all(sample.token_ids[: len(prompt)] == prompt for prompt in prompts)
    assert sample.token_ids == [*prompts[-1], *results[-1].ids]
    assert sample.prompt_len == len(QUESTION)
    trained = [at for at, mask in enumerate(sample.loss_mask) if mask]
    assert [sample.token_ids[at] for at in trained] == [id for result in results for id in result.ids]
    wanted = [logprob for result in results for logprob in result.logprobs]
    assert all(abs(sample.logprobs[at] - logprob) < 1e-6 for at, logprob in zip(trained, wanted, strict=True))
    versions = [span.version for span in sample.version_spans for _ in range(span.length)]
    assert [versions[at] for at in trained] == [4, 4, 4, 4, 5, 5, 5]
    assert [span.length for span in sample.responses] == [3, 2, 2]
    assert [node.num_aborts for node in session.forest.nodes if node.kind == "response"] == [0, 1, 0]
