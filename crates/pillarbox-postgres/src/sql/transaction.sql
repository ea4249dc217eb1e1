-- Transactional handlers.

-- name: begin
-- For as long as the transaction lasts: how long a statement, and the handler between two, may take; and whose it is. First the server's process, for who has to cancel it.
select
    pg_backend_pid(),
    set_config('statement_timeout', $1, true),
    set_config('idle_in_transaction_session_timeout', $1, true),
    set_config('application_name', $2, true)

-- name: claims
-- Which of these claims are still this instance's. Not locked: whoever takes one away need not wait for the handler, whose
-- transaction then fails when it ends the claim. The owner is compared in a way that no index serves: an instance may have many claims.
select d.position
from @schema@.delivery as d
join unnest($3::bigint[], $4::bigint[]) as c (position, claim) on c.position = d.position and c.claim = d.claim
where d.subscription = $1 and d.owner is not distinct from $2::bigint and d.position = any ($3::bigint[])

-- name: end
-- Ends claims that are still this instance's, in the order in which everybody locks deliveries.
with ours as (
    select d.subscription, d.position, d.key
    from @schema@.delivery as d
    join unnest($3::bigint[], $4::bigint[]) as c (position, claim) on c.position = d.position and c.claim = d.claim
    where d.subscription = $1 and d.owner is not distinct from $2::bigint and d.position = any ($3::bigint[])
    order by d.position
    for update of d
)
delete from @schema@.delivery as d
using ours
where d.subscription = any (array[ours.subscription]) and d.position = ours.position
returning d.key

-- name: promote
select @schema@.promote(array_fill($1::bigint, array[cardinality($2::text[])]), $2)

-- name: cancel
-- Ends the statement of a session, unless the session works on something else by now.
select pg_cancel_backend(pid) from pg_stat_activity where pid = $1 and application_name = $2
