use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::etcd;
use crate::figures::{self, Figures};
use crate::report::SkippedStep;
use crate::runner;
use crate::step::{Step, StepKind};
use crate::workspace::Workspace;

/// Modules that decode, validate, plan and commit. The command reports their coverage.
const MODULES: [&str; 16] = [
    "format/src/decode",
    "format/src/frame",
    "format/src/index",
    "format/src/record",
    "format/src/table",
    "format/src/table_views",
    "format/src/validate",
    "format/src/verify",
    "store/src/blob",
    "store/src/control",
    "store/src/engine/local",
    "store/src/io/disk",
    "store/src/ledger",
    "store/src/merge",
    "store/src/metadata",
    "store/src/plan",
];

/// Files and folders of these modules that contain only tests. They do not count.
const TESTS: [&str; 5] = [
    "store/src/engine/local/tests",
    "store/src/engine/local/tests.rs",
    "store/src/ledger/tests",
    "store/src/ledger/tests.rs",
    "store/src/merge/tests.rs",
];

const SUITES: &str =
    "--package tssd-format --package tssd-store --package tssd-tests --all-features";

/// Number of lines of a module, and of those that the tests execute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lines {
    count: u64,
    covered: u64,
}

/// Runs the tests with coverage instrumentation, and prints the line coverage of each module.
pub(crate) fn run(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    let Some(tools) = LlvmTools::find()? else {
        let left_out = SkippedStep { name: "coverage", reason: "rustup component add llvm-tools" };
        return Ok(runner::run(workspace, Vec::new(), vec![left_out], verbose)?.has_passed());
    };
    let folder = CoverageFolder(workspace.target.join("coverage"));
    let profiles = folder.profiles();
    if profiles.exists() {
        fs::remove_dir_all(&profiles)?;
    }
    let mut chain = Vec::from_iter(etcd::install_step());
    chain.extend(steps(&folder));
    let report = runner::run(workspace, vec![chain], Vec::new(), verbose)?;
    if !report.has_passed() {
        return Ok(false);
    }
    let export = tools.export(&folder)?;
    let modules = modules(&workspace.root, &export);
    let figures = modules.iter().map(|(module, lines)| {
        let Lines { count, covered } = lines;
        let tenths = covered * 1000 / count.max(&1);
        println!("{module:24} {covered:>6} of {count:>6} lines, {}.{} %", tenths / 10, tenths % 10);
        ((*module).to_owned(), json!({ "lines": count, "covered": covered }))
    });
    let figures: Figures = figures.collect();
    figures::save(
        workspace,
        Figures::from_iter([("coverage".to_owned(), Value::Object(figures))]),
    )?;
    Ok(true)
}

fn steps(folder: &CoverageFolder) -> Vec<Step> {
    let instrumented = |step: Step| {
        step.argument("--target-dir")
            .argument(&folder.0)
            .env("RUSTFLAGS", "-Cinstrument-coverage")
            // `%4m` merges the counts of all processes of a program into four files.
            .env("LLVM_PROFILE_FILE", folder.profiles().join("%4m.profraw"))
            .env("TSSD_BIN", folder.0.join("debug/tssd"))
    };
    let build = format!("build --package tssd {SUITES} --bins");
    let test = format!("test --package tssd {SUITES} --lib --test suite --no-fail-fast");
    let tests = instrumented(Step::cargo("tests with coverage", &test))
        .argument("--")
        // The daemon of another user cannot write its counts.
        .argument("--skip")
        .argument("daemon_serves_only_members_of_socket_group");
    vec![
        instrumented(Step::cargo("build with coverage", &build)).kind(StepKind::Setup),
        tests.kind(StepKind::Tests),
    ]
}

/// Target folder of the instrumented build.
struct CoverageFolder(PathBuf);

impl CoverageFolder {
    fn profiles(&self) -> PathBuf {
        self.0.join("profiles")
    }

