"""The forest of a session: every conversation state that was committed, token by token.

Consumes matched requests with what the engine returned (or ids alone, `SessionForest.append_tokens`); produces matches,
placements, training samples, and rows for the store. Pure: no file, no clock, no network.

Invariant: the ids along a path are what the engine read and returned, in order, and mask 1 is only on sampled ids.

Open first: `session_forest` (the picture and the writer) and `node`. Then `state_index` (which state a history leads
to) with `echo` (losses that are forgiven) and `identity` (keys); `lineage` (state to training sample); `records`
(histories that an agent exports) with `record_faults` and `difference` (what differs); `restore` (stored rows to a
forest); `profiles` (noise of system prompts).
"""
