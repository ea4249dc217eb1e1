-- breaking: yes
-- A relay of an older version changes a filter without telling those who run: their settlements would pass over what the new one
-- wants.

-- The number of the definition (filter, on_dead, hold, retry, processing_timeout), raised by every change of it; and by which filters
-- events were judged before, with what each lane had settled when they ended: JSON, oldest first.
alter table @schema@.subscription
    add column definition bigint not null default 1,
    add column former_filters text not null default '[]';
