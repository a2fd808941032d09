//! Which part of which request comes next, and how the result of a part is handled: the same for
//! every engine.
//!
//! The simulated engine runs on the same schedule, so the faults that its seeds find are faults of the code
//! that runs on drives.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use memascend_mem::LeaseSlice;
use slab::Slab;

use crate::engine::run_callback;
use crate::error::errno_hint;
use crate::volume::file::MADE_SHORTER;
use crate::{Completion, Counters, Geometry, IoError, Operation, Request, VolumeFile};

/// How often in a row a part is retried after EAGAIN or EINTR without progress.
const MAX_RETRIES: u32 = 1000;
/// How often in a row a transfer may move less than a block.
const MAX_SUB_BLOCK_RETRIES: u32 = 16;

/// The requests of an engine, cut into parts, in the order in which the engine carries the parts out.
/// Every engine uses a schedule: short transfers, EAGAIN and errors are handled here and nowhere
/// else.
///
/// Four queues, large and small requests of either direction, are served in turn. So a small
/// request does not wait behind a large one, and a read that computation waits for does not wait
/// behind all write-backs.
pub(crate) struct Schedule {
    /// A geometry that takes the place of the files' own.
    geometry: Option<Geometry>,
    jobs: Slab<ActiveRequest>,
    parts: Slab<RequestPart>,
    queues: [VecDeque<usize>; 4],
    last_queue: usize,
    /// Parts to be resumed or retried, which come first.
    retry_queue: VecDeque<usize>,
}

/// A request being transferred.
struct ActiveRequest {
    file: Arc<VolumeFile>,
    request: Request,
    started: Instant,
    part_bytes: usize,
    /// A short transfer is resumed at a multiple of this.
    block_bytes: usize,
    queue: usize,
    /// Bytes, from the start, that parts were issued for.
    issued: usize,
    parts: usize,
    failure: Option<Failure>,
}

struct Failure {
    source: io::Error,
    hint: &'static str,
}

impl Failure {
    fn made_shorter() -> Self {
        Self { source: io::Error::from_raw_os_error(libc::EIO), hint: MADE_SHORTER }
    }
}

/// One submission: a piece of a job.
struct RequestPart {
    job: usize,
    start: usize,
    bytes: usize,
    retries: u32,
    /// How often in a row less than a block was moved.
    sub_block_retries: u32,
}

/// The transfer that carries out a part.
pub(crate) struct Transfer {
    pub(crate) file: Arc<VolumeFile>,
    pub(crate) operation: Operation,
    /// From the beginning of the volume's data.
    pub(crate) offset: u64,
    pub(crate) address: *mut u8,
    pub(crate) bytes: usize,
    /// How often in a row nothing moved. An engine with nothing else to do waits a little longer
    /// each time.
    pub(crate) retries: u32,
}

/// A request that has ended.
pub(crate) struct Ended {
    file: Arc<VolumeFile>,
    request: Request,
    started: Instant,
    failure: Option<Failure>,
}

impl Schedule {
    /// A schedule that follows the geometry of each request's file, or another one for all.
    pub(crate) fn new(geometry: Option<Geometry>) -> Self {
        Self {
            geometry,
            jobs: Slab::new(),
            parts: Slab::new(),
            queues: Default::default(),
            last_queue: 0,
            retry_queue: VecDeque::new(),
        }
    }

    /// Accepts a request on `file`. One that the file cannot carry out is returned as ended.
    pub(crate) fn accept(
        &mut self,
        file: &Arc<VolumeFile>,
        request: Request,
        started: Instant,
    ) -> Option<Ended> {
        let file = Arc::clone(file);
        if let Err((errno, hint)) = file.check(request.offset, &request.buffer) {
            let failure = Failure { source: io::Error::from_raw_os_error(errno), hint };
            return Some(Ended { file, request, started, failure: Some(failure) });
        }
        let Geometry { part_bytes, block_bytes, .. } = self.geometry.unwrap_or(file.geometry());
        let large = request.buffer.bytes() > part_bytes;
        let queue = 2 * usize::from(large) + usize::from(request.operation == Operation::Write);
        let job = ActiveRequest {
            file,
            request,
            started,
            part_bytes,
            block_bytes,
            queue,
            issued: 0,
            parts: 0,
            failure: None,
        };
        self.queues[queue].push_back(self.jobs.insert(job));
        None
    }

    /// The next part to carry out. The caller must call [`Schedule::complete`] for the part.
    pub(crate) fn next(&mut self) -> Option<usize> {
        if let Some(part) = self.retry_queue.pop_front() {
            return Some(part);
        }
        let count = self.queues.len();
        let queue = (1..=count)
            .map(|step| (self.last_queue + step) % count)
            .find(|queue| !self.queues[*queue].is_empty())?;
        self.last_queue = queue;
        let index = self.queues[queue][0];
        let job = &mut self.jobs[index];
        let start = job.issued;
        let bytes = job.part_bytes.min(job.request.buffer.bytes() - start);
        job.issued += bytes;
        job.parts += 1;
        if job.issued == job.request.buffer.bytes() {
            self.queues[queue].pop_front();
        }
        Some(self.parts.insert(RequestPart { job: index, start, bytes, retries: 0, sub_block_retries: 0 }))
    }

