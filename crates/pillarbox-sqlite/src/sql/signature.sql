select
    max(
        coalesce((select seq from sqlite_sequence where name = 'pillarbox_event'), 0),
        coalesce((select max(position) from pillarbox_event), 0)
    ),
    (select value from pillarbox_meta where name = 'revision'),
    (select value from pillarbox_meta where name = 'queue_revision')
