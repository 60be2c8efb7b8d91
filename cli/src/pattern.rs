//! Patterns that select leaves.

use std::convert::Infallible;
use std::str::FromStr;

/// A pattern for fqns.
///
/// `*` matches any text. A pattern without `*` also matches all leaves below the fqn.
#[derive(Clone, Debug)]
pub(crate) struct Pattern(String);

impl FromStr for Pattern {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Pattern {
    /// Returns whether the pattern matches the fqn of a leaf.
    pub(crate) fn matches(&self, fqn: &str) -> bool {
        let Some((first, rest)) = self.0.split_once('*') else {
            let suffix = fqn.strip_prefix(&self.0);
            return suffix.is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('.'));
        };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        let Some(mut unmatched) =
            fqn.strip_prefix(first).and_then(|unmatched| unmatched.strip_suffix(last))
        else {
            return false;
        };
        // Match each part at its first occurrence: this leaves the most text for the later parts.
        middle.split('*').all(|part| match unmatched.split_once(part) {
            Some((_, after)) => {
                unmatched = after;
                true
            }
            None => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn pattern_matches_fqns() {
        for (pattern, fqn, matches) in [
            ("optimizer", "optimizer", true),
            ("optimizer", "optimizer.state.0", true),
            ("optimizer", "optimizers.0", false),
            ("optimizer.*", "optimizer.state.0", true),
            ("optimizer.*", "optimizer", false),
            ("*", "", true),
            ("*.weight", "layers.0.weight", true),
            ("*.weight", "weight", false),
            ("layers.*.bias", "layers.0.mlp.bias", true),
            ("layers.*.bias", "layers.bias", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b*", "xxbxxaxx", false),
            ("a*a", "a", false),
            ("**", "anything", true),
        ] {
            let parsed: Pattern = pattern.parse().unwrap_or_else(|never| match never {});
            assert_eq!(parsed.matches(fqn), matches, "{pattern} on {fqn}");
        }
    }
}
