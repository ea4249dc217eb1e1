use std::fmt;
use std::str::FromStr;

use crate::{Error, ErrorKind, Position, RangeSet, Result};

/// The place at which a reader of the log continues later. Opaque for users: store it whole, and do not compare tokens.
///
/// A bare position is not sufficient, because an event with a lower position may become visible later. So a token
/// contains the incarnation of the log, the floor up to which everything was seen, and what was seen above it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResumeToken {
    /// The incarnation that the positions belong to.
    pub incarnation: i64,
    /// The position up to which everything was seen, or can never appear.
    pub floor: Position,
    /// The positions seen above the floor.
    pub seen: RangeSet,
}

impl ResumeToken {
    /// A token with nothing seen above `floor`.
    pub fn new(incarnation: i64, floor: Position) -> Self {
        ResumeToken { incarnation, floor, seen: RangeSet::new() }
    }

    /// Whether the event at `position` was seen before.
    pub fn seen(&self, position: Position) -> bool {
        position <= self.floor || self.seen.contains(position)
    }

    /// Marks `position` as seen.
    pub fn mark(&mut self, position: Position) {
        if position > self.floor {
            self.seen.insert(position);
            self.absorb();
        }
    }

    /// Records that nothing more can appear at or below `floor`.
    pub fn raise_floor(&mut self, floor: Position) {
        self.floor = self.floor.max(floor);
        self.absorb();
    }

    fn absorb(&mut self) {
        self.seen.remove_range(0, self.floor);
        let next = self.floor.checked_add(1);
        let Some(first) = self.seen.iter().next().filter(|first| Some(*first.start()) == next) else { return };
        self.floor = *first.end();
        self.seen.remove_range(0, self.floor);
    }
}

impl fmt::Display for ResumeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.incarnation, self.floor, self.seen)
    }
}

impl FromStr for ResumeToken {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = || {
            let message = format!("'{text}' is not a resume token; use one that `pillarbox tail` printed");
            Error::new(ErrorKind::Invalid, message)
        };
        let mut parts = text.trim().splitn(3, ':');
        let (Some(incarnation), Some(floor), Some(seen)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(invalid());
        };
        let incarnation = incarnation.parse().map_err(|_| invalid())?;
        let floor = floor.parse().ok().filter(|floor| *floor >= 0).ok_or_else(invalid)?;
        let mut token = ResumeToken { incarnation, floor, seen: seen.parse().map_err(|_| invalid())? };
        // The highest position of all is nobody's, so that there is always one above what was seen.
        if token.floor == Position::MAX || token.seen.last() == Some(Position::MAX) {
            return Err(invalid());
        }
        token.absorb();
        Ok(token)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn remembers_exactly_what_was_marked(marks in prop::collection::vec(1i64..60, 0..60), floor in 0i64..30) {
            let mut token = ResumeToken::new(3, 0);
            marks.iter().for_each(|position| token.mark(*position));
            token.raise_floor(floor);
            let back: ResumeToken = token.to_string().parse().unwrap();
            prop_assert_eq!(&back, &token);
            for position in 1..80 {
                prop_assert_eq!(back.seen(position), position <= floor || marks.contains(&position), "{}", position);
            }
        }
    }

    #[test]
    fn a_late_event_below_what_was_seen_is_not_seen() {
        let mut token = ResumeToken::new(1, 0);
        [1, 2, 4].into_iter().for_each(|position| token.mark(position));
        assert_eq!(token.to_string(), "1:2:4");
        assert!(!token.seen(3));
        token.mark(3);
        assert_eq!(token.to_string(), "1:4:");
    }

    #[test]
    fn refuses_what_is_no_token() {
        for text in ["", "5", "1:2", "a:2:", "1:b:", "1:2:x", "1:-2:"] {
            assert!(text.parse::<ResumeToken>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_highest_positions_do_not_overflow() {
        const MAX: Position = Position::MAX;
        for text in [format!("1:{MAX}:"), format!("1:2:{MAX}"), format!("1:2:4-{MAX}"), format!("1:2:9{MAX}")] {
            assert!(text.parse::<ResumeToken>().is_err(), "{text}");
        }
        let mut token: ResumeToken = format!("1:2:4-{}", MAX - 1).parse().unwrap();
        token.mark(3);
        token.mark(MAX);
        token.raise_floor(MAX);
        assert_eq!((token.floor, token.seen.is_empty()), (MAX, true));
    }
}
