//! Messages without the whole of long names.

use std::borrow::Cow;

/// Maximum length of a name in a message, in characters. A longer one is abridged.
const MAX_NAME_CHARS: usize = 200;

/// Maximum length of a message, in characters. A longer one is abridged.
const MAX_MESSAGE_CHARS: usize = 2000;

/// Abridges the long names in a message, and the message itself if it is still long.
///
/// A name has at most 200 characters in the result and a message at most 2000. From a longer one, the middle is cut
/// out, and its length is added: `aaaa…zzzz (100000 characters)`. A name ends at white space and at a quote.
///
/// # Examples
///
/// ```
/// let message = format!("no leaf `{}`", "a".repeat(100_000));
/// let short = tssd_format::abridge(message);
/// assert!(short.starts_with("no leaf `aaaa") && short.ends_with("aaaa (100000 characters)`"));
/// ```
pub fn abridge(message: impl Into<String>) -> String {
    let message = message.into();
    if message.len() <= MAX_NAME_CHARS {
        return message;
    }
    let is_end = |char: char| char.is_whitespace() || matches!(char, '`' | '"' | '\'');
    let mut short = String::new();
    for part in message.split_inclusive(is_end) {
        let name = part.trim_end_matches(is_end);
        short.push_str(&abridge_name(name));
        short.push_str(&part[name.len()..]);
    }
    cut_middle(&short, MAX_MESSAGE_CHARS, 1400, 500).unwrap_or(short)
}

/// Abridges a name of more than 200 characters, as [`abridge`] does. White space does not end the name.
pub fn abridge_name(name: &str) -> Cow<'_, str> {
    cut_middle(name, MAX_NAME_CHARS, 90, 90).map_or(Cow::Borrowed(name), Cow::Owned)
}

/// Cuts all but `head` and `tail` characters out of a text of more than `max` characters.
fn cut_middle(text: &str, max: usize, head: usize, tail: usize) -> Option<String> {
    let count = if text.len() > max { text.chars().count() } else { 0 };
    if count <= max {
        return None;
    }
    let (head_end, _) = text.char_indices().nth(head)?;
    let (tail_start, _) = text.char_indices().nth(count - tail)?;
    let (head, tail) = (&text[..head_end], &text[tail_start..]);
    Some(format!("{head}…{tail} ({count} characters)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_up_to_200_characters_stay_whole() {
        let name = "ä".repeat(200);
        assert_eq!(abridge_name(&name), name);
        let message = format!("no leaf `{name}`, `{name}`");
        assert_eq!(abridge(message.as_str()), message);
    }

    #[test]
    fn middle_of_a_long_name_is_cut_out() {
        let end = "ä".repeat(90);
        let short = format!("{end}…{end} (201 characters)");
        assert_eq!(abridge_name(&"ä".repeat(201)), short);
        let message = abridge(format!("no leaf `{}` in 'file'", "ä".repeat(201)));
        assert_eq!(message, format!("no leaf `{short}` in 'file'"));
        assert_eq!(abridge(message.as_str()), message);
    }

    #[test]
    fn message_has_at_most_2000_characters() {
        for message in ["a b".repeat(100_000), "`ä`".repeat(100_000), "x".repeat(100_000)] {
            let short = abridge(message.as_str());
            assert!(short.chars().count() <= 2000, "{short}");
            assert_eq!(abridge(short.as_str()), short);
        }
    }
}
