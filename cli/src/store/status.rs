//! `tssd status`: how the daemon of a store is.

use std::time::Duration;

use serde_json::json;
use tssd_store::DaemonStatus;

use super::{Address, failure};
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
    let status = args.store.connect()?.status().map_err(|error| failure(&error))?;
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
        seconds(status.uptime),
        Size(memory.used),
        Size(memory.limit),
        memory.segments,
        Size(memory.warm),
        Size(memory.retired),
        Size(memory.created_bytes),
        memory.recycled,
    ))?;
    if memory.devices > 0 {
        print(format!("memory of GPUs: {}\n", Size(memory.devices)))?;
    }
    let mut peers =
        Table::new(&[("PEER", Align::Right), ("CLIENT", Align::Left), ("AGE", Align::Right)]);
    for peer in &status.peers {
        peers.row([who(peer.pid, peer.address.as_ref()), peer.client.clone(), seconds(peer.age)]);
    }
    print(&peers)?;
    if !status.leases.is_empty() {
        print(leases(&status))?;
    }
    for upload in &status.uploads {
        print(format!("on its way to the bucket: {upload}\n"))?;
    }
    for host in &status.hosts {
        let own = if host.is_own { " (this one)" } else { "" };
        print(format!("host: {}{own}\n", host.address))?;
    }
    if let Some(error) = &status.hosts_error {
        print(format!("other hosts cannot be asked: {error}\n"))?;
    }
    Ok(Exit::Ok)
}

/// Who reads what.
fn leases(status: &DaemonStatus) -> Table {
    let mut leases = Table::new(&[
        ("READER", Align::Right),
        ("KEY", Align::Left),
        ("VERSION", Align::Right),
        ("AGE", Align::Right),
    ]);
    for lease in &status.leases {
        let is_own = lease.pid == status.pid && lease.address.is_none();
        let reader = who(lease.pid, lease.address.as_ref());
        leases.row([
            if is_own { "the daemon".to_owned() } else { reader },
            lease.key.clone(),
            lease.version.to_string(),
            seconds(lease.age),
        ]);
    }
    leases
}

/// A process, or where somebody of another host is.
fn who(pid: u32, address: Option<&String>) -> String {
    match (address, pid) {
        (Some(address), _) => address.clone(),
        (None, 0) => "other PID namespace".to_owned(),
        (None, pid) => pid.to_string(),
    }
}

fn seconds(span: Duration) -> String {
    format!("{:.1} s", span.as_secs_f64())
}
