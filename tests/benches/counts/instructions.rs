//! Instruction counts of the hot paths, measured by callgrind.
//!
//! Instruction counts are reproducible, unlike times on shared machines. They are compared with `instructions.json`: a
//! path that takes over 5 % more instructions fails. `TSSD_UPDATE_INSTRUCTIONS=1` updates the file.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::process::Command;

use bytes::Bytes;
use tssd_format::{Archive, Layout, Options, StateDict, TorchStoreStateDict, VerifyJob};
use tssd_store::{GetOptions, Key, PutOptions};
use tssd_tests::bench::{Bench, Fsdp, Model, stacked_shapes, targets};
use tssd_tests::test_daemon::TestDaemon;

/// Environment variable of a child process under callgrind: number of turns, a space, name of a path.
const CHILD_VARIABLE: &str = "TSSD_BENCH_COUNTED";

/// Relative increase of a count above which the bench fails.
const TOLERANCE: f64 = 0.05;

/// Numbers of turns. The difference of their counts does not contain the setup.
const TURNS: [u64; 2] = [1, 4];

/// File of the expected counts. The dev profile, which `cargo xtask test --all` uses, has its own.
const EXPECTED_COUNTS: &str = if cfg!(debug_assertions) {
    concat!(env!("CARGO_MANIFEST_DIR"), "/benches/counts/instructions-dev.json")
} else {
    concat!(env!("CARGO_MANIFEST_DIR"), "/benches/counts/instructions.json")
};

