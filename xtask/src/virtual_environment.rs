use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::PathBuf;
use std::process::Command;

use crate::cache;
use crate::step::{PYTHON, Step, StepKind};
use crate::workspace::Workspace;

/// A set of Python packages that can be installed together.
pub(crate) struct Requirements {
    /// Prefix of the name of the folder of the environment.
    pub(crate) name: &'static str,
    /// Name of the step that creates the environment.
    pub(crate) step: &'static str,
    /// Path of the requirements file, relative to the root of the repository.
    pub(crate) file: &'static str,
    /// Modules that an intact environment can import, separated by commas.
    pub(crate) imports: &'static str,
    /// A package that is installed without its dependencies.
    ///
    /// They would pin older versions of the packages in the file.
    pub(crate) without_dependencies: Option<&'static str>,
}

/// A Python virtual environment, in a folder that all checkouts share.
pub(crate) struct VirtualEnvironment {
    requirements: Requirements,
    folder: PathBuf,
}

impl VirtualEnvironment {
    /// Returns the environment of these requirements. Their hash is part of the name of its folder.
    pub(crate) fn new(workspace: &Workspace, requirements: Requirements) -> io::Result<Self> {
        let Requirements { name, file, without_dependencies, .. } = requirements;
        let mut hasher = DefaultHasher::new();
        std::fs::read_to_string(workspace.root.join(file))?.hash(&mut hasher);
        // Installed packages depend on the version of Python.
        (without_dependencies, python_version()?).hash(&mut hasher);
        let folder = cache::folder().join(format!("venv/{name}-{:016x}", hasher.finish()));
        Ok(Self { requirements, folder })
    }

    /// Returns the path of the Python of the environment.
    pub(crate) fn python(&self) -> PathBuf {
        self.folder.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" })
    }

    /// Returns the step that creates the environment, or checks that it is intact.
    pub(crate) fn step(&self) -> Step {
        let Requirements { step, file, imports, without_dependencies, .. } = &self.requirements;
        Step::python(step, "xtask/environment.py")
            .argument(&self.folder)
            .argument(file)
            .argument(imports)
            .arguments(*without_dependencies)
            .kind(StepKind::Setup)
            .shows_last_line()
    }
}

fn python_version() -> io::Result<String> {
    let failed = |error: &dyn std::fmt::Display| io::Error::other(format!("{PYTHON}: {error}"));
    let output = Command::new(PYTHON).arg("--version").output().map_err(|error| failed(&error))?;
    if !output.status.success() {
        return Err(failed(&output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().into())
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::{Command, Output};

    use super::PYTHON;

    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/environment.py");

    fn run(folder: &Path, requirements: &Path, imports: &str) -> Output {
        let arguments = [SCRIPT.as_ref(), folder, requirements, imports.as_ref()];
        Command::new(PYTHON).args(arguments).output().expect("Python 3 is installed")
    }

    #[test]
    fn damaged_environment_is_recreated() {
        let root = std::env::temp_dir().join(format!("tssd-environment-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        let (folder, requirements) = (root.join("name-0"), root.join("requirements.txt"));
        fs::write(&requirements, "").unwrap();
        let (marker, python) = (folder.join("mark"), folder.join("bin/python"));
        let is_kept = || {
            let output = run(&folder, &requirements, "json");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(Command::new(&python).arg("--version").status().unwrap().success());
            let is_kept = marker.exists();
            fs::write(&marker, "").unwrap();
            is_kept
        };

        assert!(!is_kept(), "it is new");
        assert!(is_kept(), "it is intact");
        fs::remove_file(folder.join("complete")).unwrap();
        assert!(!is_kept(), "its installation was interrupted");
        fs::remove_file(&python).unwrap();
        std::os::unix::fs::symlink("/nonexistent/python", &python).unwrap();
        assert!(!is_kept(), "its Python is missing");

        let output = run(&folder, &requirements, "no_such_module");
        assert!(!output.status.success());
        assert!(!marker.exists(), "a package cannot be imported");
        assert!(String::from_utf8_lossy(&output.stderr).contains("`import no_such_module` fails"));
        fs::remove_dir_all(root).unwrap();
    }
}
