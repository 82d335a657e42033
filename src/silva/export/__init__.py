"""What a session leaves behind: its output becomes contexts, and recorded clients become sessions.

Consumes a session's forest and the raw output of its agent; produces `ExportRecord`s and, token by token, samples. The
other half reads recordings of real clients for `silva check --replay`.

Invariant: a record names a committed state or the session fails with the first difference; nothing is guessed silently.

Start with `exporter.py`; `session_export.py` applies it to a session, `recordings.py` and
`script_of.py` replay clients.
"""
