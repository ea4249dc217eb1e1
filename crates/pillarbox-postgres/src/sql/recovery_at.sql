-- Not waited for: retention may have it for a while, and the next look is not far.
update meta
set recovery_at = clock_timestamp()
where one in (select one from meta for update skip locked)
