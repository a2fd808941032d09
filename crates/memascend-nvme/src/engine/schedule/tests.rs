//! Tests of the schedule.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock, mpsc};

use super::*;
use crate::Volume;
use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const PAGE: usize = 4096;
const PART: usize = 4 * PAGE;

fn schedule(block_bytes: usize) -> Schedule {
    Schedule::new(Some(Geometry { block_bytes, memory_bytes: 512, part_bytes: PART }))
}

/// An open file without a name: the schedule asks it for alignments and a path, nothing moves.
static FILE: LazyLock<Arc<VolumeFile>> = LazyLock::new(|| {
    let directory = tempfile::tempdir().unwrap();
    Arc::clone(Volume::create(directory.path(), true).unwrap().file())
});

fn buffer(bytes: usize) -> LeaseSlice {
    let class = SizeClass::new("test", bytes, 1);
    let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
    LeaseSlice::new(Arc::new(pool.try_lease(bytes).unwrap().unwrap()), 0, bytes)
}

fn request(operation: Operation, offset: usize, bytes: usize) -> Request {
    Request { operation, offset: offset as u64, buffer: buffer(bytes), on_complete: Box::new(drop) }
}

/// The system's answer to one part.
#[derive(Debug, Clone, Copy)]
enum Answer {
    Whole,
    /// So many of 256 parts of the request, a byte at least.
    Short(u8),
    Again,
    Interrupted,
    Nothing,
    Error(i32),
}

/// A request under test, and its expected result.
struct Expected {
    /// First byte of the request on the medium.
    start: usize,
    bytes: usize,
    operation: Operation,
    buffer: LeaseSlice,
    /// The first answer that fails the request, as an errno.
    errno: Option<i32>,
    /// Ranges of the request at the system.
    out: Vec<Range<usize>>,
    ended: bool,
}

/// Requests at places of their own, carried out by a schedule on plain memory.
struct Trial {
    schedule: Schedule,
    block_bytes: usize,
    counters: Counters,
    medium: Vec<u8>,
    requests: Vec<Expected>,
    /// Parts issued and not answered: the part, its request and the range of the request.
    at_system: Vec<(usize, usize, Range<usize>)>,
    sender: mpsc::Sender<(usize, Completion)>,
    receiver: mpsc::Receiver<(usize, Completion)>,
}

impl Trial {
    fn new(block_bytes: usize, medium: Vec<u8>) -> Self {
        let (sender, receiver) = mpsc::channel();
        Self {
            schedule: schedule(block_bytes),
            block_bytes,
            counters: Counters::default(),
            medium,
            requests: Vec::new(),
            at_system: Vec::new(),
            sender,
            receiver,
        }
    }

    /// Submits a request behind those before.
    fn submit(&mut self, write: bool, pages: usize) -> Result<(), TestCaseError> {
        let (id, bytes) = (self.requests.len(), pages * PAGE);
        let start = self.requests.last().map_or(0, |last| last.start + last.bytes);
        let operation = if write { Operation::Write } else { Operation::Read };
        let mut request = request(operation, start, bytes);
        // SAFETY: the only handle to the buffer.
        unsafe { request.buffer.as_mut_slice() }.fill(0xA0 + id as u8);
        let sender = self.sender.clone();
        request.on_complete = Box::new(move |completion| sender.send((id, completion)).unwrap());
        let buffer = request.buffer.clone();
        let (errno, out, ended) = (None, Vec::new(), false);
        self.requests.push(Expected { start, bytes, operation, buffer, errno, out, ended });
        self.counters.started(Instant::now());
        prop_assert!(self.schedule.accept(&FILE, request, Instant::now()).is_none());
        Ok(())
    }

    /// Takes the next part from the schedule, if there is one.
    fn issue(&mut self) -> Result<(), TestCaseError> {
        let Some(part) = self.schedule.next() else { return Ok(()) };
        let transfer = self.schedule.transfer(part);
        let at = transfer.offset as usize;
        let id = self
            .requests
            .iter()
            .position(|request| (request.start..request.start + request.bytes).contains(&at))
            .expect("a part of a request");
        let request = &mut self.requests[id];
        let range = at - request.start..at - request.start + transfer.bytes;
        prop_assert_eq!(transfer.operation, request.operation);
        let address = request.buffer.address().as_ptr() as usize;
        prop_assert_eq!(transfer.address as usize, address + range.start);
        prop_assert!(range.start.is_multiple_of(self.block_bytes), "resumed at {}", range.start);
        prop_assert!(!range.is_empty() && range.len() <= PART && range.end <= request.bytes);
        prop_assert!(request.errno.is_none() && !request.ended, "issued after the failure");
        let apart = |other: &Range<usize>| range.end <= other.start || other.end <= range.start;
        prop_assert!(request.out.iter().all(apart), "issued twice at a time");
        request.out.push(range.clone());
        self.at_system.push((part, id, range));
        Ok(())
    }

