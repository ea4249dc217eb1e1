-- Settings of sessions and transactions, and the ends of transactions.

-- name: check_client
set client_connection_check_interval = '2s'

-- name: later_settings
-- What older servers do not know and would refuse. A database that does not check its text sends it as it is. And whether what was asked
-- for has arrived, or was dropped on the way.
select
    current_setting('search_path') as search_path,
    case when current_setting('server_version_num')::integer >= 170000 then set_config('transaction_timeout', '0', false) end,
    case when current_setting('server_encoding') = 'SQL_ASCII' then set_config('client_encoding', 'SQL_ASCII', false) end

-- name: set_name
select set_config('application_name', $1, false)

-- name: limit_idleness
select set_config('idle_session_timeout', $1, false)

-- name: relaxed
set synchronous_commit = off

-- name: durable
set synchronous_commit = on

-- name: reader
set plan_cache_mode = force_generic_plan

-- name: writer
set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off

-- name: claimer
set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off; set enable_bitmapscan = off;
set enable_sort = off; set statement_timeout = '900ms'

-- name: claim_time
-- How long a statement of a claim may take from now on, in milliseconds.
set statement_timeout = @time@

-- name: by_index
set local enable_seqscan = off; set local enable_bitmapscan = off; set local enable_hashjoin = off;
set local enable_mergejoin = off

-- name: in_order
set local enable_sort = off

-- name: sorted
set local enable_sort = on

-- name: unhurried
set local idle_in_transaction_session_timeout = '10s'

-- name: end_patience
set local lock_timeout = '200ms'

-- name: begin
begin

-- name: begin_snapshot
begin isolation level repeatable read read only

-- name: begin_relaxed_snapshot
set synchronous_commit = off; begin isolation level repeatable read read only

-- name: begin_durable
begin; set local synchronous_commit = on

-- name: begin_settlement
begin; set local idle_in_transaction_session_timeout = '10s'

-- name: read_snapshot
set transaction isolation level repeatable read, read only

-- name: commit
commit

-- name: commit_and_unlock
commit; select pg_advisory_unlock_all()

-- name: rollback
rollback

-- name: make_durable
-- Its commit waits until everything before it is flushed. A message of no use to anybody costs no dead row.
select pg_logical_emit_message(true, 'pillarbox', '')
