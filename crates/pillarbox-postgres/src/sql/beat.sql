update instance
set beat = beat + 1, beat_at = clock_timestamp(), report = $2
where id = $1
returning beat
