//! Records as keys of etcd.

use std::any::Any;
use std::future::Future;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, DeleteOptions, GetOptions, Identity,
    KeyValue, PutOptions, TlsOptions, Txn, TxnOp, TxnOpResponse, WatchOptions, WatchStream,
};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::{MetaStore, Turns, Watch};
use crate::error::{Error, ErrorKind, Result, because, causes};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::exec::backoff;
use crate::io::sync::boxed;

/// How an address of etcd begins.
const SCHEME: &str = "etcd://";

/// Where keys are, if nothing else is said.
const PREFIX: &str = "tssd";

/// What is asked while etcd elects a leader is not answered: it is asked again.
const REQUEST: Duration = Duration::from_secs(2);

/// After this time it is not asked again.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection on which nothing comes for so long is tried, and then given up.
const IDLE: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_secs(3);

/// How long a session outlives its process, in seconds.
const SESSION_SECONDS: i64 = 10;

/// A session is renewed so often.
const RENEWAL: Duration = Duration::from_secs(3);

/// Behind each record stands who has created it: so many bytes.
const TOKEN_BYTES: usize = 16;

/// How many names are listed by one request.
const PAGE: i64 = 1000;

/// The keys below a prefix.
pub(crate) struct EtcdMeta {
    client: Client,
    /// Its address, as messages have it.
    shown: String,
    /// It ends with `/`.
    prefix: String,
    turns: Turns,
    environment: SystemEnvironment,
}

type Answer<T> = std::result::Result<T, etcd_client::Error>;

impl EtcdMeta {
    /// Those at an address `etcd://HOST:PORT[,HOST:PORT…][/PREFIX]`, below `tssd` if no prefix is named. Certificates,
    /// and the name and password of a user, are those that `etcdctl` takes from the environment: `ETCDCTL_CACERT`,
    /// `ETCDCTL_CERT`, `ETCDCTL_KEY` and `ETCDCTL_USER`.
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        let invalid = |text: &str| Error::new(ErrorKind::Invalid, format_args!("`{url}`: {text}"));
        let rest = url.strip_prefix(SCHEME).unwrap_or(url);
        let (hosts, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let hosts: Vec<&str> = hosts.split(',').filter(|host| !host.is_empty()).collect();
        if hosts.is_empty() {
            return Err(invalid("it names no host: etcd://HOST:2379[,HOST:2379…][/PREFIX]"));
        }
        if hosts.iter().any(|host| host.contains('@')) {
            return Err(invalid("others can read it: set ETCDCTL_USER to USER:PASSWORD"));
        }
        let options = ConnectOptions::new()
            .with_timeout(REQUEST)
            .with_connect_timeout(REQUEST)
            .with_keep_alive(IDLE, SILENCE)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        let options = match tls()? {
            Some(tls) => options.with_tls(tls),
            None => options,
        };
        let options = match user()? {
            Some((name, password)) => options.with_user(name, password),
            None => options,
        };
        // A process has one; one that has chosen another already keeps that.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let connected = Client::connect(hosts, Some(options)).await;
        let client = connected.map_err(|error| failed(url, &error))?;
        let prefix = Some(prefix.trim_matches('/')).filter(|prefix| !prefix.is_empty());
        let prefix = format!("{}/", prefix.unwrap_or(PREFIX));
        let (turns, environment) = (Turns::default(), SystemEnvironment);
        let meta = Self { client, shown: url.to_owned(), prefix, turns, environment };
        // Whether somebody answers, and lets us, is said now and not at the first put.
        meta.get(".sessions").await?;
        Ok(meta)
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// With what the keys below a name begin.
    fn below(&self, name: &str) -> String {
        if name.is_empty() { self.prefix.clone() } else { format!("{}{name}/", self.prefix) }
    }

    /// What is stored of a record.
    fn record(&self, name: &str, found: &KeyValue) -> Result<Vec<u8>> {
        let record = found.value();
        let record = record.len().checked_sub(TOKEN_BYTES).map(|len| record[..len].to_vec());
        record.ok_or_else(|| {
            let text = format_args!("`{}`: `{name}` is cut off", self.shown);
            Error::new(ErrorKind::Corrupt, text)
        })
    }

    /// Asks until there is an answer.
    async fn ask<T, F: Future<Output = Answer<T>>>(
        &self,
        mut request: impl FnMut(Client) -> F,
    ) -> Result<T> {
        let (started, mut tries) = (Instant::now(), 0);
        loop {
            let error = match timeout(REQUEST * 2, request(self.client.clone())).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => failed(&self.shown, &error),
                Err(_) => {
                    Error::new(ErrorKind::Unreachable, format_args!("`{}`: no answer", self.shown))
                }
            };
            if error.kind() != ErrorKind::Unreachable || started.elapsed() > PATIENCE {
                return Err(error);
            }
            tries += 1;
            backoff(tries).await;
        }
    }

