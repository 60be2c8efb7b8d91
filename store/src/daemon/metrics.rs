//! Metrics of a daemon in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Write};

use super::counters::Counts;
use crate::control::{ReadStats, VersionInfo};
use crate::daemon::bucket_sync::{ReplicatorCounts, RestoreReason};
use crate::daemon::remote_blobs::{RemoteReadStats, ReplicaKind};
use crate::daemon::state::DaemonState;
use crate::error::{ErrorKind, Result};
use crate::status::{MemoryStatus, ReplicaStatus, UploadStatus};

/// Maximum number of keys, and of readers, in a page. It bounds the size of a scrape.
const MAX_SERIES: usize = 100;

/// Returns all metrics in the text format 0.0.4.
pub(crate) async fn render(state: &DaemonState) -> Result<String> {
    let keys = state.control_plane.keys("").await?;
    let mut versions = 0;
    let mut heads: BTreeMap<String, VersionInfo> = BTreeMap::new();
    for key in &keys {
        let mut visible = state.control_plane.versions(key).await?;
        versions += visible.len();
        heads.extend(visible.pop().map(|head| (key.to_string(), head)));
    }
    let counts = state.counters.lock().clone();
    let status = state.status();
    let memory = status.memory;
    let oldest = status.leases.iter().map(|lease| lease.age).max().unwrap_or_default();
    let mut page = Page::default();

    page.counter("connections_total", "Number of accepted connections.", counts.connections);
    page.counter(
        "connections_rejected_total",
        "Number of rejected connections: above the limit, or of a user without access.",
        counts.rejected_connections,
    );
    page.gauge("connections", "Number of open connections.", status.peers.len());
    page.counter("puts_total", "Number of committed contributions.", counts.puts);
    page.counter("put_bytes_total", "Bytes of committed archives.", counts.put_bytes);
    page.counter(
        "versions_published_total",
        "Number of versions that became visible.",
        counts.published,
    );
    page.counter("gets_total", "Number of versions leased to readers.", counts.gets);
    page.replicas(&counts, &state.volume.remote_blobs.stats());
    let read_bytes = |bytes: fn(&ReadStats) -> u64| {
        counts
            .reads
            .iter()
            .map(move |(transport, got)| (vec![("transport", transport.to_string())], bytes(got)))
    };
    let help = "Bytes of tensors that readers requested, by transport.";
    page.family(MetricKind::Counter, "needed_bytes_total", help, read_bytes(|got| got.needed));
    let help = "Bytes of tensors that readers copied or map, by transport.";
    page.family(
        MetricKind::Counter,
        "transferred_bytes_total",
        help,
        read_bytes(|got| got.transferred),
    );
    let help = "Bytes that readers verified, by transport.";
    page.family(MetricKind::Counter, "verified_bytes_total", help, read_bytes(|got| got.verified));
    let help = "Bytes of archives sent over connections.";
    page.counter("sent_bytes_total", help, counts.sent_bytes);
    let requests = counts.requests.iter().map(|(&(op, failed), count)| {
        (vec![("op", op.to_owned()), ("outcome", outcome(failed).to_owned())], count)
    });
    page.family(
        MetricKind::Counter,
        "requests_total",
        "Number of answered requests, by operation and outcome.",
        requests,
    );

    page.fetches(&status.replicas, status.fetchers.len());
    page.memory(&memory);
    if let Some(replicator) = &state.replicator {
        page.bucket(&replicator.counts(), &status.uploads);
    }
    page.gauge("leases", "Number of leases.", status.leases.len());
    page.gauge("lease_oldest_seconds", "Age of the oldest lease.", oldest.as_secs_f64());
    page.gauge("keys", "Number of keys with a visible version.", keys.len());
    page.gauge("versions", "Number of visible versions.", versions);
    let shown = heads.iter().take(MAX_SERIES);
    let shown = shown.map(|(key, head)| (vec![("key", key.clone())], head.number));
    let help = "Number of the newest visible version, of the first 100 keys.";
    page.family(MetricKind::Gauge, "head_version", help, shown);
    let lags = state.readers().into_iter().filter_map(|reader| {
        let lag = heads.get(&reader.key)?.number.saturating_sub(reader.version);
        let labels = vec![
            ("peer", reader.peer.to_string()),
            ("pid", reader.pid.to_string()),
            ("key", reader.key),
        ];
        Some((labels, lag))
    });
    let help = "Number of versions between the last one of a connected reader and the newest one, of the \
                first 100 readers.";
    page.family(MetricKind::Gauge, "reader_lag_versions", help, lags.take(MAX_SERIES));
    let (help, cpu) = ("CPU time of the daemon.", status.cpu_time.as_secs_f64());
    page.family(MetricKind::Counter, "cpu_seconds_total", help, [(Labels::new(), cpu)]);
    page.gauge("uptime_seconds", "Time since the daemon started.", status.uptime.as_secs_f64());
    Ok(page.0)
}

