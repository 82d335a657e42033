"""What a session takes in and what it yields."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from silva.types.generation import VersionSpan, check_spans
from silva.types.messages import JsonObject

Mode = Literal["train", "eval"]
SessionStatus = Literal["running", "exported", "failed", "cancelled"]
PromptState = Literal["pending", "trained", "delivered", "filtered", "dropped", "stale"]
MatchKind = Literal["append", "branch", "root", "join"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionInput:
    """The content of `RELAX_INPUT_JSON`: chat messages, metadata, or both."""

    messages: list[JsonObject] | None = None
    metadata: JsonObject | None = None

    def __post_init__(self) -> None:
        if self.messages is None and self.metadata is None:
            raise ValueError("a session input needs messages, metadata, or both")

    def to_json(self) -> JsonObject:
        out: JsonObject = {}
        if self.messages is not None:
            out["messages"] = self.messages
        if self.metadata is not None:
            out["metadata"] = self.metadata
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """One context that a finished session hands to training. `name` is None for an implicit export.

    `helpers` are the numbers that came with the reward besides it.
    """

    name: str | None
    node_id: int
    reward: float | None
    metadata: JsonObject = field(default_factory=dict[str, Any])
    helpers: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseSpan:
    """One response of a lineage: `length` sampled ids from `start` in the ids of the lineage."""

    node_id: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One exported lineage, token by token.

    All per-token lists have the length of `token_ids` (T). `loss_mask` is 1 only on sampled ids, `logprobs` and
    `kept_mass` are 0.0 and 1.0 where the mask is 0. It is 0 everywhere in a context whose every turn is trained by
    another one: such a context has its reward and credit, but nothing to train. `version_spans` cover the T tokens;
    version -1 stands for tokens that were not sampled. `prompt_len` counts the first observation plus the first
    opening. `responses` are the turns of the lineage, trained here or not. `credit` is the one scalar that this context
    was given, None until then (where it was given one for each turn: their mean over its sampled tokens). Where a turn
    is trained with another credit, `response_credits` holds that of each of `responses`. `images` refers to the images
    of the lineage, in order; the ids hold each as the chat template writes it, not as a model's processor expands it.
    """

    session_id: str
    group_id: str
    name: str | None
    node_id: int
    prompt_len: int
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    kept_mass: list[float]
    version_spans: tuple[VersionSpan, ...]
    responses: tuple[ResponseSpan, ...]
    reward: float | None
    helpers: dict[str, float] = field(default_factory=dict[str, float])
    credit: float | None = None
    response_credits: tuple[float, ...] | None = None
    truncated: bool = False
    metadata: JsonObject = field(default_factory=dict[str, Any])
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        lengths = (len(self.loss_mask), len(self.logprobs), len(self.kept_mass))
        if any(length != n for length in lengths):
            raise ValueError(
                f"sample {self.session_id}/{self.name}: {n} ids, but mask, logprobs, kept mass are {lengths}"
            )
        check_spans(self.version_spans, n)
        if not 0 < self.prompt_len < n:
            raise ValueError(f"sample {self.session_id}/{self.name}: prompt_len {self.prompt_len} of {n} tokens")
        self._check_responses()
        numbers = [("reward", self.reward), ("credit", self.credit), *self.helpers.items()]
        for label, value in (*numbers, *(("credit of a response", value) for value in self.response_credits or ())):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"sample {self.session_id}/{self.name}: {label} is {value}")

    def _check_responses(self) -> None:
        where = f"sample {self.session_id}/{self.name}"
        if not any(span.length for span in self.responses):
            raise ValueError(f"{where}: no token was sampled")
        outside = list(self.loss_mask)
        for span in self.responses:
            if span.start < 0 or span.length < 0 or span.start + span.length > len(outside):
                raise ValueError(f"{where}: response {span.node_id} lies outside its {len(outside)} tokens")
            outside[span.start : span.start + span.length] = [0] * span.length
        if any(outside):
            raise ValueError(f"{where}: mask 1 outside its responses")
        if self.response_credits is not None and len(self.response_credits) != len(self.responses):
            raise ValueError(f"{where}: {len(self.response_credits)} credits for {len(self.responses)} responses")

    @property
    def place(self) -> str:
        """The session and the context, for messages."""
        return f"session {self.session_id}" + ("" if self.name is None else f", context {self.name}")

    @property
    def num_turns(self) -> int:
        return len(self.responses)

    @property
    def num_trainable(self) -> int:
        return sum(self.loss_mask)

    @property
    def min_version(self) -> int:
        return min(span.version for span in self.version_spans if span.version >= 0)


Samples = tuple[TrainingSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenUsage:
    """Token counts of one turn, each token once over all attempts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(kw_only=True, slots=True)
class RequestRow:
    """What the ledger keeps of one HTTP request. Times are seconds since the session started."""

    request_id: str
    protocol: str
    stream: bool
    arrived_s: float
    match: MatchKind | None = None
    repairs: list[str] = field(default_factory=list[str])
    difference: JsonObject | None = None
    node_id: int | None = None
    http_status: int | None = None
    error_code: str | None = None
    finish_reason: str | None = None
    usage: TokenUsage | None = None
    wait_s: float = 0.0
    latency_s: float | None = None
    ignored_fields: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRow:
    """One engine call of a turn."""

    request_id: str
    attempt: int
    num_input: int
    num_output: int
    finish_reason: str
    weight_version: int | None
    cached_tokens: int
    started_s: float
    ended_s: float
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRow:
    """One forest node as stored and shown. Token lists hold only what the node adds.

    `told` is what the client got of a response where that is another message than the one in `messages`. `spellings`
    are the lossy echoes that its request made known: `key` (of the history as it was spelled), `node_id` (of the answer
    that it stands for), `beyond` (where the answer was left out: the key that the message behind it leads to) and
    `renames` (a client's ids of calls -> those that were given).
    """

    node_id: int
    parent_id: int | None
    state_key: str
    kind: Literal["root", "observation", "response"]
    messages: list[JsonObject]
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    kept_mass: list[float]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str | None = None
    num_aborts: int = 0
    tools: list[JsonObject] | None = None
    template_kwargs: JsonObject | None = None
    told: JsonObject | None = None
    spellings: list[JsonObject] = field(default_factory=list[JsonObject])


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRow:
    """Everything the ledger keeps of a session that ended: written in one transaction.

    `output` is what its agent wrote as its result, as it came; None where it wrote nothing.
    """

    session_id: str
    group_id: str
    mode: Mode
    status: SessionStatus
    reason: str | None
    error: str | None
    reward: float | None
    metadata: JsonObject
    nodes: list[NodeRow]
    requests: list[RequestRow]
    attempts: list[AttemptRow]
    samples: list[TrainingSample]
    output: bytes | None = None
