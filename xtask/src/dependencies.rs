use crate::step::{Step, Worth};
use crate::tool::Tool;

const CARGO_DENY: Tool =
    Tool { name: "cargo-deny", version: "0.20.2", step: "cargo-deny from crates.io" };

/// That what comes from others is what `deny.toml` lets in.
pub(crate) fn checks() -> Vec<Step> {
    let mut steps: Vec<Step> = CARGO_DENY.installation().into_iter().collect();
    // It looks at those of all platforms, of which building brings only this one's.
    steps.push(Step::cargo("crates of all platforms", "fetch --locked").worth(Worth::Nothing));
    let program = CARGO_DENY.program();
    let arguments = "--offline check --hide-inclusion-graph bans licenses sources";
    steps.push(Step::program("licences, bans, sources", program, arguments));
    steps
}
