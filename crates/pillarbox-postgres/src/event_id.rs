use std::sync::atomic::{AtomicI64, Ordering};

use pillarbox::{ErrorKind, Position, Timestamp};
use tokio_postgres::GenericClient;
use uuid::Uuid;

use crate::error::{Db, DbError};

/// The bits of an id that say its position: all of its second half but the two that every uuid has.
const POSITION_BITS: u64 = (1 << 62) - 1;

/// The last millisecond that an id can say.
const LAST_MS: i64 = 253_402_300_799_999;

/// The id of an event that brought none, as the function `event_id` of the schema makes it: of version 7, from the time and the position.
/// `salt` tells the ids of one log from those of others.
fn event_id(salt: i64, position: Position, created_at: Timestamp) -> Uuid {
    let time = created_at.0.clamp(0, LAST_MS) as u64;
    let place = position.wrapping_add(salt) as u64 & POSITION_BITS;
    Uuid::from_u64_pair(time << 16 | 0x7000, place | 1 << 63)
}

/// The salt of a log's ids, once it was looked at.
#[derive(Debug)]
pub(crate) struct IdSalt(AtomicI64);

/// No log has it: salts are not negative.
const UNKNOWN: i64 = -1;

impl Default for IdSalt {
    fn default() -> Self {
        IdSalt(AtomicI64::new(UNKNOWN))
    }
}

impl IdSalt {
    /// Reads it. The schema's function has it too: where the two differ, `publish()` would tell other ids than a relay delivers.
    pub(crate) async fn look(&self, client: &impl GenericClient) -> Db<()> {
        let row = client.query_one(sql!(meta, "id_salt"), &[]).await?;
        let (salt, first): (i64, Uuid) = (row.try_get("id_salt")?, row.try_get("first_id")?);
        if first != event_id(salt, 1, Timestamp(0)) {
            return Err(DbError::own(
                ErrorKind::Invalid,
                "the function event_id makes other ids than meta.id_salt says: one of them was changed, or copied without the \
                 other; as the owner of the log, and while no relay runs, run `select set_id_salt(N)` in its schema with the \
                 number of the log that the events come from",
            ));
        }
        self.0.store(salt, Ordering::Relaxed);
        Ok(())
    }

    /// The id of an event that brought none.
    pub(crate) fn id(&self, position: Position, created_at: Timestamp) -> Db<Uuid> {
        match self.0.load(Ordering::Relaxed) {
            UNKNOWN => Err(DbError::own(ErrorKind::Fatal, "the log was not looked at")),
            salt => Ok(event_id(salt, position, created_at)),
        }
    }
}

/// What an id says of a position, salted.
pub(crate) fn salted_position(id: Uuid) -> i64 {
    (id.as_u64_pair().1 & POSITION_BITS) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_says_its_time_and_its_position_in_order() {
        let salt = (1 << 61) - 1;
        let id = event_id(salt, 42, Timestamp(1_700_000_000_123));
        assert_eq!((id.get_version_num(), id.get_variant()), (7, uuid::Variant::RFC4122));
        assert_eq!(id.get_timestamp().unwrap().to_unix(), (1_700_000_000, 123_000_000));
        assert_eq!(salted_position(id) - salt, 42);
        assert!(id < event_id(salt, 43, Timestamp(1_700_000_000_123)));
        assert_ne!(id, event_id(salt - 1, 42, Timestamp(1_700_000_000_123)));
    }
}
