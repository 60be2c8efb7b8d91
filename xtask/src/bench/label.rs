use crate::bench::fit::float;
use crate::bench::quantity::{bytes, whole};
use crate::bench::record::Race;

/// What was done in a race.
pub(crate) fn what(race: &Race) -> String {
    format!("{}: {}", race.case, race.what)
}

/// What it was done with.
pub(crate) fn place(race: &Race) -> String {
    let tensors = race.tensors.map(|tensors| match tensors {
        1 => "1 tensor".into(),
        tensors => format!("{} tensors", whole(tensors)),
    });
    let size = race.bytes.map(|number| bytes(float(number)));
    let parts = [race.state_dict.clone(), tensors, size];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}
