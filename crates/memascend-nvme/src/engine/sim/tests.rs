//! Tests of the simulated disk and its engine.

use std::io;
use std::sync::mpsc;

use super::*;
use crate::Volume;
use crate::engine::sim::disk::{PART_BYTES, SECTOR_BYTES};
use crate::{BLOCK_BYTES, Operation};
use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};

const BLOCKS: usize = 4;

fn disk(faults: &str) -> Arc<SimDisk> {
    SimDisk::new(faults.parse().unwrap())
}

fn write(disk: &SimDisk, place: usize, byte: u8, bytes: usize) -> io::Result<usize> {
    disk.carry_out(Operation::Write, place as u64, &mut vec![byte; bytes])
}

fn read(disk: &SimDisk, place: usize, bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0xEE; bytes];
    assert_eq!(disk.carry_out(Operation::Read, place as u64, &mut buffer).unwrap(), bytes);
    buffer
}

/// The number of a request, its errno and its buffer afterwards.
type End = (usize, Option<i32>, Vec<u8>);

/// Everything that a caller sees of a run, in order.
fn trace(faults: Faults) -> (Vec<End>, Injected) {
    let directory = tempfile::tempdir().unwrap();
    let volume = Volume::create(directory.path(), true).unwrap();
    let disk = SimDisk::new(faults);
    let engine = SimEngine::new(volume.file(), Arc::clone(&disk));
    let bytes = 3 * PART_BYTES;
    let class = SizeClass::new("test", bytes, 40);
    let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
    let (sender, receiver) = mpsc::channel();
    for index in 0..120 {
        let length = [BLOCK_BYTES, bytes, 5 * BLOCK_BYTES][index % 3];
        let buffer = LeaseSlice::new(Arc::new(pool.try_lease(bytes).unwrap().unwrap()), 0, length);
        // SAFETY: the only handle to the buffer.
        unsafe { buffer.as_mut_slice() }.fill(index as u8);
        let sender = sender.clone();
        engine.submit(Request {
            operation: if index % 2 == 0 { Operation::Write } else { Operation::Read },
            offset: (index / 2 * 7 % 40 * bytes) as u64,
            buffer,
            on_complete: Box::new(move |completion| {
                let errno = completion.result.err().map(|error| error.errno().unwrap());
                // SAFETY: the transfer has ended.
                let bytes = unsafe { completion.buffer.as_slice() }.to_vec();
                sender.send((index, errno, bytes)).unwrap();
            }),
        });
        if index % 30 == 29 {
            engine.drain();
            engine.flush().unwrap();
            disk.crash();
        }
    }
    drop(engine);
    drop(sender);
    assert_eq!(pool.counters().live_bytes, 0);
    (receiver.iter().collect(), disk.injected())
}

#[test]
fn a_seed_repeats_and_another_differs() {
    let faults = Faults {
        seed: 4,
        read_error_one_in: 20,
        write_error_one_in: 20,
        short_one_in: 3,
        again_one_in: 4,
        misdirected_one_in: 9,
        lost_flush_one_in: 2,
        flush_error_one_in: 0,
        torn: true,
        reorder: 6,
    };
    let first = trace(faults);
    assert_eq!(first.0.len(), 120);
    let Injected { read_errors, write_errors, short, again, misdirected, lost_flushes, .. } = first.1;
    assert!([read_errors, write_errors, short, again, misdirected, lost_flushes].iter().all(|n| *n > 0));
    assert!(first == trace(faults), "seed 4 repeats");
    assert!(first != trace(Faults { seed: 5, ..faults }), "seed 5 is another");
}

#[test]
fn requests_overtake_one_another_only_where_that_was_asked_for() {
    for reorder in [0, 1, 8] {
        let (ended, _) = trace(Faults { seed: 3, reorder, ..Faults::default() });
        let order: Vec<usize> = ended.iter().map(|(index, ..)| *index).collect();
        let overtaken = order.windows(2).filter(|pair| pair[0] > pair[1]).count();
        match reorder {
            0 => assert_eq!(overtaken, 0),
            1 => assert!(overtaken > 5, "{overtaken}"),
            _ => assert!(overtaken > 30, "{overtaken}"),
        }
        // Held back, not lost: a request is overtaken by a bounded number of others.
        assert!(order.iter().enumerate().all(|(at, index)| at.abs_diff(*index) <= 30), "{order:?}");
    }
}

