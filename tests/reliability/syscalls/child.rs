//! The process whose system calls fail: this program again.
//!
//! `strace` counts calls by thread. So one thread alone does what waits for files, and it has no other core to
//! share its work with. What the process has to say, its parent reads:
//!
//! - `threads MAIN WORKER`, before it begins: it waits for a line then;
//! - `ack STEP` when a step has returned, well;
//! - `err KIND TEXT` when one has failed, then `seen VERSIONS`, and it tries that step again;
//! - `stuck KIND TEXT` if that fails too.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::getpid;
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use tokio::runtime::Builder;
use tssd_format::{Dtype, Region, TensorMeta, Value};
use tssd_store::{
    Daemon, DaemonOptions, Durability, ErrorKind, GetOptions, JobId, Key, PutOptions, Result,
    Store, Target,
};

use super::scenario::{Scenario, Step, keep};
use crate::contents::Contents;

pub(crate) const SCENARIO: &str = "TSSD_RELIABILITY_SCENARIO";
pub(crate) const PLACE: &str = "TSSD_RELIABILITY_PLACE";

/// Of each tensor.
const ELEMENTS: u64 = 256;

/// Of what is published: one tensor is more than that.
const BUCKET: u64 = 1 << 10;

/// The folder of the store, in the place of a process.
pub(crate) fn root(place: &Path) -> PathBuf {
    place.join("root")
}

pub(crate) fn key() -> Key {
    Key::new("model").unwrap()
}

fn contents(version: u64, writers: u32) -> Contents<'static> {
    Contents { key: "model", version, writers, elements: ELEMENTS }
}

/// Nobody alive is in the way, so nobody is waited for.
fn options(version: u64) -> PutOptions {
    PutOptions {
        version: Some(version),
        durability: Durability::Disk,
        timeout: Duration::ZERO,
        ..PutOptions::default()
    }
}

#[test]
#[ignore = "a process of `syscalls`"]
fn process() {
    let (Ok(scenario), Ok(place)) = (std::env::var(SCENARIO), std::env::var(PLACE)) else { return };
    let scenario = Scenario::named(&scenario);
    on_one_core();
    let mut runtime = Builder::new_current_thread();
    runtime.enable_all().max_blocking_threads(1).thread_keep_alive(Duration::from_hours(1));
    runtime.build().unwrap().block_on(async {
        let main = gettid().as_raw_nonzero();
        let worker = tokio::task::spawn_blocking(|| gettid().as_raw_nonzero()).await.unwrap();
        say(format_args!("threads {main} {worker}"));
        std::io::stdin().read_line(&mut String::new()).unwrap();
        let mut actor = Actor { place: place.into(), is_daemon: scenario.is_daemon, store: None };
        for (index, step) in scenario.steps.iter().enumerate() {
            match actor.perform(*step).await {
                Ok(()) => say(format_args!("ack {index}")),
                Err(error) => {
                    say(format_args!("err {} {error}", error.kind().name()));
                    match actor.again(*step).await {
                        Ok(()) => say(format_args!("ack {index}")),
                        Err(error) => {
                            say(format_args!("stuck {} {error}", error.kind().name()));
                            break;
                        }
                    }
                }
            }
        }
    });
    // Whatever it still does, others see the same.
    std::process::exit(0);
}

/// Nobody needs to hear it: a broken pipe ends nothing.
fn say(words: std::fmt::Arguments) {
    let _ = writeln!(std::io::stdout(), "{words}");
}

fn on_one_core() {
    let allowed = sched_getaffinity(None).unwrap();
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    let mut one = CpuSet::new();
    let process = getpid().as_raw_nonzero().get().unsigned_abs() as usize;
    one.set(cores[process % cores.len()]);
    sched_setaffinity(None, &one).unwrap();
}

pub(crate) struct Actor {
    pub(crate) place: PathBuf,
    pub(crate) is_daemon: bool,
    pub(crate) store: Option<Store>,
}

impl Actor {
    async fn store(&mut self) -> Result<Store> {
        if self.store.is_none() {
            self.store = Some(self.open().await?);
        }
        Ok(self.store.clone().unwrap())
    }

