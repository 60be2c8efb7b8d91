//! Metrics of a daemon in the text format of Prometheus.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Write};

use super::counters::Counts;
use crate::control::{ReadStats, VersionInfo};
use crate::daemon::bucket_sync::{ReplicatorCounts, RestoreReason};
use crate::daemon::remote_blobs::{RemoteReadStats, ReplicaKind};
use crate::daemon::state::DaemonState;
use crate::error::{ErrorKind, Result};
use crate::status::UploadStatus;

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
    let (counts, status) = (state.counters.lock().clone(), state.status());
    let memory = status.memory;
    let oldest = status.leases.iter().map(|lease| lease.age).max().unwrap_or_default();
    let mut page = Page::default();

    page.counter("connections_total", "Connections that were accepted.", counts.connections);
    page.counter(
        "connections_turned_away_total",
        "Connections that were turned away: too many, or of users who may not connect.",
        counts.rejected_connections,
    );
    page.gauge("connections", "Connections there are.", status.peers.len());
    page.counter("puts_total", "Contributions that were committed.", counts.puts);
    page.counter("put_bytes_total", "Bytes of archives that were committed.", counts.put_bytes);
    page.counter("versions_published_total", "Versions that became visible.", counts.published);
    page.counter("gets_total", "Versions that were given to readers.", counts.gets);
    page.replicas(&counts, &state.volume.remote_blobs.stats());
    let read_bytes = |bytes: fn(&ReadStats) -> u64| {
        counts
            .reads
            .iter()
            .map(move |(transport, got)| (vec![("transport", transport.to_string())], bytes(got)))
    };
    let help = "Bytes of tensors that readers asked for, by the way that they came.";
    page.family(MetricKind::Counter, "needed_bytes_total", help, read_bytes(|got| got.needed));
    let help = "Bytes of tensors that readers copied, or see.";
    page.family(
        MetricKind::Counter,
        "transferred_bytes_total",
        help,
        read_bytes(|got| got.transferred),
    );
    let help = "Bytes that readers checksummed.";
    page.family(MetricKind::Counter, "verified_bytes_total", help, read_bytes(|got| got.verified));
    let help = "Bytes of archives that went out over connections.";
    page.counter("read_bytes_total", help, counts.sent_bytes);
    let requests = counts.requests.iter().map(|(&(op, failed), count)| {
        (vec![("op", op.to_owned()), ("outcome", outcome(failed).to_owned())], count)
    });
    page.family(MetricKind::Counter, "requests_total", "Requests that were answered.", requests);

    page.gauge("memory_limit_bytes", "What segments may take together.", memory.limit_bytes);
    page.gauge("memory_used_bytes", "What segments take.", memory.used_bytes);
    page.gauge("device_bytes", "What segments of GPUs take there.", memory.device_bytes);
    page.gauge("memory_warm_bytes", "Of that, what is free and warm.", memory.free_bytes);
    page.gauge(
        "memory_retired_bytes",
        "Of that, what is retired and still mapped by somebody.",
        memory.retired_bytes,
    );
    page.gauge("segments", "Segments there are.", memory.segments);
    page.counter(
        "created_bytes_total",
        "Bytes of segments made: fresh pages.",
        memory.created_bytes_total,
    );
    page.counter("retired_bytes_total", "Bytes of segments retired.", memory.retired_bytes_total);
    page.counter(
        "recycled_total",
        "Segments that a writer has reused while they were mapped.",
        memory.recycled_total,
    );

    if let Some(replicator) = &state.replicator {
        page.bucket(&replicator.counts(), &status.uploads);
    }
    page.gauge("leases", "Leases that are held.", status.leases.len());
    page.gauge("lease_oldest_seconds", "Age of the oldest lease.", oldest.as_secs_f64());
    page.gauge("keys", "Keys that have a visible version.", keys.len());
    page.gauge("versions", "Versions that are visible.", versions);
    let shown = heads.iter().take(MAX_SERIES);
    let shown = shown.map(|(key, head)| (vec![("key", key.clone())], head.number));
    let help = "Number of the newest visible version; of the first 100 keys.";
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
    let help = "How far the version that a connected reader got last is behind the newest; of the \
                first 100 readers.";
    page.family(MetricKind::Gauge, "reader_lag_versions", help, lags.take(MAX_SERIES));
    page.gauge(
        "uptime_seconds",
        "For how long the daemon has served.",
        status.uptime.as_secs_f64(),
    );
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
        let help = "Bytes of archives that were leased, by who has them: this host, a host where they were read, or the one \
                    that they were put to.";
        self.family(MetricKind::Counter, "leased_bytes_total", help, leased);
        let pulled = ReplicaKind::ALL.map(|source| {
            let bytes = traffic.read_bytes.get(&source).copied().unwrap_or_default();
            (vec![("source", source.to_string())], bytes)
        });
        let help = "Bytes of archives that came from other daemons: from hosts where they were read, or to which they were \
                    put.";
        self.family(MetricKind::Counter, "pulled_bytes_total", help, pulled);
        let help = "How often another daemon was asked than the first, which did not answer or did not have it any more.";
        self.counter("passed_over_total", help, traffic.skipped);
    }

    /// Writes the metrics of the bucket.
    fn bucket(&mut self, counts: &ReplicatorCounts, uploads: &[UploadStatus]) {
        self.gauge("uploads", "Contributions on their way to the bucket.", uploads.len());
        let left = uploads.iter().map(|upload| upload.bytes.saturating_sub(upload.sent));
        let help = "What of them has not gone yet.";
        self.gauge("upload_left_bytes", help, left.fold(0, u64::saturating_add));
        let oldest = uploads.iter().map(|upload| upload.age).max().unwrap_or_default();
        self.gauge("upload_oldest_seconds", "Age of the oldest.", oldest.as_secs_f64());
        self.counter("uploads_total", "Contributions brought to the bucket.", counts.uploads);
        self.counter("uploaded_bytes_total", "Their bytes.", counts.uploaded_bytes);
        let help = "Tries to bring one there that have failed; most are made again.";
        self.counter("upload_failures_total", help, counts.failures);
        let help = "Contributions that were given up.";
        self.counter("uploads_given_up_total", help, counts.given_up);
        let restored = RestoreReason::ALL.map(|reason| {
            let bytes = counts.restored_bytes.get(&reason).copied().unwrap_or_default();
            (vec![("reason", reason.to_string())], bytes)
        });
        let help = "Bytes of archives that came back from the bucket: nobody else has them, or whoever has them did \
                    not answer.";
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
