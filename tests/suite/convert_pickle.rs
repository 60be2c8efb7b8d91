//! `tssd convert` of files that torch pickles, as far as this needs no torch.
//!
//! Tests how the command finds and runs Python, its errors without Python, and that no temporary files remain.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use tssd_format::{Archive, StateDict, Tensor};

use tssd_tests::command::binary;

use super::cli::Sandbox;

/// First bytes of a file of `torch.save`: a zip file.
const ZIP: &[u8] = b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x12\x00";
/// First bytes in the format before torch 1.6, which is still available on request: a pickled number.
const LEGACY: &[u8] =
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00(X\x10\x00\x00\x00";
/// The same in pickle protocol 4, with frames.
const FRAMED: &[u8] =
    b"\x80\x04\x95\x0d\x00\x00\x00\x00\x00\x00\x00\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x04M\xe9\x03.\x80\x04";

/// Creates one file of each kind, a DCP directory, the expected archive and a stand-in for Python.
fn create_inputs() -> Sandbox {
    let place = Sandbox::new();
    place.write("zip.pt", &[ZIP, &[7; 100]].concat());
    place.write("legacy.pt", LEGACY);
    place.write("framed.pt", FRAMED);
    std::fs::create_dir(place.path("dcp")).unwrap();
    place.write("dcp/.metadata", &[1; 10]);
    place.write("dcp/__0_0.distcp", &[2; 20]);
    let mut dict = StateDict::new();
    dict.insert("weight", Tensor::from_slice(&vec![0.5_f32; 5000], &[5000]).unwrap());
    place.write_dict("read.tssd", &dict);
    std::fs::create_dir_all(place.path("venv/bin")).unwrap();
    let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("suite/python3.sh");
    std::os::unix::fs::symlink(stand_in, place.path("venv/bin/python3")).unwrap();
    place
}

/// Returns the command. Its Python runs the shell script `as_python`.
fn command(place: &Sandbox, as_python: &str, args: &str) -> Command {
    let mut command = place.command();
    command.env("VIRTUAL_ENV", place.path("venv")).env("AS_PYTHON", as_python);
    command.args(args.split_whitespace());
    command
}

/// Returns the exit code, and stdout followed by stderr.
fn code_and_text(output: Output) -> (Option<i32>, String) {
    let texts = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code(), texts.concat())
}

#[track_caller]
fn run(place: &Sandbox, as_python: &str, args: &str) -> (Option<i32>, String) {
    code_and_text(command(place, as_python, args).output().unwrap())
}

/// A script that succeeds: it writes the expected archive.
const SUCCEED: &str = r#"cp read.tssd "$new""#;

#[test]
fn convert_applies_options_to_pickled_files() {
    let place = create_inputs();
    let before = place.file_names();
    for (input, file_len) in [("zip.pt", 128), ("legacy.pt", 32), ("framed.pt", 32), ("dcp", 30)] {
        let args = format!("convert {input} -o out.tssd --codec zstd --digest --align 4096 --json");
        let (code, message) = run(&place, SUCCEED, &args);
        assert_eq!(code, Some(0), "{input}: {message}");
        let report: Json = serde_json::from_str(&message).unwrap();
        assert_eq!(report["file_len_before"], file_len, "{input}");
        assert_eq!(report["output"], "out.tssd");
        let archive = Archive::open(place.path("out.tssd")).unwrap();
        let storage = archive.storage(0);
        assert!(storage.compressed_layout.is_some() && storage.digest.is_some());
        assert_eq!(storage.align_log2, 12);
        place.run_with_code(0, "diff read.tssd out.tssd");
        std::fs::remove_file(place.path("out.tssd")).unwrap();
        assert_eq!(place.file_names(), before);

        let output = command(&place, SUCCEED, &format!("convert {input} -o -")).output().unwrap();
        assert_eq!(output.stdout, place.read("read.tssd"));
        assert_eq!(place.file_names(), before);
    }
}

