//! Sessions that are cut after each of their bytes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tssd_store::ErrorKind;
use tssd_store::blocking::Store;
use tssd_tests::campaign::Campaign;

use super::checker::check;
use super::client::{get, try_put};
use super::history::{Call, Recorder, Response, parse_log};
use super::processes::LinearDaemon;
use super::proxy::{Direction, Proxy};
use crate::linearizability::keys::{kept_versions, set_retention, store_key};
use crate::linearizability::ledger_storage::LedgerStorage;

/// The key: durable, with several versions.
const KEY: u8 = 3;

/// Limit of the time that a client may be blocked.
const MAX_LATENCY: Duration = Duration::from_secs(5);

/// Number of sessions with one daemon.
///
/// All clients that use the socket through the proxy are one process to the daemon. While it runs,
/// it may have memory mapped, so the daemon does not reuse that memory.
const SESSIONS_PER_DAEMON: u64 = 32;

/// A daemon, a proxy in front of it, and a log.
struct Setup {
    proxy: Proxy,
    /// A direct connection to the daemon.
    store: Store,
    recorder: Recorder<Vec<u8>>,
    puts: u32,
    _serve: LinearDaemon,
    _folder: TempDir,
}

impl Setup {
    fn new(over_tcp: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let serve = LinearDaemon::with_root(folder.path());
        let proxy = if over_tcp {
            Proxy::listen_tcp(serve.address)
        } else {
            Proxy::listen_unix(folder.path().join("proxy"), serve.socket.clone())
        };
        let store = serve.connect();
        set_retention(&store).unwrap();
        let recorder = Recorder(Vec::new());
        Self { proxy, store, recorder, puts: 0, _serve: serve, _folder: folder }
    }

    fn put(&mut self, store: &Store) -> Option<Response> {
        self.puts += 1;
        let put = self.puts;
        self.recorder.record(KEY, Call::Put(put), || {
            try_put(store, LedgerStorage::Daemon, KEY, put, (None, false))
        })
    }

    fn get(&mut self, store: &Store, version: Option<u64>) -> Option<Response> {
        let call = version.map_or(Call::GetNewest, Call::GetVersion);
        self.recorder.record(KEY, call, || get(store, KEY, version))
    }

    /// Puts and gets through the proxy. Returns whether both had a response.
    fn run_session(&mut self) -> bool {
        let started = Instant::now();
        let is_answered = match Store::connect(&self.proxy.url()) {
            Ok(store) => {
                let is_put = self.put(&store).is_some();
                self.get(&store, None).is_some() && is_put
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
                false
            }
        };
        let elapsed = started.elapsed();
        assert!(elapsed < MAX_LATENCY, "a disconnected client was blocked for {elapsed:?}");
        is_answered
    }

    /// Checks that the next client is served: it reads all versions, puts another one, and reads it.
    fn check_next_client(&mut self) {
        let started = Instant::now();
        let store = self.store.clone();
        for version in store.versions(&store_key(KEY)).unwrap() {
            assert!(self.get(&store, Some(version.number)).is_some(), "a get has a response");
        }
        assert!(matches!(self.put(&store), Some(Response::Put(_))), "a put succeeds");
        assert!(self.get(&store, None).is_some(), "a get has a response");
        let elapsed = started.elapsed();
        assert!(elapsed < MAX_LATENCY, "the next client was blocked for {elapsed:?}");
    }

    /// Checks the history. Returns the number of its operations.
    fn check(&self) -> u64 {
        let operations = parse_log(std::str::from_utf8(&self.recorder.0).unwrap());
        let checked = check(kept_versions(KEY), &operations);
        assert!(checked.is_ok(), "{checked:#?}");
        operations.len() as u64
    }
}

/// Cuts of a session in one direction.
struct CutSeries {
    over_tcp: bool,
    direction: Direction,
    /// Number of bytes of the session.
    bytes: u64,
    /// Number of offsets tried, and of sessions cut there.
    ///
    /// A session may end before its offset, because the numbers in it may have fewer digits.
    tried: u64,
    cut: u64,
}

impl CutSeries {
    /// Runs a session without a cut, to count its bytes.
    fn measure(over_tcp: bool, direction: Direction) -> Self {
        let mut setup = Setup::new(over_tcp);
        assert!(setup.run_session(), "a session without a cut succeeds");
        setup.check_next_client();
        setup.check();
        Self {
            over_tcp,
            direction,
            bytes: setup.proxy.forwarded_bytes(direction),
            tried: 0,
            cut: 0,
        }
    }

    /// Returns the next offset, far from the previous one.
    fn next_offset(&mut self) -> u64 {
        let mut strides = self.bytes * 5 / 8..=self.bytes + 1;
        let stride = strides.find(|stride| is_coprime(*stride, self.bytes));
        let offset = self.tried * stride.unwrap() % self.bytes;
        self.tried += 1;
        offset
    }

    fn figures(&self) -> Value {
        let endpoint = if self.over_tcp { "address" } else { "socket" };
        let preposition = if self.direction == Direction::ToDaemon { "to" } else { "from" };
        json!({ "way": format!("{preposition} the {endpoint}"), "of": self.bytes, "cut": self.cut })
    }

    fn is_done(&self) -> bool {
        self.tried == self.bytes
    }
}

fn is_coprime(left: u64, right: u64) -> bool {
    if right == 0 { left == 1 } else { is_coprime(right, left % right) }
}

#[test]
#[ignore = "cargo xtask reliability runs it"]
fn session_cut_after_any_byte_keeps_history_linearizable() {
    let campaign = Campaign::start("histories: cuts");
    let directions = [Direction::ToDaemon, Direction::FromDaemon];
    let transports = [false, true].into_iter();
    let mut all_series: Vec<CutSeries> = transports
        .flat_map(|over_tcp| directions.map(|direction| CutSeries::measure(over_tcp, direction)))
        .collect();
    let (mut unanswered, mut operations) = (0, 0);
    let cut = |all_series: &[CutSeries]| all_series.iter().map(|series| series.cut).sum::<u64>();
    while campaign.should_continue(cut(&all_series), 1000)
        && !all_series.iter().all(CutSeries::is_done)
    {
        for series in &mut all_series {
            let mut setup = Setup::new(series.over_tcp);
            for _ in 0..SESSIONS_PER_DAEMON.min(series.bytes - series.tried) {
                setup.proxy.cut_after(series.direction, series.next_offset());
                let is_answered = setup.run_session();
                series.cut += u64::from(setup.proxy.has_reached_limit());
                unanswered += u64::from(!is_answered);
                setup.check_next_client();
            }
            operations += setup.check();
        }
    }
    let offsets: Vec<Value> = all_series.iter().map(CutSeries::figures).collect();
    campaign.finish(json!({
        "cuts": cut(&all_series),
        "sessions not answered": unanswered,
        "operations": operations,
        "violations": 0,
        "offsets": offsets,
    }));
}
