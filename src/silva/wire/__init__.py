"""JSON that crosses the border: request bodies, output files and recordings in; replies and errors out.

Consumes raw bytes of strangers; produces canonical messages (`ModelRequest`, `OutputDocument`) and the documents of
replies and errors. Nothing here knows HTTP, so a client in this process reads and writes the same documents.

Invariant: whatever the bytes are, the result is a value or an error that names the path of the offending field.

Start with `formats.py` (one format per protocol), then `chat_format.py` and `history.py`, which keeps an unchanged
history from being read again. `output_document.py` reads what agents write as their result.
"""

from silva.wire.chat_format import ChatFormat
from silva.wire.chat_input import project_message
from silva.wire.fields import read_conversation
from silva.wire.formats import FORMATS, ApiFormat
from silva.wire.history import HistoryCache
from silva.wire.images import RequestImages
from silva.wire.json_in import read_list, read_value
from silva.wire.messages_format import MessagesFormat
from silva.wire.messages_input import project_anthropic_message
from silva.wire.model_request import ModelRequest
from silva.wire.output_document import OutputDocument, OutputRecord, output_invalid, parse_output, record_invalid
from silva.wire.recording_head import KEPT_HEADERS, RETRY_HEADERS, route_of
from silva.wire.responses_format import ResponsesFormat, ResponsesOptions
from silva.wire.responses_input import InputHistory

__all__ = [
    "FORMATS", "KEPT_HEADERS", "RETRY_HEADERS", "ApiFormat", "ChatFormat", "HistoryCache", "InputHistory",
    "MessagesFormat", "ModelRequest", "OutputDocument", "OutputRecord", "RequestImages", "ResponsesFormat",
    "ResponsesOptions", "output_invalid", "parse_output", "project_anthropic_message", "project_message",
    "read_conversation", "read_list", "read_value", "record_invalid", "route_of",
]  # fmt: skip
