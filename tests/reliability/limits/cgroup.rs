//! A daemon in a control group (cgroup) with little memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tssd_store::blocking::Store;
use tssd_store::{ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::campaign::Campaign;
use tssd_tests::command::{DaemonProcess, memory_tempdir};

use crate::contents::Contents;
use crate::limits::client_process::LimitedProcess;
use crate::limits::fixtures::assert_error_kind;

/// Memory limit of the cgroup, in bytes.
const LIMIT_BYTES: u64 = 192 << 20;

/// Elements of a tensor. A version has 8 MiB.
const ELEMENTS: u64 = 1 << 18;

fn contents(key: &str) -> Contents<'_> {
    Contents { key, version: 1, writers: 1, elements: ELEMENTS }
}

/// A cgroup below that of this process. Removed on drop.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a cgroup of version 1 or 2. On failure returns the reason.
    fn new() -> Result<Self, String> {
        let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap();
        let mut reason = "this process is in no control group".to_owned();
        for line in cgroups.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next().unwrap(), parts.next().unwrap());
            let (mount, limit) = match controllers {
                "" => ("/sys/fs/cgroup", "memory.max"),
                all if all.split(',').any(|it| it == "memory") => {
                    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
                }
                _ => continue,
            };
            let own_cgroup = Path::new(mount).join(path.trim_start_matches('/'));
            // In a container the path refers to the host, and does not exist here.
            let own_cgroup =
                if own_cgroup.join("cgroup.procs").exists() { own_cgroup } else { mount.into() };
            let cgroup = Self(own_cgroup.join(format!("tssd-{}", std::process::id())));
            let created = fs::create_dir(&cgroup.0)
                .and_then(|()| fs::write(cgroup.0.join(limit), LIMIT_BYTES.to_string()));
            match created {
                Ok(()) => return Ok(cgroup),
                Err(error) => reason = format!("{}: {error}", cgroup.0.display()),
            }
        }
        Err(reason)
    }

    /// Returns the number of processes in the cgroup that the kernel killed for lack of memory.
    fn oom_kills(&self) -> u64 {
        let texts = ["memory.oom_control", "memory.events"]
            .map(|name| fs::read_to_string(self.0.join(name)));
        let lines = texts.iter().flatten().flat_map(|text| text.lines());
        let mut oom_kills = lines.filter_map(|line| line.strip_prefix("oom_kill "));
        oom_kills.next().expect("it says how often").parse().unwrap()
    }

    fn peak_bytes(&self) -> u64 {
        let names = ["memory.max_usage_in_bytes", "memory.peak"];
        let mut texts = names.iter().filter_map(|name| fs::read_to_string(self.0.join(name)).ok());
        texts.next().and_then(|text| text.trim().parse().ok()).unwrap_or_default()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The processes in it have just been killed. The kernel removes them with a delay.
        let is_removed = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            fs::remove_dir(&self.0).is_ok() || !self.0.exists()
        });
        assert!(is_removed || std::thread::panicking(), "{} cannot be removed", self.0.display());
    }
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn daemon_stays_within_its_cgroup_memory_limit() {
    let campaign = Campaign::start("limits: control group");
    let cgroup = match Cgroup::new() {
        Ok(cgroup) => cgroup,
        Err(reason) => return campaign.finish(json!({ "skipped": reason })),
    };
    let (mut rounds, mut puts, mut refused, mut reads) = (0, 0, 0, 0);
    while campaign.should_continue(rounds, 2) {
        let folder = memory_tempdir();
        let enter_script = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", cgroup.0.display());
        let prefix = ["sh", "-c", &enter_script, "sh"];
        let serve = DaemonProcess::start_by(&prefix, folder.path(), &[]);
        let store = serve.connect();
        let limit = store.status().unwrap().memory.limit_bytes;
        assert_eq!(
            limit,
            LIMIT_BYTES / 2,
            "half of the limit of the cgroup: {}",
            serve.startup_line
        );
        assert!(serve.startup_line.contains(": 100 MB of memory"), "{}", serve.startup_line);
        // The memory of the writer is charged to the cgroup, too.
        let counts = LimitedProcess::start(&prefix, "little memory", &serve.url).counts();
        puts += counts[0];
        refused += counts[1];
        for number in 0..counts[0] {
            let name = format!("k{number}");
            let (dict, _) =
                store.get_state_dict(&Key::new(&name).unwrap(), &GetOptions::default()).unwrap();
            contents(&name).assert_matches(&dict);
            reads += 1;
        }
        store
            .keys(None)
            .unwrap()
            .iter()
            .for_each(|key| assert_eq!(store.delete(key, None).unwrap(), 1));
        store
            .put_state_dict(
                &Key::new("k0").unwrap(),
                &contents("k0").part(0),
                &PutOptions::default(),
            )
            .unwrap();
        rounds += 1;
    }
    assert_eq!(cgroup.oom_kills(), 0);
    campaign.finish(json!({
        "rounds": rounds, "MiB of the group": LIMIT_BYTES >> 20, "puts": puts, "refused for want of memory": refused,
        "reads": reads, "killed": 0, "most MiB of the group": cgroup.peak_bytes() >> 20,
    }));
}

/// Puts versions until no memory is left, and once more after a delete.
///
/// Returns the number of versions that stay and the number of refused puts.
pub(super) fn put_until_memory_runs_out(url: &str) -> Vec<u64> {
    let store = Store::connect(url).unwrap();
    let options = PutOptions { timeout: Duration::from_millis(300), ..PutOptions::default() };
    let put = |number: u64| {
        let name = format!("k{number}");
        let key = Key::new(&name).unwrap();
        store.put_state_dict(&key, &contents(&name).part(0), &options)
    };
    let (mut number, mut refused) = (0, 0);
    while refused < 3 {
        match put(number) {
            Ok(_) => number += 1,
            Err(error) => {
                assert_error_kind(&error, &[ErrorKind::Busy]);
                assert!(error.to_string().contains("memory"), "{error}");
                refused += 1;
                // Stored versions stay readable.
                let (dict, _) =
                    store.get_state_dict(&Key::new("k0").unwrap(), &GetOptions::default()).unwrap();
                contents("k0").assert_matches(&dict);
            }
        }
    }
    assert!(number >= 8, "only {number} versions fit");
    // A delete frees the memory for another version.
    store.delete(&Key::new(format!("k{}", number - 1)).unwrap(), None).unwrap();
    put(number - 1).unwrap();
    vec![number, refused]
}
