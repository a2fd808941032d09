//! Which part of which request comes next, and what becomes of a part: the same for every engine.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use slab::Slab;

use crate::engine::run_callback;
use crate::error::errno_hint;
use crate::volume::file::MADE_SHORTER;
use crate::{Completion, Counters, Geometry, IoError, Operation, Request, VolumeFile};

/// How often a part is tried again when the system says so, and nothing moves.
const RETRIES: u32 = 1000;
/// How often in a row less than a block may be moved at the same place.
const CRUMBS: u32 = 16;

/// The requests of a volume, cut into parts, in the order in which an engine should carry the parts out. Every
/// engine runs on one: what becomes of a short transfer, of EAGAIN or of an error is decided here and nowhere else.
///
/// There are four queues, large and small requests of either direction, which are served by turns: a small request does
/// not wait behind a large one, and a read that somebody computes on does not wait behind all that is being written back.
pub(crate) struct Schedule {
    part_bytes: usize,
    /// Where a short transfer may be resumed: at a multiple of this.
    block_bytes: usize,
    jobs: Slab<Job>,
    parts: Slab<Part>,
    queues: [VecDeque<usize>; 4],
    turn: usize,
    /// Parts that moved only partly, or not yet: they come first.
    again: VecDeque<usize>,
}

/// A request being transferred.
struct Job {
    request: Request,
    started: Instant,
    /// Bytes from the start that parts were made of.
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
struct Part {
    job: usize,
    start: usize,
    bytes: usize,
    retries: u32,
    /// How often in a row less than a block was moved.
    crumbs: u32,
}

/// What to do for a part.
pub(crate) struct Transfer {
    pub(crate) operation: Operation,
    /// From the beginning of the volume's data.
    pub(crate) offset: u64,
    pub(crate) address: *mut u8,
    pub(crate) bytes: usize,
    /// How often nothing moved: whoever has nothing else to do should wait a little longer each time.
    pub(crate) retries: u32,
}

/// A request that has ended.
pub(crate) struct Ended {
    request: Request,
    started: Instant,
    failure: Option<Failure>,
}

impl Schedule {
    pub(crate) fn new(file: &VolumeFile) -> Self {
        Self::with(file.geometry())
    }

    pub(crate) fn with(geometry: Geometry) -> Self {
        Self {
            part_bytes: geometry.part_bytes,
            block_bytes: geometry.block_bytes,
            jobs: Slab::new(),
            parts: Slab::new(),
            queues: Default::default(),
            turn: 0,
            again: VecDeque::new(),
        }
    }

    /// Takes a request on. One that the volume cannot carry out ends here.
    pub(crate) fn accept(&mut self, file: &VolumeFile, request: Request, started: Instant) -> Option<Ended> {
        if let Err((errno, hint)) = file.check(request.offset, &request.buffer) {
            let failure = Failure { source: io::Error::from_raw_os_error(errno), hint };
            return Some(Ended { request, started, failure: Some(failure) });
        }
        let queue = self.queue_of(&request);
        let job = self.jobs.insert(Job { request, started, issued: 0, parts: 0, failure: None });
        self.queues[queue].push_back(job);
        None
    }

    /// The next part to carry out. Whoever takes it owes a call of [`Schedule::complete`].
    pub(crate) fn next(&mut self) -> Option<usize> {
        if let Some(part) = self.again.pop_front() {
            return Some(part);
        }
        let count = self.queues.len();
        let queue = (1..=count)
            .map(|step| (self.turn + step) % count)
            .find(|queue| !self.queues[*queue].is_empty())?;
        self.turn = queue;
        let index = self.queues[queue][0];
        let job = &mut self.jobs[index];
        let start = job.issued;
        let bytes = self.part_bytes.min(job.request.buffer.bytes() - start);
        job.issued += bytes;
        job.parts += 1;
        if job.issued == job.request.buffer.bytes() {
            self.queues[queue].pop_front();
        }
        Some(self.parts.insert(Part { job: index, start, bytes, retries: 0, crumbs: 0 }))
    }

    /// What is to be done for a part.
    pub(crate) fn transfer(&self, part: usize) -> Transfer {
        let Part { job, start, bytes, retries, .. } = self.parts[part];
        let request = &self.jobs[job].request;
        // SAFETY: `start + bytes` is within the request's buffer.
        let address = unsafe { request.buffer.address().as_ptr().add(start) };
        let offset = request.offset + start as u64;
        Transfer { operation: request.operation, offset, address, bytes, retries }
    }

    /// Takes the result of a part: bytes moved or what the system said. Returns the request if it has ended; a part that
    /// moved partly is among the next.
    pub(crate) fn complete(&mut self, part: usize, result: io::Result<usize>) -> Option<Ended> {
        let piece = &mut self.parts[part];
        let failure = match result {
            Ok(0) => Some(Failure::made_shorter()),
            Ok(moved) => {
                let left = piece.bytes;
                let whole = if moved >= left { left } else { moved / self.block_bytes * self.block_bytes };
                piece.start += whole;
                piece.bytes -= whole;
                (piece.retries, piece.crumbs) =
                    if whole > 0 { (0, 0) } else { (piece.retries + 1, piece.crumbs + 1) };
                // Always a part of the same block: the file ends in it.
                (piece.crumbs > CRUMBS).then(Failure::made_shorter)
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Some(Failure::made_shorter()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {
                piece.retries += 1;
                piece.crumbs = 0;
                None
            }
            Err(source) => Some(Failure { hint: errno_hint(&source), source }),
        };
        let failure = failure.or_else(|| {
            (piece.retries > RETRIES).then(|| Failure {
                source: io::Error::from_raw_os_error(libc::EAGAIN),
                hint: "the system had no resources for it for a long time",
            })
        });
        let index = piece.job;
        // Once a part has failed, the others need not go on.
        let lost = failure.is_some() || self.jobs[index].failure.is_some();
        if !lost && piece.bytes > 0 {
            self.again.push_back(part);
            return None;
        }
        self.parts.remove(part);
        self.jobs[index].parts -= 1;
        if let Some(failure) = failure {
            self.give_up_waiting(index);
            let job = &mut self.jobs[index];
            job.failure.get_or_insert(failure);
            if job.issued < job.request.buffer.bytes() {
                // The rest of it would only fail too, perhaps after a long time each.
                job.issued = job.request.buffer.bytes();
                let queue = self.queue_of(&self.jobs[index].request);
                self.queues[queue].retain(|queued| *queued != index);
            }
        }
        let job = &self.jobs[index];
        if job.parts > 0 || job.issued < job.request.buffer.bytes() {
            return None;
        }
        let Job { request, started, failure, .. } = self.jobs.remove(index);
        Some(Ended { request, started, failure })
    }

    /// Ends the parts of a job that wait to be tried again.
    fn give_up_waiting(&mut self, job: usize) {
        let (parts, jobs) = (&mut self.parts, &mut self.jobs);
        self.again.retain(|part| {
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

    /// Every request that has not ended.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Request> {
        self.jobs.drain().map(|job| job.request)
    }

    fn queue_of(&self, request: &Request) -> usize {
        let large = request.buffer.bytes() > self.part_bytes;
        2 * usize::from(large) + usize::from(request.operation == Operation::Write)
    }
}

impl Ended {
    /// Counts the request and calls back.
    pub(crate) fn tell(self, file: &VolumeFile, counters: &Counters) {
        let Self { request: Request { operation, offset, buffer, on_complete }, started, failure } = self;
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
