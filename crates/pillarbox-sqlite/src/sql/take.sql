-- An owner that was seen to stand still at a beat, and has beaten since, lives.
update pillarbox_cursor
set owner = ?4, epoch = epoch + 1, takeovers = takeovers + (owner is not null and owner <> ?4)
where subscription = ?1 and lane = ?2 and epoch = ?3
    and not exists (select 1 from pillarbox_instance where id = pillarbox_cursor.owner and beat <> ?5)
returning epoch
