/// Truncates a text to at most `length` characters. A truncated text ends with "…".
pub(crate) fn truncate(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.into();
    }
    let start: String = text.chars().take(length - 1).collect();
    format!("{}…", start.trim_end())
}

#[cfg(test)]
mod tests {
    use super::truncate;

    #[test]
    fn long_text_is_truncated() {
        assert_eq!(truncate("abc", 3), "abc");
        assert_eq!(truncate("ab cd", 4), "ab…");
    }
}
