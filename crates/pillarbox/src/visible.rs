use std::borrow::Cow;
use std::fmt::Write;

/// Text for one line on a terminal. What a terminal would act on is shown as an escape and does nothing: an event's key, or what a server
/// says, must not clear the screen, change colours, turn the direction of text or begin a line of its own.
pub fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, |text, character| match character {
        '\n' => text.push_str("\\n"),
        '\r' => text.push_str("\\r"),
        '\t' => text.push_str("\\t"),
        // Writing to a string does not fail.
        other => {
            let _ = write!(text, "\\u{{{:x}}}", u32::from(other));
        }
    })
}

/// JSON on one line, with the same characters as JSON escapes: what is read from it stays the same. A raw tab or line break can only be
/// white space between tokens and becomes a space; the others stand in strings alone.
pub fn visible_json(json: &str) -> Cow<'_, str> {
    escaped(json, |text, character| {
        if matches!(character, '\t' | '\n' | '\r') {
            return text.push(' ');
        }
        let mut units = [0; 2];
        for unit in character.encode_utf16(&mut units) {
            let _ = write!(text, "\\u{unit:04x}");
        }
    })
}

fn escaped(text: &str, escape: impl Fn(&mut String, char)) -> Cow<'_, str> {
    // Without a way out of the loop it takes many bytes at a time, and there is hardly ever one of these.
    if !text.bytes().fold(false, |found, byte| found | may_begin_active(byte)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if is_active(character) { escape(&mut out, character) } else { out.push(character) }
    }
    Cow::Owned(out)
}

/// Whether a terminal or a reader of lines acts on the character: C0, DEL, C1, separators of lines, controls of direction.
fn is_active(character: char) -> bool {
    let direction =
        matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    character.is_control() || direction || matches!(character, '\u{2028}' | '\u{2029}')
}

/// Whether the UTF-8 of a character that [`is_active`] can begin with the byte.
fn may_begin_active(byte: u8) -> bool {
    matches!(byte, 0..=0x1f | 0x7f | 0xc2 | 0xd8 | 0xe2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\u{1b}[31m\u{7}\n\r\t\u{7f}\u{9b}2J\u{202e}\u{2066}\u{200f}\u{2028}ü";

    #[test]
    fn nothing_that_a_terminal_acts_on_is_left() {
        let text = visible(HOSTILE);
        assert_eq!(text, r"a\u{1b}[31m\u{7}\n\r\t\u{7f}\u{9b}2J\u{202e}\u{2066}\u{200f}\u{2028}ü");
        assert_eq!(visible(&text), text, "what is escaped stays so");
        assert!(matches!(visible("größe 猫 🐈"), Cow::Borrowed(_)));
    }

    #[test]
    fn every_active_character_is_found_by_its_first_byte() {
        for character in (char::MIN..=char::MAX).filter(|character| is_active(*character)) {
            let text = format!("x{character}");
            assert!(!visible(&text).contains(character), "{character:?}");
        }
    }

    #[test]
    fn json_means_the_same() {
        let json = serde_json::to_string(HOSTILE).unwrap();
        let shown = visible_json(&json);
        assert!(!shown.chars().any(is_active), "{shown}");
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), HOSTILE);
    }

    #[test]
    fn white_space_between_tokens_stays_white_space() {
        assert_eq!(visible_json("{\r\n\t\"a\":\t\"\u{7f}\"\n}"), "{   \"a\": \"\\u007f\" }");
    }
}
