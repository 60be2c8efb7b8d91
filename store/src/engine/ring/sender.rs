//! The writer's side of a ring.

use std::collections::BTreeSet;
#[cfg(target_os = "linux")]
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
use tokio::sync::oneshot;
use tssd_format::{Error as FormatError, ErrorKind as FormatKind, StateDict, Value};

use super::bucket::Filling;
#[cfg(target_os = "linux")]
use super::lender;
use super::{MARK, Mark, channel};
#[cfg(target_os = "linux")]
use crate::device;
use crate::engine::context::Context;
use crate::engine::get::GetOptions;
use crate::engine::put::{PutOptions, PutReport, Residency, Ring, Role};
use crate::error::{Error, ErrorKind, Result};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::sync::boxed;
use crate::key::Key;
use crate::ledger::{Digest, Durability, Refusal, WriterSet};
#[cfg(target_os = "linux")]
use crate::route::Transport;

/// Puts a state dict to those who [receive](crate::Store::receiver) it now. Returns when all of them have it.
pub(crate) async fn put(
    context: &Arc<Context>,
    key: &Key,
    dict: &StateDict,
    options: &PutOptions,
    ring: Ring,
) -> Result<PutReport> {
    let mut sender = Sender::new(context, key, options, ring)?;
    for (path, leaf) in dict.leaves() {
        sender.hold(&path.fqn(), leaf)?;
    }
    sender.finish().await
}

/// A version on its way.
pub(crate) struct Sender {
    context: Arc<Context>,
    key: Key,
    options: PutOptions,
    ring: Ring,
    started: Instant,
    writer: u32,
    /// Of all leaves.
    names: BTreeSet<String>,
    filling: Filling,
    /// What is to be lent, if it is; else it is in the filling.
    pending: Vec<(String, Value)>,
    begun: Option<Begun>,
    /// Why something was not lent that was to be.
    not_lent: Option<String>,
}

/// What is known from the first bucket on.
struct Begun {
    device: Option<String>,
    channel: Key,
    version: u64,
    /// The number of this put.
    put: u64,
    readers: u64,
    /// How many parts have been put.
    parts: u64,
    /// Of all of them.
    report: Option<PutReport>,
    digests: Vec<u8>,
}

impl Begun {
    /// What the next bucket says of itself.
    fn mark(&self, is_last: bool) -> Mark {
        let Self { version, put, parts: part, .. } = *self;
        Mark { version, put, part, is_last, is_lent: false }
    }
}

impl Sender {
    pub(crate) fn new(
        context: &Arc<Context>,
        key: &Key,
        options: &PutOptions,
        ring: Ring,
    ) -> Result<Self> {
        if options.durability != Durability::Memory || options.digests {
            let text = "what goes through a ring stays nowhere: durability and digests need residency=host";
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Self {
            context: context.clone(),
            key: key.clone(),
            options: options.clone(),
            ring,
            started: Instant::now(),
            writer: prove_alone(&format!("key `{key}`"), &StateDict::new(), options)?,
            names: BTreeSet::new(),
            filling: Filling::new(ring.bucket_bytes),
            pending: Vec::new(),
            begun: None,
            not_lent: None,
        })
    }

    fn lends(&self) -> bool {
        matches!(self.options.residency, Residency::Lent(_))
    }

    /// Takes a leaf that was not added before.
    fn hold(&mut self, fqn: &str, leaf: &Value) -> Result<()> {
        self.take_name(fqn)?;
        self.hold_more(fqn, leaf)
    }

    /// Notes the fqn of a leaf; refuses one that was noted before.
    pub(crate) fn take_name(&mut self, fqn: &str) -> Result<()> {
        if self.names.insert(fqn.to_owned()) {
            return Ok(());
        }
        let error = FormatError::new(FormatKind::AmbiguousFqn);
        Err(Error::request(format_args!("`{fqn}`"), error))
    }

