//! Hosts on this machine: network namespaces with an address each, on one bridge.
//!
//! They can be disconnected, lose packets, or be slow. A namespace ends with the process that holds
//! it, and that process ends with this one, so nothing is left.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::command::kill_and_wait;
use crate::host::Host;

/// A fault of the connection of a host.
#[derive(Clone, Copy, Debug)]
pub enum NetworkFault {
    /// All packets are dropped.
    DropAll,
    /// Incoming packets are dropped.
    DropIncoming,
    /// Outgoing packets are dropped.
    DropOutgoing,
    /// This percentage of outgoing packets is dropped.
    Lossy(u8),
    /// Outgoing data is limited to this number of megabits per second.
    RateLimited(u32),
}

/// The nftables table in which a host drops packets.
const TABLE: &str = "inet trouble";

/// A network of hosts that reach each other.
pub struct Network {
    hosts: Vec<Namespace>,
    _switch: Namespace,
}

struct Namespace {
    /// The process that holds the namespace.
    holder: Child,
    host: Host,
}

impl Network {
    /// Creates a network with this number of hosts.
    ///
    /// # Errors
    ///
    /// The reason, if the user lacks permission, or `unshare`, `ip`, `nft` or `tc` is missing.
    pub fn new(hosts: u8) -> Result<Self, String> {
        let switch = Namespace::create(Ipv4Addr::UNSPECIFIED)?;
        let all = |namespace: &Namespace, commands: &[&str]| {
            commands.iter().try_for_each(|command| run(&namespace.host, command))
        };
        all(&switch, &["ip link add name switch type bridge", "ip link set switch up"])?;
        let mut namespaces = Vec::new();
        for host in 0..hosts {
            let address = Ipv4Addr::new(10, 77, 0, host + 1);
            let namespace = Namespace::create(address)?;
            let (host_pid, switch_pid) = (namespace.holder.id(), switch.holder.id());
            let cable = format!(
                "ip link add name eth0 netns {host_pid} type veth peer name port{host} netns {switch_pid}"
            );
            all(&switch, &[&cable])?;
            all(&switch, &[&format!("ip link set port{host} master switch up")])?;
            let address = format!("ip address add {address}/24 dev eth0");
            let up = ["ip link set lo up", "ip link set eth0 up"];
            all(&namespace, &[&address, up[0], up[1]])?;
            all(&namespace, &["tc qdisc replace dev eth0 root pfifo"])?;
            all(&namespace, &[&format!("nft add table {TABLE}")])?;
            for chain in ["input", "output"] {
                let hook = format!("{{ type filter hook {chain} priority 0 ; }}");
                all(&namespace, &[&format!("nft add chain {TABLE} {chain} {hook}")])?;
            }
            namespaces.push(namespace);
        }
        Ok(Self { hosts: namespaces, _switch: switch })
    }

    /// Returns all hosts.
    pub fn hosts(&self) -> Vec<Host> {
        self.hosts.iter().map(|namespace| namespace.host.clone()).collect()
    }

    fn host(&self, host: usize) -> &Host {
        &self.hosts[host].host
    }

    /// Injects a fault into the connection of a host, until it is healed.
    ///
    /// # Panics
    ///
    /// If a command fails.
    pub fn inject(&self, host: usize, trouble: NetworkFault) {
        let drop = |chain: &str, condition: &str| {
            let device = if chain == "input" { "iifname" } else { "oifname" };
            format!("nft add rule {TABLE} {chain} {device} eth0 {condition} drop")
        };
        let commands = match trouble {
            NetworkFault::DropAll => vec![drop("input", ""), drop("output", "")],
            NetworkFault::DropIncoming => vec![drop("input", "")],
            NetworkFault::DropOutgoing => vec![drop("output", "")],
            NetworkFault::Lossy(percent) => {
                vec![drop("output", &format!("numgen random mod 100 < {percent}"))]
            }
            NetworkFault::RateLimited(megabits) => {
                let bucket = format!("tbf rate {megabits}mbit burst 64kb latency 200ms");
                vec![format!("tc qdisc replace dev eth0 root {bucket}")]
            }
        };
        for command in commands {
            run(self.host(host), &command).unwrap();
        }
    }

    /// Removes the fault of the connection of a host.
    ///
    /// # Panics
    ///
    /// If a command fails.
    pub fn heal(&self, host: usize) {
        run(self.host(host), &format!("nft flush table {TABLE}")).unwrap();
        run(self.host(host), "tc qdisc replace dev eth0 root pfifo").unwrap();
    }
}

impl Namespace {
    fn create(address: Ipv4Addr) -> Result<Self, String> {
        let mut holder = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--net", "sh", "-c"])
            .arg("echo there; exec sleep infinity")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("setpriv: {error}"))?;
        let mut first_line = String::new();
        let output = holder.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut first_line).map_err(|error| error.to_string())?;
        let namespace = PathBuf::from(format!("/proc/{}/ns/net", holder.id()));
        if first_line == "there\n" {
            return Ok(Self { holder, host: Host { address, namespace: Some(namespace) } });
        }
        let output = holder.wait_with_output().map_err(|error| error.to_string())?;
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        kill_and_wait(&mut self.holder);
    }
}

/// Runs a command on a host.
fn run(host: &Host, command: &str) -> Result<(), String> {
    let enter = host.command_prefix();
    let command: Vec<&str> =
        enter.iter().map(String::as_str).chain(command.split_whitespace()).collect();
    let failed = |reason: &dyn std::fmt::Display| format!("{}: {reason}", command.join(" "));
    let output = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| failed(&error))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(failed(&stderr.trim())) }
}
