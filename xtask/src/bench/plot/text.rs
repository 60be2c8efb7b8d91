/// At most this many characters.
pub(crate) fn short(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.into();
    }
    let start: String = text.chars().take(length - 1).collect();
    format!("{}…", start.trim_end())
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn what_is_too_long_is_cut() {
        assert_eq!(short("abc", 3), "abc");
        assert_eq!(short("ab cd", 4), "ab…");
    }
}
