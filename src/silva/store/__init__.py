"""What a run leaves behind: the run ledger (SQLite), dumps, images, metrics, and the readers of all of these.

Consumes prompts, groups and sessions as they start and end. Produces RUN_DIR/run.db, one dump file per rollout step,
media files and metrics.jsonl; and, read back, counts, documents for `silva show`, stored sessions and samples.

Invariant: one process writes, through one thread, in the order of the calls. A session's rows appear together or not
at all, and every sample is proven to be what its lineage of nodes says before it is written.

Open `ledger.py` first (the writer), then `schema.sql` (the tables) and `queries.py` (the readers).
"""
