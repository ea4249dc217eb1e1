-- What a session is pinned to, whatever the database or the role say. A commit that is answered is on the disk.
set default_transaction_isolation = 'read committed';
set default_transaction_read_only = off;
set idle_in_transaction_session_timeout = '10s';
set client_min_messages = warning;
-- The arrays of a batch are large, and a plan of their own would be no better.
set plan_cache_mode = force_generic_plan;
select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') in ('off', 'local');