#[test]
fn each_fault_hits_at_its_rate_and_only_when_asked_for() {
    let counts = |faults: Faults| {
        let disk = SimDisk::new(faults);
        let mut told = [0_u64; 4];
        for index in 0..4000 {
            let (place, bytes) = (index * BLOCKS * BLOCK_BYTES, BLOCKS * BLOCK_BYTES);
            let operations = [Operation::Write, Operation::Read];
            for (operation, errors) in operations.into_iter().zip(0..) {
                match disk.carry_out(operation, place as u64, &mut vec![1; bytes]) {
                    Ok(moved) if moved == bytes => {}
                    Ok(moved) => {
                        assert!((BLOCK_BYTES..bytes).contains(&moved), "{moved}");
                        told[2] += 1;
                    }
                    Err(error) => match error.raw_os_error().unwrap() {
                        libc::EAGAIN | libc::EINTR => told[3] += 1,
                        libc::EIO => told[errors] += 1,
                        libc::ENOSPC if operation == Operation::Write => told[errors] += 1,
                        other => panic!("{operation} gave {other}"),
                    },
                }
            }
            disk.flush().unwrap();
        }
        let found = disk.injected();
        assert_eq!(told, [found.write_errors, found.read_errors, found.short, found.again]);
        [
            found.read_errors,
            found.write_errors,
            found.short,
            found.again,
            found.misdirected,
            found.lost_flushes,
        ]
    };
    assert_eq!(counts(Faults { seed: 1, torn: true, reorder: 9, ..Faults::default() }), [0; 6]);
    let names = [
        "read_error_one_in",
        "write_error_one_in",
        "short_one_in",
        "again_one_in",
        "misdirected_one_in",
        "lost_flush_one_in",
    ];
    for (kind, name) in names.iter().enumerate() {
        for seed in [1, 2] {
            let found = counts(format!("seed={seed}, {name}=10").parse().unwrap());
            // Reads and writes may both be short, or have to be tried again.
            let expected = if kind == 2 || kind == 3 { 800 } else { 400 };
            assert!(found[kind].abs_diff(expected) < 120, "{name}: {found:?}");
            assert!(found.iter().enumerate().all(|(other, n)| other == kind || *n == 0), "{name}: {found:?}");
        }
        let found = counts(format!("{name}=1").parse().unwrap());
        assert_eq!(found[kind], if kind == 2 || kind == 3 { 8000 } else { 4000 }, "{name}");
    }
}

#[test]
fn a_failed_write_leaves_some_of_it_and_a_failed_read_fills_some_of_the_buffer() {
    let disk = disk("seed=3,write_error_one_in=2,read_error_one_in=2");
    let bytes = BLOCKS * BLOCK_BYTES;
    let (mut partly, mut none, mut filled) = (0, 0, 0);
    for index in 0..200 {
        if write(&disk, index * bytes, 7, bytes).is_ok() {
            continue;
        }
        let mut buffer = vec![0xEE; bytes];
        let failed = disk.carry_out(Operation::Read, (index * bytes) as u64, &mut buffer).is_err();
        let count = buffer.iter().filter(|byte| **byte == 7).count();
        match (failed, count) {
            (true, _) => filled += usize::from(buffer[0] != 0xEE && buffer[bytes - 1] == 0xEE),
            (false, 0) => none += 1,
            (false, _) => partly += usize::from(count < bytes),
        }
    }
    assert!(partly > 10 && none > 10 && filled > 10, "{partly}, {none}, {filled}");
}

#[test]
fn a_crash_keeps_what_was_flushed_and_of_the_rest_each_block_old_or_new() {
    for torn in [0, 1] {
        let disk = disk(&format!("seed=5,torn={torn}"));
        let blocks = 300;
        write(&disk, 0, 1, blocks * BLOCK_BYTES).unwrap();
        disk.flush().unwrap();
        write(&disk, 100 * BLOCK_BYTES, 2, 200 * BLOCK_BYTES).unwrap();
        assert!(read(&disk, 100 * BLOCK_BYTES, BLOCK_BYTES) == [2; BLOCK_BYTES], "seen before the crash");
        disk.crash();
        let after = read(&disk, 0, blocks * BLOCK_BYTES);
        assert!(after[..100 * BLOCK_BYTES].iter().all(|byte| *byte == 1), "flushed is flushed");
        let (mut old, mut new, mut mixed) = (0, 0, 0);
        for block in after[100 * BLOCK_BYTES..].chunks(BLOCK_BYTES) {
            for sector in block.chunks(SECTOR_BYTES) {
                assert!(sector == [1; SECTOR_BYTES] || sector == [2; SECTOR_BYTES]);
            }
            match block.iter().filter(|byte| **byte == 2).count() {
                0 => old += 1,
                BLOCK_BYTES => new += 1,
                _ => mixed += 1,
            }
        }
        assert!(old > 40 && new > 40, "{old} old, {new} new");
        assert_eq!(mixed > 40, torn == 1, "{mixed} torn");
        disk.crash();
        assert!(after == read(&disk, 0, blocks * BLOCK_BYTES), "what survived a crash stays");
    }
}

