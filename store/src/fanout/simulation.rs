//! A simulation of hosts that fetch one archive at the same time, in virtual time, with the code that decides.
//!
//! Each link sends its bytes in the order of the requests. A piece has come when the uplink of its sender and the
//! downlink of its receiver have sent it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use super::{
    FetchPlan, Fetcher, FetcherId, Holder, Part, PieceNumber, PieceRequest, PresentPieces, Source,
    Wants,
};

/// Time from a request to the first byte.
const LATENCY: u64 = 200;

/// Times after which a host asks for the other fetchers again. The last one repeats.
const ANNOUNCE_INTERVALS: [u64; 5] = [10_000, 20_000, 40_000, 100_000, 200_000];

/// Time after which a request to a host that died fails.
const RESET: u64 = 10_000;

/// A fleet of hosts. Times are in microseconds.
struct Fleet {
    hosts: usize,
    pieces: PieceNumber,
    /// Time that a link takes for one piece.
    piece_time: u64,
    /// Longest delay between the first host and the last one.
    jitter: u64,
    /// Hosts whose links take this multiple of the time.
    slow: BTreeMap<usize, u64>,
    /// Hosts that die, and when.
    deaths: BTreeMap<usize, u64>,
    /// Hosts that come much later, and when.
    late: BTreeMap<usize, u64>,
}

struct Host {
    plan: FetchPlan,
    present: BTreeSet<PieceNumber>,
    /// Pieces that another host has asked for before this one did.
    on_demand: BTreeSet<PieceNumber>,
    /// Hosts that wait for a piece.
    waiting: BTreeMap<PieceNumber, Vec<usize>>,
    uplink_free: u64,
    downlink_free: u64,
    completed: Option<u64>,
    /// Number of times that it has asked for the other fetchers.
    announcements: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Announce(usize),
    Deliver { to: usize, request: PieceRequest, is_on_demand: bool },
    Reset { to: usize, request: PieceRequest },
}

/// What a run has measured.
struct Outcome {
    /// When each host had the archive.
    completed: Vec<Option<u64>>,
    /// Pieces that the holder has sent.
    sent_by_holder: u64,
    /// Lower bound of the completion: the time that one link needs for the archive.
    bound: u64,
}

impl Outcome {
    /// Returns the completion of the last host, as a multiple of the bound. Hosts that died or are slow do not count.
    fn ratio(&self, fleet: &Fleet) -> f64 {
        let counts = |host: &usize| {
            !fleet.slow.contains_key(host)
                && !fleet.deaths.contains_key(host)
                && !fleet.late.contains_key(host)
        };
        let hosts = (0..fleet.hosts).filter(counts);
        let last = hosts.map(|host| self.completed[host].expect("it has all pieces")).max();
        fraction(last.unwrap_or(0), self.bound)
    }

    /// Returns what the holder has sent, as a multiple of the archive.
    fn sent(&self, fleet: &Fleet) -> f64 {
        fraction(self.sent_by_holder, u64::from(fleet.pieces))
    }
}

#[expect(clippy::cast_precision_loss, reason = "times and counts are far below 2^52")]
fn fraction(value: u64, whole: u64) -> f64 {
    value as f64 / whole as f64
}

struct Simulation<'a> {
    fleet: &'a Fleet,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    hosts: Vec<Host>,
    holder_free: u64,
    sent_by_holder: u64,
}

fn fetcher_id(host: usize) -> FetcherId {
    let number = u64::try_from(host).expect("usize has at most 64 bits");
    (number + 1).wrapping_mul(0x2545_f491_4f6c_dd1d)
}

impl Fleet {
    fn new(hosts: usize, pieces: PieceNumber) -> Self {
        Self {
            hosts,
            pieces,
            piece_time: 20_000,
            jitter: 30_000,
            slow: BTreeMap::new(),
            deaths: BTreeMap::new(),
            late: BTreeMap::new(),
        }
    }

    fn run(&self) -> Outcome {
        let plan = |number| {
            let mut plan = FetchPlan::new(fetcher_id(number), self.pieces, Holder::Daemons);
            plan.set_wants(Wants::Archive, (0..self.pieces).map(|piece| (piece, Part::WHOLE)));
            plan
        };
        let host = |number| Host {
            plan: plan(number),
            present: BTreeSet::new(),
            on_demand: BTreeSet::new(),
            waiting: BTreeMap::new(),
            uplink_free: 0,
            downlink_free: 0,
            completed: None,
            announcements: 0,
        };
        let mut simulation = Simulation {
            fleet: self,
            now: 0,
            events: BinaryHeap::new(),
            sequence: 0,
            hosts: (0..self.hosts).map(host).collect(),
            holder_free: 0,
            sent_by_holder: 0,
        };
        for host in 0..self.hosts {
            let spread = fetcher_id(host) % (self.jitter + 1);
            let start = self.late.get(&host).copied().unwrap_or(spread);
            simulation.schedule(start, Event::Announce(host));
        }
        simulation.run();
        Outcome {
            completed: simulation.hosts.iter().map(|host| host.completed).collect(),
            sent_by_holder: simulation.sent_by_holder,
            bound: u64::from(self.pieces) * self.piece_time,
        }
    }
}