/// Name of a path, and the function that runs it a number of times.
type Path = (&'static str, fn(u64));

const PATHS: &[Path] = &[
    ("format: plan a layout, 10,000 tensors", plan),
    ("format: encode 16 MB", encode),
    ("format: open, 30,000 tensors", open),
    ("format: verify 16 MB", verify),
    ("format: make a state dict of 10,000 tensors", load),
    ("format: look up 1,000 of 10,000 tensors", look_up),
    ("store: plan a reader of Kimi K2, 64 writers to 128 readers", reshard),
    ("store: put 1,000 tensors, daemon included", put),
    ("store: get 1,000 tensors in place, daemon included", get),
    ("store: put and pull 1,000 tensors over TCP, daemon included", pull),
    ("store: put and get 1 tensor 10 times, daemon included", single),
];

/// Runs a path if this process is a child under callgrind. Returns whether it is.
pub(crate) fn run_if_child() -> bool {
    let Ok(args) = std::env::var(CHILD_VARIABLE) else { return false };
    let (turns, name) = args.split_once(' ').unwrap();
    let (_, run) = PATHS.iter().find(|(path, _)| *path == name).unwrap();
    run(turns.parse().unwrap());
    true
}

/// Counts the instructions of all paths, and compares them with the expected counts.
///
/// # Panics
///
/// If valgrind is not installed, or a path takes over 5 % more instructions than expected.
#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
#[expect(clippy::print_stdout, reason = "a bench prints its result")]
pub(crate) fn all(bench: &mut Bench) {
    let expected = std::fs::read_to_string(EXPECTED_COUNTS).unwrap_or_else(|_| "{}".into());
    let expected: BTreeMap<String, u64> = serde_json::from_str(&expected).unwrap();
    let mut found = BTreeMap::new();
    let mut longer = Vec::new();
    for (name, _) in PATHS {
        let [one, several] = TURNS.map(|turns| count(name, turns));
        let own = (several - one) / (TURNS[1] - TURNS[0]);
        found.insert((*name).to_owned(), own);
        let change = expected.get(*name).map(|&before| own as f64 / before as f64 - 1.0);
        bench.record_counts(name, &[("instructions", own as f64)]);
        if let Some(change) = change {
            println!("  that is {:+.1} % of what is written down\n", 100.0 * change);
        }
        if change.is_none_or(|change| change > TOLERANCE) {
            longer.push(*name);
        }
    }
    if std::env::var_os("TSSD_UPDATE_INSTRUCTIONS").is_some() {
        std::fs::write(EXPECTED_COUNTS, serde_json::to_string_pretty(&found).unwrap() + "\n")
            .unwrap();
    } else {
        assert!(
            longer.is_empty(),
            "these take over 5 % more instructions than instructions.json says: {longer:?}; if that is \
             meant, run again with TSSD_UPDATE_INSTRUCTIONS=1"
        );
    }
}

fn count(name: &str, turns: u64) -> u64 {
    let program = std::env::current_exe().unwrap();
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(program)
        .env(CHILD_VARIABLE, format!("{turns} {name}"))
        .output()
        .expect("valgrind is installed");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {stderr}");
    // The last line has the total count.
    let (_, count) = stderr.rsplit_once("Collected :").expect("callgrind says what it has counted");
    count.split_whitespace().next().unwrap().parse().unwrap()
}

fn encoded(model: &Model) -> Bytes {
    TorchStoreStateDict::from_state_dict(&model.dict).unwrap().as_bytes().clone()
}

fn plan(turns: u64) {
    let model = Model::tiny(10_000);
    for _ in 0..turns {
        black_box(Layout::plan(&model.dict, &Options::new()).unwrap());
    }
}

fn encode(turns: u64) {
    let model = Model::uniform(16, 16_000_000);
    let len = Layout::plan(&model.dict, &Options::new()).unwrap().file_len();
    let mut file = vec![1; usize::try_from(len).unwrap()];
    for _ in 0..turns {
        let layout = Layout::plan(&model.dict, &Options::new()).unwrap();
        layout.write_into(black_box(&mut file)).unwrap();
    }
}

fn open(turns: u64) {
    let file = encoded(&Model::experts(30_000, 4));
    for _ in 0..turns {
        black_box(Archive::from_bytes(black_box(file.clone())).unwrap());
    }
}

fn verify(turns: u64) {
    let archive = Archive::from_bytes(encoded(&Model::uniform(16, 16_000_000))).unwrap();
    for _ in 0..turns {
        archive.verify_jobs().iter().try_for_each(VerifyJob::run).unwrap();
    }
}

fn load(turns: u64) {
    let archive = Archive::from_bytes(encoded(&Model::tiny(10_000))).unwrap();
    for _ in 0..turns {
        black_box(archive.to_state_dict().unwrap());
    }
}

fn look_up(turns: u64) {
    let model = Model::tiny(10_000);
    let names: Vec<String> = model.tensors().into_iter().map(|(name, _)| name).collect();
    let archive = Archive::from_bytes(encoded(&model)).unwrap();
    for _ in 0..turns {
        for name in names.iter().step_by(10) {
            black_box(archive.tensor(name).unwrap());
        }
    }
}

fn reshard(turns: u64) {
    let shapes = stacked_shapes("kimi-k2");
    let fsdp = Fsdp::new(&shapes[..200], 64, 128);
    for _ in 0..turns {
        black_box(fsdp.plan(0));
    }
}

fn put(turns: u64) {
    let model = Model::tiny(1000);
    let served = TestDaemon::new(1 << 30);
    let store = served.connect();
    for _ in 0..turns {
        store.put_state_dict(&key(), &model.dict, &PutOptions::default()).unwrap();
    }
}

fn get(turns: u64) {
    let model = Model::tiny(1000);
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    writer.put_state_dict(&key(), &model.dict, &PutOptions::default()).unwrap();
    let mut memory = vec![0; usize::try_from(model.bytes).unwrap()];
    for _ in 0..turns {
        let mut targets = targets(&model, &mut memory);
        reader.get_state_dict_into(&key(), &mut targets, &GetOptions::default()).unwrap();
    }
}

fn pull(turns: u64) {
    let model = Model::tiny(1000);
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect_tcp());
    let mut memory = vec![0; usize::try_from(model.bytes).unwrap()];
    for _ in 0..turns {
        writer.put_state_dict(&key(), &model.dict, &PutOptions::default()).unwrap();
        let mut targets = targets(&model, &mut memory);
        reader.get_state_dict_into(&key(), &mut targets, &GetOptions::default()).unwrap();
    }
}

fn single(turns: u64) {
    let served = TestDaemon::new(1 << 30);
    let (writer, reader) = (served.connect(), served.connect());
    for number in 0..10 * turns {
        let mut dict = StateDict::new();
        let tensor = tssd_format::Tensor::from_slice(&[number], &[1]).unwrap();
        dict.insert("weight", tensor);
        writer.put_state_dict(&key(), &dict, &PutOptions::default()).unwrap();
        black_box(reader.get_state_dict(&key(), &GetOptions::default()).unwrap());
    }
}

fn key() -> Key {
    Key::new("model").unwrap()
}
