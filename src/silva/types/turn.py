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
    """What a request asks for besides its history. It outlives the body, so it holds none of it."""

    model: str = "model"
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    ignored_fields: tuple[str, ...] = ()
    object_calls: bool = False
    """Calls can only be told with an object of arguments; others are told as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """One sampled token as shown to the client. `data` is its UTF-8, None where it is only a part of a character."""

    text: str
    logprob: float
    data: bytes | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReply:
    """A committed turn, ready to be told. `message` is the new part of the assistant's turn.

    `matched_stop` is the stop string that ended it, where one did.
    """

    request_id: str
    created_s: float
    message: Message
    finish: FinishReason
    usage: TokenUsage
    matched_stop: str | None = None
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiError:
    """An answer that is no turn. `code` is a stable word, `field` the path of the offending value.

    `request_id` says which request it was (empty: one that was not recorded). The rest is told of a stream that failed.
    """

    status: int
    code: str
    message: str
    field: str | None = None
    request_id: str = ""
    model: str = "model"
    created_s: float = 0.0

    @classmethod
    def of(cls, fault: RequestError | EngineFault | StorageFault) -> ApiError:
        """The answer to a request that ended in this fault."""
        if isinstance(fault, RequestError):
            return cls(status=fault.status, code=fault.code, message=str(fault), field=fault.field)
        if isinstance(fault, EngineFault):
            return cls(status=503, code="engine_error", message=f"the inference engine failed: {fault}")
        return cls(status=503, code="storage_failed", message=str(fault))