#[test]
fn convert_reports_failures_of_python() {
    let place = create_inputs();
    let before = place.file_names();
    place.write("out.tssd", b"old");
    let mut expected_names = before.clone();
    expected_names.push("out.tssd".into());
    expected_names.sort();
    let refused =
        r#"{"message": "x is not unpickled", "advice": "do it by hand", "is_damage": false}"#;
    let damaged = r#"{"message": "zip.pt: cut off", "advice": null, "is_damage": true}"#;
    let missing = "echo \"ModuleNotFoundError: No module named 'tssd'\" >&2; exit 1";
    for (as_python, code, parts) in [
        (format!("echo '{refused}'"), 5, &["x is not unpickled", "help: do it by hand"][..]),
        (format!("echo '{damaged}'"), 1, &["zip.pt: cut off"]),
        (missing.into(), 5, &["venv/bin/python3 has no module 'tssd'", "install tssd and torch"]),
        (
            missing.replace("tssd'", "torch'"),
            5,
            &["has no module 'torch'", "install tssd and torch"],
        ),
        ("echo words >&2; echo why >&2; exit 7".into(), 5, &["failed: exit status: 7: why"]),
        ("kill -9 $$".into(), 5, &["failed: signal: 9"]),
        // Python exits with 0, but wrote no file or a bad one.
        (":".into(), 3, &["cannot read"]),
        (r#"printf short > "$new""#.into(), 1, &["TooShort"]),
    ] {
        let (found, message) = run(&place, &as_python, "convert zip.pt --force -o out.tssd");
        assert_eq!(found, Some(code), "{as_python}: {message}");
        for part in parts {
            assert!(message.contains(part), "{as_python}: {message}");
        }
        assert_eq!(
            (place.file_names(), place.read("out.tssd")),
            (expected_names.clone(), b"old".to_vec())
        );
    }
    let as_json =
        run(&place, &format!("echo '{refused}'"), "convert zip.pt --force -o out.tssd --json").1;
    assert_eq!(serde_json::from_str::<Json>(&as_json).unwrap()["help"], "do it by hand");
}

#[test]
fn convert_reports_missing_python() {
    let place = create_inputs();
    let before = place.file_names();
    std::fs::create_dir(place.path("nothing")).unwrap();
    for root in [None, Some("nothing"), Some("")] {
        let mut command = place.command();
        command.args(["convert", "dcp", "-o", "out.tssd"]).env("PATH", place.path("nothing"));
        match root {
            Some(root) => command.env("VIRTUAL_ENV", root),
            None => command.env_remove("VIRTUAL_ENV"),
        };
        let (code, message) = code_and_text(command.output().unwrap());
        assert_eq!(code, Some(5), "{message}");
        assert!(
            message.contains("there is no python3") && message.contains("VIRTUAL_ENV"),
            "{message}"
        );
    }
    std::fs::remove_dir(place.path("nothing")).unwrap();
    assert_eq!(place.file_names(), before);
}

#[test]
fn convert_prefers_python_next_to_its_executable() {
    let place = create_inputs();
    std::fs::create_dir(place.path("bin")).unwrap();
    std::fs::rename(place.path("venv/bin/python3"), place.path("bin/python3")).unwrap();
    // `cp` writes the executable. If this process did, a child forked meanwhile could hold it open for writing.
    let copied = Command::new("cp").arg(binary()).arg(place.path("bin/tssd")).status().unwrap();
    assert!(copied.success());
    let linked = place.path("venv/bin/tssd");
    std::os::unix::fs::symlink(place.path("bin/tssd"), &linked).unwrap();
    for path in [place.path("bin/tssd"), linked] {
        let mut command = Command::new(path);
        command.args(["convert", "dcp", "-o", "out.tssd", "--force"]).current_dir(place.path(""));
        command.env("AS_PYTHON", SUCCEED).env("VIRTUAL_ENV", "/nowhere");
        let (code, message) = code_and_text(command.output().unwrap());
        assert_eq!(code, Some(0), "{message}");
    }
}

#[test]
fn convert_checks_its_output_before_it_runs_python() {
    let place = create_inputs();
    for output in ["nowhere/out.tssd", "zip.pt/out.tssd"] {
        let (code, message) = run(&place, "touch asked", &format!("convert zip.pt -o {output}"));
        assert!(matches!(code, Some(3 | 5)), "{message}");
    }
    assert!(!place.path("asked").exists());
}

#[test]
fn diff_and_stdin_reject_torch_files_with_help() {
    let place = create_inputs();
    for file in ["zip.pt", "legacy.pt", "framed.pt"] {
        let message = place.run_with_code(5, &format!("diff {file} read.tssd"));
        let parts = [file, "is a file of torch.save", "`tssd convert FILE -o OUT.tssd`"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        let mut command = command(&place, "touch asked", "convert - -o out.tssd");
        let input = std::fs::File::open(place.path(file)).unwrap();
        let (code, message) = code_and_text(command.stdin(input).output().unwrap());
        assert_eq!(code, Some(5), "{message}");
        assert!(message.contains("<stdin> is a file of torch.save"), "{message}");
    }
    assert!(!place.path("asked").exists());
}

/// Starts the command, and waits until its Python runs and has begun to write a file.
fn spawn_and_wait_for_python(place: &Sandbox, as_python: &str) -> Child {
    let as_python =
        format!(r#"echo part > "$new"; echo $$ > begun.part; mv begun.part begun; {as_python}"#);
    let mut command = command(place, &as_python, "convert dcp -o out.tssd");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !place.path("begun").exists() {
        assert!(child.try_wait().unwrap().is_none(), "the command exited early");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child
}

#[test]
fn killed_convert_ends_python_and_leaves_no_files() {
    // Waits for the end of its stdin.
    let waits = "cat > /dev/null; touch ended";
    // Writes until it cannot create its file. Discards stderr: an error message to a closed pipe would end the script.
    let writes = r#"exec 2> /dev/null; while echo more > "$new.part"; do mv "$new.part" "$new"; done; touch ended"#;
    for (as_python, signal) in [(waits, Signal::INT), (waits, Signal::TERM), (writes, Signal::TERM)]
    {
        let place = create_inputs();
        let before = place.file_names();
        let mut child = spawn_and_wait_for_python(&place, as_python);
        let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        while !place.path("ended").exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        std::fs::remove_file(place.path("begun")).unwrap();
        std::fs::remove_file(place.path("ended")).unwrap();
        assert_eq!(place.file_names(), before);
    }
}
