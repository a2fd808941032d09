use std::collections::VecDeque;
use std::io;
use std::time::Instant;

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
            jobs: Slab::default(),
            parts: Slab::default(),
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
        let job = self.jobs.get_mut(index);
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
        let Part { job, start, bytes, retries, .. } = *self.parts.get(part);
        let request = &self.jobs.get(job).request;
        // SAFETY: `start + bytes` is within the request's buffer.
        let address = unsafe { request.buffer.address().as_ptr().add(start) };
        let offset = request.offset + start as u64;
        Transfer { operation: request.operation, offset, address, bytes, retries }
    }

    /// Takes the result of a part: bytes moved or what the system said. Returns the request if it has ended; a part that
    /// moved partly is among the next.
    pub(crate) fn complete(&mut self, part: usize, result: io::Result<usize>) -> Option<Ended> {
        let piece = self.parts.get_mut(part);
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
        let lost = failure.is_some() || self.jobs.get(index).failure.is_some();
        if !lost && piece.bytes > 0 {
            self.again.push_back(part);
            return None;
        }
        self.parts.remove(part);
        self.jobs.get_mut(index).parts -= 1;
        if let Some(failure) = failure {
            self.give_up_waiting(index);
            let job = self.jobs.get_mut(index);
            job.failure.get_or_insert(failure);
            if job.issued < job.request.buffer.bytes() {
                // The rest of it would only fail too, perhaps after a long time each.
                job.issued = job.request.buffer.bytes();
                let queue = self.queue_of(&self.jobs.get(index).request);
                self.queues[queue].retain(|queued| *queued != index);
            }
        }
        let job = self.jobs.get(index);
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
            let keep = parts.get(*part).job != job;
            if !keep {
                parts.remove(*part);
                jobs.get_mut(job).parts -= 1;
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
        self.jobs.slots.drain(..).flatten().map(|job| job.request)
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

/// Slots with stable indices, reused.
struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    fn insert(&mut self, value: T) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.slots[index] = Some(value);
                index
            }
            None => {
                self.slots.push(Some(value));
                self.slots.len() - 1
            }
        }
    }

    fn get(&self, index: usize) -> &T {
        self.slots[index].as_ref().expect("the slot is taken")
    }

    fn get_mut(&mut self, index: usize) -> &mut T {
        self.slots[index].as_mut().expect("the slot is taken")
    }

    fn remove(&mut self, index: usize) -> T {
        let value = self.slots[index].take().expect("the slot is taken");
        self.free.push(index);
        value
    }

    fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::ops::Range;
    use std::sync::{Arc, LazyLock, mpsc};

    use super::*;
    use crate::Volume;
    use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};
    use proptest::prelude::*;

    const PAGE: usize = 4096;
    const PART: usize = 4 * PAGE;

    fn schedule(block_bytes: usize) -> Schedule {
        Schedule::with(Geometry { block_bytes, memory_bytes: 512, part_bytes: PART })
    }

    /// An open file without a name: the schedule asks it for alignments and a path, nothing moves.
    static FILE: LazyLock<Arc<VolumeFile>> = LazyLock::new(|| {
        let directory = tempfile::tempdir().unwrap();
        Arc::clone(Volume::create(directory.path(), true).unwrap().file())
    });

    fn buffer(bytes: usize) -> LeaseSlice {
        let class = SizeClass { consumer: "test".into(), bytes, count: 1 };
        let pool = Pool::new(&PageableAllocator, &[class]).unwrap();
        LeaseSlice::new(Arc::new(pool.try_lease(bytes).unwrap().unwrap()), 0, bytes)
    }

    fn request(operation: Operation, offset: usize, bytes: usize) -> Request {
        Request { operation, offset: offset as u64, buffer: buffer(bytes), on_complete: Box::new(drop) }
    }

    /// What the system answers to one part.
    #[derive(Debug, Clone, Copy)]
    enum Answer {
        Whole,
        /// So many of 256 parts of what was asked for, a byte at least.
        Short(u8),
        Again,
        Interrupted,
        Nothing,
        Error(i32),
    }

    /// A request and what the model knows of it.
    #[derive(Default)]
    struct Expected {
        /// The first answer that fails it, as an errno.
        errno: Option<i32>,
        /// Ranges of it at the system.
        out: Vec<Range<usize>>,
        ended: bool,
    }

    fn answer() -> impl Strategy<Value = Answer> {
        prop_oneof![
            8 => Just(Answer::Whole),
            5 => any::<u8>().prop_map(Answer::Short),
            2 => Just(Answer::Again),
            2 => Just(Answer::Interrupted),
            1 => prop_oneof![Just(Answer::Nothing), Just(Answer::Error(libc::EIO)), Just(Answer::Error(libc::ENOSPC))],
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        /// Requests on places of their own, carried out in any order with any answers, against plain memory.
        #[test]
        fn every_request_ends_once_with_all_of_its_bytes_or_with_its_first_error(
            requests in prop::collection::vec((any::<bool>(), 1_usize..20), 1..8),
            turns in prop::collection::vec((any::<bool>(), any::<usize>(), answer()), 0..200),
            large_blocks in any::<bool>(),
        ) {
            let block_bytes = if large_blocks { PAGE } else { 512 };
            let mut schedule = schedule(block_bytes);
            let total: usize = requests.iter().map(|(_, pages)| pages * PAGE).sum();
            let mut medium: Vec<u8> = (0..total).map(|index| (index / 3 + index / PAGE) as u8).collect();
            let before = medium.clone();
            let (sender, receiver) = mpsc::channel();
            let counters = Counters::default();
            let mut places = Vec::new();
            let mut expected: Vec<Expected> = Vec::new();
            let mut submitted = requests.iter();
            let mut at_system: Vec<(usize, usize, Range<usize>)> = Vec::new();
            let mut turns = turns.into_iter();
            let mut offset = 0;
            loop {
                // When the turns are over, everything is carried out without further faults.
                let (issue, which, answer) = turns.next().unwrap_or((true, 0, Answer::Whole));
                if let Some((write, pages)) = submitted.next() {
                    let (id, bytes) = (expected.len(), pages * PAGE);
                    let operation = if *write { Operation::Write } else { Operation::Read };
                    let mut request = request(operation, offset, bytes);
                    // SAFETY: the only handle to the buffer.
                    unsafe { request.buffer.as_mut_slice() }.fill(0xA0 + id as u8);
                    let sender = sender.clone();
                    request.on_complete = Box::new(move |completion| sender.send((id, completion)).unwrap());
                    places.push((offset, bytes, operation, request.buffer.clone()));
                    offset += bytes;
                    expected.push(Expected::default());
                    counters.started(Instant::now());
                    prop_assert!(schedule.accept(&FILE, request, Instant::now()).is_none());
                }
                if issue && let Some(part) = schedule.next() {
                    let transfer = schedule.transfer(part);
                    let at = transfer.offset as usize;
                    let id = places.iter().position(|(start, bytes, ..)| (*start..start + bytes).contains(&at));
                    let id = id.expect("a part of a request");
                    let (start, bytes, operation, buffer) = &places[id];
                    let range = at - start..at - start + transfer.bytes;
                    prop_assert_eq!(transfer.operation, *operation);
                    prop_assert_eq!(transfer.address as usize, buffer.address().as_ptr() as usize + range.start);
                    prop_assert!(range.start.is_multiple_of(block_bytes), "resumed at {}", range.start);
                    prop_assert!(!range.is_empty() && range.len() <= PART && range.end <= *bytes);
                    let known = &mut expected[id];
                    prop_assert!(known.errno.is_none() && !known.ended, "issued after the failure");
                    let apart = |other: &Range<usize>| range.end <= other.start || other.end <= range.start;
                    prop_assert!(known.out.iter().all(apart), "issued twice at a time");
                    known.out.push(range.clone());
                    at_system.push((part, id, range));
                }
                if at_system.is_empty() {
                    if schedule.is_empty() && submitted.len() == 0 {
                        break;
                    }
                    continue;
                }
                let (part, id, range) = at_system.swap_remove(which % at_system.len());
                let (start, _, operation, buffer) = &places[id];
                let moved = match answer {
                    Answer::Whole => range.len(),
                    Answer::Short(share) => (range.len() * usize::from(share) / 256).max(1),
                    _ => 0,
                };
                // SAFETY: the request is not complete, and one thread carries out everything.
                let bytes = &mut unsafe { buffer.as_mut_slice() }[range.start..range.start + moved];
                let place = &mut medium[start + range.start..start + range.start + moved];
                match operation {
                    Operation::Read => bytes.copy_from_slice(place),
                    Operation::Write => place.copy_from_slice(bytes),
                }
                let error = |errno| Err(io::Error::from_raw_os_error(errno));
                let result = match answer {
                    Answer::Whole | Answer::Short(_) => Ok(moved),
                    Answer::Again => error(libc::EAGAIN),
                    Answer::Interrupted => error(libc::EINTR),
                    Answer::Nothing => Ok(0),
                    Answer::Error(errno) => error(errno),
                };
                let known = &mut expected[id];
                known.out.retain(|other| *other != range);
                match answer {
                    Answer::Nothing => drop(known.errno.get_or_insert(libc::EIO)),
                    Answer::Error(errno) => drop(known.errno.get_or_insert(errno)),
                    _ => {}
                }
                if let Some(ended) = schedule.complete(part, result) {
                    ended.tell(&FILE, &counters);
                    let (told, completion) = receiver.try_recv().expect("told at once");
                    prop_assert_eq!(told, id, "the request whose part ended");
                    prop_assert!(known.out.is_empty(), "told while parts are at the system");
                    prop_assert!(!std::mem::replace(&mut known.ended, true), "told twice");
                    prop_assert_eq!(completion.result.err().and_then(|error| error.errno()), known.errno);
                } else if known.errno.is_some() {
                    prop_assert!(!known.out.is_empty(), "failed and nothing under way, but not told");
                }
            }
            for (id, (known, (start, bytes, operation, buffer))) in expected.iter().zip(&places).enumerate() {
                prop_assert!(known.ended, "request {} never ended", id);
                // SAFETY: the request has ended.
                let buffer = unsafe { buffer.as_slice() };
                let (now, then) = (&medium[*start..start + bytes], &before[*start..start + bytes]);
                match operation {
                    Operation::Read => prop_assert!(now == then, "a read wrote"),
                    Operation::Write => {
                        prop_assert!(buffer.iter().all(|byte| *byte == 0xA0 + id as u8), "a write read");
                    }
                }
                prop_assert!(known.errno.is_some() || now == buffer, "request {} left bytes out", id);
            }
            let left = counters.snapshot();
            prop_assert_eq!(left.in_flight, 0);
            let failed = expected.iter().filter(|known| known.errno.is_some()).count() as u64;
            prop_assert_eq!(left.reads.failures + left.writes.failures, failed);
        }

        /// Whatever mixture of requests waits, each kind gets every fourth part at the least.
        #[test]
        fn a_small_request_is_never_more_than_four_parts_away(
            large in prop::collection::vec((any::<bool>(), 5_usize..40), 1..6),
            small in prop::collection::vec(any::<bool>(), 1..4),
            skipped in 0_usize..12,
        ) {
            let mut schedule = schedule(512);
            let operation = |write| if write { Operation::Write } else { Operation::Read };
            for (write, pages) in large {
                prop_assert!(schedule
                    .accept(&FILE, request(operation(write), 0, pages * PAGE), Instant::now())
                    .is_none());
            }
            for _ in 0..skipped {
                let _ = schedule.next();
            }
            let mut kinds: HashMap<bool, usize> = HashMap::new();
            for write in &small {
                *kinds.entry(*write).or_default() += 1;
                let request = request(operation(*write), 1 << 30, PAGE);
                prop_assert!(schedule.accept(&FILE, request, Instant::now()).is_none());
            }
            // The last of a kind comes after those before it, each within four parts.
            let mut taken: HashMap<bool, usize> = HashMap::new();
            for count in 1.. {
                let Some(part) = schedule.next() else { break };
                let transfer = schedule.transfer(part);
                if transfer.offset >= 1 << 30 {
                    let number = taken.entry(transfer.operation == Operation::Write).or_default();
                    *number += 1;
                    prop_assert!(count <= 4 * *number, "small request {} was part {}", number, count);
                }
            }
            prop_assert_eq!(taken, kinds);
        }
    }

    #[test]
    fn a_part_that_never_moves_ends_after_a_bound_and_progress_starts_the_count_anew() {
        let again = || Err(io::Error::from_raw_os_error(libc::EAGAIN));
        for moves_first in [false, true] {
            let mut schedule = schedule(512);
            let (sender, receiver) = mpsc::channel();
            let mut request = request(Operation::Read, 0, 2 * PAGE);
            request.on_complete = Box::new(move |completion| sender.send(completion.result).unwrap());
            assert!(schedule.accept(&FILE, request, Instant::now()).is_none());
            let mut tries = 0;
            if moves_first {
                for result in std::iter::repeat_with(again).take(RETRIES as usize).chain([Ok(600)]) {
                    let part = schedule.next().expect("not given up yet");
                    assert!(schedule.complete(part, result).is_none());
                }
            }
            let ended = loop {
                let part = schedule.next().expect("not ended yet");
                assert_eq!(schedule.transfer(part).retries, tries);
                tries += 1;
                assert_eq!(schedule.transfer(part).offset, if moves_first { 512 } else { 0 });
                // Less than a block is no progress either.
                let result = if tries.is_multiple_of(3) { Ok(511) } else { again() };
                if let Some(ended) = schedule.complete(part, result) {
                    break ended;
                }
            };
            assert_eq!(tries, RETRIES + 1);
            assert!(schedule.is_empty() && schedule.next().is_none());
            let counters = Counters::default();
            counters.started(Instant::now());
            ended.tell(&FILE, &counters);
            let error = receiver.try_recv().unwrap().unwrap_err();
            assert_eq!(error.errno(), Some(libc::EAGAIN));
            assert!(error.to_string().contains("for a long time"), "{error}");
        }
    }

    #[test]
    fn a_failed_request_does_not_keep_trying_its_other_parts() {
        let mut schedule = schedule(512);
        assert!(schedule.accept(&FILE, request(Operation::Write, 0, 8 * PART), Instant::now()).is_none());
        let parts: Vec<usize> = (0..3).map(|_| schedule.next().unwrap()).collect();
        assert!(schedule.complete(parts[0], Err(io::Error::from_raw_os_error(libc::EAGAIN))).is_none());
        assert!(schedule.complete(parts[1], Err(io::Error::from_raw_os_error(libc::EIO))).is_none());
        assert!(schedule.next().is_none(), "neither the part to be tried again nor new ones");
        // The last part out moves only partly: the request ends all the same.
        assert!(schedule.complete(parts[2], Ok(512)).is_some());
        assert!(schedule.is_empty());
    }
}
