//! Transfers to and from an arena that grows and shrinks, on real files.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use memascend_mem::{Lease, LeaseSlice, LockedAllocator, PageableAllocator, Pool, SizeClass};
use memascend_nvme::{
    Completion, Engine, EngineOptions, Operation, Request, RingEngine, ThreadsEngine, Volume,
};

const MIB: usize = 1 << 20;
/// Bytes of the buffers of each class, and how many there can be.
const CLASSES: [(usize, usize); 3] = [(64 << 10, 24), (MIB, 8), (5 * MIB, 4)];

type Open = fn(&Volume) -> Arc<dyn Engine>;

fn threads(volume: &Volume) -> Arc<dyn Engine> {
    Arc::new(ThreadsEngine::new(volume.file(), 3).unwrap())
}

fn ring(volume: &Volume) -> Arc<dyn Engine> {
    Arc::new(RingEngine::new(volume.file(), EngineOptions::default()).unwrap())
}

fn polled_by_a_kernel_thread(volume: &Volume) -> Arc<dyn Engine> {
    let options = EngineOptions { sq_poll: true, ..EngineOptions::default() };
    Arc::new(RingEngine::new(volume.file(), options).unwrap())
}

fn volume(bytes: usize) -> (Volume, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let volume = Volume::create(directory.path(), true).unwrap();
    volume.reserve(bytes as u64).unwrap();
    (volume, directory)
}

/// The engines that transfer on the volume's file.
fn engines() -> Vec<Open> {
    match RingEngine::new(volume(MIB).0.file(), EngineOptions::default()) {
        Ok(_) => vec![threads, ring, polled_by_a_kernel_thread],
        Err(error) => {
            eprintln!("ring engine not tested: {error}");
            vec![threads]
        }
    }
}

fn pool() -> Pool {
    let classes = CLASSES.map(|(bytes, most)| SizeClass::new("test", bytes, most / 2).up_to(most));
    Pool::new(&PageableAllocator::default(), &classes).unwrap()
}

/// A small generator of well-mixed numbers (Steele and others 2014, SplitMix64).
struct Mix(u64);

impl Mix {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((value ^ (value >> 31)) % below as u64) as usize
    }
}

fn transfer(
    engine: &dyn Engine,
    operation: Operation,
    offset: usize,
    buffer: LeaseSlice,
) -> mpsc::Receiver<Completion> {
    let (sender, receiver) = mpsc::channel();
    engine.submit(Request {
        operation,
        offset: offset as u64,
        buffer,
        on_complete: Box::new(move |completion| drop(sender.send(completion))),
    });
    receiver
}

fn fill(buffer: &LeaseSlice, seed: u64) {
    // SAFETY: the tests fill a buffer before they submit it, through the only handle.
    let (words, _) = unsafe { buffer.as_mut_slice() }.as_chunks_mut::<8>();
    for (index, word) in words.iter_mut().enumerate() {
        *word = (seed << 32 | index as u64).to_le_bytes();
    }
}

fn is_filled(buffer: &LeaseSlice, seed: u64) -> bool {
    // SAFETY: the transfer has ended, and nothing writes.
    let (words, _) = unsafe { buffer.as_slice() }.as_chunks::<8>();
    words.iter().enumerate().all(|(index, word)| *word == (seed << 32 | index as u64).to_le_bytes())
}

/// Waits until every buffer that was to go is gone.
fn wait_for_leaving(pool: &Pool) {
    let begin = Instant::now();
    while pool.counters().leaving_bytes > 0 {
        assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", pool.counters());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn transfers_are_right_while_the_arena_grows_and_shrinks() {
    const PLACES: usize = 8;
    const PLACE_BYTES: usize = 5 * MIB;
    for open in engines() {
        for registered in [false, true] {
            let (volume, _directory) = volume(PLACES * PLACE_BYTES);
            let (engine, pool) = (open(&volume), pool());
            if registered {
                engine.register(&pool);
            }
            let stop = Arc::new(AtomicBool::new(false));
            let resizer = std::thread::spawn({
                let (pool, stop) = (pool.clone(), Arc::clone(&stop));
                move || {
                    let (mut mix, mut times) = (Mix(5), 0);
                    while !stop.load(Ordering::Acquire) {
                        let (bytes, most) = CLASSES[mix.next(CLASSES.len())];
                        pool.resize(bytes, mix.next(most + 1)).unwrap();
                        times += 1;
                        if mix.next(4) == 0 {
                            std::thread::sleep(Duration::from_micros(mix.next(500) as u64));
                        }
                    }
                    times
                }
            });
            // Content of each place of the volume: number of bytes, and their seed.
            let mut written: [(usize, u64); PLACES] = [(0, 0); PLACES];
            let (mut mix, mut reads) = (Mix(6), 0);
            for round in 0..120_u64 {
                // A write or a read of every place, all under way together.
                let mut under_way = Vec::new();
                for (place, content) in written.iter_mut().enumerate() {
                    let write = content.0 == 0 || mix.next(2) == 0;
                    let bytes = if write { CLASSES[mix.next(CLASSES.len())].0 } else { content.0 };
                    let Some(lease) = pool.lease(bytes, Duration::from_millis(2)).unwrap() else { continue };
                    let buffer = LeaseSlice::new(Arc::new(lease), 0, bytes);
                    let operation = if write {
                        *content = (bytes, round * PLACES as u64 + place as u64 + 1);
                        fill(&buffer, content.1);
                        Operation::Write
                    } else {
                        fill(&buffer, 0);
                        Operation::Read
                    };
                    under_way.push((transfer(&*engine, operation, place * PLACE_BYTES, buffer), content.1));
                }
                for (receiver, seed) in under_way {
                    let ended = receiver.recv_timeout(Duration::from_secs(60)).expect("it ends");
                    ended.result.unwrap();
                    assert!(is_filled(&ended.buffer, seed), "{} in round {round}", engine.name());
                    reads += 1;
                }
            }
            stop.store(true, Ordering::Release);
            let times = resizer.join().unwrap();
            assert!(reads > 200 && times > 20, "{} tested nothing: {reads}, {times}", engine.name());
            let elastic = engine.features().iter().any(|feature| feature == "sparse_buffers");
            assert_eq!(elastic, registered && engine.name() == "ring", "{:?}", engine.features());
            drop(engine);
            // An engine that is gone is told no more.
            CLASSES.iter().for_each(|(bytes, _)| pool.resize(*bytes, 0).unwrap());
            wait_for_leaving(&pool);
            assert_eq!(pool.counters().reserved_bytes, 0);
        }
    }
}

/// Bytes of a range of addresses that are resident.
fn resident_bytes(range: &Range<usize>) -> usize {
    let mut resident = 0;
    let mut inside = false;
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let hex = |text: &str| usize::from_str_radix(text, 16).ok();
        let first = line.split_whitespace().next().unwrap();
        if let Some((Some(start), Some(_))) = first.split_once('-').map(|(start, end)| (hex(start), hex(end)))
        {
            inside = range.contains(&start);
        } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| inside) {
            resident += kib.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10;
        }
    }
    resident
}

