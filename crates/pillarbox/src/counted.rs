use std::fmt::Display;

/// A count with its noun, in the singular for one: "1 event", "3 events", "2 deliveries".
pub fn counted<N: Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    match noun.strip_suffix('y') {
        _ if count == N::from(1) => format!("1 {noun}"),
        Some(stem) if !stem.ends_with(['a', 'e', 'o', 'u']) => format!("{count} {stem}ies"),
        _ => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_the_singular() {
        assert_eq!([0u64, 1, 2].map(|count| counted(count, "event")), ["0 events", "1 event", "2 events"]);
        assert_eq!(
            [0i64, 1, 2].map(|count| counted(count, "delivery")),
            ["0 deliveries", "1 delivery", "2 deliveries"]
        );
        assert_eq!([1usize, 2].map(|count| counted(count, "key")), ["1 key", "2 keys"]);
    }
}
