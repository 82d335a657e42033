"""JSON that crosses the border: request bodies, output files and recordings in; replies and errors out.

Consumes raw bytes of strangers; produces canonical messages (`ModelRequest`, `OutputDocument`) and the documents of
replies and errors. Nothing here knows HTTP, so a client in this process reads and writes the same documents.

Invariant: whatever the bytes are, the result is a value or an error that names the path of the offending field.

Start with `formats.py` (one format per protocol), then `chat_format.py` and `history.py`, which keeps an unchanged
history from being read again. `output_document.py` reads what agents write as their result.
"""
