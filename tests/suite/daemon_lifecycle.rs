//! Daemons in operation: clients start them, idle ones exit, and a group of users can share one.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tssd_format::{StateDict, Tensor};
use tssd_store::blocking::{Daemon, Store};
use tssd_store::{DaemonOptions, Durability, ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::command::{DaemonProcess, binary};
use tssd_tests::training_steps::{key, options, read_step, step_part, wait_until};

/// A user's runtime directory. Dropping it stops the daemon whose socket is there.
struct RuntimeDir(tempfile::TempDir);

impl RuntimeDir {
    /// Writes a file to put and returns its path.
    fn write_model(&self) -> PathBuf {
        let model = self.0.path().join("model.tssd");
        let mut dict = StateDict::new();
        dict.insert("step", 1_i64);
        let encoded = tssd_format::TorchStoreStateDict::from_state_dict(&dict).unwrap();
        std::fs::write(&model, encoded.as_bytes()).unwrap();
        model
    }

    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Returns a command on the store `unix:shared`. The command starts `program` as the daemon.
    fn command(&self, program: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command
            .args(arguments)
            .env("XDG_RUNTIME_DIR", self.0.path())
            .env("TSSD_BIN", program)
            .env("TSSD_STORE", "unix:shared")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(&binary(), arguments).output().unwrap()
    }

    /// Returns the path of the socket with `extension` appended.
    fn socket_path(&self, extension: &str) -> PathBuf {
        self.0.path().join(format!("tssd/shared.sock{extension}"))
    }

    /// Returns the daemon that serves the socket, if any.
    fn pid(&self) -> Option<Pid> {
        let is_served = self.socket_path("").exists();
        let pid = std::fs::read_to_string(self.socket_path(".lock")).ok()?;
        Pid::from_raw(pid.trim().parse().ok()?).filter(|_| is_served)
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            rustix::process::kill_process(pid, Signal::TERM).unwrap();
            // The temporary folder must outlive the socket.
            while self.socket_path("").exists() {
                std::thread::yield_now();
            }
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn concurrent_clients_start_one_daemon() {
    let runtime = RuntimeDir::new();
    let clients: Vec<_> = (0..8)
        .map(|_| runtime.command(&binary(), &["status", "--json"]).spawn().unwrap())
        .collect();
    let pids: Vec<serde_json::Value> = clients
        .into_iter()
        .map(|client| {
            let output = client.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", text(&output.stderr));
            let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            status["pid"].clone()
        })
        .collect();
    let pid = runtime.pid().unwrap();
    assert!(pids.iter().all(|other| *other == pid.as_raw_nonzero().get()), "{pid:?}: {pids:?}");
    // The daemon leads its own session.
    assert_eq!(rustix::process::getsid(Some(pid)).unwrap(), pid);
    assert_eq!(text(&std::fs::read(runtime.socket_path(".log")).unwrap()), "");
}

#[test]
fn a_version_outlives_the_client_that_started_the_daemon() {
    let runtime = RuntimeDir::new();
    let model = runtime.write_model();
    let put = runtime.run(&["put", "policy", model.to_str().unwrap()]);
    assert!(put.status.success(), "{}", text(&put.stderr));
    let keys = runtime.run(&["ls"]);
    assert!(text(&keys.stdout).contains("policy"), "{}", text(&keys.stderr));
}

#[test]
fn client_reports_why_daemon_did_not_start() {
    let runtime = RuntimeDir::new();
    let program = runtime.0.path().join("program");
    std::fs::write(&program, "#!/bin/sh\necho 'the moon is full' >&2\nexit 5\n").unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let clients: Vec<_> =
        (0..3).map(|_| runtime.command(&program, &["ls"]).spawn().unwrap()).collect();
    for client in clients {
        let output = client.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(4), "unreachable");
        assert!(text(&output.stderr).contains("the moon is full"), "{}", text(&output.stderr));
    }
    let output = runtime.command(Path::new("/nowhere/tssd"), &["ls"]).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    let error = text(&output.stderr);
    let expected = "error: cannot start the daemon \"shared\": command \"/nowhere/tssd\" of TSSD_BIN not found\n\
                    help: set TSSD_BIN to the command, or start \"tssd serve --socket shared\"\n";
    assert_eq!(error, expected);
    // The failed starts do not block a program that works.
    assert!(runtime.run(&["ls"]).status.success());
}

#[test]
fn client_starts_command_next_to_its_executable() {
    let runtime = RuntimeDir::new();
    let folder = runtime.0.path().join("bin");
    std::fs::create_dir(&folder).unwrap();
    let program = folder.join("client");
    std::fs::copy(binary(), &program).unwrap();
    let run = || {
        let mut command = Command::new(&program);
        command
            .arg("ls")
            .env_remove("TSSD_BIN")
            .env("PATH", "/nowhere")
            .env("XDG_RUNTIME_DIR", runtime.0.path())
            .env("TSSD_STORE", "unix:shared");
        command.output().unwrap()
    };
    let error = text(&run().stderr);
    let place = format!("command \"tssd\" not found next to {} nor on PATH", program.display());
    assert!(error.contains(&place), "{error}");
    std::fs::copy(binary(), folder.join("tssd")).unwrap();
    let output = run();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn client_reports_missing_runtime_folder() {
    let runtime = RuntimeDir::new();
    let mut command = runtime.command(&binary(), &["ls"]);
    let output = command.env("XDG_RUNTIME_DIR", runtime.0.path().join("gone")).output().unwrap();
    let error = text(&output.stderr);
    assert!(!output.status.success());
    assert!(error.contains("gone/tssd") && error.contains("XDG_RUNTIME_DIR"), "{error}");
}

#[test]
fn daemon_exits_after_linger_without_clients_and_versions() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let linger = Duration::from_millis(50);
    let options =
        DaemonOptions { linger: Some(linger), ..DaemonOptions::for_socket(&socket, 64 << 20) };
    let daemon = Daemon::bind(options).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let daemon = std::thread::spawn(move || daemon.serve(stopped).unwrap());
    let url = format!("unix:{}", socket.display());
    let key = Key::new("policy").unwrap();
    let store = Store::connect(&url).unwrap();
    let mut dict = StateDict::new();
    dict.insert("step", 1_i64);
    store.put_state_dict(&key, &dict, &PutOptions::default()).unwrap();
    std::thread::sleep(linger * 4);
    assert_eq!(store.versions(&key).unwrap().len(), 1, "the daemon serves a connected client");
    drop(store);
    std::thread::sleep(linger * 4);
    let store = Store::connect(&url).unwrap();
    assert_eq!(store.versions(&key).unwrap().len(), 1, "the daemon keeps a version in memory");
    store.delete(&key, None).unwrap();
    drop(store);
    daemon.join().unwrap();
    assert!(!socket.exists());
    drop(stop);
}

#[test]
fn socket_is_private_to_user_unless_group_is_set() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mode = |path: &Path| path.metadata().unwrap().mode() & 0o7777;
    drop(Daemon::bind(DaemonOptions::for_socket(&socket, 1 << 20)).unwrap());
    assert_eq!(mode(&socket), 0o600);
    let group = rustix::process::getegid().as_raw();
    let options = || DaemonOptions {
        socket_group: Some(group),
        ..DaemonOptions::for_socket(&socket, 1 << 20)
    };
    std::fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
    let error = Daemon::bind(options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "the group cannot enter the folder: {error}");
    std::fs::set_permissions(&folder, Permissions::from_mode(0o750)).unwrap();
    drop(Daemon::bind(options()).unwrap());
    assert_eq!((mode(&socket), socket.metadata().unwrap().gid()), (0o660, group));
    assert_eq!(mode(folder.path()), 0o750);

    let runtime = RuntimeDir::new();
    let output = runtime.run(&["serve", "--socket-group", "no such group"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("no such group"), "{}", text(&output.stderr));
}

/// Only root can run clients as other users. For other users the test does nothing.
#[test]
fn daemon_serves_only_members_of_socket_group() {
    const GROUP: u32 = 12345;
    const MEMBER: u32 = 54321;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("tssd");
    std::fs::copy(binary(), &program).unwrap();
    let list_keys = |allow_uids: &[u32], user: u32, group: u32| {
        let socket = folder.path().join("socket");
        let daemon = Daemon::bind(DaemonOptions {
            socket_group: Some(GROUP),
            allow_uids: allow_uids.to_vec(),
            ..DaemonOptions::for_socket(&socket, 1 << 20)
        });
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let daemon = daemon.unwrap();
        let daemon = std::thread::spawn(move || daemon.serve(stopped).unwrap());
        let mut client = Command::new(&program);
        client.args(["ls", "--store", &format!("unix:{}", socket.display())]);
        let output = client.current_dir("/").uid(user).gid(group).output().unwrap();
        drop(stop);
        daemon.join().unwrap();
        (output.status.success(), text(&output.stderr))
    };
    assert_eq!(list_keys(&[], MEMBER, GROUP), (true, String::new()));
    assert!(!list_keys(&[], MEMBER, MEMBER).0, "the client is not in the group");
    assert!(list_keys(&[MEMBER], MEMBER, GROUP).0);
    let (is_served, error) = list_keys(&[MEMBER + 1], MEMBER, GROUP);
    assert!(!is_served && error.contains("--allow-uid"), "the uid is not allowed: {error}");
}

/// Like a client in a container: it has its own PID namespace and shares the socket.
#[test]
fn daemon_serves_clients_of_other_pid_namespaces() {
    let unshare = ["unshare", "--pid", "--fork", "--kill-child"];
    let probe = Command::new(unshare[0]).args(&unshare[1..]).arg("true").output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        println!("left out: PID namespaces are not permitted here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let daemon = DaemonProcess::start_by(&unshare, folder.path(), &["--memory-limit", "64MB"]);
    let store = daemon.connect();
    for step in 1..=8 {
        store.put_state_dict(&key(), &step_part(step, 0, 1), &options(step, 0, 1)).unwrap();
        assert_eq!(read_step(&daemon.connect(), None, 1).unwrap(), step);
    }
    let opened = store.open(&key(), &GetOptions::default()).unwrap();
    let status = store.status().unwrap();
    assert_eq!((status.pid, status.peers[0].pid, status.leases[0].pid), (1, 0, 0));
    assert!(status.leases[0].to_string().contains("another PID namespace"), "{status:?}");
    let output = Command::new(binary()).args(["status", "--store", &daemon.url]).output().unwrap();
    let table = text(&output.stdout);
    assert_eq!(table.matches("other PID namespace").count(), 3, "{table}");
    drop(opened);
}

#[test]
fn daemon_completes_open_puts_and_rejects_new_ones_on_sigterm() {
    let [root, socket] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let args = ["--root", root.path().to_str().unwrap()];
    let mut daemon = DaemonProcess::start(socket.path(), &args);
    let (store, other) = (daemon.connect(), daemon.connect());
    let durable = PutOptions { durability: Durability::Disk, ..PutOptions::default() };
    let mut publisher = store.publish(&key(), &durable, 1 << 20).unwrap();
    let leaf = |step: u8| Tensor::from_slice(&vec![step; 2 << 20], &[2 << 20]).unwrap();
    publisher.add("first", leaf(1)).unwrap();
    publisher.flush().unwrap();
    daemon.signal(Signal::TERM);
    let other_key = Key::new("another").unwrap();
    wait_until("the daemon rejects new puts", || {
        match other.put_state_dict(&other_key, &step_part(1, 0, 1), &options(1, 0, 1)) {
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                assert!(error.to_string().contains("is ending"), "{error}");
                true
            }
        }
    });
    publisher.add("second", leaf(2)).unwrap();
    assert!(publisher.finish().unwrap().visible);
    assert!(daemon.process.wait().unwrap().success());
    let store = DaemonProcess::start(socket.path(), &args);
    let store = store.connect();
    for (fqn, step) in [("first", 1), ("second", 2)] {
        let tensor = store.get(&key(), fqn, &GetOptions::default()).unwrap();
        assert!(tensor.view().span().iter().all(|byte| *byte == step), "{fqn}");
    }
}

#[test]
fn log_option_enables_events_of_put_and_get() {
    let runtime = RuntimeDir::new();
    let model = runtime.write_model();
    let put = ["put", "policy", model.to_str().unwrap()];
    let silent = runtime.run(&[&put[..], &["--quiet"]].concat());
    assert_eq!(text(&silent.stderr), "");
    let logged = runtime.run(&[&put[..], &["--quiet", "--log", "debug"]].concat());
    let lines = text(&logged.stderr);
    for [event, fields @ ..] in [
        ["written", "version=2", "bytes=", "begin_seconds=", "write_seconds="],
        ["committed", "put{key=policy version=2}", "version=2", "visible=true", "commit_seconds="],
    ] {
        let line = lines.lines().find(|line| line.contains(event)).expect(&lines);
        assert!(fields.iter().all(|field| line.contains(field)), "{fields:?} in {line}");
    }
    let get = ["get", "policy", "-o", "-", "--log", "debug"];
    let lines = text(&runtime.run(&get).stderr);
    let line = lines.lines().find(|line| line.contains("read")).expect(&lines);
    for field in ["get{key=policy version=2}", "bytes_needed=", "copy_seconds="] {
        assert!(line.contains(field), "{field} in {line}");
    }
    let output = runtime.run(&["ls", "--log", "chatty"]);
    assert_eq!(output.status.code(), Some(2));
}
