//! Tests of the schedule.

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

    /// Requests on places of their own, carried out in any order with any answers, against plain
    /// memory.
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
