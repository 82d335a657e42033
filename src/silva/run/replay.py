"""Replays a recorded client: would its session be linear, and if not, why?

The recorded requests go to a gateway of our own over HTTP, in their order; a script answers what the model answered in
the recording.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from silva.codec import TurnCodec
from silva.config import RunConfig, validate
from silva.export import RecordedRequest, answers_of, as_sent_here, generic_parser, items_of, read_recording, spoken
from silva.forest import AUTO, NONE, PROFILES, REPAIR_PREFIX, exported_leaves, parse_profiles
from silva.gateway import GatewayApp, GatewayOptions, GatewayServer
from silva.inference import ScriptedEngine, ScriptLine
from silva.parsers import TurnParser
from silva.rollout import Leases
from silva.run.parts import load_codec
from silva.store import MediaStore
from silva.turns import Session, SessionRegistry, TurnService
from silva.types import Conversation, JsonObject, Message, SystemClock
from silva.wire import RETRY_HEADERS

UNKNOWN_ANSWER = "ok"
_ROOM = 1 << 22
_CLIENTS = (
    (
        ("claude-cli", "claude-code"),
        "Claude Code: CLAUDE_CODE_ATTRIBUTION_HEADER=0 (no billing line), "
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 (no side calls), DISABLE_PROMPT_CACHING=1, "
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1",
    ),
    (("codex",), 'Codex: a provider of its own with wire_api="responses" and env_key, and web search off'),
    (("opencode",), "opencode: `opencode run --title x` with an openai-compatible provider (no side call for a title)"),
)


@dataclass(kw_only=True)
class Replayed:
    """The outcome of one recorded session under some options."""

    session: Session | None
    """The session with its forest; None where no request opened one."""
    turns: list[JsonObject]
    """What became of each request, in order."""

    @property
    def num_roots(self) -> int:
        nodes = [] if self.session is None else self.session.forest.nodes
        return sum(node.parent is not None and node.parent.kind == "root" for node in nodes)

    @property
    def num_leaves(self) -> int:
        any_turn = self.session is not None and any(node.kind == "response" for node in self.session.forest.nodes)
        return len(exported_leaves(self.session.forest, "leaves")) if self.session is not None and any_turn else 0

    @property
    def linear(self) -> bool:
        return self.num_roots == self.num_leaves == 1 and all(turn["http_status"] == 200 for turn in self.turns)


async def replay_recording(config: RunConfig, path: Path) -> JsonObject:
    """What became of each recorded session, and under `linear` whether none would fork or be refused.

    Raises ConfigError for a broken file.
    """
    validate(config, "serve")
    recording = read_recording(path)
    found: list[JsonObject] = []
    codec = await asyncio.to_thread(load_codec, config)
    for name, requests in recording.sessions.items():
        answers = answers_of(requests)
        first = await _replay(config, codec, requests, answers)
        remedies: list[str] = []
        if not first.linear:
            tried = list(_variants(config, answers))
            for flags, changes in tried:
                if (await _replay(replace(config, **changes), codec, requests, answers)).linear:
                    remedies.append(flags)
            if not remedies and len(tried) > 1:
                every = await _replay(replace(config, **_merged(tried)), codec, requests, answers)
                remedies = [" ".join(flags for flags, _ in tried)] if every.linear else []
        found.append(
            {
                "session": name,
                "linear": first.linear,
                "num_roots": first.num_roots,
                "num_leaves": first.num_leaves,
                "requests": first.turns,
                "linear_with": remedies,
                "client_settings": _client_settings(first, requests, remedies),
            }
        )
    return {
        "file": str(path),
        "num_other_requests": recording.num_others,
        "sessions": found,
        "linear": all(session["linear"] for session in found),
    }


def _variants(config: RunConfig, answers: Sequence[Message | None]) -> Iterator[tuple[str, dict[str, object]]]:
    """Options that may help, each alone: the flags that set them, and their values."""
    in_force = {profile.name for profile in parse_profiles(config.agentic_profiles)}
    for name in PROFILES:
        if name not in in_force:
            yield f"--agentic-profiles {name}", {"agentic_profiles": [*sorted(in_force), name]}
    if config.agentic_echo_match == "exact":
        yield "--agentic-echo-match lenient", {"agentic_echo_match": "lenient"}
    said = [answer for answer in answers if answer is not None]
    if config.agentic_tool_call_parser == NONE and any(answer.tool_calls for answer in said):
        yield "--agentic-tool-call-parser auto", {"agentic_tool_call_parser": "auto"}
    if config.agentic_reasoning_parser == NONE and any(answer.reasoning for answer in said):
        yield "--agentic-reasoning-parser auto", {"agentic_reasoning_parser": "auto"}


def _merged(tried: Sequence[tuple[str, dict[str, object]]]) -> dict[str, object]:
    """All variants at once."""
    values = {name: value for _, changes in tried for name, value in changes.items()}
    return values | {name: [AUTO] for name in values if name == "agentic_profiles"}


def _client_settings(first: Replayed, requests: Sequence[RecordedRequest], remedies: Sequence[str]) -> list[str]:
    """Settings of the client itself that may help, where the session is not linear by itself."""
    agents = " ".join(request.headers.get("user-agent", "").lower() for request in requests)
    billed = PROFILES["claude-code-billing@1"].marker.encode()
    if any(billed in request.body[: 1 << 16] for request in requests):
        agents += " claude-code"
    noisy = any(kind.startswith(REPAIR_PREFIX) for turn in first.turns for kind in turn["repairs"])
    if first.linear and not noisy:
        return []
    return [words for names, words in _CLIENTS if any(name in agents for name in names)]


async def _replay(
    config: RunConfig, codec: TurnCodec, requests: Sequence[RecordedRequest], answers: Sequence[Message | None]
) -> Replayed:
    """Send every request of one session, each after the engine was given the recorded answer."""
    parser = generic_parser(
        reasoning=config.agentic_reasoning_parser != NONE, tool_calls=config.agentic_tool_call_parser != NONE
    )
    opened: list[Session] = []
    turns: list[JsonObject] = []
    ids: dict[str, str] = {}
    items = items_of(requests)
    opening = codec.decode(_opening(codec))
    async with _gateway(config, codec, parser, opened) as (engine, server):
        for request, answer in zip(requests, answers, strict=True):
            said, faithful = (UNKNOWN_ANSWER, True) if answer is None else spoken(answer, parser, opening)
            engine.rewrite([ScriptLine(text=said)])
            body = _body(request, ids, items)
            status, error = await asyncio.to_thread(_post, server.base_url, request, body)
            record = opened[0].requests[-1]
            turns.append(
                {
                    "line": request.line,
                    "path": request.route,
                    "match": record.match,
                    "repairs": record.repairs,
                    "difference": record.difference,
                    "http_status": status,
                    "error": error,
                    "answer": "unknown" if answer is None else "as recorded" if faithful else "not as recorded",
                }
            )
            if answer is not None and record.node_id is not None:
                given = opened[0].forest.nodes[record.node_id].messages[0].tool_calls
                ids |= {old.id: new.id for old, new in zip(answer.tool_calls, given, strict=False) if old.id}
    return Replayed(session=opened[0] if opened else None, turns=turns)


def _opening(codec: TurnCodec) -> list[int]:
    message = Message(role="user", content="hello")
    return codec.encode_root((message,), Conversation(template_kwargs={})).opening_ids


def _body(request: RecordedRequest, ids: dict[str, str], items: dict[str, JsonObject]) -> bytes:
    try:
        return json.dumps(as_sent_here(request, ids, items)).encode()
    except (ValueError, RecursionError):
        return request.body  # not JSON: the gateway reports it


@asynccontextmanager
async def _gateway(
    config: RunConfig, codec: TurnCodec, parser: TurnParser, opened: list[Session]
) -> AsyncIterator[tuple[ScriptedEngine, GatewayServer]]:
    clock = SystemClock()
    engine = ScriptedEngine(
        [ScriptLine(text=UNKNOWN_ANSWER)],
        codec=codec,
        clock=clock,
        max_context_len=config.rollout_max_context_len or _ROOM,
    )
    with tempfile.TemporaryDirectory(prefix="silva-replay-") as folder:
        turns = TurnService(
            engine=engine,
            codec=codec,
            parser=parser,
            clock=clock,
            options=config,
            media=MediaStore(Path(folder)),
        )
        leases = Leases(engine)

        def on_open(session: Session) -> None:
            opened.append(session)
            leases.grant(session)

        registry = SessionRegistry(engine, clock, open_sessions=True, on_open=on_open)
        server = GatewayServer(GatewayApp(registry, turns, clock, GatewayOptions()), GatewayOptions())
        await server.start()
        try:
            yield engine, server
        finally:
            await registry.close()
            await server.close()
            turns.close()


def _post(base_url: str, request: RecordedRequest, body: bytes) -> tuple[int, str | None]:
    """The status of one request, and the message of a refusal."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 0, timeout=600)
    try:
        headers = {"authorization": "Bearer replay", "content-type": "application/json"}
        headers |= {name: quote(request.headers[name]) for name in RETRY_HEADERS if name in request.headers}
        connection.request("POST", f"{url.path}/v1/{request.route}", body, headers)
        reply = connection.getresponse()
        text = reply.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if reply.status == 200:
        return 200, None
    try:
        return reply.status, str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.status, text[:400]