#[test]
fn a_lost_flush_says_all_is_well_and_a_crash_then_takes_data() {
    let disk = disk("seed=5,lost_flush_one_in=1");
    write(&disk, 0, 1, 100 * BLOCK_BYTES).unwrap();
    disk.flush().unwrap();
    assert_eq!(disk.injected(), Injected { lost_flushes: 1, ..Injected::default() });
    disk.crash();
    let after = read(&disk, 0, 100 * BLOCK_BYTES);
    let lost = after.iter().filter(|byte| **byte == 0).count();
    assert!(lost > 10 * BLOCK_BYTES && lost < 90 * BLOCK_BYTES, "{lost} bytes lost");
}

#[test]
fn a_flush_that_fails_forgets_and_the_next_one_succeeds() {
    let disk = disk("seed=5,flush_error_one_in=2");
    let mut failed = 0;
    for round in 1..=40_u8 {
        write(&disk, 0, round, 20 * BLOCK_BYTES).unwrap();
        let Err(error) = disk.flush() else {
            assert!(read(&disk, 0, 20 * BLOCK_BYTES).iter().all(|byte| *byte == round));
            continue;
        };
        failed += 1;
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let after = read(&disk, 0, 20 * BLOCK_BYTES);
        let lost = after.iter().filter(|byte| **byte != round).count();
        assert!(lost > 0, "round {round}");
        while disk.flush().is_err() {
            failed += 1;
        }
        assert!(after == read(&disk, 0, 20 * BLOCK_BYTES), "a flush brings nothing back");
    }
    assert!(failed > 10, "{failed}");
    assert_eq!(disk.injected(), Injected { flush_errors: failed, ..Injected::default() });
}

#[test]
fn a_misdirected_write_changes_another_place_and_not_its_own() {
    let disk = disk("seed=5,misdirected_one_in=1");
    let (place, bytes) = (1000 * BLOCK_BYTES, BLOCKS * BLOCK_BYTES);
    let (mut above, mut below) = (0, 0);
    for round in 0..50 {
        assert_eq!(write(&disk, place, 1 + round, bytes).unwrap(), bytes);
        assert!(read(&disk, place, bytes).iter().all(|byte| *byte == 0));
        let around = read(&disk, place - 8 * bytes, 16 * bytes);
        let at = around.iter().position(|byte| *byte == 1 + round).expect("it went somewhere");
        assert_eq!(around.iter().filter(|byte| **byte == 1 + round).count(), bytes);
        if at < 8 * bytes {
            below += 1
        } else {
            above += 1
        }
        assert_eq!(disk.injected(), Injected { misdirected: u64::from(round) + 1, ..Injected::default() });
    }
    assert!(above > 10 && below > 10, "{above} above, {below} below");
}

#[test]
fn what_is_not_in_whole_blocks_of_the_drive_is_refused() {
    for (seed, block) in [(2, SECTOR_BYTES), (3, BLOCK_BYTES)] {
        let disk = disk(&format!("seed={seed}"));
        assert_eq!(write(&disk, block, 1, block).unwrap(), block);
        for (place, bytes) in [(block / 2, block), (block, block / 2)] {
            assert_eq!(write(&disk, place, 2, bytes).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        }
        assert!(read(&disk, block, block).iter().all(|byte| *byte == 1));
    }
}

#[test]
fn faults_are_read_from_text() {
    let text = "seed=7, read_error_one_in=1,write_error_one_in=2,short_one_in=3,again_one_in=4,\
                misdirected_one_in=5,lost_flush_one_in=6,flush_error_one_in=7,torn=1,reorder=9";
    let expected = Faults {
        seed: 7,
        read_error_one_in: 1,
        write_error_one_in: 2,
        short_one_in: 3,
        again_one_in: 4,
        misdirected_one_in: 5,
        lost_flush_one_in: 6,
        flush_error_one_in: 7,
        torn: true,
        reorder: 9,
    };
    assert_eq!(text.parse(), Ok(expected));
    assert_eq!(" ".parse(), Ok(Faults::default()));
    assert_eq!("torn=0,".parse(), Ok(Faults::default()));
    for (text, complaint) in
        [("torn", "name=number"), ("seed=x", "not a number"), ("seed=-1", "not a number"), ("a=1", "unknown")]
    {
        let error = text.parse::<Faults>().unwrap_err();
        assert!(error.contains(complaint), "{error}");
    }
}