/// Bytes of a range of addresses that the rings of this process have registered, as the kernel tells;
/// None if it does not.
fn registered_bytes(range: &Range<usize>) -> Option<usize> {
    let mut told = None;
    for file in std::fs::read_dir("/proc/self/fdinfo").unwrap() {
        let Ok(text) = std::fs::read_to_string(file.unwrap().path()) else { continue };
        let Some((_, table)) = text.split_once("UserBufs:") else { continue };
        for line in table.lines() {
            // `index: 0xaddress/bytes`
            let Some((address, bytes)) = line.split_once(": 0x").and_then(|(_, place)| place.split_once('/'))
            else {
                continue;
            };
            if range.contains(&usize::from_str_radix(address, 16).unwrap()) {
                *told.get_or_insert(0) += bytes.trim().parse::<usize>().unwrap();
            }
        }
    }
    told
}

#[test]
fn given_back_memory_is_neither_resident_nor_registered() {
    let (volume, _directory) = volume(MIB);
    let Ok(engine) = RingEngine::new(volume.file(), EngineOptions::default()) else {
        eprintln!("not tested: no io_uring");
        return;
    };
    const LARGE: usize = 96 * MIB;
    let classes = [SizeClass::new("test", MIB, 4).up_to(16), SizeClass::new("large", LARGE, 0).up_to(1)];
    let pool = match Pool::new(&LockedAllocator::default(), &classes) {
        Err(error) if error.is_pinning_refused() => {
            Pool::new(&PageableAllocator::default(), &classes).unwrap()
        }
        pool => pool.unwrap(),
    };
    engine.register(&pool);
    if !engine.features().iter().any(|feature| feature == "sparse_buffers") {
        eprintln!("not tested: {:?}", engine.features());
        return;
    }
    let (start, bytes) = pool.arena();
    let range = start.as_ptr().addr()..start.as_ptr().addr() + bytes;
    // The lock of the ring may be held while the kernel writes the table: then it writes none.
    let registered = || (0..100).find_map(|_| registered_bytes(&range));
    if registered().is_none() {
        eprintln!("not tested: the kernel does not show what is registered");
        return;
    }
    let large = |pool: &Pool| -> Lease {
        pool.resize(LARGE, 1).unwrap();
        pool.try_lease(LARGE).unwrap().unwrap()
    };
    for (count, held) in [(16, 0), (9, 3), (4, 4), (1, 1), (16, 1)] {
        let held: Vec<_> = (0..held).map(|_| pool.try_lease(1).unwrap().unwrap()).collect();
        pool.resize(MIB, count).unwrap();
        let lease = large(&pool);
        fill(&LeaseSlice::new(Arc::new(lease), 0, LARGE), 1);
        assert_eq!(registered(), Some(count * MIB + LARGE), "{count}");
        assert!(resident_bytes(&range) >= LARGE);
        pool.resize(LARGE, 0).unwrap();
        assert_eq!(registered(), Some(count * MIB), "{count}");
        assert!(resident_bytes(&range) <= count * MIB, "{count}: {}", resident_bytes(&range));
        assert!(engine.features().iter().all(|feature| !feature.contains("not registered")));
        drop(held);
    }
    // A buffer in use leaves the table when it returns.
    let held: Vec<_> = (0..16).map(|_| pool.try_lease(1).unwrap().unwrap()).collect();
    pool.resize(MIB, 1).unwrap();
    assert_eq!(registered(), Some(16 * MIB));
    drop(held);
    wait_for_leaving(&pool);
    assert_eq!(registered(), Some(MIB));
    assert!(resident_bytes(&range) <= MIB);
}