    /// The system answers the part that `which` chooses among those issued.
    fn complete(&mut self, which: usize, answer: Answer) -> Result<(), TestCaseError> {
        let (part, id, range) = self.at_system.swap_remove(which % self.at_system.len());
        let request = &mut self.requests[id];
        let moved = answer.moved(range.len());
        // SAFETY: the request is not complete, and one thread carries out everything.
        let bytes = &mut unsafe { request.buffer.as_mut_slice() }[range.start..range.start + moved];
        let start = request.start + range.start;
        let place = &mut self.medium[start..start + moved];
        match request.operation {
            Operation::Read => bytes.copy_from_slice(place),
            Operation::Write => place.copy_from_slice(bytes),
        }
        request.out.retain(|other| *other != range);
        match answer {
            Answer::Nothing => drop(request.errno.get_or_insert(libc::EIO)),
            Answer::Error(errno) => drop(request.errno.get_or_insert(errno)),
            _ => {}
        }
        if let Some(ended) = self.schedule.complete(part, answer.result(moved)) {
            ended.tell(&self.counters);
            let (told, completion) = self.receiver.try_recv().expect("told at once");
            prop_assert_eq!(told, id, "the request whose part ended");
            prop_assert!(request.out.is_empty(), "told while parts are at the system");
            prop_assert!(!std::mem::replace(&mut request.ended, true), "told twice");
            prop_assert_eq!(completion.result.err().and_then(|error| error.errno()), request.errno);
        } else if request.errno.is_some() {
            prop_assert!(!request.out.is_empty(), "failed and nothing under way, but not told");
        }
        Ok(())
    }

    /// Every request has ended, with all of its bytes moved unless it failed. `before` is the
    /// medium before the first request.
    fn check(&self, before: &[u8]) -> Result<(), TestCaseError> {
        for (id, request) in self.requests.iter().enumerate() {
            prop_assert!(request.ended, "request {} never ended", id);
            // SAFETY: the request has ended.
            let buffer = unsafe { request.buffer.as_slice() };
            let range = request.start..request.start + request.bytes;
            let (now, then) = (&self.medium[range.clone()], &before[range]);
            match request.operation {
                Operation::Read => prop_assert!(now == then, "a read wrote"),
                Operation::Write => {
                    prop_assert!(buffer.iter().all(|byte| *byte == 0xA0 + id as u8), "a write read");
                }
            }
            prop_assert!(request.errno.is_some() || now == buffer, "request {} left bytes out", id);
        }
        let counted = self.counters.snapshot();
        prop_assert_eq!(counted.in_flight, 0);
        let failed = self.requests.iter().filter(|request| request.errno.is_some()).count() as u64;
        prop_assert_eq!(counted.reads.failures + counted.writes.failures, failed);
        Ok(())
    }
}

impl Answer {
    /// Bytes moved of `bytes`.
    fn moved(self, bytes: usize) -> usize {
        match self {
            Self::Whole => bytes,
            Self::Short(share) => (bytes * usize::from(share) / 256).max(1),
            _ => 0,
        }
    }

    /// The system's answer when `moved` bytes were moved.
    fn result(self, moved: usize) -> io::Result<usize> {
        match self {
            Self::Whole | Self::Short(_) => Ok(moved),
            Self::Again => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
            Self::Interrupted => Err(io::Error::from_raw_os_error(libc::EINTR)),
            Self::Nothing => Ok(0),
            Self::Error(errno) => Err(io::Error::from_raw_os_error(errno)),
        }
    }
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

    /// Requests on places of their own, carried out in any order with any answers, against plain
    /// memory.
    #[test]
    fn every_request_ends_once_with_all_of_its_bytes_or_with_its_first_error(
        requests in prop::collection::vec((any::<bool>(), 1_usize..20), 1..8),
        turns in prop::collection::vec((any::<bool>(), any::<usize>(), answer()), 0..200),
        large_blocks in any::<bool>(),
    ) {
        let total: usize = requests.iter().map(|(_, pages)| pages * PAGE).sum();
        let medium: Vec<u8> = (0..total).map(|index| (index / 3 + index / PAGE) as u8).collect();
        let mut trial = Trial::new(if large_blocks { PAGE } else { 512 }, medium.clone());
        let (mut submitted, mut turns) = (requests.iter(), turns.into_iter());
        loop {
            // When the turns are over, everything is carried out without further faults.
            let (issue, which, answer) = turns.next().unwrap_or((true, 0, Answer::Whole));
            if let Some((write, pages)) = submitted.next() {
                trial.submit(*write, *pages)?;
            }
            if issue {
                trial.issue()?;
            }
            if !trial.at_system.is_empty() {
                trial.complete(which, answer)?;
            } else if trial.schedule.is_empty() && submitted.len() == 0 {
                break;
            }
        }
        trial.check(&medium)?;
    }

    /// In any mixture of waiting requests, each kind gets at least every fourth part.
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
            for result in std::iter::repeat_with(again).take(MAX_RETRIES as usize).chain([Ok(600)]) {
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
        assert_eq!(tries, MAX_RETRIES + 1);
        assert!(schedule.is_empty() && schedule.next().is_none());
        let counters = Counters::default();
        counters.started(Instant::now());
        ended.tell(&counters);
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
