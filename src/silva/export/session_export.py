"""A session that ended: its contexts, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from silva.export.exporter import NO_RESPONSE, Exporter
from silva.forest import build_samples
from silva.turns import Session
from silva.types import ExportRecord, RequestRow, Samples, SessionFailure, SharedPrefix


def export_session(exporter: Exporter, session: Session) -> list[ExportRecord]:
    """The contexts of a session that ended, as its output has them. Raises SessionFailure as `Exporter.records`."""
    try:
        return exporter.records(session.forest, session.output or b"", session.mode, f"session {session.session_id}")
    except SessionFailure as failure:
        if failure.reason != NO_RESPONSE:
            raise
        raise SessionFailure(NO_RESPONSE, f"{failure}: {_why_none(session)}") from failure


def session_samples(session: Session, records: Sequence[ExportRecord], shared_prefix: SharedPrefix) -> Samples:
    """The exported contexts of a session, token by token. Slow where there are millions of tokens."""
    return build_samples(
        session.forest,
        records,
        session_id=session.session_id,
        group_id=session.group_id,
        shared_prefix=shared_prefix,
    )


def _why_none(session: Session) -> str:
    """Why a session has no turn: what became of its requests."""
    if not session.requests:
        return (
            "it sent no request under its key; see that it asks RELAX_BASE_URL, with RELAX_SESSION_ID as the key, and "
            "waits for the answer"
        )
    return f"none of its {len(session.requests)} request(s) got one, the last ended with {end_of(session.requests[-1])}"


def end_of(record: RequestRow) -> str:
    """How a request ended, for messages."""
    return " ".join(str(part) for part in (record.http_status, record.error_code) if part is not None) or "no answer"
