select c.*, r.ordinal
from unnest($2::bigint[], $3::bigint[], $4::integer[], $5::boolean[], $6::timestamptz[], $7::boolean[]) with ordinality
    as r (subscription, first, rows, suspects, since, again, ordinal)
cross join lateral claim_deliveries(
    r.subscription, $1::integer, r.first, r.rows, r.suspects, $8::integer, r.since, r.again, $9::integer, $10::integer
) as c
