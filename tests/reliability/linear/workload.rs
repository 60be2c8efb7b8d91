//! What clients ask: mostly reads, enough puts that versions come and go all the time.

use tssd_tests::dice::Dice;

use super::history::Call;

/// The next call of a client that has seen this number, and whose next put has this name.
pub(crate) fn call(dice: &mut Dice, keep: usize, seen: u64, put: u32, patience: u64) -> Call {
    match dice.below(100) {
        0..12 => Call::Put(put),
        // One that was, one that will be.
        12..34 => Call::Numbered((seen + 1).saturating_sub(dice.below(keep as u64 + 3))),
        34..38 => Call::Wait(seen + dice.below(3), patience),
        // Only what was seen: nobody knows how a number is taken that is open at the moment.
        38..44 if keep == 1 && seen > 0 => Call::Delete(seen),
        _ => Call::Newest,
    }
}
