update pillarbox_cursor
set owner = ?4, epoch = epoch + 1, takeovers = takeovers + (owner is not null and owner <> ?4)
where subscription = ?1 and lane = ?2 and epoch = ?3
returning epoch
