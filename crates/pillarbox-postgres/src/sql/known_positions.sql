-- The highest position that the books or the log know of, and the highest handed out, which is read later.
select
    greatest(
        m.log_start - 1,
        (select max(greatest(c.floor, upper(c.settled) - 1)) from cursor as c),
        (select d.high from dead_range as d order by d.low desc limit 1),
        (select e.position from event as e order by e.position desc limit 1)
    ),
    coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0)
from meta as m
