-- breaking: no
-- The journal: streams of events with dense versions. An event of a stream has the stream's name as its key.

drop index pillarbox_event_stream;
-- Serves reading a stream, `requeue` by version, and that no version is written twice.
create unique index pillarbox_event_stream on pillarbox_event (key, stream_version) where stream_version is not null;

-- A stream has one topic, so that a filter of topics wants all of it or nothing.
alter table pillarbox_stream add column topic text not null default 'journal';
delete from pillarbox_stream;
insert into pillarbox_stream (name, version, topic)
select key, max(stream_version), topic from pillarbox_event where stream_version is not null and key is not null group by key;

-- For SQL alone: an insert appends the next version of a stream. Not a trigger of pillarbox_event, which would cost every insert there a third
-- of its time.
create view pillarbox_journal as
select key as stream, stream_version as version, topic, type, payload, content_type, headers, id, position, created_at
from pillarbox_event
where stream_version is not null;

create trigger pillarbox_journal_append instead of insert on pillarbox_journal
begin
    select raise(abort, 'pillarbox: an event of a stream needs stream, version and type; the first version is 1')
    where new.stream is null or instr(new.stream, char(0)) > 0 or new.version is null or new.type is null;
    select raise(abort, 'pillarbox: PB409: the stream is not at the version before this one; roll back, load the stream and decide again')
    where new.version <> 1 + coalesce((select version from pillarbox_stream where name = new.stream), 0);
    select raise(abort, 'pillarbox: the stream has another topic; a stream has one topic')
    from pillarbox_stream
    where name = new.stream and topic <> coalesce(new.topic, 'journal');
    insert into pillarbox_event (topic, key, type, payload, content_type, headers, stream_version)
    select
        coalesce(new.topic, 'journal'), new.stream, new.type, new.payload, new.content_type, coalesce(new.headers, '{}'),
        new.version
    where new.id is null;
    insert into pillarbox_event (id, topic, key, type, payload, content_type, headers, stream_version)
    select
        new.id, coalesce(new.topic, 'journal'), new.stream, new.type, new.payload, new.content_type,
        coalesce(new.headers, '{}'), new.version
    where new.id is not null;
    insert into pillarbox_stream (name, version, topic) values (new.stream, new.version, coalesce(new.topic, 'journal'))
    on conflict (name) do update set version = excluded.version;
end;
