//! A meta store of keys in etcd.

use std::any::Any;
use std::error::Error as _;
use std::future::Future;
use std::path::Path;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, DeleteOptions, GetOptions, Identity,
    KeyValue, PutOptions, TlsOptions, Txn, TxnOp, TxnOpResponse, WatchOptions, WatchStream,
};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::{MetaStore, NameLocks, Watch};
use crate::error::{Error, ErrorKind, Result, append_causes, system_errno};
use crate::io::environment::{Environment, SystemEnvironment};
use crate::io::exec::backoff;
use crate::io::sync::boxed;

/// Scheme of an etcd address.
const SCHEME: &str = "etcd://";

/// Default prefix of all keys.
const DEFAULT_PREFIX: &str = "tssd";

/// Timeout of a request. While etcd elects a leader, it does not answer, and the request is retried.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Time after which a request is not retried.
const RETRY_LIMIT: Duration = Duration::from_secs(30);

/// Time without traffic after which a connection is probed.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Time without an answer to the probe after which a connection is closed.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// Time to live of a session without renewal, in seconds.
const SESSION_TTL_SECONDS: i64 = 10;

/// Interval at which a session is renewed.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(3);

/// Length in bytes of the token that follows each record and identifies its creation.
const TOKEN_BYTES: usize = 16;

/// Maximum number of names in the answer to one list request.
const PAGE_LIMIT: i64 = 1000;

/// A meta store of the keys below a prefix.
pub(crate) struct EtcdMeta {
    client: Client,
    /// Its address, for error messages.
    url: String,
    /// Prefix of all keys. It ends with `/`.
    prefix: String,
    locks: NameLocks,
    environment: SystemEnvironment,
}

type EtcdResult<T> = std::result::Result<T, etcd_client::Error>;

impl EtcdMeta {
    /// Connects to an address `etcd://HOST:PORT[,HOST:PORT…][/PREFIX]`. The default prefix is `tssd`.
    ///
    /// Certificates and the user are read from the environment variables of `etcdctl`: `ETCDCTL_CACERT`,
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
            .with_timeout(REQUEST_TIMEOUT)
            .with_connect_timeout(REQUEST_TIMEOUT)
            .with_keep_alive(KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        let options = match read_tls_options()? {
            Some(tls) => options.with_tls(tls),
            None => options,
        };
        let options = match read_user()? {
            Some((name, password)) => options.with_user(name, password),
            None => options,
        };
        // A process has one crypto provider. If it has installed another one already, that one stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let connected = Client::connect(hosts, Some(options)).await;
        let client = connected.map_err(|error| convert_error(url, &error))?;
        let prefix = Some(prefix.trim_matches('/')).filter(|prefix| !prefix.is_empty());
        let prefix = format!("{}/", prefix.unwrap_or(DEFAULT_PREFIX));
        let (locks, environment) = (NameLocks::default(), SystemEnvironment);
        let meta = Self { client, url: url.to_owned(), prefix, locks, environment };
        // Reports an unreachable server or denied access now, and not at the first put.
        meta.get(".sessions").await?;
        Ok(meta)
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Returns the prefix of the keys below a name.
    fn prefix_of(&self, name: &str) -> String {
        if name.is_empty() { self.prefix.clone() } else { format!("{}{name}/", self.prefix) }
    }

    /// Returns the record of a key, without its token.
    fn decode_record(&self, name: &str, found: &KeyValue) -> Result<Vec<u8>> {
        let record = found.value();
        let record = record.len().checked_sub(TOKEN_BYTES).map(|len| record[..len].to_vec());
        record.ok_or_else(|| {
            let text = format_args!("`{}`: `{name}` is cut off", self.url);
            Error::new(ErrorKind::Corrupt, text)
        })
    }

    /// Sends a request, and retries it while etcd is unreachable.
    async fn send<T, F: Future<Output = EtcdResult<T>>>(
        &self,
        mut request: impl FnMut(Client) -> F,
    ) -> Result<T> {
        let (started, mut attempts) = (Instant::now(), 0);
        loop {
            let error = match timeout(REQUEST_TIMEOUT * 2, request(self.client.clone())).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => convert_error(&self.url, &error),
                Err(_) => {
                    Error::new(ErrorKind::Unreachable, format_args!("`{}`: no answer", self.url))
                }
            };
            if error.kind() != ErrorKind::Unreachable || started.elapsed() > RETRY_LIMIT {
                return Err(error);
            }
            attempts += 1;
            backoff(attempts).await;
        }
    }

