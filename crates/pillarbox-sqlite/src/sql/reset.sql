delete from pillarbox_event;
delete from pillarbox_event_kept;
delete from pillarbox_delivery;
delete from pillarbox_recovery;
delete from pillarbox_dead_range;
delete from pillarbox_dedup;
delete from pillarbox_skip;
delete from pillarbox_stream;
