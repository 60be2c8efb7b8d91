//! The command `tssd` in a wheel. A binary of this package has the features of the extension module, so the crates
//! below both are compiled once.

use std::process::ExitCode;

fn main() -> ExitCode {
    tssd_cli::main()
}
