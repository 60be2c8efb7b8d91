use crate::step::{Step, StepKind};
use crate::tool::Tool;

const CARGO_DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", step: "install cargo-deny" };

/// Checks that the dependencies satisfy `deny.toml`.
pub(crate) fn checks() -> Vec<Step> {
    let mut steps: Vec<Step> = CARGO_DENY.install_step().into_iter().collect();
    // cargo-deny checks the dependencies of all platforms. A build fetches only those of this platform.
    steps
        .push(Step::cargo("fetch crates of all platforms", "fetch --locked").kind(StepKind::Setup));
    let program = CARGO_DENY.program();
    let arguments = "--offline check --hide-inclusion-graph bans licenses sources";
    steps.push(Step::program("licences, bans, sources", program, arguments));
    steps
}
