select
    clock_timestamp(), coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0), log_start, fresh_floor, log_id,
    incarnation, schema_version, current_schema(), pruned_to, retention_keep_ms, recovery_at
from meta
