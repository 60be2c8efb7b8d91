//! Finding a leaf by its fqn.

use std::collections::BTreeSet;

use crate::error::Result;
use crate::key::{Key, Step};
use crate::number::Int;
use crate::record::kind;
use crate::views::Views;

/// The leaves that an fqn may mean: two at most, as two are one too many.
pub(crate) fn leaves_named(views: &Views<'_>, fqn: &str) -> Result<Vec<usize>> {
    let mut search = FqnSearch { views, fqn, seen: BTreeSet::new(), found: Vec::new() };
    search.descend(0, 0)?;
    Ok(search.found)
}

/// All ways to split an fqn into keys. Each pair of node and position is tried once, so the work is
/// bounded by nodes times dots, whatever the file holds.
struct FqnSearch<'a> {
    views: &'a Views<'a>,
    fqn: &'a str,
    seen: BTreeSet<(usize, usize)>,
    found: Vec<usize>,
}

impl FqnSearch<'_> {
    fn descend(&mut self, node: usize, from: usize) -> Result<()> {
        if !kind::is_container(self.views.nodes[node].kind) || !self.seen.insert((node, from)) {
            return Ok(());
        }
        let rest = &self.fqn[from..];
        let ends = rest.match_indices('.').map(|(dot, _)| dot).chain([rest.len()]);
        for end in ends {
            for step in spellings(&rest[..end]) {
                let Some(child) = self.views.child(node, &step) else { continue };
                if end < rest.len() {
                    self.descend(child, from + end + 1)?;
                } else if !kind::is_container(self.views.nodes[child].kind) {
                    self.found.push(child);
                }
                if self.found.len() > 1 {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// The steps that a part of an fqn may stand for.
fn spellings(part: &str) -> Vec<Step> {
    let mut steps = vec![Step::Key(Key::from(part))];
    if let Ok(int) = part.parse::<Int>()
        && int.to_string() == part
    {
        if let Some(index) = int.as_i64().and_then(|int| u32::try_from(int).ok()) {
            steps.push(Step::Index(index));
        }
        steps.push(Step::Key(Key::Int(int)));
    }
    match part {
        "True" => steps.push(Step::Key(Key::Bool(true))),
        "False" => steps.push(Step::Key(Key::Bool(false))),
        "None" => steps.push(Step::Key(Key::None)),
        _ => {}
    }
    steps
}
