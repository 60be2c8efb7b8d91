//! What all sessions of a daemon share: the controller, the arena, who is there and who reads what.

use std::any::Any;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tssd_format::Blob;

use super::DaemonOptions;
use super::counters::{Counters, Reader};
use super::delegate::Delegate;
use super::elsewhere::Elsewhere;
use super::hosts::{self, Hosts};
use super::lost::Lost;
use super::mirror::{Bucket, Mirror, Why};
use super::reading::Reading;
use super::registry::{Grant, Registry};
use super::replicas;
use super::tiers::{Place, Tiers};
use crate::arena::{Exhausted, PeerId, Pool, Span};
use crate::controller::LocalController;
use crate::disk::Disk;
use crate::environment::{Environment, SystemEnvironment, wait};
use crate::error::{Error, ErrorKind, Result};
use crate::key::Key;
use crate::ledger::{Durability, LeaseId, Selector, VersionId};
use crate::ledgers::{OwnedLedgers, SharedLedgers};
use crate::meta::{self, DirectoryMeta};
use crate::net::{Endpoint, Identity};
use crate::status::{DaemonStatus, LeaseStatus, PeerStatus};
use crate::sync::{AsyncMutex, Mutex, MutexGuard, watch};
use crate::volume::{DirectoryVolume, Volume};

/// How many kilobytes of copies of archives are on their way to other hosts at most, for all together.
pub(super) const COPIES: usize = 256 << 10;

/// Who holds what is fetched.
const FETCHER: PeerId = 0;

/// Of how many keys it is known what a reader got last.
const MAX_READ: usize = 16;

pub(super) struct House {
    pub(super) registry: Arc<dyn Registry>,
    pub(super) pool: Arc<Pool>,
    pub(super) tiers: Tiers,
    /// The bucket that versions are copied to, if there is one.
    pub(super) mirror: Option<Arc<Mirror>>,
    pub(super) counters: Counters,
    pub(super) reading: Reading,
    pub(super) lost: Arc<Lost>,
    /// Whoever has it copies something small from elsewhere.
    copying: AsyncMutex<()>,
    /// Another one after each start.
    pub(super) instance: u64,
    /// How many kilobytes of copies may be on their way to other hosts.
    pub(super) copies: Arc<Semaphore>,
    inner: Mutex<Inner>,
    next: AtomicU64,
    started: Instant,
    closing: watch::Sender<bool>,
    /// How many are connected.
    present: watch::Sender<usize>,
    /// What goes on by itself, and ends with this.
    _upkeep: JoinSet<()>,
}

#[derive(Default)]
struct Inner {
    peers: BTreeMap<PeerId, Peer>,
    leases: BTreeMap<LeaseId, Held>,
    /// The versions that were fetched last, each under a lease.
    fetched: BTreeMap<Key, Grant>,
}

struct Peer {
    pid: u32,
    /// Where it is, if it is not of this host.
    address: Option<SocketAddr>,
    client: String,
    since: Instant,
    /// The number of the version that it got last, of each of a few keys.
    read: BTreeMap<Key, u64>,
}

/// A version that a peer has been given, and where its bytes are.
pub(super) struct Leased {
    pub(super) grant: Grant,
    pub(super) manifest: Span,
    pub(super) archives: BTreeMap<String, Place>,
}

/// A lease of the registry: whoever lets go of it last hands it back.
struct Registered {
    key: Key,
    lease: LeaseId,
    /// What others keep of the version.
    _reached: Option<Arc<dyn Any + Send + Sync>>,
}

/// A lease that a peer holds.
struct Held {
    peer: PeerId,
    key: Key,
    id: VersionId,
    number: u64,
    /// What it holds, by its names in the volume.
    names: Vec<String>,
    /// The registry's lease, if it has one: that of a version that was fetched is shared.
    registered: Option<Arc<Registered>>,
    since: Instant,
}

