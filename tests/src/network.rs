//! Hosts on this machine: network namespaces with an address each, on one switch. They can be cut off, lose packets
//! and be slow.
//!
//! A namespace ends with the process that holds it, and that one with this: nothing is left behind, however it ends.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use crate::command::end;
use crate::host::Host;

/// What may be wrong with a host's connection.
#[derive(Clone, Copy, Debug)]
pub enum Trouble {
    /// Nothing comes in, and nothing goes out.
    Cut,
    /// Nothing comes in.
    Deaf,
    /// Nothing goes out.
    Mute,
    /// So many of a hundred packets are lost on their way out.
    Lossy(u8),
    /// At most so many megabits go out in a second.
    Slow(u32),
}

/// The table in which a host drops packets.
const TABLE: &str = "inet trouble";

/// Some hosts that reach each other.
pub struct Network {
    hosts: Vec<Namespace>,
    _switch: Namespace,
}

struct Namespace {
    /// Whoever holds it.
    holder: Child,
    host: Host,
}

impl Network {
    /// So many hosts.
    ///
    /// # Errors
    ///
    /// Why there can be none: the user may not make them, or `unshare`, `ip`, `nft` or `tc` is missing.
    pub fn new(hosts: u8) -> Result<Self, String> {
        let switch = Namespace::at(Ipv4Addr::UNSPECIFIED)?;
        let all = |namespace: &Namespace, commands: &[&str]| {
            commands.iter().try_for_each(|command| run(&namespace.host, command))
        };
        all(&switch, &["ip link add name switch type bridge", "ip link set switch up"])?;
        let mut namespaces = Vec::new();
        for host in 0..hosts {
            let address = Ipv4Addr::new(10, 77, 0, host + 1);
            let own = Namespace::at(address)?;
            let (here, there) = (own.holder.id(), switch.holder.id());
            let cable = format!(
                "ip link add name eth0 netns {here} type veth peer name port{host} netns {there}"
            );
            all(&switch, &[&cable])?;
            all(&switch, &[&format!("ip link set port{host} master switch up")])?;
            let address = format!("ip address add {address}/24 dev eth0");
            let up = ["ip link set lo up", "ip link set eth0 up"];
            all(&own, &[&address, up[0], up[1]])?;
            all(&own, &["tc qdisc replace dev eth0 root pfifo"])?;
            all(&own, &[&format!("nft add table {TABLE}")])?;
            for way in ["input", "output"] {
                let hook = format!("{{ type filter hook {way} priority 0 ; }}");
                all(&own, &[&format!("nft add chain {TABLE} {way} {hook}")])?;
            }
            namespaces.push(own);
        }
        Ok(Self { hosts: namespaces, _switch: switch })
    }

    /// All of them.
    pub fn hosts(&self) -> Vec<Host> {
        self.hosts.iter().map(|namespace| namespace.host.clone()).collect()
    }

    fn host(&self, host: usize) -> &Host {
        &self.hosts[host].host
    }

    /// Something is wrong with a host's connection, until it is healed.
    ///
    /// # Panics
    ///
    /// If the system says no.
    pub fn trouble(&self, host: usize, trouble: Trouble) {
        let drop = |way: &str, what: &str| {
            let device = if way == "input" { "iifname" } else { "oifname" };
            format!("nft add rule {TABLE} {way} {device} eth0 {what} drop")
        };
        let commands = match trouble {
            Trouble::Cut => vec![drop("input", ""), drop("output", "")],
            Trouble::Deaf => vec![drop("input", "")],
            Trouble::Mute => vec![drop("output", "")],
            Trouble::Lossy(percent) => {
                vec![drop("output", &format!("numgen random mod 100 < {percent}"))]
            }
            Trouble::Slow(megabits) => {
                let bucket = format!("tbf rate {megabits}mbit burst 64kb latency 200ms");
                vec![format!("tc qdisc replace dev eth0 root {bucket}")]
            }
        };
        for command in commands {
            run(self.host(host), &command).unwrap();
        }
    }

    /// Nothing is wrong with a host's connection any more.
    ///
    /// # Panics
    ///
    /// If the system says no.
    pub fn heal(&self, host: usize) {
        run(self.host(host), &format!("nft flush table {TABLE}")).unwrap();
        run(self.host(host), "tc qdisc replace dev eth0 root pfifo").unwrap();
    }
}

impl Namespace {
    fn at(address: Ipv4Addr) -> Result<Self, String> {
        let mut holder = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--net", "sh", "-c"])
            .arg("echo there; exec sleep infinity")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("setpriv: {error}"))?;
        let mut said = String::new();
        let output = holder.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut said).map_err(|error| error.to_string())?;
        let namespace = PathBuf::from(format!("/proc/{}/ns/net", holder.id()));
        if said == "there\n" {
            return Ok(Self { holder, host: Host { address, namespace: Some(namespace) } });
        }
        let output = holder.wait_with_output().map_err(|error| error.to_string())?;
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        end(&mut self.holder);
    }
}

/// Runs a command on a host that says nothing.
fn run(host: &Host, words: &str) -> Result<(), String> {
    let enter = host.enter();
    let words: Vec<&str> =
        enter.iter().map(String::as_str).chain(words.split_whitespace()).collect();
    let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", words.join(" "));
    let output = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| failed(&error))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(failed(&said.trim())) }
}
