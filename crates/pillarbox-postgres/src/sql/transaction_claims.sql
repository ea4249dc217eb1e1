-- Which of these claims are still this instance's. Not locked: whoever takes one away need not wait for the handler, whose
-- transaction then fails when it ends the claim. The owner is compared in a way that no index serves: an instance may have many claims.
select d.position
from @schema@.delivery as d
join unnest($3::bigint[], $4::bigint[]) as c (position, claim) on c.position = d.position and c.claim = d.claim
where d.subscription = $1 and d.owner is not distinct from $2::bigint and d.position = any ($3::bigint[])