    /// Returns the instrumented programs: the command and the test binaries.
    fn programs(&self) -> io::Result<Vec<PathBuf>> {
        let mut programs = vec![self.0.join("debug/tssd")];
        for entry in fs::read_dir(self.0.join("debug/deps"))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_test =
                ["suite-", "tssd_format-", "tssd_store-"].iter().any(|test| name.starts_with(test));
            if is_test && path.extension().is_none() {
                programs.push(path);
            }
        }
        Ok(programs)
    }
}

/// Folder of the LLVM tools of the Rust toolchain, which read the counts.
struct LlvmTools(PathBuf);

impl LlvmTools {
    /// Returns the tools, if they are installed.
    fn find() -> io::Result<Option<Self>> {
        let libraries = Command::new("rustc").args(["--print", "target-libdir"]).output()?.stdout;
        let libraries = String::from_utf8_lossy(&libraries);
        let folder = Path::new(libraries.trim()).with_file_name("bin");
        Ok(folder.join("llvm-cov").exists().then_some(Self(folder)))
    }

    /// Exports the coverage of each file as JSON.
    fn export(&self, folder: &CoverageFolder) -> io::Result<Value> {
        let merged = folder.0.join("counted.profdata");
        let mut merge = Command::new(self.0.join("llvm-profdata"));
        // Killed processes may leave invalid profiles.
        merge
            .args(["merge", "--failure-mode=all", "--sparse", "--output"])
            .arg(&merged)
            .arg(folder.profiles());
        output(&mut merge)?;
        let mut export = Command::new(self.0.join("llvm-cov"));
        export.args(["export", "--summary-only", "--instr-profile"]).arg(&merged);
        for program in folder.programs()? {
            export.arg("--object").arg(program);
        }
        serde_json::from_slice(&output(&mut export)?).map_err(io::Error::other)
    }
}

/// Runs a command, and returns its stdout.
fn output(command: &mut Command) -> io::Result<Vec<u8>> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let program = command.get_program().to_string_lossy();
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{program}: {}: {errors}", output.status)))
}

/// Returns the sum of the lines of each module over its files.
fn modules(root: &Path, export: &Value) -> BTreeMap<&'static str, Lines> {
    let mut modules = BTreeMap::new();
    for file in export["data"][0]["files"].as_array().into_iter().flatten() {
        let path = Path::new(file["filename"].as_str().unwrap_or_default());
        let Ok(path) = path.strip_prefix(root) else { continue };
        let is_in = |module: &&str| {
            path.starts_with(module) || path.with_extension("") == Path::new(module)
        };
        let Some(module) = MODULES.into_iter().find(is_in) else { continue };
        if TESTS.into_iter().any(|tests| path.starts_with(tests)) {
            continue;
        }
        let lines: &mut Lines = modules.entry(module).or_default();
        let figure = |name| file["summary"]["lines"][name].as_u64().unwrap_or_default();
        lines.count += figure("count");
        lines.covered += figure("covered");
    }
    modules
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::{Lines, modules};

    #[test]
    fn lines_are_summed_by_module() {
        let file = |path, count, covered| json!({ "filename": path, "summary": { "lines": { "count": count, "covered": covered } } });
        let export = json!({ "data": [{ "files": [
            file("/tssd/store/src/ledger.rs", 10, 9),
            file("/tssd/store/src/ledger/begin.rs", 20, 20),
            file("/tssd/store/src/ledger/tests/jobs.rs", 50, 50),
            file("/tssd/store/src/metadata.rs", 5, 1),
            file("/tssd/store/src/engine/put.rs", 7, 7),
            file("/others/store/src/plan.rs", 7, 7),
        ] }] });
        let found = modules(Path::new("/tssd"), &export);
        let lines = |count, covered| Lines { count, covered };
        let expected = [("store/src/ledger", lines(30, 29)), ("store/src/metadata", lines(5, 1))];
        assert_eq!(found, expected.into());
    }
}