    fn hold_more(&mut self, fqn: &str, leaf: &Value) -> Result<()> {
        if let Value::Shards(_) = leaf {
            // Their meshes may name others.
            let mut alone = StateDict::new();
            alone.insert(fqn, leaf.clone());
            prove_alone(&format!("`{fqn}`"), &alone, &self.options)?;
        }
        if self.lends() {
            self.pending.push((fqn.to_owned(), leaf.clone()));
            return Ok(());
        }
        self.filling.add(fqn, leaf)
    }

    /// Adds a leaf, and puts what is full. It must stay as it is until [`Sender::flush`] or [`Sender::finish`] returns.
    pub(crate) async fn add(&mut self, fqn: &str, leaf: &Value) -> Result<()> {
        self.hold(fqn, leaf)?;
        // The last one says so.
        while self.filling.full() > 1 {
            self.put_full(false).await?;
        }
        Ok(())
    }

    /// Adds a part of a tensor whose name is taken, and puts it.
    pub(crate) async fn add_part(&mut self, fqn: &str, part: &Value) -> Result<()> {
        self.hold_more(fqn, part)?;
        self.put_all(false).await
    }

    /// Puts what there is.
    pub(crate) async fn flush(&mut self) -> Result<()> {
        self.put_all(false).await
    }

    /// Puts what is left; returns when all readers have everything.
    pub(crate) async fn finish(mut self) -> Result<PutReport> {
        self.put_all(true).await?;
        let begun = self.begun.take().expect("there is one bucket at least");
        taken(&self.context, &begun.channel, 0, self.options.timeout).await?;
        let report = begun.report.expect("it is put");
        let mut why = format!("{}; {} readers took it", report.why, begun.readers);
        if let Some(not_lent) = &self.not_lent {
            why = format!("{why}; not lent: {not_lent}");
        }
        Ok(PutReport {
            version: begun.version,
            digest: Digest::of(&begun.digests),
            why,
            seconds: self.started.elapsed().as_secs_f64(),
            ..report
        })
    }

    async fn put_all(&mut self, is_last: bool) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            match self.lend(&pending, is_last).await? {
                Lent::Taken => return Ok(()),
                Lent::Cannot(why) => {
                    self.not_lent = Some(why);
                    for (fqn, leaf) in &pending {
                        self.filling.add(fqn, leaf)?;
                    }
                }
            }
        }
        self.filling.flush()?;
        while self.filling.full() > 1 {
            self.put_full(false).await?;
        }
        if self.filling.full() > 0 || is_last { self.put_full(is_last).await } else { Ok(()) }
    }

    /// Puts the first bucket that is full; an empty one if there is none.
    async fn put_full(&mut self, is_last: bool) -> Result<()> {
        let bucket = self.filling.pop().unwrap_or_default();
        self.begin(&bucket).await?;
        let begun = self.begun.as_ref().expect("it has begun");
        let behind = u64::from(self.ring.buckets.get()) - 1;
        taken(&self.context, &begun.channel, behind, self.options.timeout).await?;
        let mark = begun.mark(is_last);
        let residency = Residency::Ring(self.ring);
        // One that is empty goes no way.
        let require = self.options.require.filter(|_| !bucket.entries().is_empty());
        let put = PutOptions { residency, require, ..self.bucket_options(mark) };
        let report = self.context.put(&begun.channel, &bucket, &put).await?;
        self.count(report);
        Ok(())
    }

    /// What a bucket is put with.
    fn bucket_options(&self, mark: Mark) -> PutOptions {
        let mut attrs = self.options.attrs.clone();
        attrs.extend([mark.attr()]);
        PutOptions {
            version: None,
            writer: Some(self.writer),
            writers: Some(WriterSet::one(self.writer)),
            job: None,
            attrs,
            rewind: false,
            ..self.options.clone()
        }
    }

    fn count(&mut self, report: PutReport) {
        let begun = self.begun.as_mut().expect("it has begun");
        begun.parts += 1;
        begun.digests.extend(report.digest.0);
        match &mut begun.report {
            None => begun.report = Some(report),
            Some(all) => {
                all.bytes += report.bytes;
                all.phases += report.phases;
                all.id = report.id;
            }
        }
    }

    /// Finds out where the first bucket goes, and waits for readers there; the others go there too.
    async fn begin(&mut self, bucket: &StateDict) -> Result<()> {
        let device = home(bucket)?;
        if let Some(begun) = &self.begun {
            return match (&begun.device, &device) {
                (known, Some(other)) if known.as_ref() != Some(other) => {
                    Err(elsewhere(known.as_deref(), other))
                }
                _ => Ok(()),
            };
        }
        let channel = channel(&self.key, device.as_deref())?;
        let version = number(&self.context, &channel, &self.options).await?;
        let patience = self.options.timeout;
        let readers = readers(&self.context, &channel, self.ring.readers, patience).await?;
        let put = u64::try_from(SystemEnvironment.random() >> 64).expect("it is half of it");
        self.begun = Some(Begun {
            device,
            channel,
            version,
            put,
            readers,
            parts: 0,
            report: None,
            digests: Vec::new(),
        });
        Ok(())
    }
}

