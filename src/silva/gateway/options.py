"""Options of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from silva.types import opt

ResponsesEvents = Literal["full", "minimal"]
"""`full`: what a client would have seen of each item while it grew; `minimal`: each item once, when it is done."""


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Where the model API listens and how it answers."""

    gateway_host: str = opt("gateway", "127.0.0.1", metavar="HOST")
    """Address that the model API listens on."""
    gateway_port: int = opt("gateway", 0, low=0, high=65535, metavar="PORT")
    """Port of the model API; 0 picks a free one."""
    gateway_advertised_url: str | None = opt("gateway", None, metavar="URL")
    """Base URL given to agents that run on other machines (default: the listening address)."""
    agentic_disconnect_grace_s: float = opt("gateway", 30.0, metavar="SECONDS", low=0)
    """Seconds that a turn waits for a retry after its client left; then it ends uncommitted."""
    agentic_sse_data_heartbeat_s: float | None = opt("gateway", None, metavar="SECONDS", above=0)
    """Seconds between heartbeats sent as data, for clients that ignore comments (default: off)."""
    agentic_responses_events: ResponsesEvents = opt("gateway", "full")
    """Events of a Responses stream: the full sequence of each item, or only its output_item.done."""
