-- breaking: no
-- What is dead costs nothing when a lane is loaded.

-- Serves the load of a lane: what is not dead, in order of arrival.
create index pillarbox_delivery_alive on pillarbox_delivery (subscription, lane, arrival) where died_at is null;

-- Serves the load of a lane where dead events hold their key back: the first dead one of each key.
create index pillarbox_delivery_dead on pillarbox_delivery (subscription, lane, key, arrival)
where died_at is not null and key is not null;