/// A version that goes through a ring has one writer: says who that is.
fn prove_alone(what: &str, dict: &StateDict, options: &PutOptions) -> Result<u32> {
    let role = Role::of(dict, options)?;
    if role.is_alone() {
        return Ok(role.writer());
    }
    let text = format_args!(
        "{what}: a version that goes through a ring has one writer: gather its shards, or put those of each rank under a \
         key of their own, with writers= that rank"
    );
    Err(Error::new(ErrorKind::Invalid, text))
}

/// What has become of tensors that were to be lent.
enum Lent {
    /// All readers have them.
    Taken,
    /// Nothing yet: why they cannot be lent.
    Cannot(String),
}

#[cfg(not(target_os = "linux"))]
impl Sender {
    async fn lend(&mut self, _pending: &[(String, Value)], _is_last: bool) -> Result<Lent> {
        Ok(Lent::Cannot("there are no GPUs here".to_owned()))
    }
}

#[cfg(target_os = "linux")]
impl Sender {
    /// Lends tensors to the readers, and waits until they have them.
    async fn lend(&mut self, pending: &[(String, Value)], is_last: bool) -> Result<Lent> {
        if let Some(other) = self.options.require.filter(|way| *way != Transport::CudaIpc) {
            return Ok(Lent::Cannot(format!("{other} is required")));
        }
        let mut filling = Filling::new(u64::MAX);
        for (fqn, leaf) in pending {
            filling.add(fqn, leaf)?;
        }
        filling.flush()?;
        let bucket = filling.pop().unwrap_or_default();
        self.begin(&bucket).await?;
        let begun = self.begun.as_ref().expect("it has begun");
        let export = match super::export::export(&bucket, begun.device.as_deref()).await? {
            Ok(export) => export,
            Err(why) => return Ok(Lent::Cannot(why)),
        };
        let mark = Mark { is_lent: true, ..begun.mark(is_last) };
        let options =
            PutOptions { residency: Residency::Host, require: None, ..self.bucket_options(mark) };
        let (context, channel, left) =
            (self.context.clone(), begun.channel.clone(), self.options.timeout);
        // Until this call ends, in whatever way, and the connection is there.
        let _lender = context.controller().follow(&lender(&channel, begun.put)?).await?;
        let (waiting, is_left) = oneshot::channel::<Infallible>();
        // It goes on if nobody waits for it any more: until it is taken back the tensors are held here.
        let lending = tokio::spawn(boxed(async move {
            let put = context.put(&channel, &export.dict, &options).await;
            let taken = match &put {
                Ok(_) => tokio::select! {
                    taken = taken(&context, &channel, 0, left) => Some(taken),
                    _ = is_left => None,
                },
                Err(_) => None,
            };
            if !matches!(taken, Some(Ok(()))) {
                // Whoever is reading now finds another version when it has read, and takes it for nothing.
                let mark = Mark { part: u64::MAX, is_last: false, is_lent: false, ..mark };
                let mut attrs = options.attrs.clone();
                attrs.extend([mark.attr()]);
                let timeout = PutOptions::default().timeout;
                let options = PutOptions { attrs, timeout, ..options };
                context.put(&channel, &StateDict::new(), &options).await?;
            }
            taken.transpose()?;
            drop(bucket);
            put.map(|report| export.report(report))
        }));
        let ended = |error| Error::io("the put was cut off", std::io::Error::other(error));
        let lent = lending.await;
        drop(waiting);
        self.count(lent.map_err(ended)??);
        Ok(Lent::Taken)
    }
}

