//! Reconciliation of the ledger of a bucket with the ledger of the original versions: a pure function.

use crate::ledger::{Command, Label, Selection, Selector, State, VersionId, VersionOutcome};

/// Returns the commands that apply pins, retention and deletions of `own` to the bucket.
pub(crate) fn reconcile(own: &State, bucket: &State) -> Vec<Command> {
    let mut commands = Vec::new();
    // In the order of their positions, because a rollback to an older position than the newest one is refused.
    for version in own.visible().filter(|version| version.stored_at.is_some()) {
        let selector = Selector::Id(version.id);
        let (position, now) = (Some(version.position()), version.visible_since());
        if bucket.version(&selector).is_some_and(|it| it.position() != version.position()) {
            commands.push(Command::Rollback { selector, position, now });
        }
    }
    let is_in_bucket = |id: VersionId| bucket.visible().any(|version| version.id == id);
    let is_pinned = |state: &State, label: &str, id| {
        state.pins().any(|(pinned, to)| pinned == label && to == id)
    };
    for (label, id) in own.pins().filter(|(_, id)| is_in_bucket(*id)) {
        if !is_pinned(bucket, label, id) {
            // A label that an older release has accepted may be none of this one.
            if let Ok(label) = Label::new(label) {
                commands.push(Command::Pin { selector: Selector::Id(id), label });
            }
        }
    }
    // Versions that `own` has never contained belong to another store.
    for (label, id) in bucket.pins().filter(|(_, id)| own.outcome_of(*id).is_some()) {
        let moved = own.pins().any(|(pinned, to)| pinned == label && is_in_bucket(to));
        if !moved && !is_pinned(own, label, id) {
            commands.push(Command::Unpin { label: label.to_owned() });
        }
    }
    let (keep, ttl) = own.retention();
    // A copy replaces older versions in the bucket only once `own` has recorded that the copy is stored.
    let is_head_recorded =
        bucket.head().is_none_or(|head| own.versions().any(|it| it.id == head.id && it.uploaded));
    let count = u32::try_from(bucket.visible().count()).unwrap_or(u32::MAX);
    if is_head_recorded && (bucket.retention() != (keep, ttl) || count > keep.get()) {
        commands.push(Command::Retain { keep, ttl });
    }
    let is_visible = |id: VersionId| own.visible().any(|version| version.id == id);
    // Open copies of versions that were deleted, or that a daemon had begun before it exited.
    let is_wanted = |id| is_visible(id) || own.open().any(|version| version.id == id);
    for version in bucket.open().filter(|version| !is_wanted(version.id)) {
        commands.push(Command::Abandon { id: version.id });
    }
    for version in bucket.visible() {
        if own.outcome_of(version.id) == Some(VersionOutcome::Visible) && !is_visible(version.id) {
            commands.push(Command::Delete { selection: Selection::Id(version.id) });
        }
    }
    commands
}
