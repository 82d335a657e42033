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
SharedPrefix = Literal["once", "each"]
"""How often a turn that several contexts of a session share is trained: by the first of them, or by each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionInput:
    """The content of `RELAX_INPUT_JSON`: chat messages, metadata, or both."""

    messages: list[JsonObject] | None = None
    """In Chat form; None where the row has none."""
    metadata: JsonObject | None = None
    """The row's metadata object; None where it has none."""

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
    """One context that a finished session hands to training."""

    name: str | None
    """The context among those of its session; None for an implicit export."""
    node_id: int
    """The response that ends the context."""
    reward: float | None
    """Its reward; None while nothing has given one."""
    metadata: JsonObject = field(default_factory=dict[str, Any])
    """What the agent wrote beside it."""
    helpers: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers that came with the reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseSpan:
    """One response of a lineage."""

    node_id: int
    """The node of the response."""
    start: int
    """Index of its first sampled id in the ids of the lineage."""
    length: int
    """Number of its sampled ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One exported lineage, token by token (T tokens).

    Example: a prompt of two ids and a turn of two sampled ids have `token_ids=[5, 6, 7, 2]`, `loss_mask=[0, 0, 1, 1]`,
    `logprobs=[0.0, 0.0, -0.5, -0.25]`, `prompt_len=2` and `responses=(ResponseSpan(node_id=2, start=2, length=2),)`.
    """

    session_id: str
    """The session that it comes from."""
    group_id: str
    """The group of that session."""
    name: str | None
    """The context; None for an implicit export."""
    node_id: int
    """The response that ends the lineage."""
    prompt_len: int
    """Tokens of the first observation and the first opening."""
    token_ids: list[int]
    """Prompt and responses in one piece, [T]."""
    loss_mask: list[int]
    """1 where the model sampled the token and this sample trains it, [T]. All 0: another context trains every turn."""
    logprobs: list[float]
    """Log-probs of the sampled ids, 0.0 where the mask is 0, [T]."""
    kept_mass: list[float]
    """Probability that top-p and top-k left in play, 1.0 where the mask is 0, [T]."""
    version_spans: tuple[VersionSpan, ...]
    """Weight version of each token, covering all T; -1 for tokens that were not sampled."""
    responses: tuple[ResponseSpan, ...]
    """The turns of the lineage, whether trained here or not."""
    reward: float | None
    """The reward of this context; None before one is given."""
    helpers: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers that came with the reward."""
    credit: float | None = None
    """The one scalar of this context; None before credit. With credit per turn, their mean over its sampled tokens."""
    response_credits: tuple[float, ...] | None = None
    """Credit of each of `responses`, where turns differ; None where all have `credit`."""
    truncated: bool = False
    """The last turn was cut by length."""
    metadata: JsonObject = field(default_factory=dict[str, Any])
    """What the agent or the row gave."""
    images: tuple[str, ...] = ()
    """References to the images of the lineage, in order. The ids hold each as the chat template writes it."""

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
    """Tokens that the engine was given."""
    completion_tokens: int
    """Tokens that it sampled."""
    cached_tokens: int = 0
    """Prompt tokens that were not prefilled again."""
    reasoning_tokens: int = 0
    """Sampled tokens of the reasoning."""


@dataclass(kw_only=True, slots=True)
class RequestRow:
    """What the ledger keeps of one HTTP request. Times are seconds since the session started."""

    request_id: str
    """Unique in the session."""
    protocol: str
    """The dialect of the request."""
    stream: bool
    """Whether the reply is streamed."""
    arrived_s: float
    """When it arrived."""
    match: MatchKind | None = None
    """How it met the forest; None before it was matched."""
    repairs: list[str] = field(default_factory=list[str])
    """Kinds of the repairs that matching made."""
    difference: JsonObject | None = None
    """The first field in which a branch or new root differs; None otherwise."""
    node_id: int | None = None
    """The response that it committed; None where it committed none."""
    http_status: int | None = None
    """Status of the reply; None while it is open."""
    error_code: str | None = None
    """Stable word of the error; None where there was none."""
    finish_reason: str | None = None
    """Why the turn ended; None without one."""
    usage: TokenUsage | None = None
    """Tokens of the turn; None without one."""
    wait_s: float = 0.0
    """Seconds that it waited for the gate."""
    latency_s: float | None = None
    """Seconds from arrival to the end; None while it is open."""
    ignored_fields: list[str] = field(default_factory=list[str])
    """Paths of the fields that were not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRow:
    """One engine call of a turn."""

    request_id: str
    """The turn."""
    attempt: int
    """Number of earlier calls for the same turn."""
    num_input: int
    """Ids that the engine was given."""
    num_output: int
    """Ids that it returned."""
    finish_reason: str
    """Why the call ended; `error` where it failed."""
    weight_version: int | None
    """Version of the last sampled id; None without one."""
    cached_tokens: int
    """Prompt ids that were not prefilled again."""
    started_s: float
    """Start, in seconds since the session started."""
    ended_s: float
    """End, in the same seconds."""
    error: str | None = None
    """What failed; None where nothing did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRow:
    """One forest node as stored and shown. Token lists hold only what the node adds."""

    node_id: int
    """Its place in the forest, from 0."""
    parent_id: int | None
    """The node above; None for a root."""
    state_key: str
    """Key of the state, in hex."""
    kind: Literal["root", "observation", "response"]
    """What the node adds."""
    messages: list[JsonObject]
    """Its own messages in Chat shape; empty for a turn of ids."""
    token_ids: list[int]
    """Its own ids, [T]."""
    loss_mask: list[int]
    """1 on sampled ids, [T]."""
    logprobs: list[float]
    """Log-probs of the sampled ids, 0.0 elsewhere, [T]."""
    kept_mass: list[float]
    """Kept probability of the sampled ids, 1.0 elsewhere, [T]."""
    version_spans: tuple[VersionSpan, ...]
    """Weight versions of the T ids; -1 for those that were not sampled."""
    finish_reason: str | None = None
    """Why a response ended; None for other nodes."""
    num_aborts: int = 0
    """Aborted engine calls of the turn."""
    tools: list[JsonObject] | None = None
    """Tools of a root; None for other nodes."""
    template_kwargs: JsonObject | None = None
    """Template arguments of a root; None for other nodes."""
    told: JsonObject | None = None
    """What the client received of a response, where that differs from `messages`."""
    spellings: list[JsonObject] = field(default_factory=list[JsonObject])
    """Lossy echoes that its request made known: `key` as spelled, `node_id` of the answer, `beyond` and `renames`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRow:
    """Everything that the ledger keeps of a session that ended, written in one transaction."""

    session_id: str
    """Unique in the run."""
    group_id: str
    """Its group."""
    mode: Mode
    """Training or evaluation."""
    status: SessionStatus
    """How it ended."""
    reason: str | None
    """Stable word for a failure; None otherwise."""
    error: str | None
    """The failure in words; None otherwise."""
    reward: float | None
    """Reward of the session; None without one."""
    metadata: JsonObject
    """What the row gave."""
    nodes: list[NodeRow]
    """Its forest."""
    requests: list[RequestRow]
    """Its model requests."""
    attempts: list[AttemptRow]
    """Its engine calls."""
    samples: list[TrainingSample]
    """What it exports."""
    output: bytes | None = None
    """What its agent wrote as its result, unchanged; None where it wrote nothing."""