impl House {
    /// With what the directory and the bucket hold, if there are any; or with a controller, another daemon, or ledgers
    /// that others have too, who are told where this one is.
    pub(super) async fn open(
        options: &DaemonOptions,
        identity: Identity,
        own: Option<Endpoint>,
        bucket: Option<Bucket>,
    ) -> Result<Self> {
        let pool = Arc::new(Pool::new(options.memory_limit));
        let mut ledgers = OwnedLedgers::keeping(options.keep);
        let mut directory = None;
        if let Some(root) = &options.root {
            let root = root.canonicalize().map_err(|error| Error::io(root.display(), error))?;
            let disk = Disk::at(root);
            ledgers = ledgers.recover(Arc::new(DirectoryMeta::new(disk.clone()))).await?;
            directory = Some(DirectoryVolume::new(disk));
        }
        let tiers = Tiers::new(pool, directory, Elsewhere::new(identity.clone()));
        let mut upkeep = JoinSet::new();
        let environment = || Arc::new(SystemEnvironment);
        let mirror = |own: &LocalController, bucket: Option<Bucket>| {
            let (store, shown) = bucket.map(|bucket| (bucket.store(), bucket.shown))?;
            let (own, replicas) = (own.clone(), tiers.replicas.clone());
            Some(Mirror::new(store, shown, own, replicas, options.bucket_rate))
        };
        let (registry, mirror): (Arc<dyn Registry>, _) =
            match (&options.controller, &options.meta, own) {
                (Some(controller), _, Some(own)) => {
                    let controller = controller.parse()?;
                    let delegate =
                        Delegate::connect(controller, identity, own, tiers.clone()).await?;
                    (Arc::new(delegate), None)
                }
                (None, Some(url), Some(own)) => {
                    let record = own.to_string().into_bytes();
                    let meta = meta::open(url).await?;
                    let mut ledgers = SharedLedgers::of_host(meta, record, options.keep);
                    if let Some(bucket) = &bucket {
                        ledgers = ledgers.restore(bucket.ledgers.clone());
                    }
                    let hosts =
                        Hosts::new(ledgers.clone(), tiers.elsewhere.clone(), tiers.pool.clone());
                    let controller = LocalController::among(
                        Arc::new(ledgers),
                        Arc::new(tiers.clone()),
                        Arc::new(hosts),
                        environment(),
                    );
                    upkeep.spawn(hosts::look_after(controller.clone(), tiers.replicas.clone()));
                    let mirror = mirror(&controller, bucket);
                    (Arc::new(controller), mirror)
                }
                _ => {
                    if let Some(bucket) = &bucket {
                        // Nobody else writes there: what is open was begun by a daemon that has ended.
                        bucket.store().abandon_all_open().await?;
                        ledgers = ledgers.restore(bucket.ledgers.clone()).await?;
                    }
                    let controller = LocalController::new(
                        Arc::new(ledgers),
                        Arc::new(tiers.clone()),
                        environment(),
                    );
                    controller.recover().await?;
                    let mirror = mirror(&controller, bucket);
                    (Arc::new(controller), mirror)
                }
            };
        upkeep.spawn(replicas::look_after(tiers.replicas.clone(), registry.clone()));
        Ok(Self { mirror, _upkeep: upkeep, ..Self::new(registry, tiers) })
    }

