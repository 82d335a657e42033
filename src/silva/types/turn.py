"""What a model request asks for besides its history, and what comes of it: a reply or an error. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from silva.types.errors import EngineFault, RequestError, StorageFault
from silva.types.generation import FinishReason
from silva.types.messages import Message
from silva.types.rollout import TokenUsage


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOptions:
    """What a request asks for besides its history. It outlives the body, so it keeps nothing of it."""

    model: str = "model"
    """Any name; replies repeat it."""
    stream: bool = False
    """True where the reply is a stream of events."""
    max_tokens: int | None = None
    """Most tokens to sample; None leaves it to the run and the context."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn, besides those of the run."""
    seed: int | None = None
    """Sampling seed; None derives one from the run's."""
    logprobs: bool = False
    """True where the reply has the log-prob of each sampled token."""
    ignored_fields: tuple[str, ...] = ()
    """Names of what the request contains and Silva ignores."""
    object_calls: bool = False
    """True where the protocol needs call arguments to be a JSON object. Other calls are sent as text then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """One sampled token as the client sees it."""

    text: str
    """Its text; empty for the end-of-turn marker."""
    logprob: float
    """Natural log of its probability."""
    data: bytes | None
    """Its UTF-8; None where it is only a part of a character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReply:
    """A committed turn, ready to be sent."""

    request_id: str
    """Unique in the run; reply ids are made of it."""
    created_s: float
    """Unix time of the commit."""
    message: Message
    """The new part of the assistant's turn."""
    finish: FinishReason
    """Why sampling ended."""
    usage: TokenUsage
    """Tokens, each counted once over all attempts."""
    matched_stop: str | None = None
    """The stop string that ended the turn; None where none did."""
    logprobs: Sequence[TokenLogprob] | None = None
    """One per sampled token; None where the request asked for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiError:
    """An answer that is no turn.

    Example: `ApiError(status=400, code="empty_messages", message="messages is empty; ...", field="messages")`.
    """

    status: int
    """HTTP status, also where there is no HTTP."""
    code: str
    """A stable word for machines."""
    message: str
    """What is wrong and what to do, for people."""
    field: str | None = None
    """Path of the offending value; None where there is no single one."""
    request_id: str = ""
    """The request; empty where it has no row."""
    model: str = "model"
    """The model that a failed stream was opened with."""
    created_s: float = 0.0
    """Unix time at which a failed stream was opened."""

    @classmethod
    def of(cls, fault: RequestError | EngineFault | StorageFault) -> ApiError:
        """The answer to a request that ended in this fault."""
        if isinstance(fault, RequestError):
            return cls(status=fault.status, code=fault.code, message=str(fault), field=fault.field)
        if isinstance(fault, EngineFault):
            return cls(status=503, code="engine_error", message=f"the inference engine failed: {fault}")
        return cls(status=503, code="storage_failed", message=str(fault))
