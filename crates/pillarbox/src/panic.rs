use std::any::Any;

use crate::Failure;

/// What a panic says.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// A handler that panicked has failed with the event.
pub fn handler_panicked(text: &str) -> Failure {
    Failure { kind: "panic", ..Failure::event(format!("the handler panicked: {text}")) }
}

#[cfg(test)]
mod tests {
    use std::panic::{catch_unwind, panic_any};

    use super::*;

    #[test]
    fn a_panic_says_its_text_whichever_way_it_was_given() {
        let said = |panics: fn()| panic_text(&*catch_unwind(panics).unwrap_err()).to_owned();
        assert_eq!(said(|| panic!("as it stands")), "as it stands");
        assert_eq!(said(|| panic_any(String::from("put together"))), "put together");
        assert_eq!(said(|| panic_any(7)), "no message");
    }
}
