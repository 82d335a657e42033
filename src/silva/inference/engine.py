"""The Engine line: everything behind it samples tokens, nothing in front of it does."""

from __future__ import annotations

from typing import Literal, Protocol

from silva.types import EngineUsage, GenerateRequest, GenerateResult, WeightSource

ImageSupport = Literal["none", "placed", "any"]
"""none: text only; placed: images for which the chat template has a place; any: also others, shown as a word."""


class Engine(Protocol):
    """Samples token ids for token ids.

    All methods are called on the event loop and never block it. `generate` may be cancelled: the engine then frees the
    request as `abort` would. An abort makes the pending `generate` return its partial ids with finish reason `abort`.
    A fault raises `EngineFault`.
    """

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token."""
        ...

    @property
    def max_context_len(self) -> int:
        """Most tokens, prompt and response together, that one request may hold."""
        ...

    @property
    def image_support(self) -> ImageSupport:
        """Which images a request may bring. Others are refused before they reach the engine."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    async def abort(self, request_id: str) -> None:
        """End one request early. Unknown ids are ignored."""
        ...

    async def load_weights(self, source: WeightSource) -> None:
        """Copy new weights in. Tokens sampled after the return carry the version of the source."""
        ...

    async def close_session(self, session_id: str) -> None:
        """Free what is cached for a session. Unknown ids are ignored."""
        ...

    def usage(self) -> EngineUsage: ...
