//! Range reads from a bucket.
//!
//! Several requests are in flight at once. Bytes are verified before the call returns.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::mpsc::RecvTimeoutError;

use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tssd_format::Runs;

use crate::blob::requests::{Request, RequestPlan};
use crate::blob::{RangeCopy, RangeJob, RangeReader, VerifyMode};
use crate::convert::to_u64;
use crate::error::{Error, ErrorKind, Result};
use crate::io::bucket::{Bucket, retry};
use crate::io::cancel::CancelToken;
use crate::io::parallel;
use crate::io::sync::Lock;

/// Requests of one call that are in flight, or answered and not processed yet.
const WINDOW: usize = 16;

/// Reads ranges of the objects of a bucket.
pub(super) struct BucketReader {
    bucket: Bucket,
}

/// Sends the response of a request. If it is dropped without a response, it sends an error.
struct PendingResponse {
    number: usize,
    bytes: Option<object_store::Result<Bytes>>,
    responses: ResponseSender,
}

type ResponseSender = mpsc::SyncSender<(usize, object_store::Result<Bytes>)>;

impl PendingResponse {
    fn send(mut self, bytes: object_store::Result<Bytes>) {
        self.bytes = Some(bytes);
    }
}

impl Drop for PendingResponse {
    fn drop(&mut self) {
        let cut_off = || {
            let source = "the request was cut off".into();
            Err(object_store::Error::Generic { store: "bucket", source })
        };
        let bytes = self.bytes.take().unwrap_or_else(cut_off);
        // The channel has room for every request in flight. It fails only if the receiver has stopped waiting.
        drop(self.responses.try_send((self.number, bytes)));
    }
}

impl BucketReader {
    pub(super) fn new(bucket: Bucket) -> Self {
        Self { bucket }
    }

    /// Starts a request. Its response arrives in the channel with its number.
    fn send(&self, number: usize, path: &Path, range: &Range<u64>, responses: &ResponseSender) {
        let (objects, requests) = (self.bucket.objects(), self.bucket.request_permits());
        let (path, range) = (path.clone(), range.clone());
        let pending = PendingResponse { number, bytes: None, responses: responses.clone() };
        self.bucket.spawn(async move {
            let _one = requests.acquire().await;
            pending.send(retry(|| objects.get_range(&path, range.clone())).await);
        });
    }

    fn check_response(
        &self,
        request: &Request,
        response: object_store::Result<Bytes>,
    ) -> Result<Bytes> {
        let name = &*request.blob;
        let bytes = match response {
            Err(object_store::Error::NotFound { .. }) => {
                let text = format_args!(
                    "`{}` was deleted while it was read: read the newest version, or keep more of them",
                    self.bucket.display_name(name)
                );
                return Err(Error::new(ErrorKind::Overtaken, text));
            }
            response => response.map_err(|error| self.bucket.error(name, &error))?,
        };
        if to_u64(bytes.len()) != request.range.end - request.range.start {
            let text = format_args!("`{}` is cut off", self.bucket.display_name(name));
            return Err(Error::new(ErrorKind::Corrupt, text));
        }
        Ok(bytes)
    }
}

impl RangeReader for BucketReader {
    fn read_ranges(&self, jobs: Vec<RangeJob<'_>>, stop: &CancelToken) -> Result<u64> {
        let plan = RequestPlan::new(jobs);
        let requests = &plan.requests;
        let paths = requests.iter().map(|request| self.bucket.path(&request.blob));
        let paths: Vec<Path> = paths.collect::<Result<_>>()?;
        let (responses, receiver) = mpsc::sync_channel(WINDOW);
        let (receiver, next) = (Lock::new(receiver), AtomicUsize::new(0));
        let send = || {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if let (Some(request), Some(path)) = (requests.get(number), paths.get(number)) {
                self.send(number, path, &request.range, &responses);
            }
        };
        (0..WINDOW).for_each(|_| send());
        let process = |_: usize| {
            let receiver = receiver.lock();
            let (number, response) = loop {
                stop.check()?;
                match receiver.recv_timeout(CancelToken::POLL_INTERVAL) {
                    Ok(response) => break response,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        let text = "the requests to the bucket ended";
                        return Err(Error::new(ErrorKind::Unreachable, text));
                    }
                }
            };
            drop(receiver);
            let bytes = self.check_response(&requests[number], response)?;
            send();
            plan.scatter(&requests[number], &bytes, |blob| self.bucket.display_name(blob))?;
            Ok::<_, Error>(to_u64(bytes.len()))
        };
        Ok(parallel::map((0..requests.len()).collect(), process)?.into_iter().sum())
    }

    fn read_exact_at(&self, blob: &str, target: &mut [u8], offset: u64) -> io::Result<()> {
        let runs = Runs::contiguous(to_u64(target.len()));
        let whole = RangeCopy {
            blob: blob.into(),
            source: offset,
            target: 0,
            runs,
            verify: VerifyMode::Skip,
        };
        let pulled = self
            .read_ranges(vec![RangeJob { target, copies: vec![whole] }], &CancelToken::default());
        pulled.map(drop).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::PutPayload;
    use object_store::memory::InMemory;
    use tssd_format::{ChunkSize, StorageReference, checksum};

    use super::*;

    /// Verifies each chunk that contains a requested byte, and no other chunk.
    #[test]
    fn partial_reads_verify_the_chunks_they_touch_and_no_others() {
        let payload: Vec<u8> = (0..2500_u32).flat_map(u32::to_le_bytes).collect();
        let object = [&[0; 4096][..], &payload].concat();
        let bucket = Bucket::new(Arc::new(InMemory::new()), Path::default(), "s3://test").unwrap();
        let (objects, put) = (bucket.objects(), PutPayload::from(object));
        bucket
            .request_blocking("blob", async move { objects.put(&"blob".into(), put).await })
            .unwrap();
        let reader = BucketReader::new(bucket);
        let chunk_size = ChunkSize::from_log2(12).unwrap();
        let crcs: Vec<u32> = payload.chunks(4096).map(checksum).collect();
        for wrong in 0..4 {
            let mut crcs = crcs.clone();
            crcs.iter_mut().skip(wrong).take(1).for_each(|crc| *crc ^= 1);
            let (offset, len) = (4096, 10_000);
            let storage =
                Arc::new(StorageReference { offset, len, chunk_size, crcs, ..Default::default() });
            for (wanted, chunks) in [(5000..5100, 1..2), (4095..8193, 0..3), (9999..10_000, 2..3)] {
                let mut target = vec![0; wanted.len()];
                let runs = Runs::contiguous(to_u64(wanted.len()));
                let (source, verify) =
                    (4096 + to_u64(wanted.start), VerifyMode::PartialChunks(storage.clone()));
                let part = RangeCopy { blob: "blob".into(), source, target: 0, runs, verify };
                let pulled = reader.read_ranges(
                    vec![RangeJob { target: &mut target, copies: vec![part] }],
                    &CancelToken::default(),
                );
                if chunks.contains(&wrong) {
                    assert_eq!(pulled.unwrap_err().kind(), ErrorKind::Corrupt);
                } else {
                    pulled.unwrap();
                    assert!(target == payload[wanted]);
                }
            }
        }
    }
}
