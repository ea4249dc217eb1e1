-- The highest position handed out, and a time before it was read. Not `select last_value`: that can be up to 32 ahead of the
-- truth.
select coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0), statement_timestamp()
