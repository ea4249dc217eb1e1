-- Ends claims of instance $1: `done` deletes, `back` counts no attempt. Which were still its own, and the keys that may have another
-- head now. $9 errors are kept. Written so that each row is looked up by the primary key: the owner is compared in a way that no
-- index serves, and the subscription in one that only a look at the index does. Else some plans compare all ends with all rows.
with ended as (
    select *
    from unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::integer[], $7::timestamptz[], $8::text[])
        with ordinality as e (subscription, position, claim, fate, attempts, due_at, error, ordinal)
), gone as (
    delete from delivery as d
    using ended as e
    where e.fate = 'done' and d.subscription = any (array[e.subscription]) and d.position = e.position
        and d.owner is not distinct from $1::integer and d.claim = e.claim
    returning e.ordinal, d.subscription, d.key
), changed as (
    update delivery as d
    set state = case when e.fate <> 'back' then e.fate when d.attempts > 0 then 'retrying' else 'pending' end,
        attempts = coalesce(e.attempts, d.attempts),
        due_at = coalesce(e.due_at, least(d.due_at, clock_timestamp())),
        ready_at = case when e.fate <> 'dead' then greatest(e.due_at, clock_timestamp()) end,
        died_at = case e.fate when 'dead' then clock_timestamp() end,
        errors = case
            when e.error is null then d.errors
            else (
                select jsonb_agg(kept.error order by kept.number)::text
                from (
                    select a.error, a.number, count(*) over () as count
                    from jsonb_array_elements(d.errors::jsonb || e.error::jsonb) with ordinality as a (error, number)
                ) as kept
                where kept.number > kept.count - $9::bigint
            )
        end,
        owner = null, claim = null, claimed_at = null
    from ended as e
    where e.fate <> 'done' and d.subscription = any (array[e.subscription]) and d.position = e.position
        and d.owner is not distinct from $1 and d.claim = e.claim
    returning e.ordinal, d.subscription, case d.state when 'dead' then d.key end
)
select ordinal, subscription, key from gone
union all
select * from changed
