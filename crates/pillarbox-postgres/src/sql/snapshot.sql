select
    clock_timestamp() as now, coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) as horizon, log_start, fresh_floor,
    log_id, incarnation, schema_version, current_schema() as schema, pruned_to, retention_keep_ms, recovery_at
from meta
