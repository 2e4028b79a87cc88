"""The schema, as numbered migrations. Never edit one that has shipped: add the next."""

from __future__ import annotations

MIGRATIONS: list[str] = [
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE rollouts (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        rollout_id TEXT NOT NULL UNIQUE,
        input TEXT NOT NULL,
        is_train INTEGER NOT NULL,
        config TEXT NOT NULL,
        metadata TEXT NOT NULL,
        run TEXT,
        step INTEGER,
        state TEXT NOT NULL,
        last_attempt_id TEXT,
        outcome TEXT,
        error_message TEXT,
        reward REAL,
        calls INTEGER NOT NULL DEFAULT 0,
        k8s_job_name TEXT,
        version INTEGER NOT NULL DEFAULT 1,
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL
    );
    CREATE INDEX rollouts_by_state ON rollouts (state, seq);
    CREATE INDEX rollouts_by_run ON rollouts (run, step, seq);
    CREATE TABLE terminal (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        rollout_id TEXT NOT NULL UNIQUE,
        run TEXT
    );
    CREATE INDEX terminal_by_run ON terminal (run, seq);
    CREATE TABLE attempts (
        rollout_id TEXT NOT NULL,
        attempt_id TEXT NOT NULL,
        controller_id TEXT,
        phase TEXT NOT NULL,
        outcome TEXT,
        reported TEXT,
        reason TEXT,
        exit_code INTEGER,
        signal INTEGER,
        started_at REAL NOT NULL,
        ended_at REAL,
        lease_seconds REAL,
        lease_expires_at REAL,
        reward REAL,
        calls INTEGER NOT NULL DEFAULT 0,
        delivered INTEGER NOT NULL DEFAULT 0,
        late_writes INTEGER NOT NULL DEFAULT 0,
        log_tail TEXT,
        PRIMARY KEY (rollout_id, attempt_id)
    );
    CREATE INDEX attempts_by_lease ON attempts (lease_expires_at) WHERE ended_at IS NULL;
    CREATE INDEX attempts_by_controller ON attempts (controller_id) WHERE ended_at IS NULL;
    CREATE INDEX attempts_with_late_writes ON attempts (late_writes) WHERE late_writes > 0;
    CREATE TABLE keys (
        hash BLOB PRIMARY KEY,
        kind TEXT NOT NULL,
        rollout_id TEXT NOT NULL,
        attempt_id TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX keys_by_rollout ON keys (rollout_id);
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        rollout_id TEXT NOT NULL,
        attempt_id TEXT NOT NULL,
        event_type TEXT NOT NULL,
        timestamp REAL NOT NULL,
        data TEXT,
        call_id TEXT
    );
    CREATE INDEX events_by_attempt ON events (rollout_id, attempt_id, seq);
    -- A call's prompt is the first base_len ids of (base's prompt + response), then prompt_suffix: the tokens of a
    -- conversation are stored once however many turns it has. Its messages are shared with request_base likewise.
    CREATE TABLE calls (
        call_id TEXT PRIMARY KEY,
        rollout_id TEXT NOT NULL,
        attempt_id TEXT NOT NULL,
        seq INTEGER NOT NULL,
        dialect TEXT NOT NULL,
        base TEXT,
        base_len INTEGER NOT NULL,
        prompt_suffix BLOB NOT NULL,
        response_ids BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        versions BLOB NOT NULL,
        finish_reason TEXT NOT NULL,
        parent TEXT,
        break_reason TEXT,
        break_index INTEGER,
        delivered INTEGER NOT NULL,
        untrainable TEXT,
        reward REAL,
        requested TEXT NOT NULL,
        effective TEXT NOT NULL,
        started_at REAL NOT NULL,
        ended_at REAL NOT NULL,
        engine TEXT,
        model TEXT NOT NULL,
        request_base TEXT,
        request_base_len INTEGER NOT NULL,
        request_suffix BLOB NOT NULL,
        tools BLOB,
        response TEXT,
        fingerprint BLOB NOT NULL
    );
    CREATE INDEX calls_by_attempt ON calls (rollout_id, attempt_id, seq);
    CREATE INDEX calls_untrainable ON calls (untrainable) WHERE untrainable IS NOT NULL;
    CREATE TABLE messages (hash BLOB PRIMARY KEY, body TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE message_uses (
        rollout_id TEXT NOT NULL,
        hash BLOB NOT NULL,
        PRIMARY KEY (rollout_id, hash)
    ) WITHOUT ROWID;
    CREATE INDEX message_uses_by_hash ON message_uses (hash);
    CREATE TABLE models (
        model TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (model, endpoint)
    ) WITHOUT ROWID;
    CREATE TABLE idempotency (
        key TEXT PRIMARY KEY,
        body_hash BLOB NOT NULL,
        answer TEXT NOT NULL,
        created_at REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX idempotency_by_age ON idempotency (created_at);
    """,
    """
    ALTER TABLE calls ADD COLUMN kind TEXT NOT NULL DEFAULT 'main';
    ALTER TABLE calls ADD COLUMN images TEXT;
    ALTER TABLE calls ADD COLUMN routed_experts BLOB;
    ALTER TABLE calls ADD COLUMN routed_format TEXT;
    -- The client's body: a head, then the first raw_base_len hashes of raw_base's, then raw_suffix.
    ALTER TABLE calls ADD COLUMN raw_head BLOB;
    ALTER TABLE calls ADD COLUMN raw_fields TEXT;
    ALTER TABLE calls ADD COLUMN raw_base TEXT;
    ALTER TABLE calls ADD COLUMN raw_base_len INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE calls ADD COLUMN raw_suffix BLOB;
    ALTER TABLE calls ADD COLUMN ordinal INTEGER NOT NULL DEFAULT 0;
    UPDATE calls SET ordinal = seq + 1;
    """,
    """
    CREATE INDEX rollouts_by_age ON rollouts (state, updated_at);
    """,
    """
    ALTER TABLE calls ADD COLUMN gateway TEXT;
    ALTER TABLE calls ADD COLUMN abandoned INTEGER NOT NULL DEFAULT 0;
    """,
    # Model calls among the events are read from `calls`, and a rollout's count of calls is its last attempt's.
    """
    DELETE FROM events WHERE call_id IS NOT NULL;
    """,
    """
    -- Not claimed before: another attempt waits a while.
    ALTER TABLE rollouts ADD COLUMN not_before REAL NOT NULL DEFAULT 0;
    """,
    """
    -- What agents and graders printed, in pieces: each is the bytes from `start` on.
    CREATE TABLE logs (
        rollout_id TEXT NOT NULL,
        attempt_id TEXT NOT NULL,
        part TEXT NOT NULL,
        start INTEGER NOT NULL,
        data BLOB NOT NULL,
        is_last INTEGER NOT NULL,
        PRIMARY KEY (rollout_id, attempt_id, part, start)
    );
    """,
]