    /// Creates a record in one transaction, with an optional condition and an optional further operation.
    async fn put(
        &self,
        name: &str,
        mut record: Vec<u8>,
        condition: Option<Compare>,
        extra: Option<TxnOp>,
    ) -> Result<bool> {
        let token = self.environment.random_id().to_le_bytes();
        record.extend(token);
        let key = self.key(name);
        let is_new = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
        let put = TxnOp::put(key.clone(), record, None);
        let create = Txn::new()
            .when(condition.into_iter().chain([is_new]).collect::<Vec<_>>())
            .and_then(extra.into_iter().chain([put]).collect::<Vec<_>>())
            .or_else([TxnOp::get(key, None)]);
        let mut requests = 0;
        let answer = self
            .send(|mut client| {
                requests += 1;
                let create = create.clone();
                async move { client.txn(create).await }
            })
            .await?;
        if answer.succeeded() {
            return Ok(true);
        }
        // An earlier request of this call may have succeeded without an answer. The token shows whether it did.
        let is_own = answer.op_responses().into_iter().find_map(|response| match response {
            TxnOpResponse::Get(found) => found.kvs().first().map(|it| it.value().ends_with(&token)),
            _ => None,
        });
        is_own.or((requests == 1).then_some(false)).ok_or_else(|| {
            // Either the record was created and then deleted as superseded, or it was never created.
            let text = format_args!("`{}`: unknown whether the request created `{name}`", self.url);
            Error::new(ErrorKind::Unreachable, text)
        })
    }
}

/// Reads the name and the password of the etcd user from the environment.
fn read_user() -> Result<Option<(String, String)>> {
    let Ok(user) = std::env::var("ETCDCTL_USER") else { return Ok(None) };
    let (name, password) = user.split_once(':').ok_or_else(|| {
        let text = "the environment says ETCDCTL_USER without `:PASSWORD`";
        Error::new(ErrorKind::Invalid, text)
    })?;
    Ok(Some((name.to_owned(), password.to_owned())))
}