impl Simulation<'_> {
    fn schedule(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, event)));
    }

    fn is_dead(&self, host: usize) -> bool {
        self.fleet.deaths.get(&host).is_some_and(|death| *death <= self.now)
    }

    fn slowness(&self, host: usize) -> u64 {
        self.fleet.slow.get(&host).copied().unwrap_or(1)
    }

    fn run(&mut self) {
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            self.now = time;
            match event {
                Event::Announce(host) => self.announce(host),
                Event::Deliver { to, request, is_on_demand } => {
                    self.deliver(to, request, is_on_demand);
                }
                Event::Reset { to, request } => {
                    if !self.hosts[to].present.contains(&request.piece) {
                        self.hosts[to].plan.fail(request);
                    }
                    self.poll(to);
                }
            }
        }
    }

    /// Tells a host the fetchers that have joined.
    fn announce(&mut self, host: usize) {
        if self.is_dead(host) || self.hosts[host].completed.is_some() {
            return;
        }
        self.hosts[host].announcements += 1;
        let fetchers: Vec<Fetcher> = self
            .hosts
            .iter()
            .enumerate()
            .filter(|(_, fetcher)| fetcher.announcements > 0)
            .map(|(number, fetcher)| Fetcher {
                id: fetcher_id(number),
                wants: Wants::Archive,
                is_complete: fetcher.completed.is_some(),
            })
            .collect();
        self.hosts[host].plan.set_fetchers(fetchers);
        for fetcher in (0..self.hosts.len()).filter(|fetcher| *fetcher != host) {
            let present = &self.hosts[fetcher].present;
            let mut bits = vec![0; self.fleet.pieces.div_ceil(8).try_into().expect("it is small")];
            for piece in present {
                let byte: &mut u8 = &mut bits[usize::try_from(piece / 8).expect("as above")];
                *byte |= 1 << (piece % 8);
            }
            self.hosts[host].plan.set_present(fetcher_id(fetcher), PresentPieces::Bits(bits));
        }
        self.poll(host);
        let last = ANNOUNCE_INTERVALS.len() - 1;
        let interval = ANNOUNCE_INTERVALS[(self.hosts[host].announcements - 1).min(last)];
        self.schedule(self.now + interval, Event::Announce(host));
    }

    fn poll(&mut self, host: usize) {
        if self.is_dead(host) {
            return;
        }
        let now = Duration::from_micros(self.now);
        while let Some(request) = self.hosts[host].plan.next_request(now) {
            self.request(host, request);
        }
    }

    fn request(&mut self, host: usize, request: PieceRequest) {
        if self.hosts[host].present.contains(&request.piece) {
            self.schedule(self.now, Event::Deliver { to: host, request, is_on_demand: false });
            return;
        }
        let Source::Fetcher(id) = request.source else {
            // Another host may have asked for it before.
            if !self.hosts[host].on_demand.contains(&request.piece) {
                self.send_from_holder(host, request, false);
            }
            return;
        };
        let fetcher = (0..self.hosts.len()).find(|fetcher| fetcher_id(*fetcher) == id);
        let fetcher = fetcher.expect("the fetcher is a host");
        if self.is_dead(fetcher) {
            self.schedule(self.now + RESET, Event::Reset { to: host, request });
        } else if self.hosts[fetcher].present.contains(&request.piece) {
            self.send(fetcher, host, request);
        } else {
            let is_requested =
                self.hosts[fetcher].plan.in_flight.keys().any(|it| it.piece == request.piece);
            self.hosts[fetcher].waiting.entry(request.piece).or_default().push(host);
            let plan = &mut self.hosts[fetcher].plan;
            if plan.queues.get(&Source::Holder).is_some_and(|it| it.contains(&request.piece)) {
                plan.prioritize(request.piece);
            } else if !is_requested && self.hosts[fetcher].on_demand.insert(request.piece) {
                let request = PieceRequest { piece: request.piece, source: Source::Holder };
                self.send_from_holder(fetcher, request, true);
            }
        }
    }

    fn send_from_holder(&mut self, to: usize, request: PieceRequest, is_on_demand: bool) {
        self.sent_by_holder += 1;
        self.holder_free = self.holder_free.max(self.now) + self.fleet.piece_time;
        let sent = self.holder_free;
        self.receive(to, request, sent, is_on_demand);
    }

    fn send(&mut self, from: usize, to: usize, request: PieceRequest) {
        let time = self.fleet.piece_time * self.slowness(from);
        let sender = &mut self.hosts[from];
        sender.uplink_free = sender.uplink_free.max(self.now) + time;
        let sent = sender.uplink_free;
        self.receive(to, request, sent, false);
    }

    fn receive(&mut self, to: usize, request: PieceRequest, sent: u64, is_on_demand: bool) {
        let time = self.fleet.piece_time * self.slowness(to);
        let receiver = &mut self.hosts[to];
        receiver.downlink_free = receiver.downlink_free.max(self.now) + time;
        let arrival = sent.max(receiver.downlink_free) + LATENCY;
        self.schedule(arrival, Event::Deliver { to, request, is_on_demand });
    }

    fn deliver(&mut self, to: usize, request: PieceRequest, is_on_demand: bool) {
        if self.is_dead(to) {
            return;
        }
        let piece = request.piece;
        let now = Duration::from_micros(self.now);
        let host = &mut self.hosts[to];
        host.present.insert(piece);
        host.on_demand.remove(&piece);
        if is_on_demand {
            // Its own request, if it has made one meanwhile, has the piece too.
            let own: Vec<PieceRequest> =
                host.plan.in_flight.keys().filter(|it| it.piece == piece).copied().collect();
            for request in own {
                host.plan.complete(request, now);
            }
        } else {
            host.plan.complete(request, now);
        }
        if host.plan.is_complete() && host.completed.is_none() {
            host.completed = Some(self.now);
        }
        for waiting in self.hosts[to].waiting.remove(&piece).unwrap_or_default() {
            let request = PieceRequest { piece, source: Source::Fetcher(fetcher_id(to)) };
            self.send(to, waiting, request);
        }
        self.poll(to);
    }
}

