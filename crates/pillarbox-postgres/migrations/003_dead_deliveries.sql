-- breaking: no
-- What is dead costs nothing when a lane is loaded. `died_at` stands for the state: an index that names the state would make every
-- change of it touch all indexes.

-- Serves the load of a lane: what is not dead, in order of arrival.
create index delivery_alive on @schema@.delivery (subscription, lane, arrival) where not queued and died_at is null;
-- Serves the load of a lane where dead events hold their key back: the first dead one of each key.
create index delivery_dead on @schema@.delivery (subscription, lane, key, arrival)
where not queued and died_at is not null and key is not null;
