"""The model API over HTTP: routes, credentials, streams, retries that join, and the server.

Consumes HTTP requests; produces exactly one answer for each, and leaves the turn itself to the turn service. The JSON
of the protocols is in `wire`; a dialect adds only header names and the frames of its streams.

Invariant: a turn is committed before the last byte of its reply is sent, and nothing that a client sends causes a 5xx.

Start with `app.py` (routes), then `exchange.py` (one request from credential to last byte), `held.py` (which request
repeats which turn) and `answer.py` (heartbeats and bursts).
"""

from silva.gateway.app import GatewayApp
from silva.gateway.options import GatewayOptions
from silva.gateway.recorder import Recorder
from silva.gateway.server import GatewayServer, require_loopback

__all__ = ["GatewayApp", "GatewayOptions", "GatewayServer", "Recorder", "require_loopback"]
