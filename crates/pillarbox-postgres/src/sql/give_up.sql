insert into skip (subscription, position, position_to, reason) values ($1::bigint, $2::bigint, $3::bigint, $4::text)
on conflict (subscription, position) do update set
    position_to = greatest(skip.position_to, excluded.position_to), reason = excluded.reason, at = excluded.at