    async fn open(&self) -> Result<Store> {
        let root = root(&self.place);
        if !self.is_daemon {
            return tokio::task::spawn_blocking(|| Store::directory(root)).await.unwrap();
        }
        let socket = self.place.join("run/socket");
        let mut options = DaemonOptions::at(&socket, 64 << 20);
        options.root = Some(root);
        match Daemon::bind(options).await {
            Ok(daemon) => drop(tokio::spawn(daemon.serve(std::future::pending()))),
            // It is there: what failed was something of this connection.
            Err(error) if error.kind() == ErrorKind::Busy => {}
            Err(error) => return Err(error),
        }
        Store::connect(&format!("unix:{}", socket.display())).await
    }

    /// A daemon starts, which sweeps, and ends.
    pub(crate) async fn sweep(&mut self) -> Result<()> {
        self.store = None;
        let mut options = DaemonOptions::at(self.place.join("run/socket"), 64 << 20);
        options.root = Some(root(&self.place));
        Daemon::bind(options).await?.serve(std::future::ready(())).await
    }

    /// A call that has failed is made again, once it has been looked what is visible meanwhile.
    async fn again(&mut self, step: Step) -> Result<()> {
        self.store = None;
        let versions = self.store().await?.versions(&key()).await?;
        let numbers: Vec<_> = versions.iter().map(|info| info.number.to_string()).collect();
        say(format_args!("seen {}", numbers.join(",")));
        self.perform(step).await
    }

    pub(crate) async fn perform(&mut self, step: Step) -> Result<()> {
        let (store, key) = (self.store().await?, key());
        match step {
            Step::Open => {}
            Step::Put(number) => {
                let dict = contents(number, 1).part(0);
                assert!(store.put_state_dict(&key, &dict, &options(number)).await?.visible);
            }
            Step::PutByTwo(number) => {
                for writer in 0..2 {
                    let options = PutOptions {
                        writer: Some(writer),
                        writers: Some((0..2).collect()),
                        job: Some(JobId("job".into())),
                        ..options(number)
                    };
                    let dict = contents(number, 2).part(writer);
                    let report = store.put_state_dict(&key, &dict, &options).await?;
                    assert!(report.visible || writer == 0, "{report:?}");
                }
            }
            Step::Publish(number) => {
                let mut publisher = store.publish(&key, &options(number), BUCKET)?;
                for (name, value) in contents(number, 1).entries(0) {
                    publisher.add(name, value).await?;
                }
                assert!(publisher.finish().await?.visible);
            }
            Step::Get => drop(self.get().await?),
            Step::Delete(number) => drop(store.delete(&key, number).await?),
            Step::Retain(count) => store.retain(&key, keep(count)).await?,
        }
        Ok(())
    }

    /// Reads all that is visible, in all ways: its numbers, and the bytes that the store says it has.
    pub(crate) async fn get(&mut self) -> Result<Vec<(u64, u64)>> {
        loop {
            match self.get_once().await {
                // A proof that was owed is done meanwhile, and another version is visible.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                done => return done,
            }
        }
    }

    async fn get_once(&mut self) -> Result<Vec<(u64, u64)>> {
        let (store, key) = (self.store().await?, key());
        let versions = store.versions(&key).await?;
        for info in &versions {
            let options = GetOptions { version: Some(info.number), ..GetOptions::default() };
            let writers = u32::try_from(info.writers.len()).unwrap();
            let contents = contents(info.number, writers);
            let (dict, _) = store.get_state_dict(&key, &options).await?;
            contents.check(&dict);
            self.get_part(&store, &contents, &options).await?;
        }
        Ok(versions.iter().map(|info| (info.number, info.bytes)).collect())
    }

    async fn get_part(
        &self,
        store: &Store,
        contents: &Contents<'_>,
        options: &GetOptions,
    ) -> Result<()> {
        let (whole, name) = (contents.part(0), "rank0_1");
        let Value::Tensor(expected) = whole.leaf(name).unwrap() else { panic!("a tensor") };
        let elements = expected.view().as_slice::<i64>().unwrap();
        let region = Region::new(&[7], &[20]).unwrap();
        let slice = store.get_slice(&key(), name, &region, options).await?;
        assert_eq!(slice.view().as_slice::<i64>().unwrap(), &elements[7..27]);
        let mut bytes = vec![0; 8 * elements.len()];
        let meta = TensorMeta::new(Dtype::Int64, &[ELEMENTS]).unwrap();
        let target =
            Target { fqn: name.to_owned(), place: None, meta, memory: (&mut bytes).into() };
        store.get_state_dict_into(&key(), &mut [target], options).await?;
        assert_eq!(bytes, expected.view().span());
        Ok(())
    }
}
