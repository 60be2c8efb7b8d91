//! What tells the ledger of a bucket from that of which it has copies: a pure function.

use crate::ledger::{Command, Fate, Selection, Selector, State, VersionId};

/// The steps after which the bucket keeps what is kept here, and has forgotten what is forgotten.
pub(crate) fn differences(own: &State, there: &State) -> Vec<Command> {
    let mut commands = Vec::new();
    let is_there = |id: VersionId| there.visible().any(|version| version.id == id);
    let is_pinned = |state: &State, label: &str, id| {
        state.pins().any(|(pinned, to)| pinned == label && to == id)
    };
    for (label, id) in own.pins().filter(|(_, id)| is_there(*id)) {
        if !is_pinned(there, label, id) {
            commands.push(Command::Pin { selector: Selector::Id(id), label: label.to_owned() });
        }
    }
    // What this store has never known is not its own.
    for (label, id) in there.pins().filter(|(_, id)| own.outcome_of(*id).is_some()) {
        let moved = own.pins().any(|(pinned, to)| pinned == label && is_there(to));
        if !moved && !is_pinned(own, label, id) {
            commands.push(Command::Unpin { label: label.to_owned() });
        }
    }
    let (keep, ttl) = own.retention();
    // What a copy replaces goes when it is known here that the copy is there.
    let is_known =
        there.head().is_none_or(|head| own.versions().any(|it| it.id == head.id && it.stored));
    let count = u32::try_from(there.visible().count()).unwrap_or(u32::MAX);
    if is_known && (there.retention() != (keep, ttl) || count > keep.get()) {
        commands.push(Command::Retain { keep, ttl });
    }
    let is_visible = |id: VersionId| own.visible().any(|version| version.id == id);
    // What a daemon has begun there that has ended since, and what was deleted.
    let is_wanted = |id| is_visible(id) || own.open().any(|version| version.id == id);
    for version in there.open().filter(|version| !is_wanted(version.id)) {
        commands.push(Command::Abandon { id: version.id });
    }
    for version in there.visible() {
        if own.outcome_of(version.id) == Some(Fate::Visible) && !is_visible(version.id) {
            commands.push(Command::Delete { selection: Selection::Id(version.id) });
        }
    }
    commands
}
