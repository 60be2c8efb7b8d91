//! Maps of a daemon's memory that the driver has pinned: copies from and to them go at the speed of the bus.
#![expect(unsafe_code, reason = "what is pinned must stay where it is")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use super::driver::{self, Context};

/// Maps that are there, by their beginnings.
static MAPS: Mutex<BTreeMap<usize, Map>> = Mutex::new(BTreeMap::new());

struct Map {
    len: usize,
    is_writable: bool,
    state: State,
}

enum State {
    /// Nothing of it was copied from or to a device yet.
    Plain,
    /// In a context.
    Pinned(Context),
    /// It could not be: why.
    Pageable(String),
}

fn maps() -> MutexGuard<'static, BTreeMap<usize, Map>> {
    MAPS.lock().expect("nobody panics while holding the maps")
}

/// Memory was mapped, which stays where it is until [`unmapped`] says otherwise.
pub(crate) fn mapped(start: usize, len: usize, is_writable: bool) {
    maps().insert(start, Map { len, is_writable, state: State::Plain });
}

/// It is about to be unmapped.
pub(crate) fn unmapped(start: usize) {
    // Held meanwhile: who pins does not pin what is going.
    let mut maps = maps();
    if let Some(Map { state: State::Pinned(context), .. }) = maps.remove(&start)
        && let Ok(_entered) = context.enter()
    {
        driver::unpin(start);
    }
}

/// Pins the map that memory lies in, if there is one and it can be. Says why it is not pinned.
pub(super) fn pin(context: Context, memory: Range<usize>) -> Result<(), String> {
    let mut maps = maps();
    let found = maps.range_mut(..=memory.start).next_back();
    let found = found.filter(|(start, map)| memory.end <= **start + map.len);
    let Some((start, map)) = found else {
        return Err("it is no memory of a daemon that this process has mapped".to_owned());
    };
    match &map.state {
        State::Pinned(_) => return Ok(()),
        State::Pageable(why) => return Err(why.clone()),
        State::Plain => {}
    }
    let entered = context.enter().map_err(|error| error.to_string())?;
    // SAFETY: the map is there until it is taken out of the maps, which are held here.
    let pinned = unsafe { driver::pin(*start, map.len, map.is_writable) };
    drop(entered);
    map.state = match &pinned {
        Ok(()) => State::Pinned(context),
        Err(why) => State::Pageable(why.clone()),
    };
    pinned
}
