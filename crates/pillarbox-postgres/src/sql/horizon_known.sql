-- The highest position handed out, and the lowest that it can be: that of the last event, or what lies just below the leaves that
-- follow each other without a gap to the open-ended one.
select
    coalesce(pg_sequence_last_value('event_position_seq'::regclass), 0),
    greatest(
        (select e.position from event as e order by e.position desc limit 1),
        (
            select max(l.low) - 1
            from leaf as l
            where not exists (select from leaf as below where below.high = l.low)
        ),
        0
    )
