"""The words that all rooms share: plain data that checks itself when it is made.

Messages (`messages`), what goes to an engine and comes back (`generation`), what a session takes in and yields
(`rollout`), a model request and its reply (`turn`), errors, options, clocks, strict JSON.

Consumes nothing and imports no other room. Invariant: a misaligned sample or result cannot exist, because lengths are
checked on construction.

Open first: `messages`, then `rollout` (`TrainingSample`).
"""

from silva.types.clock import Clock, SystemClock, Timer
from silva.types.errors import (
    AgentExecutionError,
    ConfigError,
    DatasetError,
    EngineFault,
    GroupEnd,
    RequestError,
    RunStopped,
    SessionFailure,
    SilvaError,
    StorageFault,
    TransitionRefused,
    first_silva_error,
    system_reason,
)
from silva.types.generation import (
    LOGPROB_ROUNDING,
    LOWEST_LOGPROB,
    EngineUsage,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Media,
    SamplingParams,
    VersionSpan,
    append_span,
    check_spans,
    join_spans,
)
from silva.types.messages import (
    EMPTY_TOOL_RESULT,
    MEDIA_PREFIX,
    Conversation,
    Image,
    JsonObject,
    Message,
    Part,
    Role,
    ToolCall,
    images_of,
    join_texts,
    part_to_chat,
    text_of,
)
from silva.types.numbers import mean, spread
from silva.types.option import OptionInfo, flag_of, opt, part_of
from silva.types.rollout import (
    AttemptRow,
    ExportRecord,
    MatchKind,
    Mode,
    NodeRow,
    PromptState,
    RequestRow,
    ResponseSpan,
    Samples,
    SessionInput,
    SessionRow,
    SessionStatus,
    SharedPrefix,
    TokenUsage,
    TrainingSample,
)
from silva.types.sample_view import GroupView, OptionsView, SampleView
from silva.types.sampling_options import SamplingOptions
from silva.types.strict_json import JsonFault, TooDeep, finite_number, read_json, read_json_at
from silva.types.text import MAX_SHOWN, SURROGATE, safe_text, shown, shown_field
from silva.types.turn import ApiError, TokenLogprob, TurnOptions, TurnReply
from silva.types.weights import MemoryWeights, WeightSource

__all__ = [
    "EMPTY_TOOL_RESULT", "LOGPROB_ROUNDING", "LOWEST_LOGPROB", "MAX_SHOWN", "MEDIA_PREFIX", "SURROGATE",
    "AgentExecutionError", "ApiError", "AttemptRow", "Clock", "ConfigError", "Conversation", "DatasetError",
    "EngineFault", "EngineUsage", "ExportRecord", "FinishReason", "GenerateRequest", "GenerateResult", "GroupEnd",
    "GroupView", "Image", "JsonFault", "JsonObject", "MatchKind", "Media", "MemoryWeights", "Message", "Mode",
    "NodeRow", "OptionInfo", "OptionsView", "Part", "PromptState", "RequestError", "RequestRow", "ResponseSpan",
    "Role", "RunStopped", "SampleView", "Samples", "SamplingOptions", "SamplingParams", "SessionFailure",
    "SessionInput", "SessionRow", "SessionStatus", "SharedPrefix", "SilvaError", "StorageFault", "SystemClock", "Timer",
    "TokenLogprob", "TokenUsage", "TooDeep", "ToolCall", "TrainingSample", "TransitionRefused", "TurnOptions",
    "TurnReply", "VersionSpan", "WeightSource", "append_span", "check_spans", "finite_number", "first_silva_error",
    "flag_of", "images_of", "join_spans", "join_texts", "mean", "opt", "part_of", "part_to_chat", "read_json",
    "read_json_at", "safe_text", "shown", "shown_field", "spread", "system_reason", "text_of",
]  # fmt: skip
