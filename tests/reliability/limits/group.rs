//! A daemon in a control group with little memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tssd_store::blocking::Store;
use tssd_store::{ErrorKind, GetOptions, Key, PutOptions};
use tssd_tests::command::{Serve, quick_folder};
use tssd_tests::proof::Proof;

use super::holdings::assert_typed;
use super::processes::Actor;
use crate::contents::Contents;

/// What the group may have.
const LIMIT: u64 = 192 << 20;

/// A version of 8 MiB.
const ELEMENTS: u64 = 1 << 18;

fn contents(key: &str) -> Contents<'_> {
    Contents { key, version: 1, writers: 1, elements: ELEMENTS }
}

/// A control group below that of this process; it goes with this.
struct Group(PathBuf);

impl Group {
    /// In version 1 of control groups, or in version 2; or why not.
    fn new() -> Result<Self, String> {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
        let mut why = "this process is in no control group".to_owned();
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next().unwrap(), parts.next().unwrap());
            let (mount, limit) = match controllers {
                "" => ("/sys/fs/cgroup", "memory.max"),
                all if all.split(',').any(|it| it == "memory") => {
                    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
                }
                _ => continue,
            };
            let own = Path::new(mount).join(path.trim_start_matches('/'));
            // In a container that path is of another place.
            let own = if own.join("cgroup.procs").exists() { own } else { mount.into() };
            let group = Self(own.join(format!("tssd-{}", std::process::id())));
            let made = fs::create_dir(&group.0)
                .and_then(|()| fs::write(group.0.join(limit), LIMIT.to_string()));
            match made {
                Ok(()) => return Ok(group),
                Err(error) => why = format!("{}: {error}", group.0.display()),
            }
        }
        Err(why)
    }

    /// How processes of it were killed, or 0 where nobody says.
    fn kills(&self) -> u64 {
        let texts = ["memory.oom_control", "memory.events"]
            .map(|name| fs::read_to_string(self.0.join(name)));
        let lines = texts.iter().flatten().flat_map(|text| text.lines());
        let mut kills = lines.filter_map(|line| line.strip_prefix("oom_kill "));
        kills.next().expect("it says how often").parse().unwrap()
    }

    fn most(&self) -> u64 {
        let names = ["memory.max_usage_in_bytes", "memory.peak"];
        let mut texts = names.iter().filter_map(|name| fs::read_to_string(self.0.join(name)).ok());
        texts.next().and_then(|text| text.trim().parse().ok()).unwrap_or_default()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Whoever was in it has just been killed.
        let is_gone = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            fs::remove_dir(&self.0).is_ok() || !self.0.exists()
        });
        assert!(is_gone || std::thread::panicking(), "{} stays", self.0.display());
    }
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn a_daemon_lives_within_its_control_group() {
    let proof = Proof::begin("limits: control group");
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return proof.end(json!({ "skipped": why })),
    };
    let (mut rounds, mut puts, mut refused, mut reads) = (0, 0, 0, 0);
    while proof.goes_on(rounds, 2) {
        let folder = quick_folder();
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", group.0.display());
        let within = ["sh", "-c", &enter, "sh"];
        let serve = Serve::under(&within, folder.path(), &[]);
        let store = serve.connect();
        let limit = store.status().unwrap().memory.limit;
        assert_eq!(limit, LIMIT / 2, "half of what the group has: {}", serve.said);
        assert!(serve.said.contains(": 100 MB of memory"), "{}", serve.said);
        // The writer's memory is charged to the group as well.
        let words = Actor::start(&within, "little memory", &serve.url).words();
        puts += words[0];
        refused += words[1];
        for number in 0..words[0] {
            let name = format!("k{number}");
            let (dict, _) =
                store.get_state_dict(&Key::new(&name).unwrap(), &GetOptions::default()).unwrap();
            contents(&name).check(&dict);
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
    assert_eq!(group.kills(), 0);
    proof.end(json!({
        "rounds": rounds, "MiB of the group": LIMIT >> 20, "puts": puts, "refused for want of memory": refused,
        "reads": reads, "killed": 0, "most MiB of the group": group.most() >> 20,
    }));
}

/// A process of the group: puts versions until there is no room, and goes on when there is. Says how many versions stay
/// and how many puts were refused.
pub(super) fn put_until_there_is_none(url: &str) -> Vec<u64> {
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
                assert_typed(&error, &[ErrorKind::Busy]);
                assert!(error.to_string().contains("memory"), "{error}");
                refused += 1;
                // What is there is whole all the same.
                let (dict, _) =
                    store.get_state_dict(&Key::new("k0").unwrap(), &GetOptions::default()).unwrap();
                contents("k0").check(&dict);
            }
        }
    }
    assert!(number >= 8, "only {number} fit");
    // Room for one is room for another.
    store.delete(&Key::new(format!("k{}", number - 1)).unwrap(), None).unwrap();
    put(number - 1).unwrap();
    vec![number, refused]
}
