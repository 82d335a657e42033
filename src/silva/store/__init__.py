"""What a run leaves behind: the run ledger (SQLite), dumps, images, metrics, and the readers of all of these.

Consumes prompts, groups and sessions as they start and end. Produces RUN_DIR/run.db, one dump file per rollout step,
media files and metrics.jsonl; and, read back, counts, documents for `silva show`, stored sessions and samples.

Invariant: one process writes, through one thread, in the order of the calls. A session's rows appear together or not
at all, and every sample is proven to be what its lineage of nodes says before it is written.

Open `ledger.py` first (the writer), then `schema.sql` (the tables) and `queries.py` (the readers).
"""

from silva.store.documents import ContextDoc, NodeDoc, RequestDoc, RunDoc, SessionDoc, show_run, show_session
from silva.store.dump_line import DumpLine
from silva.store.dumps import (
    PLACEHOLDER,
    check_dump_template,
    dump_path,
    session_lines,
    session_rows,
    write_rollout_dump,
)
from silva.store.encode import short_floats, to_json
from silva.store.files import DB_NAME, lock_run, whole_file
from silva.store.ledger import Recovered, RunLedger
from silva.store.loads import RecordedGroup, RecordedSession, read_rollout_dump
from silva.store.media import MEDIA_DIR, MediaStore
from silva.store.metrics import METRICS_NAME, MetricsWriter
from silva.store.queries import (
    Context,
    Counts,
    LedgerCounts,
    accounting,
    accounting_line,
    check_ledgers,
    counts,
    open_run,
    pending_places,
    roots_per_session,
)
from silva.store.step_numbers import engine_busy, gateway_numbers, start_lag
from silva.store.stored import StoredSession, load_session

__all__ = [
    "DB_NAME", "MEDIA_DIR", "METRICS_NAME", "PLACEHOLDER", "Context", "ContextDoc", "Counts", "DumpLine",
    "LedgerCounts", "MediaStore", "MetricsWriter", "NodeDoc", "RecordedGroup", "RecordedSession", "Recovered",
    "RequestDoc", "RunDoc", "RunLedger", "SessionDoc", "StoredSession", "accounting", "accounting_line",
    "check_dump_template", "check_ledgers", "counts", "dump_path", "engine_busy", "gateway_numbers", "load_session",
    "lock_run", "open_run", "pending_places", "read_rollout_dump", "roots_per_session", "session_lines",
    "session_rows", "short_floats", "show_run", "show_session", "start_lag", "to_json", "whole_file",
    "write_rollout_dump",
]  # fmt: skip
