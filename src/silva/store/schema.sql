-- The run ledger, version 3. One file per run: RUN_DIR/run.db.
--
-- Token lists live in `nodes` only: a node holds what it adds, a sample is a pointer to a node plus what the path cannot
-- say. Array columns are packed little-endian: ids int32, masks uint8, logprobs and kept mass float32 with one entry per
-- id whose mask is 1 (elsewhere they are 0 and 1 by definition). JSON columns hold JSON text.

CREATE TABLE schema_version (version INTEGER NOT NULL);
INSERT INTO schema_version VALUES (3);

-- One use of one dataset row.
CREATE TABLE prompts (
    prompt_id TEXT PRIMARY KEY,
    mode      TEXT NOT NULL CHECK (mode IN ('train', 'eval')),
    dataset   TEXT NOT NULL,
    epoch     INTEGER NOT NULL,
    row       INTEGER NOT NULL,
    position  INTEGER NOT NULL,              -- order of issue within its mode, from 0
    input     TEXT NOT NULL DEFAULT '{}',    -- JSON object: messages and metadata as the agent got them, label
    state     TEXT NOT NULL DEFAULT 'pending'
              CHECK (state IN ('pending', 'trained', 'delivered', 'filtered', 'dropped', 'stale')),
    reason    TEXT CHECK (reason IS NOT NULL OR state IN ('pending', 'trained', 'delivered')),
    train_step INTEGER CHECK ((train_step IS NULL) = (state = 'pending'))   -- step that trained it or gave it up
);
CREATE INDEX prompts_by_state ON prompts (mode, state, reason);

-- One try at running a prompt's sessions.
CREATE TABLE groups (
    group_id   TEXT PRIMARY KEY,
    prompt_id  TEXT NOT NULL REFERENCES prompts,
    mode       TEXT NOT NULL CHECK (mode IN ('train', 'eval')),
    n          INTEGER NOT NULL CHECK (n >= 1),
    start_step INTEGER NOT NULL,             -- rollout step in which its sessions were started
    train_step INTEGER,                      -- step that trained it or gave it up; NULL: neither happened
    attempt    INTEGER NOT NULL CHECK (attempt >= 0),
    step       INTEGER GENERATED ALWAYS AS (coalesce(train_step, start_step)) VIRTUAL,   -- whose accounts it is in
    UNIQUE (prompt_id, attempt, group_id)
);
CREATE INDEX groups_by_step ON groups (step, mode);

CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    group_id   TEXT NOT NULL REFERENCES groups,
    slot       INTEGER NOT NULL CHECK (slot >= 0),
    try_index  INTEGER NOT NULL CHECK (try_index >= 0),
    mode       TEXT NOT NULL CHECK (mode IN ('train', 'eval')),
    status     TEXT NOT NULL DEFAULT 'running' CHECK (status IN ('running', 'exported', 'failed', 'cancelled')),
    reason     TEXT CHECK (reason IS NOT NULL OR status IN ('running', 'exported')),
    error      TEXT,
    reward     REAL,
    metadata   TEXT NOT NULL DEFAULT '{}',   -- JSON object
    output     BLOB,                         -- what the agent wrote as its result, compressed by zlib
    started_s  REAL NOT NULL,                -- wall seconds since the epoch
    ended_s    REAL CHECK ((ended_s IS NULL) = (status = 'running')),
    UNIQUE (group_id, slot, try_index)
);
CREATE INDEX sessions_by_status ON sessions (mode, status, reason);

-- HTTP requests in order of arrival. Times are seconds since the session started.
CREATE TABLE requests (
    session_id     TEXT NOT NULL REFERENCES sessions,
    seq            INTEGER NOT NULL,
    request_id     TEXT NOT NULL,
    protocol       TEXT NOT NULL,
    stream         INTEGER NOT NULL,
    match          TEXT CHECK (match IN ('append', 'branch', 'root', 'join')),
    repairs        TEXT NOT NULL,            -- JSON list
    difference     TEXT,                     -- JSON object
    node_id        INTEGER,
    http_status    INTEGER,
    error_code     TEXT,
    finish_reason  TEXT,
    usage          TEXT,                     -- JSON object
    arrived_s      REAL NOT NULL,
    wait_s         REAL NOT NULL,
    latency_s      REAL,
    ignored_fields TEXT NOT NULL,            -- JSON list
    PRIMARY KEY (session_id, seq)
);

-- Engine calls. Times are seconds since the session started.
CREATE TABLE attempts (
    session_id     TEXT NOT NULL REFERENCES sessions,
    seq            INTEGER NOT NULL,
    request_id     TEXT NOT NULL,
    attempt        INTEGER NOT NULL,
    num_input      INTEGER NOT NULL,
    num_output     INTEGER NOT NULL,
    finish_reason  TEXT NOT NULL,
    weight_version INTEGER,
    cached_tokens  INTEGER NOT NULL,
    started_s      REAL NOT NULL,
    ended_s        REAL NOT NULL,
    error          TEXT,
    PRIMARY KEY (session_id, seq)
);

CREATE TABLE nodes (
    session_id      TEXT NOT NULL REFERENCES sessions,
    node_id         INTEGER NOT NULL,
    parent_id       INTEGER,
    state_key       TEXT NOT NULL,
    kind            TEXT NOT NULL CHECK (kind IN ('root', 'observation', 'response')),
    messages        TEXT NOT NULL,           -- JSON list
    token_ids       BLOB NOT NULL,
    loss_mask       BLOB NOT NULL,
    logprobs        BLOB NOT NULL,
    kept_mass       BLOB NOT NULL,
    version_spans   TEXT NOT NULL,           -- JSON [[start, length, version], ...] over token_ids
    finish_reason   TEXT,
    num_aborts      INTEGER NOT NULL,
    tools           TEXT,                    -- JSON list
    template_kwargs TEXT,                    -- JSON object
    told            TEXT,                    -- JSON message that the client got of a response, where it is another one
    spellings       TEXT,                    -- JSON list: lossy echoes that its request made known; NULL: none
    PRIMARY KEY (session_id, node_id),
    FOREIGN KEY (session_id, parent_id) REFERENCES nodes (session_id, node_id)
);

-- Exported contexts. `masked` lists [start, length] runs of ids that were sampled but do not train in this sample; where
-- these are all of them, the context has nothing to train.
CREATE TABLE samples (
    session_id TEXT NOT NULL,
    seq        INTEGER NOT NULL,
    name       TEXT,
    node_id    INTEGER NOT NULL,
    prompt_len INTEGER NOT NULL,
    masked     TEXT NOT NULL,                -- JSON list
    reward     REAL,
    helpers    TEXT NOT NULL,                -- JSON object of numbers
    credit     REAL,
    response_credits TEXT,                   -- JSON list, one a response of the path; NULL: all have `credit`
    truncated  INTEGER NOT NULL,
    metadata   TEXT NOT NULL,                -- JSON object
    PRIMARY KEY (session_id, seq),
    FOREIGN KEY (session_id, node_id) REFERENCES nodes (session_id, node_id)
);

CREATE TABLE events (
    event_id INTEGER PRIMARY KEY,
    at_s     REAL NOT NULL,                  -- wall seconds since the epoch
    kind     TEXT NOT NULL,
    detail   TEXT NOT NULL                   -- JSON
);
