create table if not exists @table@ (
    id uuid primary key,
    -- The order of arrival. A number is drawn before the commit, so a lower one can appear later: read up to @end@() only.
    stored bigint generated always as identity unique,
    stored_at timestamptz not null default now(),
    source text not null,
    topic text not null,
    type text not null,
    key text,
    -- The place in the log that it comes from, within one source.
    sequence bigint not null,
    -- The version within a journal stream, whose name is the key.
    stream_version bigint,
    time timestamptz not null,
    content_type text,
    -- The payload: JSON as it was published, byte for byte, or bytes, or neither.
    data json,
    data_bytes bytea,
    headers jsonb not null
);

-- Who has appended last for a lane of a subscription; one that was replaced meanwhile finds a higher row and appends nothing.
create table if not exists @fence@ (
    log_id uuid not null,
    subscription text not null,
    lane integer not null,
    incarnation bigint not null,
    subscription_id bigint not null,
    epoch bigint not null,
    primary key (log_id, subscription, lane)
);

-- How far the table can be read in order of arrival: nothing up to there is still to appear. It waits for the appends that are
-- under way, which takes milliseconds, and new ones wait as long.
create or replace function @end@() returns bigint language plpgsql set lock_timeout = '1s' as $$
begin
    perform pg_advisory_xact_lock(hashtextextended('pillarbox', '@table@'::regclass::bigint));
    return (select coalesce(max(stored), 0) from @table@);
end
$$;
