use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

/// Returns the sum of the counters of a daemon whose lines begin with `counter`.
pub(crate) fn sum(metrics: SocketAddr, counter: &str) -> u64 {
    let mut stream = TcpStream::connect(metrics).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: daemon\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let lines = page.lines().filter(|line| line.starts_with(counter));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}
