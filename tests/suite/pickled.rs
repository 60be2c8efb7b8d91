//! `tssd convert` of what torch pickles, as far as it needs no torch: how Python is found and asked, what
//! is said where it is not there, and that nothing stays.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use tssd_format::{Archive, StateDict, Tensor};

use tssd_tests::command::binary;

use super::cli::Place;

/// How torch.save begins its files: with a zip file; before version 1.6 and on request with a number.
const ZIP: &[u8] = b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x12\x00";
const LEGACY: &[u8] =
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00(X\x10\x00\x00\x00";
const FRAMED: &[u8] =
    b"\x80\x04\x95\x0d\x00\x00\x00\x00\x00\x00\x00\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x04M\xe9\x03.\x80\x04";

/// A file of each kind, a directory of DCP, and what they are to become.
fn place() -> Place {
    let place = Place::new();
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

/// The command, for which Python does this.
fn command(place: &Place, as_python: &str, args: &str) -> Command {
    let mut command = place.command();
    command.env("VIRTUAL_ENV", place.path("venv")).env("AS_PYTHON", as_python);
    command.args(args.split_whitespace());
    command
}

fn said(output: Output) -> (Option<i32>, String) {
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    (output.status.code(), said.concat())
}

#[track_caller]
fn run(place: &Place, as_python: &str, args: &str) -> (Option<i32>, String) {
    said(command(place, as_python, args).output().unwrap())
}

const READ: &str = r#"cp read.tssd "$new""#;

#[test]
fn what_python_reads_is_stored_as_it_is_asked_for() {
    let place = place();
    let before = place.names();
    for (input, file_len) in [("zip.pt", 128), ("legacy.pt", 32), ("framed.pt", 32), ("dcp", 30)] {
        let args = format!("convert {input} -o out.tssd --zstd --digest --align 4096 --json");
        let (code, said) = run(&place, READ, &args);
        assert_eq!(code, Some(0), "{input}: {said}");
        let said: Json = serde_json::from_str(&said).unwrap();
        assert_eq!(said["file_len_before"], file_len, "{input}");
        assert_eq!(said["output"], "out.tssd");
        let archive = Archive::open(place.path("out.tssd")).unwrap();
        let storage = archive.storage(0);
        assert!(storage.packing.is_some() && storage.digest.is_some());
        assert_eq!(storage.align_log2, 12);
        place.expect(0, "diff read.tssd out.tssd");
        std::fs::remove_file(place.path("out.tssd")).unwrap();
        assert_eq!(place.names(), before);

        let output = command(&place, READ, &format!("convert {input} -o -")).output().unwrap();
        assert_eq!(output.stdout, place.read("read.tssd"));
        assert_eq!(place.names(), before);
    }
}

#[test]
fn what_python_says_is_told() {
    let place = place();
    let before = place.names();
    place.write("out.tssd", b"old");
    let mut at_first = before.clone();
    at_first.push("out.tssd".into());
    at_first.sort();
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
        // It says that all went well.
        (":".into(), 3, &["cannot read"]),
        (r#"printf short > "$new""#.into(), 1, &["TooShort"]),
    ] {
        let (found, said) = run(&place, &as_python, "convert zip.pt -o out.tssd");
        assert_eq!(found, Some(code), "{as_python}: {said}");
        for part in parts {
            assert!(said.contains(part), "{as_python}: {said}");
        }
        assert_eq!((place.names(), place.read("out.tssd")), (at_first.clone(), b"old".to_vec()));
    }
    let as_json = run(&place, &format!("echo '{refused}'"), "convert zip.pt -o out.tssd --json").1;
    assert_eq!(serde_json::from_str::<Json>(&as_json).unwrap()["help"], "do it by hand");
}

#[test]
fn without_python_it_says_what_to_install() {
    let place = place();
    let before = place.names();
    std::fs::create_dir(place.path("nothing")).unwrap();
    for root in [None, Some("nothing"), Some("")] {
        let mut command = place.command();
        command.args(["convert", "dcp", "-o", "out.tssd"]).env("PATH", place.path("nothing"));
        match root {
            Some(root) => command.env("VIRTUAL_ENV", root),
            None => command.env_remove("VIRTUAL_ENV"),
        };
        let (code, said) = said(command.output().unwrap());
        assert_eq!(code, Some(5), "{said}");
        assert!(said.contains("there is no python3") && said.contains("VIRTUAL_ENV"), "{said}");
    }
    std::fs::remove_dir(place.path("nothing")).unwrap();
    assert_eq!(place.names(), before);
}

#[test]
fn the_python_that_the_command_was_installed_with_comes_first() {
    let place = place();
    std::fs::create_dir(place.path("bin")).unwrap();
    std::fs::rename(place.path("venv/bin/python3"), place.path("bin/python3")).unwrap();
    // Another process writes it, so that none that is forked here meanwhile has it open.
    let copied = Command::new("cp").arg(binary()).arg(place.path("bin/tssd")).status().unwrap();
    assert!(copied.success());
    let linked = place.path("venv/bin/tssd");
    std::os::unix::fs::symlink(place.path("bin/tssd"), &linked).unwrap();
    for path in [place.path("bin/tssd"), linked] {
        let mut command = Command::new(path);
        command.args(["convert", "dcp", "-o", "out.tssd"]).current_dir(place.path(""));
        command.env("AS_PYTHON", READ).env("VIRTUAL_ENV", "/nowhere");
        let (code, said) = said(command.output().unwrap());
        assert_eq!(code, Some(0), "{said}");
    }
}

#[test]
fn where_it_cannot_write_python_is_not_asked() {
    let place = place();
    for output in ["nowhere/out.tssd", "zip.pt/out.tssd"] {
        let (code, said) = run(&place, "touch asked", &format!("convert zip.pt -o {output}"));
        assert!(matches!(code, Some(3 | 5)), "{said}");
    }
    assert!(!place.path("asked").exists());
}

#[test]
fn other_commands_and_stdin_say_what_it_is() {
    let place = place();
    for file in ["zip.pt", "legacy.pt", "framed.pt"] {
        let said = place.expect(5, &format!("diff {file} read.tssd"));
        let parts = [file, "is a file of torch.save", "`tssd convert FILE -o OUT.tssd`"];
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        let mut command = command(&place, "touch asked", "convert - -o out.tssd");
        let input = std::fs::File::open(place.path(file)).unwrap();
        let (code, said) = self::said(command.stdin(input).output().unwrap());
        assert_eq!(code, Some(5), "{said}");
        assert!(said.contains("<stdin> is a file of torch.save"), "{said}");
    }
    assert!(!place.path("asked").exists());
}

/// Once Python has said that it runs, and has begun a file.
fn begun(place: &Place, as_python: &str) -> Child {
    let as_python =
        format!(r#"echo part > "$new"; echo $$ > begun.part; mv begun.part begun; {as_python}"#);
    let mut command = command(place, &as_python, "convert dcp -o out.tssd");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while !place.path("begun").exists() {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child
}

#[test]
fn when_the_command_ends_python_does_and_nothing_stays() {
    // Until its stdin ends; and it goes on writing.
    let waits = "cat > /dev/null; touch ended";
    // What it says of that goes nowhere: it would end by saying it to nobody.
    let writes = r#"exec 2> /dev/null; while echo more > "$new.part"; do mv "$new.part" "$new"; done; touch ended"#;
    for (as_python, signal) in [(waits, Signal::INT), (waits, Signal::TERM), (writes, Signal::TERM)]
    {
        let place = place();
        let before = place.names();
        let mut child = begun(&place, as_python);
        let pid = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        while !place.path("ended").exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        std::fs::remove_file(place.path("begun")).unwrap();
        std::fs::remove_file(place.path("ended")).unwrap();
        assert_eq!(place.names(), before);
    }
}
