-- Fails, and the settlement with it, if a position above the horizon was read; nobody is there to decide it between two statements.
select 1 / (coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) >= $1::bigint)::integer