/// Reads the TLS options of connections to etcd from the environment.
fn read_tls_options() -> Result<Option<TlsOptions>> {
    let read = |variable: &str| match std::env::var_os(variable) {
        None => Ok(None),
        Some(path) => {
            let read = std::fs::read(&path);
            read.map(Some).map_err(|error| {
                Error::io(format_args!("{variable}, {}", path.to_string_lossy()), error)
                    .with_file(Path::new(&path))
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

/// Converts an error of the etcd client.
fn convert_error(url: &str, error: &etcd_client::Error) -> Error {
    use etcd_client::Error as EtcdError;
    let (code, text) = match error {
        EtcdError::GRpcStatus(status) => {
            (Some(i32::from(status.code())), status.message().to_owned())
        }
        error => (None, error.to_string()),
    };
    // The client's error type does not implement `source`.
    let cause: Option<&(dyn std::error::Error + 'static)> = match error {
        EtcdError::GRpcStatus(status) => status.source(),
        EtcdError::TransportError(error) => Some(error),
        EtcdError::IoError(error) => Some(error),
        _ => None,
    };
    let text = append_causes(text, cause);
    let kind = match (error, code) {
        (EtcdError::InvalidArgs(_) | EtcdError::InvalidUri(_), _) => ErrorKind::Invalid,
        // The token expired between the authentication and the request, which the client repeats once.
        (_, Some(16)) if text.contains("invalid auth token") => ErrorKind::Unreachable,
        // gRPC codes: 3 is an invalid argument, 7 permission denied, 16 unauthenticated.
        (_, Some(3 | 7 | 16)) => ErrorKind::Refused,
        // gRPC code 8, resource exhausted: the receiver rejects a record that is larger than a message can be.
        (_, Some(8)) if text.contains("larger than max") => ErrorKind::Refused,
        // gRPC code 8 otherwise: the server has no space left or is overloaded.
        (_, Some(8)) => ErrorKind::Busy,
        _ => ErrorKind::Unreachable,
    };
    Error::new(kind, format_args!("`{url}`: {text}"))
        .with_system_error(cause.and_then(system_errno), Some(Path::new(url)))
}

#[async_trait]
impl MetaStore for EtcdMeta {
    async fn create(&self, name: &str, record: Vec<u8>) -> Result<bool> {
        self.put(name, record, None, None).await
    }

    /// Creates the record in one transaction, which needs no lock.
    ///
    /// As long as the last record exists, none of its successors was deleted.
    async fn create_next(
        &self,
        folder: &str,
        last: Option<&str>,
        next: &str,
        record: Vec<u8>,
    ) -> Result<bool> {
        let prefix = self.prefix_of(folder);
        let (condition, deletion) = match last {
            Some(last) => {
                let last = format!("{prefix}{last}");
                let older = DeleteOptions::new().with_range(last.clone());
                let exists = Compare::create_revision(last, CompareOp::Greater, 0);
                (exists, Some(TxnOp::delete(prefix, Some(older))))
            }
            None => (Compare::create_revision(prefix, CompareOp::Equal, 0).with_prefix(), None),
        };
        self.put(&format!("{folder}/{next}"), record, Some(condition), deletion).await
    }

    async fn sync(&self, _name: &str) -> Result<()> {
        Ok(())
    }

    async fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let key = self.key(name);
        let found = self
            .send(|mut client| {
                let key = key.clone();
                async move { client.get(key, None).await }
            })
            .await?;
        found.kvs().first().map(|found| self.decode_record(name, found)).transpose()
    }

    async fn list_records(&self, name: &str) -> Result<Vec<(String, Option<Vec<u8>>)>> {
        let prefix = self.prefix_of(name);
        let found = self
            .send(|mut client| {
                let (prefix, all) = (prefix.clone(), GetOptions::new().with_prefix());
                async move { client.get(prefix, Some(all)).await }
            })
            .await?;
        let record = |found: &KeyValue| {
            let name = String::from_utf8_lossy(&found.key()[prefix.len()..]).into_owned();
            let record = self.decode_record(&name, found)?;
            Ok((name, Some(record)))
        };
        let is_direct_child = |found: &&KeyValue| !found.key()[prefix.len()..].contains(&b'/');
        found.kvs().iter().filter(is_direct_child).map(record).collect()
    }

    async fn list(&self, name: &str) -> Result<Vec<String>> {
        let prefix = self.prefix_of(name);
        let (mut from, mut names) = (prefix.clone().into_bytes(), Vec::new());
        let end = prefix_end(&prefix);
        loop {
            let page = self
                .send(|mut client| {
                    let options = GetOptions::new()
                        .with_range(end.clone())
                        .with_keys_only()
                        .with_limit(PAGE_LIMIT);
                    let from = from.clone();
                    async move { client.get(from, Some(options)).await }
                })
                .await?;
            for found in page.kvs() {
                // A key that is not UTF-8 is not a record.
                let Ok(key) = std::str::from_utf8(found.key()) else { continue };
                let rest = key.strip_prefix(&prefix).unwrap_or_default();
                let component = rest.split('/').next().unwrap_or_default();
                if names.last().is_none_or(|last| last != component) {
                    names.push(component.to_owned());
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
        self.send(delete).await.map(drop)
    }

    /// Deletes nothing: `create_next` has already deleted superseded records.
    async fn delete_superseded(&self, _folder: &str, _names: Vec<String>) -> Vec<String> {
        Vec::new()
    }

    fn excludes_other_processes(&self) -> bool {
        false
    }

    async fn lock(&self, name: &str) -> Result<Box<dyn Any + Send>> {
        Ok(Box::new(self.locks.lock(name).await))
    }

    async fn hold_session(&self, name: &str, mut record: Vec<u8>) -> Result<Box<dyn Any + Send>> {
        record.extend(self.environment.random_id().to_le_bytes());
        let session = Session { client: self.client.clone(), key: self.key(name), record };
        let lease = self.send(|_| session.begin()).await?;
        let (end, ended) = oneshot::channel::<()>();
        // The task ends when the caller drops the sender.
        drop(tokio::spawn(boxed(session.keep_alive(lease, ended))));
        Ok(Box::new(end))
    }

    async fn has_ended(&self, name: &str) -> Result<bool> {
        Ok(self.get(name).await?.is_none())
    }

    fn watch(&self, name: &str, duration: Duration) -> Box<dyn Watch> {
        let deadline = Instant::now().checked_add(duration);
        Box::new(EtcdWatch {
            client: self.client.clone(),
            prefix: self.prefix_of(name),
            deadline,
            stream: None,
        })
    }
}

/// A session: a key under a lease, which exists until a few seconds after its process has ended.
struct Session {
    client: Client,
    key: String,
    record: Vec<u8>,
}

impl Session {
    /// Creates the key under a new lease, and returns the lease.
    async fn begin(&self) -> EtcdResult<i64> {
        let mut client = self.client.clone();
        let lease = client.lease_grant(SESSION_TTL_SECONDS, None).await?.id();
        let options = PutOptions::new().with_lease(lease);
        client.put(self.key.clone(), self.record.clone(), Some(options)).await?;
        Ok(lease)
    }

    /// Renews the lease until the session ends.
    ///
    /// If the process was paused or disconnected until the lease expired, it takes another lease. What other processes
    /// have decided meanwhile is in the ledgers, and nothing else depends on the lease.
    async fn keep_alive(self, mut lease: i64, ended: oneshot::Receiver<()>) {
        let renewal = async {
            let mut failures = 0;
            loop {
                match failures {
                    0 => sleep(RENEWAL_INTERVAL).await,
                    failures => backoff(failures).await,
                }
                let renewed = timeout(REQUEST_TIMEOUT, self.renew(lease)).await;
                let failed = match renewed {
                    Ok(Ok(true)) => None,
                    Ok(Ok(false)) => match timeout(REQUEST_TIMEOUT, self.begin()).await {
                        Ok(Ok(new_lease)) => {
                            lease = new_lease;
                            None
                        }
                        failed => Some(failed.map(drop)),
                    },
                    failed => Some(failed.map(drop)),
                };
                failures = if failed.is_some() { failures + 1 } else { 0 };
                if let Some(failed) = failed {
                    tracing::warn!(?failed, key = self.key, "not renewed");
                }
            }
        };
        tokio::select! {
            () = renewal => {}
            _ = ended => {}
        }
        // If the request fails, the lease expires.
        let _ = timeout(REQUEST_TIMEOUT, self.client.clone().lease_revoke(lease)).await;
    }

    /// Renews the lease. Returns `false` if it does not exist any longer.
    async fn renew(&self, lease: i64) -> EtcdResult<bool> {
        // `lease_keep_alive` renews the lease once before it returns.
        match self.client.clone().lease_keep_alive(lease).await {
            Ok(_) => Ok(true),
            Err(etcd_client::Error::LeaseKeepAliveError(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A watch for changes below a prefix.
struct EtcdWatch {
    client: Client,
    prefix: String,
    /// `None` means no deadline.
    deadline: Option<Instant>,
    stream: Option<WatchStream>,
}

#[async_trait]
impl Watch for EtcdWatch {
    async fn changed(&mut self) -> bool {
        let remaining = self
            .deadline
            .map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
        if remaining.is_zero() {
            return false;
        }
        match &mut self.stream {
            None => {
                let options = WatchOptions::new().with_prefix();
                let started = self.client.watch(self.prefix.clone(), Some(options));
                match timeout(REQUEST_TIMEOUT.min(remaining), started).await {
                    Ok(Ok(stream)) => self.stream = Some(stream),
                    _ => sleep(REQUEST_TIMEOUT.min(remaining)).await,
                }
                // The watch does not report changes that were made before it began.
                true
            }
            Some(stream) => {
                let answer = timeout(remaining, stream.message()).await;
                if !matches!(answer, Ok(Ok(Some(_)))) {
                    self.stream = None;
                }
                answer.is_ok()
            }
        }
    }
}

/// Returns the exclusive end of the range of keys with a prefix. The prefix ends with `/`.
fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    end.pop();
    end.push(b'/' + 1);
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn refused_connection_has_errno_and_url() {
        let mut client = Client::connect(["127.0.0.1:1"], None).await.unwrap();
        let error = client.get("key", None).await.unwrap_err();
        let error = convert_error("etcd://127.0.0.1:1", &error);
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert_eq!(error.errno(), Some(111), "{error}");
        assert_eq!(error.file(), Some(Path::new("etcd://127.0.0.1:1")));
    }
}
