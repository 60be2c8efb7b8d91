//! The command `tssd`.

use std::process::ExitCode;

fn main() -> ExitCode {
    tssd_cli::main()
}
