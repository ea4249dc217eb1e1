-- The highest position handed out. Not `select last_value`: that can be up to 32 ahead of the truth.
select coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0), current_setting('transaction_isolation')