    /// Creates a record, if a condition holds, and does something besides.
    async fn put(
        &self,
        name: &str,
        mut record: Vec<u8>,
        condition: Option<Compare>,
        besides: Option<TxnOp>,
    ) -> Result<bool> {
        let token = self.environment.random().to_le_bytes();
        record.extend(token);
        let key = self.key(name);
        let is_new = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
        let put = TxnOp::put(key.clone(), record, None);
        let create = Txn::new()
            .when(condition.into_iter().chain([is_new]).collect::<Vec<_>>())
            .and_then(besides.into_iter().chain([put]).collect::<Vec<_>>())
            .or_else([TxnOp::get(key, None)]);
        let mut requests = 0;
        let answer = self
            .ask(|mut client| {
                requests += 1;
                let create = create.clone();
                async move { client.txn(create).await }
            })
            .await?;
        if answer.succeeded() {
            return Ok(true);
        }
        // An earlier request of this call may have been done and not answered: the token tells.
        let there = answer.op_responses().into_iter().find_map(|response| match response {
            TxnOpResponse::Get(found) => found.kvs().first().map(|it| it.value().ends_with(&token)),
            _ => None,
        });
        there.or((requests == 1).then_some(false)).ok_or_else(|| {
            // It was followed so often since then that it is deleted, or it never was.
            let text = format_args!("`{}`: nobody knows whether `{name}` was ours", self.shown);
            Error::new(ErrorKind::Unreachable, text)
        })
    }
}

/// The name and the password of etcd's user, if the environment says them.
fn user() -> Result<Option<(String, String)>> {
    let Ok(user) = std::env::var("ETCDCTL_USER") else { return Ok(None) };
    let named = user.split_once(':').ok_or_else(|| {
        let text = "the environment says ETCDCTL_USER without `:PASSWORD`";
        Error::new(ErrorKind::Invalid, text)
    })?;
    Ok(Some((named.0.to_owned(), named.1.to_owned())))
}

