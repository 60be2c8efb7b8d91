use crate::bench::fit::to_float;
use crate::bench::quantity::{bytes, integer};
use crate::bench::record::Race;

/// Returns the title of a race: its case and description.
pub(crate) fn race_title(race: &Race) -> String {
    format!("{}: {}", race.case, race.what)
}

/// Returns the input of a race: state dict, number of tensors and size.
pub(crate) fn race_input(race: &Race) -> String {
    let tensors = race.tensors.map(|tensors| match tensors {
        1 => "1 tensor".into(),
        tensors => format!("{} tensors", integer(tensors)),
    });
    let size = race.bytes.map(|number| bytes(to_float(number)));
    let parts = [race.state_dict.clone(), tensors, size];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}
