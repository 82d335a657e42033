"""A whole gateway on a real loopback port inside the test's event loop, with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from silva.codec import TurnCodec
from silva.config.options import RunConfig
from silva.forest.lineage import build_sample, linear_leaf
from silva.forest.node import Node
from silva.forest.session_forest import SessionForest
from silva.gateway.app import GatewayApp
from silva.gateway.server import GatewayServer
from silva.inference.scripted import ScriptedEngine, read_script
from silva.parsers import TurnParser
from silva.rollout.leases import Leases
from silva.store.media import MEDIA_DIR, MediaStore
from silva.turns.session import Session
from silva.turns.session_registry import SessionRegistry
from silva.turns.turn_service import TurnService
from silva.types.clock import Clock, SystemClock
from silva.types.generation import check_spans
from silva.types.rollout import ExportRecord, TrainingSample

Json = dict[str, Any]
ECHO_MATCH = os.environ.get("SILVA_TEST_ECHO_MATCH", "lenient")
"""What every test that does not say otherwise runs with, so that the whole suite can run under either."""


class Serve:
    """Handle of a running gateway. Sessions open by their bearer key unless they were opened by hand."""

    def __init__(self, codec: TurnCodec, engine: Any, recorded: Callable[[], list[Json]]):
        self.codec = codec
        self.engine = engine
        self.recorded = recorded
        self.media_dir: Path
        self.finished: dict[str, bytes] = {}
        self.opened: dict[str, Session] = {}
        self.leases = Leases(engine)
        self.registry: SessionRegistry
        self.turns: TurnService
        self.server: GatewayServer
        self.http: httpx.AsyncClient

    def on_open(self, session: Session) -> None:
        self.opened[session.session_id] = session
        self.leases.grant(session)

    @property
    def base_url(self) -> str:
        return self.server.base_url

    def calls(self, session_id: str | None = None) -> list[Json]:
        """Engine calls as the engine saw them."""
        return [call for call in self.recorded() if session_id in (None, call["session_id"])]

    def session(self, session_id: str) -> Session:
        return self.opened[session_id]

    def forest(self, session_id: str) -> SessionForest:
        return self.opened[session_id].forest

    def responses(self, session_id: str) -> list[Node]:
        return [node for node in self.forest(session_id).nodes if node.kind == "response"]

    def sdk(self, session_id: str, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=session_id, max_retries=0, **options)

    async def post(self, session_id: str, body: Any, path: str = "/v1/chat/completions", **more: str) -> httpx.Response:
        """One request. `more` are headers, `_` for `-`."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {session_id}", **{name.replace("_", "-"): more[name] for name in more}}
        return await self.http.post(self.base_url + path, content=content, headers=headers)

    async def chat(self, session_id: str, messages: list[Json], **fields: Any) -> Json:
        """One turn that must work; the answer's JSON."""
        answer = await self.post(session_id, {"model": "m", "messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def message(self, session_id: str, messages: list[Json], **fields: Any) -> Json:
        """One turn that must work; the assistant message."""
        return (await self.chat(session_id, messages, **fields))["choices"][0]["message"]

    def sample(self, session_id: str, node: Node | None = None) -> TrainingSample:
        """The exported lineage (of the only leaf, unless a node is given), after the invariants were checked."""
        forest = self.forest(session_id)
        node = node or linear_leaf(forest)
        record = ExportRecord(name=None, node_id=node.node_id, reward=1.0)
        sample = build_sample(forest, record, session_id=session_id, group_id="g")
        self._check(sample, node)
        return sample

    def _check(self, sample: TrainingSample, leaf: Node) -> None:
        ids, mask = sample.token_ids, sample.loss_mask
        assert len(ids) == len(mask) == len(sample.logprobs) == len(sample.kept_mass)
        check_spans(sample.version_spans, len(ids))
        assert all(logprob == 0 for logprob, on in zip(sample.logprobs, mask, strict=True) if not on)
        calls = {call["request_id"]: call for call in self.calls(sample.session_id) if call["attempt"] == 0}
        sampled: list[int] = []
        for node in leaf.path():
            if node.kind != "response":
                continue
            sampled.extend(node.sampled)
            given = calls[node.request_id or ""]["input_ids"]
            assert ids[: len(given)] == given, f"the engine input of node {node.node_id} is no prefix of the sample"
        assert [token for token, on in zip(ids, mask, strict=True) if on] == sampled


async def until(condition: Callable[[], Any]) -> None:
    """Wait until the condition holds; fails where it never does."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition never came true")


@asynccontextmanager
async def serving(
    codec: TurnCodec,
    script: list[Json],
    *,
    parser: TurnParser | None = None,
    clock: Clock | None = None,
    open_sessions: bool = True,
    engine_context_len: int = 32768,
    engine: Any = None,
    recorded: Callable[[], list[Json]] | None = None,
    retry_delays_s: tuple[float, ...] = (0.001, 0.001, 0.001),
    resume_aborted: bool = True,
    **options: Any,
) -> AsyncIterator[Serve]:
    """Run a gateway on these script lines until the block ends, or on an `engine` whose calls `recorded` tells."""
    clock = clock or SystemClock()
    config = RunConfig(**{"agentic_echo_match": ECHO_MATCH, **options})
    with tempfile.TemporaryDirectory(prefix="silva-serve-") as folder:
        path, log = Path(folder) / "script.jsonl", Path(folder) / "engine.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in script))
        engine = engine or ScriptedEngine(
            read_script(path), codec=codec, clock=clock, log_path=log, max_context_len=engine_context_len
        )
        await engine.start()
        serve = Serve(codec, engine, recorded or (lambda: [json.loads(line) for line in log.read_text().splitlines()]))
        serve.media_dir = Path(folder) / MEDIA_DIR

        async def finish(session: Session, body: bytes) -> Json:
            serve.finished[session.session_id] = body
            return {"status": "exported", "reason": None, "num_samples": 1}

        serve.registry = SessionRegistry(
            engine,
            clock,
            open_sessions=open_sessions,
            on_open=serve.on_open,
            on_finish=finish,
        )
        serve.turns = TurnService(
            engine=engine,
            codec=codec,
            parser=parser or TurnParser.from_names(reasoning="generic", tool_call="generic"),
            clock=clock,
            options=config,
            retry_delays_s=retry_delays_s,
            resume_aborted=resume_aborted,
            media=MediaStore(serve.media_dir),
        )
        serve.app = GatewayApp(serve.registry, serve.turns, clock, config)
        serve.server = GatewayServer(serve.app, config)
        await serve.server.start()
        try:
            limits = httpx.Limits(max_connections=300)
            async with httpx.AsyncClient(timeout=60, limits=limits, verify=False) as serve.http:
                yield serve
        finally:
            await serve.registry.close()
            await serve.server.close()
            serve.turns.close()
            await engine.close()
