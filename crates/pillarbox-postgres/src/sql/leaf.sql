-- The tables that the log consists of.

-- name: leaves
-- The leaves in order, each with the time of its first event.
select
    l.name, l.low, l.high, l.emptied,
    (
        select e.created_at
        from event as e
        where e.position >= l.low and e.position < coalesce(l.high, 9223372036854775807)
        order by e.position
        limit 1
    ) as oldest
from leaf as l
order by l.low

-- name: figures
select coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0) as horizon, leaf_size, clock_timestamp() as now
from meta

-- name: size
select pg_relation_size($1::text::regclass)

-- name: read
-- Reads a leaf alone and from end to end, as the table is read when it is attached.
set local max_parallel_workers_per_gather = 0;
set local enable_indexscan = off;
set local enable_indexonlyscan = off;
set local enable_bitmapscan = off;
set local statement_timeout = @timeout@;
select count(position) from event where position >= @low@ and position < @high@

-- name: read_open
-- The same for the open-ended leaf.
set local max_parallel_workers_per_gather = 0;
set local enable_indexscan = off;
set local enable_indexonlyscan = off;
set local enable_bitmapscan = off;
set local statement_timeout = @timeout@;
select count(position) from event where position >= @low@

-- name: log_holders
-- Transactions that have used the log and are not over: nobody gets it for himself before they are.
select virtualtransaction
from pg_locks
where locktype = 'relation'
    and database = (select oid from pg_database where datname = current_database())
    and relation = 'event'::regclass
    and granted
    and pid is distinct from pg_backend_pid()

-- name: empty
-- Takes all events out of a leaf. In one message, as `arrange`: if we are stopped in between, nobody waits for us.
set local lock_timeout = @timeout@;
set local pillarbox.removes = '@removes@';
select empty_leaf('@leaf@')

-- name: arrange
-- Lays leaves with these bounds.
set local lock_timeout = @lock_timeout@;
set local statement_timeout = @timeout@;
select arrange_leaves('{@bounds@}')

-- name: note
update meta
set leaves_due = $1, leaves_due_since = case when $1 is not null then coalesce(leaves_due_since, clock_timestamp()) end
where leaves_due is distinct from $1

-- name: due
select leaves_due, leaves_due_since from meta

-- name: due_for
select extract(epoch from clock_timestamp() - leaves_due_since)::double precision from meta
