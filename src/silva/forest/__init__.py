"""The forest of a session: every conversation state that was committed, token by token.

Consumes matched requests with what the engine returned (or ids alone, `SessionForest.append_tokens`); produces matches,
placements, training samples, and rows for the store. Pure: no file, no clock, no network.

Invariant: the ids along a path are what the engine read and returned, in order, and mask 1 is only on sampled ids.

Open first: `session_forest` (the picture and the writer) and `node`. Then `state_index` (which state a history leads
to) with `echo` (losses that are forgiven) and `identity` (keys); `lineage` (state to training sample); `records`
(histories that an agent exports) with `record_faults` and `difference` (what differs); `restore` (stored rows to a
forest); `profiles` (noise of system prompts).
"""

from silva.forest.difference import first_difference
from silva.forest.echo import MessageAt, MessagesBetween
from silva.forest.identity import canonical_tool, is_object_text, message_digest, root_key
from silva.forest.joined_lineage import join_lineage
from silva.forest.lineage import ExportMode, build_samples, exported_leaves, node_rows
from silva.forest.node import Node
from silva.forest.options import MatchOptions
from silva.forest.placement import Match, Placement, Response
from silva.forest.profiles import AUTO, NONE, PROFILES, REPAIR_PREFIX, Canonicaliser, linear_under, parse_profiles
from silva.forest.record_faults import RecordHistory, why_unmatched
from silva.forest.records import Candidate, Choice, ToldHistories, choose
from silva.forest.restore import restore_forest
from silva.forest.session_forest import SessionForest

__all__ = [
    "AUTO", "NONE", "PROFILES", "REPAIR_PREFIX", "Candidate", "Canonicaliser", "Choice", "ExportMode", "Match",
    "MatchOptions", "MessageAt", "MessagesBetween", "Node", "Placement", "RecordHistory", "Response", "SessionForest",
    "ToldHistories", "build_samples", "canonical_tool", "choose", "exported_leaves",
    "first_difference", "is_object_text", "join_lineage", "linear_under", "message_digest", "node_rows",
    "parse_profiles", "restore_forest", "root_key", "why_unmatched",
]  # fmt: skip
