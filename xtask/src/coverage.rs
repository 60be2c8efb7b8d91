use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::etcd;
use crate::figures::{self, Figures};
use crate::report::LeftOut;
use crate::runner;
use crate::step::{Step, Worth};
use crate::workspace::Workspace;

/// What decodes, validates, plans and commits: of these it is said how much the tests run.
const MODULES: [&str; 16] = [
    "format/src/decode",
    "format/src/frame",
    "format/src/index",
    "format/src/record",
    "format/src/table",
    "format/src/validate",
    "format/src/verify",
    "format/src/views",
    "store/src/controller",
    "store/src/disk",
    "store/src/ledger",
    "store/src/ledgers",
    "store/src/merge",
    "store/src/meta",
    "store/src/plan",
    "store/src/volume",
];

/// What of these modules only tests have.
const TESTS: [&str; 2] = ["store/src/testing/simulated_disk.rs", "store/src/ledger/stories"];

const SUITES: &str =
    "--package tssd-format --package tssd-store --package tssd-tests --all-features";

/// How many lines of a module there are, and how many of them are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lines {
    count: u64,
    covered: u64,
}

/// Runs the tests, counting which lines they run, and says it by module.
pub(crate) fn run(workspace: &Workspace, verbose: bool) -> io::Result<bool> {
    let Some(tools) = Tools::find()? else {
        let left_out = LeftOut { name: "coverage", why: "rustup component add llvm-tools" };
        return Ok(runner::run(workspace, Vec::new(), vec![left_out], verbose)?.has_passed());
    };
    let folder = Folder(workspace.target.join("coverage"));
    let profiles = folder.profiles();
    if profiles.exists() {
        fs::remove_dir_all(&profiles)?;
    }
    let mut all = Vec::from_iter(etcd::installation());
    all.extend(steps(&folder));
    let report = runner::run(workspace, vec![all], Vec::new(), verbose)?;
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
    figures::keep(
        workspace,
        Figures::from_iter([("coverage".to_owned(), Value::Object(figures))]),
    )?;
    Ok(true)
}

fn steps(folder: &Folder) -> Vec<Step> {
    let counted = |step: Step| {
        step.argument("--target-dir")
            .argument(&folder.0)
            .env("RUSTFLAGS", "-Cinstrument-coverage")
            // Four files for each program, which its processes add to.
            .env("LLVM_PROFILE_FILE", folder.profiles().join("%4m.profraw"))
            .env("TSSD_BIN", folder.0.join("debug/tssd"))
    };
    let build = format!("build --package tssd {SUITES} --bins");
    let test = format!("test --package tssd {SUITES} --lib --test suite --no-fail-fast");
    let tests = counted(Step::cargo("tests, counted", &test))
        .argument("--")
        // A daemon of another user may not write what it has counted.
        .argument("--skip")
        .argument("daemon_serves_only_members_of_socket_group");
    vec![
        counted(Step::cargo("build with counters", &build)).worth(Worth::Nothing),
        tests.worth(Worth::Tests),
    ]
}

/// Where everything is built once more, with counters.
struct Folder(PathBuf);

impl Folder {
    fn profiles(&self) -> PathBuf {
        self.0.join("profiles")
    }

    /// The programs that count: the command, and the test binaries.
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

/// The programs of LLVM that read what was counted, as the compiler has them.
struct Tools(PathBuf);

impl Tools {
    fn find() -> io::Result<Option<Self>> {
        let libraries = Command::new("rustc").args(["--print", "target-libdir"]).output()?.stdout;
        let libraries = String::from_utf8_lossy(&libraries);
        let folder = Path::new(libraries.trim()).with_file_name("bin");
        Ok(folder.join("llvm-cov").exists().then_some(Self(folder)))
    }

    /// What was counted, by file.
    fn export(&self, folder: &Folder) -> io::Result<Value> {
        let merged = folder.0.join("counted.profdata");
        let mut merge = Command::new(self.0.join("llvm-profdata"));
        // What a process that was killed has left may be no profile.
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

fn output(command: &mut Command) -> io::Result<Vec<u8>> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let program = command.get_program().to_string_lossy();
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{program}: {}: {errors}", output.status)))
}

/// The lines of each module, of all of its files.
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
    fn files_are_counted_with_their_module() {
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
        let wanted = [("store/src/ledger", lines(30, 29)), ("store/src/ledgers", lines(5, 1))];
        assert_eq!(found, wanted.into());
    }
}