#[test]
fn many_hosts_take_little_longer_than_one() {
    for (hosts, pieces) in [(1, 200), (2, 200), (4, 200), (8, 200), (16, 400), (32, 1000)] {
        let fleet = Fleet::new(hosts, pieces);
        let outcome = fleet.run();
        let (ratio, sent) = (outcome.ratio(&fleet), outcome.sent(&fleet));
        println!("{hosts} hosts: {ratio:.2} of the bound, the holder sent {sent:.2} archives");
        assert!(ratio <= 1.2, "{hosts}: {ratio}");
        assert!(sent <= 1.3, "{hosts}: {sent}");
    }
}

#[test]
fn slow_host_slows_others_by_a_fifth_at_most() {
    let fleet = Fleet::new(8, 200);
    let before = fleet.run().ratio(&fleet);
    let fleet = Fleet { slow: BTreeMap::from([(3, 10)]), ..fleet };
    let outcome = fleet.run();
    let (ratio, sent) = (outcome.ratio(&fleet), outcome.sent(&fleet));
    println!("a slow host: {ratio:.2} of the bound ({before:.2} without it), {sent:.2} archives");
    assert!(ratio <= 1.2 * before, "{ratio} {before}");
    assert!(sent <= 1.3, "{sent}");
}

#[test]
fn dead_host_and_late_host_do_not_keep_others() {
    let mut fleet = Fleet::new(8, 200);
    fleet.deaths.insert(5, 1_500_000);
    fleet.late.insert(6, 60_000_000);
    let outcome = fleet.run();
    let (ratio, sent) = (outcome.ratio(&fleet), outcome.sent(&fleet));
    println!("a host that dies, one that is late: {ratio:.2} of the bound, {sent:.2} archives");
    assert!(ratio <= 1.4, "{ratio}");
    assert!(sent <= 1.3, "{sent}");
    let late = outcome.completed[6].expect("it has all pieces") - 60_000_000;
    assert!(late <= outcome.bound * 3 / 2, "{late} {}", outcome.bound);
}

#[test]
#[ignore = "takes a minute: run it with --ignored --nocapture"]
fn large_fleets() {
    for (hosts, pieces) in [(64, 2000), (128, 4000)] {
        let fleet = Fleet { piece_time: 1340, ..Fleet::new(hosts, pieces) };
        let outcome = fleet.run();
        let (ratio, sent) = (outcome.ratio(&fleet), outcome.sent(&fleet));
        println!("{hosts} hosts: {ratio:.2} of the bound, the holder sent {sent:.2} archives");
    }
}
