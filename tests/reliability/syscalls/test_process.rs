//! The process into whose system calls faults are injected: this program in another role.
//!
//! `strace` counts calls by thread. So only one thread executes blocking file operations, and the
//! process runs on one core. The parent reads the output of the process:
//!
//! - `threads MAIN WORKER` before it begins. It then waits for a line on stdin.
//! - `ack STEP` when a step has succeeded.
//! - `err KIND TEXT` when a step has failed, then `seen VERSIONS`. It then retries the step.
//! - `stuck KIND TEXT` if the retry fails, too.

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
pub(crate) const WORK_DIR: &str = "TSSD_RELIABILITY_PLACE";

/// Elements of each tensor.
const ELEMENTS: u64 = 256;

/// Size of a bucket of published tensors. One tensor exceeds it.
const BUCKET: u64 = 1 << 10;

/// Returns the directory of the store in the working directory of a process.
pub(crate) fn store_root(place: &Path) -> PathBuf {
    place.join("root")
}

pub(crate) fn key() -> Key {
    Key::new("model").unwrap()
}

fn contents(version: u64, writers: u32) -> Contents<'static> {
    Contents { key: "model", version, writers, elements: ELEMENTS }
}

/// Returns the options of a put. No living writer can block it, so its timeout is zero.
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
    let (Ok(scenario), Ok(place)) = (std::env::var(SCENARIO), std::env::var(WORK_DIR)) else {
        return;
    };
    let scenario = Scenario::by_name(&scenario);
    pin_to_one_core();
    let mut runtime = Builder::new_current_thread();
    runtime.enable_all().max_blocking_threads(1).thread_keep_alive(Duration::from_hours(1));
    runtime.build().unwrap().block_on(async {
        let main = gettid().as_raw_nonzero();
        let worker = tokio::task::spawn_blocking(|| gettid().as_raw_nonzero()).await.unwrap();
        print_line(format_args!("threads {main} {worker}"));
        std::io::stdin().read_line(&mut String::new()).unwrap();
        let mut actor =
            StepRunner { work_dir: place.into(), is_daemon: scenario.is_daemon, store: None };
        for (index, step) in scenario.steps.iter().enumerate() {
            match actor.run_step(*step).await {
                Ok(()) => print_line(format_args!("ack {index}")),
                Err(error) => {
                    print_line(format_args!("err {} {error}", error.kind().name()));
                    match actor.retry(*step).await {
                        Ok(()) => print_line(format_args!("ack {index}")),
                        Err(error) => {
                            print_line(format_args!("stuck {} {error}", error.kind().name()));
                            break;
                        }
                    }
                }
            }
        }
    });
    // Exit without the destructors of the runtime. They would make no visible difference.
    std::process::exit(0);
}

/// Prints a line. Ignores a closed pipe.
fn print_line(line: std::fmt::Arguments) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn pin_to_one_core() {
    let allowed = sched_getaffinity(None).unwrap();
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    let mut one = CpuSet::new();
    let process = getpid().as_raw_nonzero().get().unsigned_abs() as usize;
    one.set(cores[process % cores.len()]);
    sched_setaffinity(None, &one).unwrap();
}

pub(crate) struct StepRunner {
    pub(crate) work_dir: PathBuf,
    pub(crate) is_daemon: bool,
    pub(crate) store: Option<Store>,
}

impl StepRunner {
    async fn store(&mut self) -> Result<Store> {
        if self.store.is_none() {
            self.store = Some(self.open_store().await?);
        }
        Ok(self.store.clone().unwrap())
    }

    async fn open_store(&self) -> Result<Store> {
        let root = store_root(&self.work_dir);
        if !self.is_daemon {
            return tokio::task::spawn_blocking(|| Store::directory(root)).await.unwrap();
        }
        let socket = self.work_dir.join("run/socket");
        let mut options = DaemonOptions::for_socket(&socket, 64 << 20);
        options.root = Some(root);
        match Daemon::bind(options).await {
            Ok(daemon) => drop(tokio::spawn(daemon.serve(std::future::pending()))),
            // The daemon runs. Only the connection has failed.
            Err(error) if error.kind() == ErrorKind::Busy => {}
            Err(error) => return Err(error),
        }
        Store::connect(&format!("unix:{}", socket.display())).await
    }

    /// Starts a daemon, which sweeps, and ends it.
    pub(crate) async fn run_sweep(&mut self) -> Result<()> {
        self.store = None;
        let mut options = DaemonOptions::for_socket(self.work_dir.join("run/socket"), 64 << 20);
        options.root = Some(store_root(&self.work_dir));
        Daemon::bind(options).await?.serve(std::future::ready(())).await
    }

    /// Retries a failed step, after it has printed which versions are visible.
    async fn retry(&mut self, step: Step) -> Result<()> {
        self.store = None;
        let versions = self.store().await?.versions(&key()).await?;
        let numbers: Vec<_> = versions.iter().map(|info| info.number.to_string()).collect();
        print_line(format_args!("seen {}", numbers.join(",")));
        self.run_step(step).await
    }

    pub(crate) async fn run_step(&mut self, step: Step) -> Result<()> {
        let (store, key) = (self.store().await?, key());
        match step {
            Step::Open => {}
            Step::Put(number) => {
                let dict = contents(number, 1).part(0);
                assert!(store.put_state_dict(&key, &dict, &options(number)).await?.visible);
            }
            Step::PutByTwoWriters(number) => {
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
            Step::Get => drop(self.read_all().await?),
            Step::Delete(number) => drop(store.delete(&key, number).await?),
            Step::Retain(count) => store.retain(&key, keep(count)).await?,
        }
        Ok(())
    }

    /// Reads all visible versions in all ways. Returns their numbers and sizes in bytes.
    pub(crate) async fn read_all(&mut self) -> Result<Vec<(u64, u64)>> {
        loop {
            match self.read_all_once().await {
                // A pending verification has finished meanwhile, and another version is visible.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                done => return done,
            }
        }
    }

    async fn read_all_once(&mut self) -> Result<Vec<(u64, u64)>> {
        let (store, key) = (self.store().await?, key());
        let versions = store.versions(&key).await?;
        for info in &versions {
            let options = GetOptions { version: info.number.into(), ..GetOptions::default() };
            let writers = u32::try_from(info.writers.len()).unwrap();
            let contents = contents(info.number, writers);
            let (dict, _) = store.get_state_dict(&key, &options).await?;
            contents.assert_matches(&dict);
            self.check_partial_reads(&store, &contents, &options).await?;
        }
        Ok(versions.iter().map(|info| (info.number, info.bytes)).collect())
    }

    async fn check_partial_reads(
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
            Target { fqn: name.to_owned(), shard_spec: None, meta, memory: (&mut bytes).into() };
        store.get_state_dict_into(&key(), &mut [target], options).await?;
        assert_eq!(bytes, expected.view().span());
        Ok(())
    }
}
