select c.*
from claim_deliveries(
    $2::bigint, $1::integer, $3::bigint, $4::integer, $5::boolean, $8::integer, $6::timestamptz, $7::boolean, $9::integer,
    $10::integer
) as c
