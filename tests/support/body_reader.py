"""Reading request bodies of one protocol, without a server; and JSON of every shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import strategies as st

from silva.forest.identity import message_digest, root_key
from silva.types.errors import RequestError
from silva.types.messages import Message
from silva.wire.formats import ApiFormat
from silva.wire.history import HistoryCache
from silva.wire.model_request import ModelRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


class BodyReader:
    """Parses bodies as one protocol does, each with an empty history unless one is given."""

    def __init__(self, form: ApiFormat):
        self._form = form

    def parse(self, body: Any, history: HistoryCache | None = None) -> ModelRequest:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._form.parse(data, HistoryCache() if history is None else history)

    def refusal(self, body: Any, history: HistoryCache | None = None) -> RequestError:
        """The error of a body that must be refused."""
        with pytest.raises(RequestError) as caught:
            self.parse(body, history)
        assert 400 <= caught.value.status < 500
        return caught.value

    def read_or_refuse(self, body: Any, history: HistoryCache) -> ModelRequest | None:
        """A request that is the same whenever it is read, or None where the body is refused as a 4xx with words."""
        try:
            request = self.parse(body, history)
        except RequestError as error:
            assert 400 <= error.status < 500 and str(error)
            return None
        assert [message_digest(message) for message in messages_of(request)] == request.digests
        root_key(request.conversation)
        assert self.parse(body, history).digests == request.digests == self.parse(body).digests
        return request


def messages_of(request: ModelRequest) -> tuple[Message, ...]:
    return request.messages_between(0, len(request.digests))