    /// The transfer that carries out `part`.
    pub(crate) fn transfer(&self, part: usize) -> Transfer {
        let RequestPart { job, start, bytes, retries, .. } = self.parts[part];
        let ActiveRequest { file, request, .. } = &self.jobs[job];
        // SAFETY: `start + bytes` is within the request's buffer.
        let address = unsafe { request.buffer.address().as_ptr().add(start) };
        let offset = request.offset + start as u64;
        Transfer { file: Arc::clone(file), operation: request.operation, offset, address, bytes, retries }
    }

    /// The bytes that `part` moves.
    pub(crate) fn part_bytes(&self, part: usize) -> usize {
        self.parts[part].bytes
    }

    /// Handles the result of a part: bytes moved, or the system's error. Returns the request if it
    /// has ended. A part that moved only partly is queued again.
    pub(crate) fn complete(&mut self, part: usize, result: io::Result<usize>) -> Option<Ended> {
        let piece = &mut self.parts[part];
        let block_bytes = self.jobs[piece.job].block_bytes;
        let failure = match result {
            Ok(0) => Some(Failure::made_shorter()),
            Ok(moved) => {
                let left = piece.bytes;
                let whole = if moved >= left { left } else { moved / block_bytes * block_bytes };
                piece.start += whole;
                piece.bytes -= whole;
                (piece.retries, piece.sub_block_retries) =
                    if whole > 0 { (0, 0) } else { (piece.retries + 1, piece.sub_block_retries + 1) };
                // Every transfer ended inside the same block: the file ends there.
                (piece.sub_block_retries > MAX_SUB_BLOCK_RETRIES).then(Failure::made_shorter)
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Some(Failure::made_shorter()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {
                piece.retries += 1;
                piece.sub_block_retries = 0;
                None
            }
            Err(source) => Some(Failure { hint: errno_hint(&source), source }),
        };
        let failure = failure.or_else(|| {
            (piece.retries > MAX_RETRIES).then(|| Failure {
                source: io::Error::from_raw_os_error(libc::EAGAIN),
                hint: "the system had no resources for it for a long time",
            })
        });
        let index = piece.job;
        // Once a part has failed, the request's other parts are not retried.
        let lost = failure.is_some() || self.jobs[index].failure.is_some();
        if !lost && piece.bytes > 0 {
            self.retry_queue.push_back(part);
            return None;
        }
        self.parts.remove(part);
        self.jobs[index].parts -= 1;
        if let Some(failure) = failure {
            self.give_up_waiting(index);
            let job = &mut self.jobs[index];
            job.failure.get_or_insert(failure);
            if job.issued < job.request.buffer.bytes() {
                // The remaining parts would fail too, each perhaps after a long time.
                job.issued = job.request.buffer.bytes();
                self.queues[job.queue].retain(|queued| *queued != index);
            }
        }
        let job = &self.jobs[index];
        if job.parts > 0 || job.issued < job.request.buffer.bytes() {
            return None;
        }
        let ActiveRequest { file, request, started, failure, .. } = self.jobs.remove(index);
        Some(Ended { file, request, started, failure })
    }

    /// Ends the parts of a job that wait to be tried again.
    fn give_up_waiting(&mut self, job: usize) {
        let (parts, jobs) = (&mut self.parts, &mut self.jobs);
        self.retry_queue.retain(|part| {
            let keep = parts[*part].job != job;
            if !keep {
                parts.remove(*part);
                jobs[job].parts -= 1;
            }
            keep
        });
    }

    /// Whether no request is left, not even in flight.
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Ends every request with an error of the system, also requests with parts in flight. The kernel may
    /// still use their buffers, so the caller never uses them again.
    pub(crate) fn fail_all(&mut self, errno: i32, hint: &'static str) -> Vec<Ended> {
        self.parts.clear();
        self.retry_queue.clear();
        self.queues.iter_mut().for_each(VecDeque::clear);
        let failure = || Some(Failure { source: io::Error::from_raw_os_error(errno), hint });
        let ended = |ActiveRequest { file, request, started, .. }| Ended {
            file,
            request,
            started,
            failure: failure(),
        };
        self.jobs.drain().map(ended).collect()
    }

    /// Every request that has not ended.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Request> {
        self.jobs.drain().map(|job| job.request)
    }
}

impl Ended {
    /// The memory of the request.
    pub(crate) fn buffer(&self) -> &LeaseSlice {
        &self.request.buffer
    }

    /// Counts the request and calls back.
    pub(crate) fn tell(self, counters: &Counters) {
        let Self { file, request: Request { operation, offset, buffer, on_complete }, started, failure } =
            self;
        let bytes = buffer.bytes();
        counters.ended(operation, bytes, started, failure.is_none());
        let result = match failure {
            None => Ok(()),
            Some(Failure { source, hint }) => Err(IoError::Transfer {
                operation,
                path: file.path().to_owned(),
                offset: file.position(offset),
                bytes,
                source,
                hint,
            }),
        };
        run_callback(on_complete, Completion { buffer, result });
    }
}

#[cfg(test)]
mod tests;
