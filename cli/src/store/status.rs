//! `tssd status`: prints the state of the daemon of a store.

use std::time::Duration;

use serde_json::json;
use tssd_store::DaemonStatus;

use super::{Address, store_failure};
use crate::console::{Console, print, print_json};
use crate::exit::Exit;
use crate::failure::Result;
use crate::size::Size;
use crate::table::{Align, Table};

/// Print how the daemon of a store is: its memory, who is connected, who reads what.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    store: Address,
}

pub(crate) fn run(args: &Args, console: Console) -> Result<Exit> {
    let status = args.store.connect()?.status().map_err(|error| store_failure(&error))?;
    if console.json {
        print_json(&json!(status))?;
        return Ok(Exit::Ok);
    }
    let memory = &status.memory;
    print(format!(
        "{}, process {}, up for {}\nmemory: {} of {} in {} segments; {} warm and free, {} retired; {} \
         made, {} times recycled\n",
        status.daemon,
        status.pid,
        format_seconds(status.uptime),
        Size(memory.used_bytes),
        Size(memory.limit_bytes),
        memory.segments,
        Size(memory.free_bytes),
        Size(memory.retired_bytes),
        Size(memory.created_bytes_total),
        memory.recycled_total,
    ))?;
    let moved = status.moved_bytes_total;
    let megabytes = std::num::NonZeroU64::new(moved / 1_000_000);
    let per_gigabyte = megabytes.map_or_else(String::new, |megabytes| {
        let micros = status.cpu_time.as_micros() / u128::from(megabytes.get());
        format!(", {}.{:03} s per GB", micros / 1000, micros % 1000)
    });
    print(format!(
        "CPU: {} for {} moved{per_gigabyte}\n",
        format_seconds(status.cpu_time),
        Size(moved),
    ))?;
    let (archives, deltas) = (memory.retained_bytes, memory.delta_bytes);
    if archives + deltas > 0 {
        let sizes = format!("archives {}, deltas {}", Size(archives), Size(deltas));
        print(format!("retained for deltas: {sizes}\n"))?;
    }
    if memory.device_bytes > 0 {
        print(format!("memory of GPUs: {}\n", Size(memory.device_bytes)))?;
    }
    let mut peers =
        Table::new(&[("PEER", Align::Right), ("CLIENT", Align::Left), ("AGE", Align::Right)]);
    for peer in &status.peers {
        peers.row([
            peer_label(peer.pid, peer.address.as_ref()),
            peer.client.clone(),
            format_seconds(peer.age),
        ]);
    }
    print(&peers)?;
    if !status.leases.is_empty() {
        print(lease_table(&status))?;
    }
    if !status.replicas.is_empty() {
        print(replica_table(&status))?;
    }
    if !status.fetchers.is_empty() {
        print(fetcher_table(&status))?;
    }
    for upload in &status.uploads {
        print(format!("on its way to the bucket: {upload}\n"))?;
    }
    for host in &status.hosts {
        let own = if host.is_self { " (this one)" } else { "" };
        print(format!("host: {}{own}\n", host.address))?;
    }
    if let Some(error) = &status.hosts_error {
        print(format!("other hosts cannot be asked: {error}\n"))?;
    }
    Ok(Exit::Ok)
}

/// Returns a table of the leases: reader, key, version and age.
fn lease_table(status: &DaemonStatus) -> Table {
    let mut leases = Table::new(&[
        ("READER", Align::Right),
        ("KEY", Align::Left),
        ("VERSION", Align::Right),
        ("AGE", Align::Right),
    ]);
    for lease in &status.leases {
        let is_own = lease.pid == status.pid && lease.address.is_none();
        let reader = peer_label(lease.pid, lease.address.as_ref());
        leases.row([
            if is_own { "the daemon".to_owned() } else { reader },
            lease.key.clone(),
            lease.version.to_string(),
            format_seconds(lease.age),
        ]);
    }
    leases
}

/// Returns a table of the versions that the daemon has fetched or fetches: how much, from where, at which rate.
fn replica_table(status: &DaemonStatus) -> Table {
    let mut replicas = Table::new(&[
        ("REPLICA", Align::Left),
        ("VERSION", Align::Right),
        ("PRESENT", Align::Right),
        ("SIZE", Align::Right),
        ("RATE", Align::Right),
        ("TIME", Align::Right),
        ("FROM", Align::Left),
        ("BASE", Align::Right),
    ]);
    for replica in &status.replicas {
        let senders = replica.senders.iter();
        let senders: Vec<String> =
            senders.map(|(sender, bytes)| format!("{sender} {}", Size(*bytes))).collect();
        let slow = if replica.is_slow { " (slow)" } else { "" };
        replicas.row([
            replica.key.clone(),
            replica.version.to_string(),
            Size(replica.present_bytes).to_string(),
            Size(replica.bytes).to_string(),
            format!("{}/s{slow}", Size(replica.bytes_per_second)),
            format_seconds(replica.duration),
            senders.join(", "),
            replica.base.map_or_else(String::new, |base| base.to_string()),
        ]);
    }
    replicas
}

/// Returns a table of the daemons that have fetched archives of this one, or fetch them.
fn fetcher_table(status: &DaemonStatus) -> Table {
    let mut fetchers = Table::new(&[
        ("FETCHER", Align::Left),
        ("KEY", Align::Left),
        ("VERSION", Align::Right),
        ("PRESENT", Align::Right),
        ("STATE", Align::Left),
    ]);
    for fetcher in &status.fetchers {
        fetchers.row([
            fetcher.address.clone(),
            fetcher.key.clone(),
            fetcher.version.to_string(),
            Size(fetcher.present_bytes).to_string(),
            if fetcher.is_complete { "complete" } else { "fetching" }.to_owned(),
        ]);
    }
    fetchers
}

/// Returns a label for a peer: its address if it is on another host, else its process ID.
///
/// The process ID 0 stands for a process in another PID namespace.
fn peer_label(pid: u32, address: Option<&String>) -> String {
    match (address, pid) {
        (Some(address), _) => address.clone(),
        (None, 0) => "other PID namespace".to_owned(),
        (None, pid) => pid.to_string(),
    }
}

fn format_seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}