    /// With what is in these tiers, and whoever decides about that.
    pub(super) fn new(registry: Arc<dyn Registry>, tiers: Tiers) -> Self {
        // One that all readers of JSON can hold.
        let instance = u64::try_from(SystemEnvironment.random() >> 76).unwrap_or_default();
        Self {
            registry,
            pool: tiers.pool.clone(),
            tiers,
            mirror: None,
            counters: Counters::default(),
            reading: Reading::default(),
            lost: Arc::default(),
            copying: AsyncMutex::default(),
            instance,
            copies: Arc::new(Semaphore::new(COPIES)),
            inner: Mutex::default(),
            next: AtomicU64::new(1),
            started: Instant::now(),
            closing: watch::channel(false).0,
            present: watch::channel(0).0,
            _upkeep: JoinSet::new(),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics while holding the house")
    }

    /// A number that no other peer or contribution has.
    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Sessions end.
    pub(super) fn close(&self) {
        self.closing.send_replace(true);
    }

    pub(super) fn is_closing(&self) -> bool {
        *self.closing.borrow()
    }

    /// Returns when sessions are to end.
    pub(super) async fn closed(&self) {
        // The sender is here: it does not go before.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }

    /// Returns when nobody has been connected for so long and nothing is held that would be lost;
    /// without a time, never.
    pub(super) async fn unneeded(&self, linger: Option<Duration>) {
        let Some(linger) = linger else { return std::future::pending().await };
        let mut present = self.present.subscribe();
        loop {
            // The sender is here: it does not go before.
            let _ = present.wait_for(|count| *count == 0).await;
            let came = present.wait_for(|count| *count > 0);
            if tokio::time::timeout(linger, came).await.is_err()
                && matches!(self.registry.holds_memory().await, Ok(false))
            {
                return;
            }
        }
    }

    pub(super) fn join(&self, peer: PeerId, origin: (u32, Option<SocketAddr>), client: String) {
        let (pid, address) = origin;
        let joined = Peer { pid, address, client, since: Instant::now(), read: BTreeMap::new() };
        let mut inner = self.inner();
        inner.peers.insert(peer, joined);
        self.present.send_replace(inner.peers.len());
        drop(inner);
        self.counters.count().connections += 1;
    }

    /// Gives a reader a version, with a lease.
    pub(super) async fn lease(
        &self,
        peer: PeerId,
        key: &Key,
        selector: Selector,
    ) -> Result<Leased> {
        let mut is_again = false;
        loop {
            let grant = match self.hold_fetched(peer, key, selector, |_| false) {
                Some(grant) => grant,
                None => match self.registry.lease(peer, key, selector).await {
                    Ok(grant) => self.hold(peer, key, grant),
                    Err(error) => self.instead(peer, key, selector, error).await?,
                },
            };
            match self.place(key, &grant).await {
                Ok((manifest, archives)) => {
                    self.count_get(peer, key, grant.number, &archives);
                    return Ok(Leased { grant, manifest, archives });
                }
                Err(error) => {
                    self.release(peer, grant.lease).await;
                    // What was here may have been let go of before it was held.
                    if is_again || error.kind() != ErrorKind::Corrupt {
                        return Err(error);
                    }
                    is_again = true;
                }
            }
        }
    }

    /// What was fetched, if whoever decides no longer has it and it was not rewound since.
    async fn instead(
        &self,
        peer: PeerId,
        key: &Key,
        selector: Selector,
        error: Error,
    ) -> Result<Grant> {
        let epoch = match error.kind() {
            ErrorKind::NotFound => {
                let versions = self.registry.versions(key).await.unwrap_or_default();
                versions.iter().map(|version| version.epoch).max()
            }
            ErrorKind::Unreachable => None,
            _ => return Err(error),
        };
        let is_current = |grant: &Grant| epoch.is_none_or(|epoch| grant.epoch >= epoch);
        self.hold_fetched(peer, key, selector, is_current).ok_or(error)
    }

    /// A peer holds what it was granted.
    fn hold(&self, peer: PeerId, key: &Key, grant: Grant) -> Grant {
        let (key, lease, reached) = (key.clone(), grant.lease, grant.reached.clone());
        let registered = Arc::new(Registered { key: key.clone(), lease, _reached: reached });
        self.hold_under(&mut self.inner(), peer, &key, grant, Some(registered))
    }

    fn hold_under(
        &self,
        inner: &mut Inner,
        peer: PeerId,
        key: &Key,
        grant: Grant,
        registered: Option<Arc<Registered>>,
    ) -> Grant {
        let names: Vec<String> = grant.names().cloned().collect();
        self.pool.hold(&names);
        let (number, since) = (grant.number, Instant::now());
        let held = Held { peer, key: key.clone(), id: grant.id, number, names, registered, since };
        inner.leases.insert(grant.lease, held);
        grant
    }

    /// A peer holds a version that was fetched, if it is the one that it asks for: by its identity, or, if
    /// that is good enough, by its number.
    fn hold_fetched(
        &self,
        peer: PeerId,
        key: &Key,
        selector: Selector,
        is_good: impl Fn(&Grant) -> bool,
    ) -> Option<Grant> {
        let mut inner = self.inner();
        let grant = inner.fetched.get(key)?;
        let is_it = match selector {
            Selector::Newest => false,
            Selector::Number(number) => grant.number == number && is_good(grant),
            Selector::Id(id) => grant.id == id,
        };
        if !is_it || grant.instance != self.registry.instance() {
            return None;
        }
        let registered = inner.leases.get(&grant.lease)?.registered.clone();
        let lease = LeaseId(SystemEnvironment.random());
        let grant = Grant { lease, ..grant.clone() };
        Some(self.hold_under(&mut inner, peer, key, grant, registered))
    }

    /// Proves that what is to be so durable can be.
    pub(super) fn check(&self, durability: Durability) -> Result<()> {
        if durability == Durability::Object && self.mirror.is_none() {
            let text =
                "this daemon has no bucket: what must outlast its host needs serve --bucket URL";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        self.tiers.admit(durability).map(drop)
    }

    /// Does something with a key that may change what is kept of it, here and in the bucket.
    pub(super) async fn change<T>(
        &self,
        key: &Key,
        change: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let Some(mirror) = &self.mirror else { return change.await };
        let was_there = mirror.has(key).await?;
        let changed = change.await?;
        self.let_go_of_replaced(key).await;
        if was_there {
            mirror.sync(key).await?;
        }
        Ok(changed)
    }

    /// Lets go of what was brought back from the bucket and is visible no more.
    pub(super) async fn let_go_of_replaced(&self, key: &Key) {
        let fetched = self.inner().fetched.get(key).map(|grant| (grant.id, grant.lease));
        let Some((id, lease)) = fetched.filter(|_| self.mirror.is_some()) else { return };
        let Ok(versions) = self.registry.versions(key).await else { return };
        if versions.iter().all(|version| version.id != id) {
            {
                let mut inner = self.inner();
                if inner.fetched.get(key).is_some_and(|grant| grant.lease == lease) {
                    inner.fetched.remove(key);
                }
            }
            self.release(FETCHER, lease).await;
        }
    }

    /// Brings what of a version nobody else has who answers back from the bucket into memory, where it stays until
    /// another version of its key is fetched.
    async fn restore(&self, key: &Key, grant: &Grant) -> Result<()> {
        let Some(mirror) = &self.mirror else { return Ok(()) };
        let (mut missing, now) = (Vec::new(), Instant::now());
        for name in grant.names() {
            match self.tiers.place(name)? {
                None => missing.push((name.clone(), Why::Alone)),
                Some(Place::There(..)) => {
                    let elsewhere = &self.tiers.elsewhere;
                    let is_only_there = !grant.stored && !elsewhere.are_several(name);
                    let is_there = is_only_there || elsewhere.prefer_who_answers(name, now).await;
                    if grant.stored && !is_there {
                        missing.push((name.clone(), Why::Unanswered));
                    }
                }
                Some(Place::Here(_)) => {}
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let own = match self.registry.lease(FETCHER, key, Selector::Id(grant.id)).await {
            Ok(own) => self.hold(FETCHER, key, own),
            // It was replaced meanwhile: whoever has leased it before gets it all the same.
            Err(_) => return mirror.restore(key, grant.id, missing).await,
        };
        match mirror.restore(key, own.id, missing).await {
            Ok(()) => self.fetched(key, own).await,
            Err(error) => {
                self.give_up(&own).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Brings an archive that somebody holds back from the bucket, if it is there: whoever keeps it has failed.
    pub(super) async fn rescue(&self, name: &String, failed: Error) -> Result<()> {
        let held = {
            let inner = self.inner();
            let held = inner.leases.values().find(|held| held.names.contains(name));
            held.map(|held| (held.key.clone(), held.id))
        };
        let (Some(mirror), Some((key, id))) = (&self.mirror, held) else { return Err(failed) };
        let missing = vec![(name.clone(), Why::Unanswered)];
        let restored = mirror.restore(&key, id, missing).await;
        if restored.is_ok() && self.pool.span(name).is_some() { Ok(()) } else { Err(failed) }
    }

    /// Where the manifest and the archives of a version are that is held.
    async fn place(&self, key: &Key, grant: &Grant) -> Result<(Span, BTreeMap<String, Place>)> {
        self.restore(key, grant).await?;
        self.copy_manifest(key, grant).await?;
        let Place::Here(manifest) = self.found(key, grant, &grant.manifest)? else {
            return Err(Error::new(ErrorKind::Corrupt, "the manifest is elsewhere"));
        };
        let archives = grant.archives.iter();
        let archives =
            archives.map(|(file, name)| Ok((file.clone(), self.found(key, grant, name)?)));
        Ok((manifest, archives.collect::<Result<_>>()?))
    }

    /// Where something is that a version consists of.
    fn found(&self, key: &Key, grant: &Grant, name: &str) -> Result<Place> {
        self.tiers.place(name)?.ok_or_else(|| {
            let text = format_args!("key `{key}`: version {} lacks `{name}`", grant.number);
            Error::new(ErrorKind::Corrupt, text)
        })
    }

    /// The manifest of a version that another daemon has is small: it is copied, and stays while somebody
    /// holds the version.
    async fn copy_manifest(&self, key: &Key, grant: &Grant) -> Result<()> {
        let missing = grant.missing.clone().or_else(|| {
            let (keeper, len) = self.tiers.elsewhere.place(&grant.manifest)?;
            Some((grant.manifest.clone(), keeper.endpoint, len))
        });
        if missing.is_none() && self.tiers.place(&grant.manifest)?.is_some() {
            return Ok(());
        }
        let _copying = self.copying.lock().await;
        if self.pool.span(&grant.manifest).is_some() {
            return Ok(());
        }
        let bytes = self.manifest(key, grant, missing).await?;
        let nobody_waits = std::future::ready(());
        let write = |pool: &Arc<Pool>| pool.write(&grant.manifest, &bytes);
        let written = self.tiers.replicas.in_memory(&*self.registry, nobody_waits, write).await;
        let written = written.map_err(|error| Error::io(&grant.manifest, error))?;
        written.map_err(|exhausted| self.no_room(&exhausted))?;
        // As long as somebody holds the version.
        self.pool.delete(&grant.manifest);
        Ok(())
    }

    /// A manifest, from whoever has it. If he does not answer, it is made of the archives once more, if those are to be
    /// had.
    async fn manifest(
        &self,
        key: &Key,
        grant: &Grant,
        at: Option<(String, Endpoint, u64)>,
    ) -> Result<Vec<u8>> {
        let (elsewhere, now) = (&self.tiers.elsewhere, Instant::now());
        let is_there = match &at {
            Some((_, endpoint, _)) => elsewhere.answers(endpoint, now).await,
            None => false,
        };
        if !is_there {
            let mut can_be_made = true;
            for name in grant.archives.values() {
                let is_here = matches!(self.tiers.place(name)?, Some(Place::Here(_)));
                can_be_made &= is_here || elsewhere.prefer_who_answers(name, now).await;
            }
            if can_be_made && let Some(made) = self.registry.manifest(key, grant.id).await? {
                return Ok(made);
            }
        }
        let Some((name, endpoint, len)) = at else {
            for name in grant.archives.values() {
                self.found(key, grant, name)?;
            }
            let number = grant.number;
            let text = format_args!("key `{key}`: nobody has the manifest of version {number}");
            return Err(Error::new(ErrorKind::Unreachable, text));
        };
        let lines = elsewhere.host(&endpoint);
        wait(move || lines.manifest(&name, len)).await
    }

    fn count_get(&self, peer: PeerId, key: &Key, number: u64, archives: &BTreeMap<String, Place>) {
        {
            let mut inner = self.inner();
            if let Some(reader) = inner.peers.get_mut(&peer) {
                if reader.read.len() >= MAX_READ && !reader.read.contains_key(key) {
                    reader.read.pop_first();
                }
                reader.read.insert(key.clone(), number);
            }
        }
        let mut counts = self.counters.count();
        counts.gets += 1;
        for place in archives.values() {
            let source = match place {
                Place::Here(_) => None,
                Place::There(keeper, _) => Some(keeper.source),
            };
            let leased = counts.bytes_leased.entry(source).or_default();
            *leased = leased.saturating_add(place.len());
        }
    }

    /// A reader hands a lease back: nothing sees the version through it any more.
    pub(super) async fn release(&self, peer: PeerId, lease: LeaseId) {
        let held = {
            let mut inner = self.inner();
            if inner.leases.get(&lease).is_none_or(|held| held.peer != peer) {
                return;
            }
            inner.leases.remove(&lease)
        };
        if let Some(held) = held {
            self.end(held).await;
        }
    }

    async fn end(&self, held: Held) {
        self.pool.let_go(&held.names);
        if let Some(Registered { key, lease, .. }) = held.registered.and_then(Arc::into_inner) {
            self.registry.release(&key, lease).await;
        }
    }

    /// A peer is lost. If it has this host's memory, what it read cannot be written again: nobody says
    /// that it is not seen any more.
    pub(super) async fn lose(&self, peer: PeerId, is_near: bool) {
        let lost: Vec<(LeaseId, Held)> = {
            let mut inner = self.inner();
            inner.peers.remove(&peer);
            self.present.send_replace(inner.peers.len());
            inner.leases.extract_if(.., |_, held| held.peer == peer).collect()
        };
        for name in lost.iter().flat_map(|(_, held)| &held.names).filter(|_| is_near) {
            self.pool.suspect(name);
        }
        for (_, held) in lost {
            self.end(held).await;
        }
    }

    /// A version that is on its way here: what of it is elsewhere, and has to be copied. It is held until it
    /// is [fetched](House::fetched).
    pub(super) async fn fetch(
        &self,
        key: &Key,
        selector: Selector,
        only: Option<&[String]>,
    ) -> Result<(Grant, Vec<(String, u64)>)> {
        let Leased { grant, archives, .. } = self.lease(FETCHER, key, selector).await?;
        let wanted =
            archives.into_iter().filter(|(file, _)| only.is_none_or(|only| only.contains(file)));
        let far = wanted.filter_map(|(file, place)| match place {
            Place::Here(_) => None,
            Place::There(_, len) => Some((grant.archives[&file].clone(), len)),
        });
        let far = far.collect();
        Ok((grant, far))
    }

    /// A version is here, as far as it was wanted: it stays until another one of its key is. If all of it is
    /// a copy, whoever else has it need not keep it for us.
    pub(super) async fn fetched(&self, key: &Key, grant: Grant) {
        let is_copy = |name: &String| self.pool.is_doomed(name) || self.tiers.replicas.is_one(name);
        let is_copied = grant.names().all(is_copy);
        let lease = grant.lease;
        let (earlier, registered) = {
            let mut inner = self.inner();
            let held = inner.leases.get_mut(&lease).filter(|_| is_copied);
            let registered = held.and_then(|held| held.registered.take());
            (inner.fetched.insert(key.clone(), grant), registered)
        };
        if let Some(Registered { key, lease, .. }) = registered.and_then(Arc::into_inner) {
            self.registry.release(&key, lease).await;
        }
        if let Some(earlier) = earlier {
            self.release(FETCHER, earlier.lease).await;
        }
    }

    /// It did not come.
    pub(super) async fn give_up(&self, grant: &Grant) {
        self.release(FETCHER, grant.lease).await;
    }

    /// What another daemon let this one keep, nobody needs any more.
    pub(super) fn discard(&self, names: &[String]) -> Result<()> {
        if !self.registry.is_elsewhere() {
            let text = "this daemon keeps nothing for others: it decides itself";
            return Err(Error::new(ErrorKind::Refused, text));
        }
        for name in names {
            self.pool.delete(name);
        }
        Ok(())
    }

    /// Something that others may read, by its name.
    pub(super) fn open_blob(&self, name: &str) -> Result<Arc<dyn Blob>> {
        // What was leased is there: a file of the directory too.
        let blob = self.pool.open(name).map_err(|error| Error::io(name, error))?;
        blob.map(|near| near.blob).ok_or_else(|| {
            let text = format_args!("`{name}` is not there (any more): locate its version again");
            Error::new(ErrorKind::NotFound, text)
        })
    }

    /// Why there is no room, and who could make some.
    pub(super) fn no_room(&self, exhausted: &Exhausted) -> Error {
        let inner = self.inner();
        let holders: Vec<String> = inner.lease_statuses().map(|lease| lease.to_string()).collect();
        let holders = match holders.as_slice() {
            [] => "nobody reads: versions are being written or pinned".to_owned(),
            holders => format!("held by {}", holders.join(", ")),
        };
        let retired = match self.pool.status().retired {
            0 => String::new(),
            bytes => format!("; {bytes} of them were let go, and processes have them mapped still"),
        };
        Error::new(
            ErrorKind::Busy,
            format_args!(
                "no memory: {exhausted}{retired}; {holders}. Wait until they are done, keep fewer versions, \
                 or serve with a higher memory limit"
            ),
        )
    }

    /// What those who are connected got last.
    pub(super) fn readers(&self) -> Vec<Reader> {
        let inner = self.inner();
        let reader = |(&peer, joined): (&PeerId, &Peer)| {
            let pid = joined.pid;
            let read = joined.read.iter();
            let read = read.map(move |(key, &version)| Reader {
                peer,
                pid,
                key: key.to_string(),
                version,
            });
            read.collect::<Vec<_>>()
        };
        inner.peers.iter().flat_map(reader).collect()
    }

    pub(super) fn status(&self) -> DaemonStatus {
        let inner = self.inner();
        let peer = |peer: &Peer| PeerStatus {
            pid: peer.pid,
            address: peer.address.map(|address| address.to_string()),
            client: peer.client.clone(),
            age: peer.since.elapsed(),
        };
        DaemonStatus {
            pid: std::process::id(),
            daemon: concat!("tssd ", env!("CARGO_PKG_VERSION")).to_owned(),
            uptime: self.started.elapsed(),
            memory: self.pool.status(),
            peers: inner.peers.values().map(peer).collect(),
            leases: inner.lease_statuses().collect(),
            uploads: self.mirror.iter().flat_map(|mirror| mirror.uploads()).collect(),
        }
    }
}

impl Inner {
    fn lease_statuses(&self) -> impl Iterator<Item = LeaseStatus> {
        self.leases.values().map(|held| {
            let peer = self.peers.get(&held.peer);
            LeaseStatus {
                key: held.key.to_string(),
                version: held.number,
                pid: peer.map_or(0, |peer| peer.pid),
                address: peer.and_then(|peer| peer.address).map(|address| address.to_string()),
                age: held.since.elapsed(),
            }
        })
    }
}
