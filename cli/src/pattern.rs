//! Patterns that name leaves.

use std::convert::Infallible;
use std::str::FromStr;

/// A pattern for fqns: `*` stands for any text; a pattern without one also names all leaves below it.
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
    /// Whether a leaf is named.
    pub(crate) fn matches(&self, fqn: &str) -> bool {
        let Some((first, rest)) = self.0.split_once('*') else {
            let below = fqn.strip_prefix(&self.0);
            return below.is_some_and(|below| below.is_empty() || below.starts_with('.'));
        };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        let Some(mut open) = fqn.strip_prefix(first).and_then(|open| open.strip_suffix(last))
        else {
            return false;
        };
        // What comes first is best taken first: more is left for the others.
        middle.split('*').all(|part| match open.split_once(part) {
            Some((_, behind)) => {
                open = behind;
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
    fn patterns_name_leaves() {
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
