//! What a daemon has done and how it is, as Prometheus reads it.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Write};

use super::counters::Counts;
use super::elsewhere::{Source, Traffic};
use super::house::House;
use super::mirror::{MirrorCounts, Why};
use crate::control::{Got, VersionInfo};
use crate::error::{ErrorKind, Result};
use crate::status::UploadStatus;

/// How many keys and how many readers are shown at most: a scrape stays short whatever is stored.
const MAX_SERIES: usize = 100;

/// Everything, in the text format 0.0.4.
pub(crate) async fn page(house: &House) -> Result<String> {
    let keys = house.registry.keys("").await?;
    let mut versions = 0;
    let mut heads: BTreeMap<String, VersionInfo> = BTreeMap::new();
    for key in &keys {
        let mut visible = house.registry.versions(key).await?;
        versions += visible.len();
        heads.extend(visible.pop().map(|head| (key.to_string(), head)));
    }
    let (counts, status) = (house.counters.count().clone(), house.status());
    let memory = status.memory;
    let oldest = status.leases.iter().map(|lease| lease.age).max().unwrap_or_default();
    let mut page = Page::default();

    page.counter("connections_total", "Connections that were accepted.", counts.connections);
    page.counter(
        "connections_turned_away_total",
        "Connections that were turned away: too many, or of users who may not connect.",
        counts.turned_away,
    );
    page.gauge("connections", "Connections there are.", status.peers.len());
    page.counter("puts_total", "Contributions that were committed.", counts.puts);
    page.counter("put_bytes_total", "Bytes of archives that were committed.", counts.bytes_put);
    page.counter("versions_published_total", "Versions that became visible.", counts.published);
    page.counter("gets_total", "Versions that were given to readers.", counts.gets);
    page.sources(&counts, &house.tiers.elsewhere.traffic());
    let got = |bytes: fn(&Got) -> u64| {
        counts
            .got
            .iter()
            .map(move |(transport, got)| (vec![("transport", transport.to_string())], bytes(got)))
    };
    let help = "Bytes of tensors that readers asked for, by the way that they came.";
    page.family(Kind::Counter, "needed_bytes_total", help, got(|got| got.needed));
    let help = "Bytes of tensors that readers copied, or see.";
    page.family(Kind::Counter, "transferred_bytes_total", help, got(|got| got.transferred));
    let help = "Bytes that readers checksummed.";
    page.family(Kind::Counter, "verified_bytes_total", help, got(|got| got.verified));
    let help = "Bytes of archives that went out over connections.";
    page.counter("read_bytes_total", help, counts.bytes_read);
    let requests = counts.requests.iter().map(|(&(op, failed), count)| {
        (vec![("op", op.to_owned()), ("outcome", outcome(failed).to_owned())], count)
    });
    page.family(Kind::Counter, "requests_total", "Requests that were answered.", requests);

    page.gauge("memory_limit_bytes", "What segments may take together.", memory.limit);
    page.gauge("memory_used_bytes", "What segments take.", memory.used);
    page.gauge("device_bytes", "What segments of GPUs take there.", memory.devices);
    page.gauge("memory_warm_bytes", "Of that, what is free and warm.", memory.warm);
    page.gauge(
        "memory_retired_bytes",
        "Of that, what is retired and still mapped by somebody.",
        memory.retired,
    );
    page.gauge("segments", "Segments there are.", memory.segments);
    page.counter(
        "created_bytes_total",
        "Bytes of segments made: fresh pages.",
        memory.created_bytes,
    );
    page.counter("retired_bytes_total", "Bytes of segments retired.", memory.retired_bytes);
    page.counter("recycled_total", "Segments that were lent again, warm.", memory.recycled);

    if let Some(mirror) = &house.mirror {
        page.mirror(&mirror.counts(), &status.uploads);
    }
    page.gauge("leases", "Leases that are held.", status.leases.len());
    page.gauge("lease_oldest_seconds", "Age of the oldest lease.", oldest.as_secs_f64());
    page.gauge("keys", "Keys that have a visible version.", keys.len());
    page.gauge("versions", "Versions that are visible.", versions);
    let shown = heads.iter().take(MAX_SERIES);
    let shown = shown.map(|(key, head)| (vec![("key", key.clone())], head.number));
    let help = "Number of the newest visible version; of the first 100 keys.";
    page.family(Kind::Gauge, "head_version", help, shown);
    let lags = house.readers().into_iter().filter_map(|reader| {
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
    page.family(Kind::Gauge, "reader_lag_versions", help, lags.take(MAX_SERIES));
    page.gauge(
        "uptime_seconds",
        "For how long the daemon has served.",
        status.uptime.as_secs_f64(),
    );
    Ok(page.0)
}

#[derive(Default)]
struct Page(String);

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
}

type Labels = Vec<(&'static str, String)>;

impl Page {
    /// Where archives are that were asked for, and where they came from.
    fn sources(&mut self, counts: &Counts, traffic: &Traffic) {
        let leased = [None].into_iter().chain(Source::ALL.map(Some)).map(|source| {
            let name = source.map_or_else(|| "here".to_owned(), |source| source.to_string());
            (vec![("source", name)], counts.bytes_leased.get(&source).copied().unwrap_or_default())
        });
        let help = "Bytes of archives that were leased, by who has them: this host, a host where they were read, or the one \
                    that they were put to.";
        self.family(Kind::Counter, "leased_bytes_total", help, leased);
        let pulled = Source::ALL.map(|source| {
            let bytes = traffic.pulled.get(&source).copied().unwrap_or_default();
            (vec![("source", source.to_string())], bytes)
        });
        let help = "Bytes of archives that came from other daemons: from hosts where they were read, or to which they were \
                    put.";
        self.family(Kind::Counter, "pulled_bytes_total", help, pulled);
        let help = "How often another daemon was asked than the first, which did not answer or did not have it any more.";
        self.counter("passed_over_total", help, traffic.passed_over);
    }

    /// What goes to the bucket, and comes back.
    fn mirror(&mut self, counts: &MirrorCounts, uploads: &[UploadStatus]) {
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
        let restored = Why::ALL.map(|why| {
            let bytes = counts.restored_bytes.get(&why).copied().unwrap_or_default();
            (vec![("why", why.to_string())], bytes)
        });
        let help = "Bytes of archives that came back from the bucket: nobody else has them, or whoever has them did \
                    not answer.";
        self.family(Kind::Counter, "restored_bytes_total", help, restored);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(Kind::Counter, name, help, [(Labels::new(), value)]);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(Kind::Gauge, name, help, [(Labels::new(), value)]);
    }

    fn family(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, impl Display)>,
    ) {
        self.write(kind, name, help, samples).expect("a String takes any text");
    }

    fn write(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, impl Display)>,
    ) -> fmt::Result {
        let Self(text) = self;
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        writeln!(text, "# HELP tssd_{name} {help}\n# TYPE tssd_{name} {kind}")?;
        for (labels, value) in samples {
            let labels: Vec<String> = labels
                .iter()
                .map(|(label, value)| format!("{label}=\"{}\"", escaped(value)))
                .collect();
            match labels.as_slice() {
                [] => writeln!(text, "tssd_{name} {value}")?,
                labels => writeln!(text, "tssd_{name}{{{}}} {value}", labels.join(","))?,
            }
        }
        Ok(())
    }
}

/// What came of a request, as the protocol calls it.
fn outcome(failed: Option<ErrorKind>) -> &'static str {
    failed.map_or("ok", ErrorKind::name)
}

/// The value of a label, within its quotes. No key has a line break.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#)
}
