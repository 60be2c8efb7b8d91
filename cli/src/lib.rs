//! The command `tssd`, which works on TSSD archives and stores.
//!
//! Its subcommands pack, inspect, verify, compare, convert, store and demonstrate archives. This crate
//! parses arguments and prints results. The logic is in `tssd-format` and `tssd-store`. Each command
//! has one file.

// Arguments, output and exit codes.
mod codec;
mod console;
mod exit;
mod failure;
mod interrupt;
#[cfg(target_os = "linux")]
mod notify;
mod parallel;
mod size;
mod table;
mod value;

// Inputs and output files.
mod archives;
mod document;
mod element;
mod encode;
mod input;
mod model;
mod output;
mod pattern;

// Commands on files.
mod convert;
mod delta;
mod diff;
mod inspect;
mod pack;
mod roundtrip;
mod unpack;
mod verify;

// Commands on stores.
mod demo;
#[cfg(target_os = "linux")]
mod serve;
mod store;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::filter::LevelFilter;
use tssd_format::abridge;

use crate::console::{Console, Stream};
use crate::exit::Exit;
use crate::failure::Result;

/// Pack, inspect, verify, compare, convert and store PyTorch-style state dicts.
#[derive(Debug, Parser)]
#[command(version, after_help = Exit::help(), max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print results as JSON
    #[arg(long, global = true)]
    json: bool,
    /// Print no progress and no summaries
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Print details
    #[arg(short, long, global = true)]
    verbose: bool,
    /// Write to stderr what the store does, from this level on
    #[arg(long, global = true, env = "TSSD_LOG", value_name = "LEVEL")]
    log: Option<Level>,
}

/// The least severe level that the log has.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl From<Level> for LevelFilter {
    fn from(level: Level) -> Self {
        match level {
            Level::Error => Self::ERROR,
            Level::Warn => Self::WARN,
            Level::Info => Self::INFO,
            Level::Debug => Self::DEBUG,
            Level::Trace => Self::TRACE,
        }
    }
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Pack(pack::Args),
    Unpack(unpack::Args),
    Inspect(inspect::Args),
    Verify(verify::Args),
    Diff(diff::Args),
    Convert(convert::Args),
    Delta(delta::Args),
    Roundtrip(roundtrip::Args),
    Put(store::put::Args),
    Get(store::get::Args),
    Prefetch(store::prefetch::Args),
    Ls(store::ls::Args),
    Rm(store::rm::Args),
    Rollback(store::rollback::Args),
    Head(store::head::Args),
    Watch(store::head::WatchArgs),
    Pin(store::pin::Args),
    Unpin(store::pin::UnpinArgs),
    Pins(store::pin::PinsArgs),
    Status(store::status::Args),
    #[cfg(target_os = "linux")]
    Serve(Box<serve::Args>),
    Demo(demo::Args),
}

/// Parses the arguments of this process, runs the command, and returns its exit code.
pub fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|error| exit_with_usage_error(&error));
    if let Some(level) = cli.log {
        let log = tracing_subscriber::fmt().with_max_level(level).with_target(false);
        // No ANSI colors: a program may read the log.
        log.with_ansi(false).with_writer(std::io::stderr).init();
    }
    match run(&cli) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            let exit = failure.exit();
            failure.print(cli.json);
            exit.into()
        }
    }
}

/// Prints an error of the arguments, without the middle of long ones, and ends the process.
fn exit_with_usage_error(error: &clap::Error) -> ! {
    let text = error.render().to_string();
    let short = abridge(text.as_str());
    if error.use_stderr() && short != text {
        eprint!("{short}");
        std::process::exit(error.exit_code());
    }
    error.exit()
}

fn run(cli: &Cli) -> Result<Exit> {
    let (json, quiet, verbose) = (cli.json, cli.quiet, cli.verbose);
    let console = Console { json, quiet, verbose, results: Stream::Stdout };
    #[cfg(target_os = "linux")]
    if let Command::Serve(args) = &cli.command {
        return serve::run(args, console);
    }
    interrupt::install()?;
    match &cli.command {
        Command::Pack(args) => pack::run(args, console),
        Command::Unpack(args) => unpack::run(args, console),
        Command::Inspect(args) => inspect::run(args, console),
        Command::Verify(args) => verify::run(args, console),
        Command::Diff(args) => diff::run(args, console),
        Command::Convert(args) => convert::run(args, console),
        Command::Delta(args) => delta::run(args, console),
        Command::Roundtrip(args) => roundtrip::run(args, console),
        Command::Put(args) => store::put::run(args, console),
        Command::Get(args) => store::get::run(args, console),
        Command::Prefetch(args) => store::prefetch::run(args, console),
        Command::Ls(args) => store::ls::run(args, console),
        Command::Rm(args) => store::rm::run(args, console),
        Command::Rollback(args) => store::rollback::run(args, console),
        Command::Head(args) => store::head::run(args, console),
        Command::Watch(args) => store::head::watch(args, console),
        Command::Pin(args) => store::pin::run(args, console),
        Command::Unpin(args) => store::pin::unpin(args, console),
        Command::Pins(args) => store::pin::pins(args, console),
        Command::Status(args) => store::status::run(args, console),
        Command::Demo(args) => demo::run(args, console),
        #[cfg(target_os = "linux")]
        Command::Serve(_) => unreachable!("it has its own way to end"),
    }
}