/// A page of metrics.
#[derive(Default)]
struct Page(String);

#[derive(Clone, Copy)]
enum MetricKind {
    Counter,
    Gauge,
}

type Labels = Vec<(&'static str, String)>;

impl Page {
    /// Writes the metrics of leased and read archives by the kind of replica.
    fn replicas(&mut self, counts: &Counts, traffic: &RemoteReadStats) {
        let leased = [None].into_iter().chain(ReplicaKind::ALL.map(Some)).map(|source| {
            let name = source.map_or_else(|| "here".to_owned(), |source| source.to_string());
            (vec![("source", name)], counts.leased_bytes.get(&source).copied().unwrap_or_default())
        });
        let help = "Bytes of leased archives, by location: this host, a host that read them, or the host where they were \
                    put.";
        self.family(MetricKind::Counter, "leased_bytes_total", help, leased);
        let fetched = ReplicaKind::ALL.map(|source| {
            let bytes = traffic.read_bytes.get(&source).copied().unwrap_or_default();
            (vec![("source", source.to_string())], bytes)
        });
        let from_fetchers = (vec![("source", "fetcher".to_owned())], traffic.fetcher_bytes);
        let help = "Bytes of archives fetched from other daemons: hosts that read them, hosts where they were put, or hosts \
                    that fetch them at the same time.";
        let fetched = fetched.into_iter().chain([from_fetchers]);
        self.family(MetricKind::Counter, "fetched_bytes_total", help, fetched);
        let help = "Number of reads that went to the next host, because a host was unreachable or had lost the archive.";
        self.counter("read_failovers_total", help, traffic.skipped);
        let help = "Number of hosts that a shared fetch avoided, because they failed or sent damaged bytes.";
        self.counter("avoided_fetchers_total", help, traffic.avoided_fetchers);
    }

    /// Writes the metrics of the archives that hosts fetch from each other.
    fn fetches(&mut self, replicas: &[ReplicaStatus], fetchers: usize) {
        let help = "Bytes of archives of other hosts that this host has, of the last 100 versions.";
        self.by_version("replica_present_bytes", help, replicas, |replica| replica.present_bytes);
        let help = "Size of these archives.";
        self.by_version("replica_bytes", help, replicas, |replica| replica.bytes);
        let help =
            "Rate of the fetch: in the last two seconds, or of the whole fetch if it has ended.";
        self.by_version("fetch_bytes_per_second", help, replicas, |it| it.bytes_per_second);
        let slow = replicas.iter().filter(|replica| replica.is_slow).count();
        let help = "Number of versions whose fetch is slower than --min-fetch-rate.";
        self.gauge("slow_fetches", help, slow);
        let help = "Number of hosts and versions: hosts that fetch archives of this host, or have in the last 10 minutes.";
        self.gauge("fetchers", help, fetchers);
    }

    /// Writes a number for each of the last replicas.
    fn by_version(
        &mut self,
        name: &str,
        help: &str,
        replicas: &[ReplicaStatus],
        number: fn(&ReplicaStatus) -> u64,
    ) {
        let samples = replicas.iter().rev().take(MAX_SERIES).map(|status| {
            let labels = vec![("key", status.key.clone()), ("version", status.version.to_string())];
            (labels, number(status))
        });
        self.family(MetricKind::Gauge, name, help, samples);
    }

    /// Writes the metrics of the segments.
    fn memory(&mut self, memory: &MemoryStatus) {
        self.gauge("memory_limit_bytes", "Maximum bytes of all segments.", memory.limit_bytes);
        self.gauge("memory_used_bytes", "Bytes of all segments.", memory.used_bytes);
        self.gauge("device_bytes", "Bytes of segments in GPU memory.", memory.device_bytes);
        self.gauge(
            "memory_free_bytes",
            "Bytes of segments that are free and still mapped.",
            memory.free_bytes,
        );
        self.gauge(
            "memory_retired_bytes",
            "Bytes of retired segments that a process still maps.",
            memory.retired_bytes,
        );
        self.gauge(
            "memory_retained_bytes",
            "Bytes of deleted archives that are retained to make deltas.",
            memory.retained_bytes,
        );
        self.gauge(
            "memory_delta_bytes",
            "Bytes of the differences between earlier versions.",
            memory.delta_bytes,
        );
        self.gauge("segments", "Number of segments.", memory.segments);
        self.counter(
            "segment_created_bytes_total",
            "Bytes of segments created with new pages.",
            memory.created_bytes_total,
        );
        self.counter(
            "segment_retired_bytes_total",
            "Bytes of retired segments.",
            memory.retired_bytes_total,
        );
        self.counter(
            "segments_reused_total",
            "Number of segments that a writer reused while they were mapped.",
            memory.recycled_total,
        );
    }

    /// Writes the metrics of the bucket.
    fn bucket(&mut self, counts: &ReplicatorCounts, uploads: &[UploadStatus]) {
        self.gauge("uploads", "Number of pending uploads to the bucket.", uploads.len());
        let left = uploads.iter().map(|upload| upload.bytes.saturating_sub(upload.sent));
        let help = "Bytes of pending uploads that are not sent yet.";
        self.gauge("upload_pending_bytes", help, left.fold(0, u64::saturating_add));
        let oldest = uploads.iter().map(|upload| upload.age).max().unwrap_or_default();
        self.gauge(
            "upload_oldest_seconds",
            "Age of the oldest pending upload.",
            oldest.as_secs_f64(),
        );
        self.counter("uploads_total", "Number of completed uploads to the bucket.", counts.uploads);
        self.counter(
            "uploaded_bytes_total",
            "Bytes of completed uploads to the bucket.",
            counts.uploaded_bytes,
        );
        let help = "Number of failed upload attempts. Most are retried.";
        self.counter("upload_failures_total", help, counts.failures);
        let help = "Number of abandoned uploads.";
        self.counter("uploads_abandoned_total", help, counts.given_up);
        let restored = RestoreReason::ALL.map(|reason| {
            let bytes = counts.restored_bytes.get(&reason).copied().unwrap_or_default();
            (vec![("reason", reason.to_string())], bytes)
        });
        let help = "Bytes of archives restored from the bucket: no other daemon has them, or those that have them are \
                    unreachable.";
        self.family(MetricKind::Counter, "restored_bytes_total", help, restored);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(MetricKind::Counter, name, help, [(Labels::new(), value)]);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(MetricKind::Gauge, name, help, [(Labels::new(), value)]);
    }

    fn family(
        &mut self,
        kind: MetricKind,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, impl Display)>,
    ) {
        self.write(kind, name, help, samples).expect("a String takes any text");
    }

    fn write(
        &mut self,
        kind: MetricKind,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, impl Display)>,
    ) -> fmt::Result {
        let Self(text) = self;
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
        };
        writeln!(text, "# HELP tssd_{name} {help}\n# TYPE tssd_{name} {kind}")?;
        for (labels, value) in samples {
            let labels: Vec<String> = labels
                .iter()
                .map(|(label, value)| format!("{label}=\"{}\"", escape_label(value)))
                .collect();
            match labels.as_slice() {
                [] => writeln!(text, "tssd_{name} {value}")?,
                labels => writeln!(text, "tssd_{name}{{{}}} {value}", labels.join(","))?,
            }
        }
        Ok(())
    }
}

/// Returns the outcome of a request: the protocol's name of the error, or `ok`.
fn outcome(failed: Option<ErrorKind>) -> &'static str {
    failed.map_or("ok", ErrorKind::name)
}

/// Escapes the value of a label. Line breaks need no escape: keys do not contain them.
fn escape_label(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#)
}