/// How connections to etcd are encrypted, if the environment says that they are.
fn tls() -> Result<Option<TlsOptions>> {
    let read = |variable: &str| match std::env::var_os(variable) {
        None => Ok(None),
        Some(path) => {
            let read = std::fs::read(&path);
            read.map(Some).map_err(|error| {
                Error::io(format_args!("{variable}, {}", path.to_string_lossy()), error)
            })
        }
    };
    let authority = read("ETCDCTL_CACERT")?;
    let (certificate, key) = (read("ETCDCTL_CERT")?, read("ETCDCTL_KEY")?);
    if certificate.is_some() != key.is_some() {
        let text = "the environment says only one of ETCDCTL_CERT and ETCDCTL_KEY";
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    if authority.is_none() && certificate.is_none() {
        return Ok(None);
    }
    let mut options = TlsOptions::new();
    if let Some(authority) = authority {
        options = options.ca_certificate(Certificate::from_pem(authority));
    }
    if let (Some(certificate), Some(key)) = (certificate, key) {
        options = options.identity(Identity::from_pem(certificate, key));
    }
    Ok(Some(options))
}

/// An error of etcd.
fn failed(shown: &str, error: &etcd_client::Error) -> Error {
    use etcd_client::Error as Failed;
    let (code, text) = match error {
        Failed::GRpcStatus(status) => {
            let text = because(status.message().to_owned(), std::error::Error::source(status));
            (Some(i32::from(status.code())), text)
        }
        error => (None, causes(error)),
    };
    let kind = match (error, code) {
        (Failed::InvalidArgs(_) | Failed::InvalidUri(_), _) => ErrorKind::Invalid,
        // An argument that is invalid, a permission that is denied, somebody who is not known.
        (_, Some(3 | 7 | 16)) => ErrorKind::Refused,
        // A record that no message has room for, now or ever: so says whoever receives it.
        (_, Some(8)) if text.contains("larger than max") => ErrorKind::Refused,
        // There is no room left, or nobody has time.
        (_, Some(8)) => ErrorKind::Busy,
        _ => ErrorKind::Unreachable,
    };
    Error::new(kind, format_args!("`{shown}`: {text}"))
}

#[async_trait]
impl MetaStore for EtcdMeta {
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
        self.put(name, record, None, None).await
    }

    /// In one transaction, so nobody needs to be kept away: as long as the last one is there, none that followed it
    /// was deleted.
    async fn follow(
        &self,
        folder: &str,
        last: Option<&str>,
        next: &str,
        record: Vec<u8>,
    ) -> Result<bool> {
        let below = self.below(folder);
        let (condition, deletion) = match last {
            Some(last) => {
                let last = format!("{below}{last}");
                let older = DeleteOptions::new().with_range(last.clone());
                let is_there = Compare::create_revision(last, CompareOp::Greater, 0);
                (is_there, Some(TxnOp::delete(below, Some(older))))
            }
            None => (Compare::create_revision(below, CompareOp::Equal, 0).with_prefix(), None),
        };
        self.put(&format!("{folder}/{next}"), record, Some(condition), deletion).await
    }

    async fn settle(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let key = self.key(name);
        let found = self
            .ask(|mut client| {
                let key = key.clone();
                async move { client.get(key, None).await }
            })
            .await?;
        found.kvs().first().map(|found| self.record(name, found)).transpose()
    }

    async fn list_records(&self, name: &str) -> Result<Vec<(String, Option<Vec<u8>>)>> {
        let below = self.below(name);
        let found = self
            .ask(|mut client| {
                let (below, all) = (below.clone(), GetOptions::new().with_prefix());
                async move { client.get(below, Some(all)).await }
            })
            .await?;
        let record = |found: &KeyValue| {
            let name = String::from_utf8_lossy(&found.key()[below.len()..]).into_owned();
            let record = self.record(&name, found)?;
            Ok((name, Some(record)))
        };
        let is_directly_below = |found: &&KeyValue| !found.key()[below.len()..].contains(&b'/');
        found.kvs().iter().filter(is_directly_below).map(record).collect()
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        let prefix = self.below(name);
        let (mut from, mut names) = (prefix.clone().into_bytes(), Vec::new());
        let end = after(&prefix);
        loop {
            let page = self
                .ask(|mut client| {
                    let options =
                        GetOptions::new().with_range(end.clone()).with_keys_only().with_limit(PAGE);
                    let from = from.clone();
                    async move { client.get(from, Some(options)).await }
                })
                .await?;
            for found in page.kvs() {
                // What is no text is not ours.
                let Ok(key) = std::str::from_utf8(found.key()) else { continue };
                let below = key.strip_prefix(&prefix).unwrap_or_default();
                let part = below.split('/').next().unwrap_or_default();
                if names.last().is_none_or(|last| last != part) {
                    names.push(part.to_owned());
                }
            }
            let Some(last) = page.kvs().last().filter(|_| page.more()) else { break };
            from = last.key().to_vec();
            from.push(0);
        }
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let key = self.key(name);
        let delete = |mut client: Client| {
            let key = key.clone();
            async move { client.delete(key, None).await }
        };
        self.ask(delete).await.map(drop)
    }

    /// They have gone with the record that followed.
    async fn retire(&self, _folder: &str, _names: Vec<String>) -> Vec<String> {
        Vec::new()
    }

    fn keeps_away(&self) -> bool {
        false
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        Ok(Box::new(self.turns.take(name).await))
    }

    async fn session(&self, name: &str, mut record: Vec<u8>) -> Result<Box<dyn Any + Send>> {
        record.extend(self.environment.random().to_le_bytes());
        let session = Session { client: self.client.clone(), key: self.key(name), record };
        let lease = self.ask(|_| session.begin()).await?;
        let (end, ended) = oneshot::channel::<()>();
        // It ends with the other half, which is dropped.
        drop(tokio::spawn(boxed(session.last(lease, ended))));
        Ok(Box::new(end))
    }

    async fn has_ended(&self, name: &str) -> Result<bool> {
        Ok(self.get(name).await?.is_none())
    }

    fn watch(&self, name: &str, patience: Duration) -> Box<dyn Watch> {
        let deadline = Instant::now().checked_add(patience);
        Box::new(Watched {
            client: self.client.clone(),
            below: self.below(name),
            deadline,
            stream: None,
        })
    }
}

