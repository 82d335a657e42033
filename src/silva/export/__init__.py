"""What a session leaves behind: its output becomes contexts, and recorded clients become sessions.

Consumes a session's forest and the raw output of its agent; produces `ExportRecord`s and, token by token, samples. The
other half reads recordings of real clients for `silva check --replay`.

Invariant: a record names a committed state or the session fails with the first difference; nothing is guessed silently.

Start with `exporter.py`; `session_export.py` applies it to a session, `recordings.py` and
`script_of.py` replay clients.
"""

from silva.export.exporter import Exporter
from silva.export.options import ExportOptions
from silva.export.recordings import RecordedRequest, read_recording
from silva.export.script_of import answers_of, as_sent_here, generic_parser, items_of, spoken
from silva.export.session_export import end_of, export_session, session_samples

__all__ = [
    "ExportOptions", "Exporter", "RecordedRequest", "answers_of", "as_sent_here", "end_of", "export_session",
    "generic_parser", "items_of", "read_recording", "session_samples", "spoken",
]  # fmt: skip
