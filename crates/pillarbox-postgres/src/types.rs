use std::borrow::Cow;
use std::error::Error;

use pillarbox::store::RangeSet;
use pillarbox::{Position, Timestamp};
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use crate::error::{Db, DbError};

type Boxed = Box<dyn Error + Sync + Send>;

/// Microseconds from 1970 to 2000, where PostgreSQL counts from.
const EPOCH_US: i64 = 946_684_800_000_000;

/// A [`Timestamp`] as `timestamptz`. Infinities become the ends of what can be said.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Time(pub(crate) Timestamp);

/// A time before which nothing happens: a part of a millisecond counts as a whole one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DueTime(pub(crate) Timestamp);

impl<'a> FromSql<'a> for DueTime {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Boxed> {
        let us = i64::from_be_bytes(raw.try_into()?);
        Ok(DueTime(Timestamp(us.saturating_add(EPOCH_US + 999).div_euclid(1000))))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

impl<'a> FromSql<'a> for Time {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Boxed> {
        let us = i64::from_be_bytes(raw.try_into()?);
        Ok(Time(Timestamp(us.saturating_add(EPOCH_US).div_euclid(1000))))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

impl ToSql for Time {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Boxed> {
        let us = self.0.0.saturating_mul(1000).saturating_sub(EPOCH_US);
        out.extend_from_slice(&us.to_be_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}

/// Text as it is stored. In a database whose encoding is SQL_ASCII that may be any bytes: what is no character is marked.
#[derive(Debug)]
pub(crate) struct Text<'a>(pub(crate) Cow<'a, str>);

impl<'a> Text<'a> {
    /// The text, if all of it is characters. Two that are not may look the same when they are marked.
    pub(crate) fn whole(self) -> Option<&'a str> {
        match self.0 {
            Cow::Borrowed(text) => Some(text),
            Cow::Owned(_) => None,
        }
    }
}

impl<'a> FromSql<'a> for Text<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Boxed> {
        Ok(Text(String::from_utf8_lossy(raw)))
    }

    fn accepts(ty: &Type) -> bool {
        <&str as FromSql>::accepts(ty)
    }
}

/// The bytes of `json` or `jsonb`, not looked into.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawJson<'a>(pub(crate) &'a [u8]);

impl<'a> FromSql<'a> for RawJson<'a> {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Boxed> {
        // `jsonb` on the wire is a version and the text.
        Ok(RawJson(if *ty == Type::JSONB { raw.get(1..).unwrap_or_default() } else { raw }))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON || *ty == Type::JSONB
    }
}

/// JSON text as `json` or `jsonb`, not looked into.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Json<'a>(pub(crate) &'a str);

impl<'a> FromSql<'a> for Json<'a> {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Boxed> {
        // `jsonb` on the wire is a version and the text.
        let text = if *ty == Type::JSONB { raw.get(1..).unwrap_or_default() } else { raw };
        Ok(Json(std::str::from_utf8(text)?))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON || *ty == Type::JSONB
    }
}

impl ToSql for Json<'_> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Boxed> {
        if *ty == Type::JSONB {
            out.extend_from_slice(&[1]);
        }
        out.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSON || *ty == Type::JSONB
    }

    to_sql_checked!();
}

/// The text of an `int8multirange`; parameters are written `$1::text::int8multirange`.
pub(crate) fn multirange(set: &RangeSet) -> String {
    let ranges: Vec<String> = set.iter().map(|range| format!("[{},{}]", range.start(), range.end())).collect();
    format!("{{{}}}", ranges.join(","))
}

/// The set of a multirange's text, as PostgreSQL prints it: `{[1,5),[7,8)}`.
pub(crate) fn range_set(text: &str) -> Db<RangeSet> {
    let unreadable = || DbError::own(pillarbox::ErrorKind::Fatal, format!("'{text}' is no multirange of positions"));
    let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).ok_or_else(unreadable)?;
    let mut set = RangeSet::new();
    for range in inner.split_terminator(')') {
        let range = range.trim_start_matches(',').strip_prefix('[').ok_or_else(unreadable)?;
        let (low, end) = range.split_once(',').ok_or_else(unreadable)?;
        let number = |text: &str| text.parse::<Position>().map_err(|_| unreadable());
        set.insert_range(number(low)?, number(end)? - 1);
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiranges_come_back_as_they_went() {
        assert_eq!(multirange(&RangeSet::new()), "{}");
        let set: RangeSet = [1..=4, 7..=7].into_iter().collect();
        assert_eq!(multirange(&set), "{[1,4],[7,7]}");
        assert_eq!(range_set("{[1,5),[7,8)}").unwrap(), set);
        assert_eq!(range_set("{}").unwrap(), RangeSet::new());
        assert!(range_set("[1,5)").is_err());
    }
}