/// The GPU that the tensors of a state dict are on; none if they are in the host's memory.
fn home(dict: &StateDict) -> Result<Option<String>> {
    #[cfg(target_os = "linux")]
    let homes = device::driver().map_or_else(|_| BTreeSet::new(), |driver| driver.devices_of(dict));
    #[cfg(not(target_os = "linux"))]
    let homes = BTreeSet::<String>::new();
    let mut homes = homes.into_iter();
    let home = homes.next();
    match homes.next() {
        None => Ok(home),
        Some(other) => Err(elsewhere(home.as_deref(), &other)),
    }
}

fn elsewhere(home: Option<&str>, other: &str) -> Error {
    let text = format_args!(
        "a ring is of one GPU, or of the host's memory, and tensors are {} and on {other}: put what is on each by itself",
        home.map_or("there".to_owned(), |home| format!("on {home}"))
    );
    Error::new(ErrorKind::Invalid, text)
}

/// The number of the version that is put: the one that is asked for, or that after the last one.
async fn number(context: &Context, channel: &Key, options: &PutOptions) -> Result<u64> {
    let last = match context.open(channel, &GetOptions::default()).await {
        // One that has not come whole may be tried again.
        Ok(version) => version
            .attrs
            .get(MARK)
            .and_then(Mark::of)
            .map(|mark| mark.version.saturating_sub(u64::from(!mark.is_last))),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let next = last.map_or(1, |last| last.saturating_add(1));
    match (options.version, last) {
        (Some(number), Some(highest)) if number <= highest && !options.rewind => {
            Err(Error::refused(channel, Refusal::VersionNotNewer { number, highest }))
        }
        (Some(number), _) => Ok(number),
        (None, _) => Ok(next),
    }
}

/// Waits until so many readers are there. Says how many there are.
async fn readers(context: &Context, channel: &Key, wanted: u64, patience: Duration) -> Result<u64> {
    let since = Instant::now();
    loop {
        let (readers, _) = context.controller().unread(channel, u64::MAX, Duration::ZERO).await?;
        if readers >= wanted.max(1) {
            return Ok(readers);
        }
        if since.elapsed() >= patience {
            let text = format_args!(
                "`{channel}`: {readers} readers are there to receive it, {wanted} are wanted: open a receiver in each \
                 before the put"
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until not more than so many buckets are still to be read.
async fn taken(context: &Context, channel: &Key, at_most: u64, patience: Duration) -> Result<()> {
    let since = Instant::now();
    let (readers, unread) = loop {
        let left = patience.saturating_sub(since.elapsed());
        let (readers, unread) = context.controller().unread(channel, at_most, left).await?;
        if unread <= at_most {
            return Ok(());
        }
        // A daemon does not wait as long as one may want.
        if since.elapsed() >= patience {
            break (readers, unread);
        }
    };
    let text = format_args!(
        "`{channel}`: {unread} buckets have not been taken by all {readers} readers for {patience:?}: `status` says \
         who holds them"
    );
    Err(Error::new(ErrorKind::Busy, text))
}