/// A key that is there as long as its process is, and a few seconds more.
struct Session {
    client: Client,
    key: String,
    record: Vec<u8>,
}

impl Session {
    /// Creates the key, and gives the lease that it goes with.
    async fn begin(&self) -> Answer<i64> {
        let mut client = self.client.clone();
        let lease = client.lease_grant(SESSION_SECONDS, None).await?.id();
        let options = PutOptions::new().with_lease(lease);
        client.put(self.key.clone(), self.record.clone(), Some(options)).await?;
        Ok(lease)
    }

    /// Renews the lease until the session ends.
    ///
    /// Who was stopped or cut off for so long that it was lost takes another one: what others have decided meanwhile
    /// stands in the ledgers, and nothing else hangs on it.
    async fn last(self, mut lease: i64, ended: oneshot::Receiver<()>) {
        let renewed = async {
            let mut tries = 0;
            loop {
                match tries {
                    0 => sleep(RENEWAL).await,
                    tries => backoff(tries).await,
                }
                let renewed = timeout(REQUEST, self.renew(lease)).await;
                let failed = match renewed {
                    Ok(Ok(true)) => None,
                    Ok(Ok(false)) => match timeout(REQUEST, self.begin()).await {
                        Ok(Ok(begun)) => {
                            lease = begun;
                            None
                        }
                        failed => Some(failed.map(drop)),
                    },
                    failed => Some(failed.map(drop)),
                };
                tries = if failed.is_some() { tries + 1 } else { 0 };
                if let Some(failed) = failed {
                    tracing::warn!(?failed, key = self.key, "not renewed");
                }
            }
        };
        tokio::select! {
            () = renewed => {}
            _ = ended => {}
        }
        // If nobody hears it, the lease runs out.
        let _ = timeout(REQUEST, self.client.clone().lease_revoke(lease)).await;
    }

    /// Whether the lease was still there.
    async fn renew(&self, lease: i64) -> Answer<bool> {
        // It renews the lease before it returns.
        match self.client.clone().lease_keep_alive(lease).await {
            Ok(_) => Ok(true),
            Err(etcd_client::Error::LeaseKeepAliveError(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Who waits for changes below a name.
struct Watched {
    client: Client,
    below: String,
    /// None is beyond all time.
    deadline: Option<Instant>,
    stream: Option<WatchStream>,
}

#[async_trait]
impl Watch for Watched {
    async fn changed(&mut self) -> bool {
        let left = self
            .deadline
            .map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return false;
        }
        match &mut self.stream {
            None => {
                let options = WatchOptions::new().with_prefix();
                let begun = self.client.watch(self.below.clone(), Some(options));
                match timeout(REQUEST.min(left), begun).await {
                    Ok(Ok(stream)) => self.stream = Some(stream),
                    _ => sleep(REQUEST.min(left)).await,
                }
                // What has changed until now is not told.
                true
            }
            Some(stream) => {
                let answer = timeout(left, stream.message()).await;
                if !matches!(answer, Ok(Ok(Some(_)))) {
                    self.stream = None;
                }
                answer.is_ok()
            }
        }
    }
}

/// The end of the keys that begin with a prefix, which ends with `/`.
fn after(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    end.pop();
    end.push(b'/' + 1);
    end
}
