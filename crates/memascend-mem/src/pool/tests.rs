//! Tests of the pool.

use std::sync::atomic::Ordering;

use super::*;
use crate::sync::LockExt;
use crate::{PAGE_BYTES, PageableAllocator};
use proptest::prelude::*;

fn class(bytes: usize, count: usize) -> SizeClass {
    SizeClass::new("test", bytes, count)
}

fn pool(classes: &[SizeClass]) -> Pool {
    Pool::new(&PageableAllocator::default(), classes).unwrap()
}

#[test]
fn reserves_exactly_the_sum_of_its_classes() {
    let pool = pool(&[class(10_000, 3), class(4096, 2), class(1, 1)]);
    assert_eq!(pool.counters().reserved_bytes, 3 * 12_288 + 3 * 4096);
}

#[test]
fn groups_share_one_arena_but_never_each_others_buffers() {
    let groups = [vec![class(4096, 1)], vec![class(8192, 2)]];
    let pools = Pool::carve(&PageableAllocator::default(), &groups).unwrap();
    let held = pools[0].try_lease(4096).unwrap().unwrap();
    assert!(pools[0].try_lease(1).unwrap().is_none(), "the second group's buffers are not ours");
    let other = pools[1].try_lease(1).unwrap().unwrap();
    assert_eq!(other.address().as_ptr() as usize - held.address().as_ptr() as usize, 4096 + 8192);
}

#[test]
fn the_joint_peak_is_that_of_one_moment() {
    let groups = [vec![class(4096, 1), class(4096, 1)], vec![class(8192, 2)]];
    let pools = Pool::carve(&PageableAllocator::default(), &groups).unwrap();
    drop(pools[0].try_lease(4000).unwrap().unwrap());
    drop(pools[1].try_lease(8000).unwrap().unwrap());
    let at_peak = |bytes, count, live_bytes_at_peak| ClassAtPeak { bytes, count, live_bytes_at_peak };
    // Each pool had its own peak; together they never held 12,000 bytes.
    let expected = (8000, vec![at_peak(4096, 2, 0), at_peak(8192, 2, 8000)]);
    assert_eq!(pools[0].joint_peak(), expected);
    let _held = [pools[0].try_lease(100).unwrap(), pools[1].try_lease(8192).unwrap()];
    assert_eq!(pools[1].joint_peak(), (8292, vec![at_peak(4096, 2, 100), at_peak(8192, 2, 8192)]));
}

#[test]
fn exhaustion_is_a_value_and_a_return_serves_the_next() {
    let pool = pool(&[class(8192, 1)]);
    let held = pool.try_lease(5000).unwrap().unwrap();
    assert!(pool.try_lease(1).unwrap().is_none());
    assert!(matches!(pool.try_lease(8193), Err(MemError::TooLarge { largest_bytes: 8192, .. })));
    drop(held);
    assert!(pool.try_lease(8192).unwrap().is_some());
}

#[test]
fn a_waiting_lease_gets_the_buffer_that_another_thread_returns() {
    let pool = pool(&[class(4096, 1)]);
    let held = pool.try_lease(1).unwrap().unwrap();
    let waiter = std::thread::spawn({
        let pool = pool.clone();
        move || pool.lease(1, Duration::from_secs(30)).unwrap().is_some()
    });
    drop(held);
    assert!(waiter.join().unwrap());
}

#[test]
fn the_arena_outlives_the_pool_while_a_lease_lives() {
    let pool = pool(&[class(4096, 1)]);
    let slice = LeaseSlice::new(Arc::new(pool.try_lease(4096).unwrap().unwrap()), 0, 4096);
    drop(pool);
    // SAFETY: this test holds the only handle to the range.
    unsafe { slice.as_mut_slice().fill(7) };
    // SAFETY: as above.
    assert!(unsafe { slice.as_slice() }.iter().all(|byte| *byte == 7));
}

#[test]
#[should_panic(expected = "exceeds a lease")]
fn a_slice_past_its_lease_is_refused() {
    let pool = pool(&[class(4096, 1)]);
    let lease = Arc::new(pool.try_lease(1).unwrap().unwrap());
    let _ = LeaseSlice::new(lease, 4096, 1);
}

/// A fence that a test opens, or breaks.
#[derive(Default)]
struct Gate {
    open: std::sync::atomic::AtomicBool,
    broken: std::sync::atomic::AtomicBool,
}

impl Gate {
    fn open(&self) {
        self.open.store(true, Ordering::Release);
    }
}

impl Fence for Gate {
    fn is_done(&self) -> Result<bool> {
        if self.broken.load(Ordering::Acquire) {
            return Err(MemError::TooLarge { bytes: 1, largest_bytes: 0 });
        }
        Ok(self.open.load(Ordering::Acquire))
    }
}

#[test]
fn a_fenced_buffer_returns_when_lease_and_every_fence_are_gone() {
    let pool = pool(&[class(4096, 1)]);
    let gates = [Arc::new(Gate::default()), Arc::new(Gate::default())];
    let lease = pool.try_lease(1).unwrap().unwrap();
    for gate in &gates {
        lease.return_after(Arc::clone(gate) as Arc<dyn Fence>);
    }
    gates[0].open();
    assert!(pool.try_lease(1).unwrap().is_none(), "the lease lives");
    drop(lease);
    assert_eq!((pool.counters().live_bytes, pool.counters().fenced_bytes), (0, 4096));
    assert!(pool.try_lease(1).unwrap().is_none(), "one fence is left");
    gates[1].open();
    assert!(pool.try_lease(1).unwrap().is_some());
    assert_eq!(pool.counters().fenced_bytes, 0);
}

#[test]
fn waiting_for_a_fence_ends_when_it_is_done_though_nobody_calls() {
    let pool = pool(&[class(4096, 1)]);
    let gate = Arc::new(Gate::default());
    let lease = pool.try_lease(1).unwrap().unwrap();
    lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
    drop(lease);
    assert!(pool.lease(1, Duration::from_millis(5)).unwrap().is_none());
    let waiter = std::thread::spawn({
        let pool = pool.clone();
        move || pool.lease(1, Duration::from_secs(30)).unwrap().is_some()
    });
    while pool.arena.lock().waiting == 0 {
        std::thread::yield_now();
    }
    gate.open();
    assert!(waiter.join().unwrap());
    assert_eq!(pool.counters().waits, 1);
}

#[test]
fn the_arena_waits_for_the_device_that_uses_it() {
    let (gate, freed) = (Arc::new(Gate::default()), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let pool = pool(&[class(4096, 1)]);
    let lease = pool.try_lease(1).unwrap().unwrap();
    let address = lease.address().as_ptr() as usize;
    lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
    drop(lease);
    let closing = std::thread::spawn({
        let freed = Arc::clone(&freed);
        move || {
            drop(pool);
            freed.store(true, Ordering::Release);
        }
    });
    std::thread::sleep(Duration::from_millis(20));
    assert!(!freed.load(Ordering::Acquire), "freed while the device was at work");
    // SAFETY: the arena is still there, which is what is tested; no other thread touches it.
    unsafe { (address as *mut u8).write_volatile(1) };
    gate.open();
    closing.join().unwrap();
}

#[test]
fn a_fence_that_cannot_tell_keeps_its_buffer_and_says_why() {
    let pool = pool(&[class(4096, 2)]);
    let gate = Arc::new(Gate::default());
    let lease = pool.try_lease(1).unwrap().unwrap();
    lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
    drop(lease);
    gate.broken.store(true, Ordering::Release);
    let other = pool.try_lease(1).unwrap().expect("the second buffer is free");
    assert!(pool.try_lease(1).is_err());
    drop(other);
    assert!(pool.try_lease(1).unwrap().is_some());
}

#[test]
fn counters_tell_hits_waits_refusals_and_waste() {
    let groups = [vec![class(8192, 1)], vec![class(4096, 1)]];
    let pools = Pool::carve(&PageableAllocator::default(), &groups).unwrap();
    let first = pools[0].try_lease(5000).unwrap().unwrap();
    let second = pools[1].try_lease(100).unwrap().unwrap();
    assert!(pools[0].try_lease(1).unwrap().is_none());
    let counters = pools[0].counters();
    assert_eq!((counters.hits, counters.waits, counters.refusals), (1, 0, 1));
    assert_eq!((counters.live_bytes, counters.leased_bytes, counters.waste_bytes()), (5000, 8192, 3192));
    drop(second);
    drop(first);
    let _third = pools[0].try_lease(8192).unwrap().unwrap();
    assert_eq!(pools[0].counters().live_bytes_max, 8192);
    assert!(pools[1].try_lease_spare(1, 1).unwrap().is_none());
    assert!(pools[1].try_lease_spare(1, 0).unwrap().is_some());
}

/// A small generator of well-mixed numbers (Steele and others 2014, SplitMix64): seeded, so that a
/// failure repeats.
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

/// Invariant: each buffer is live, free, fenced, about to be returned or only addresses, and the counters
/// agree.
fn check(pool: &Pool, live: &[Lease]) {
    // While no other thread gives buffers back.
    let _resizing = pool.arena.resizing.locked();
    let state = pool.arena.lock();
    let arena = pool.arena.block.address().as_ptr() as usize;
    let mut ranges: Vec<(usize, usize)> =
        live.iter().map(|lease| (lease.address().as_ptr() as usize - arena, lease.capacity())).collect();
    let (mut fenced_bytes, mut absent_bytes, mut leaving_bytes) = (0, 0, 0);
    for class in &state.classes {
        let absent = class.absent.iter().chain(&class.leaving);
        ranges.extend(absent.map(|offset| (*offset, class.bytes)));
        absent_bytes += class.absent.len() * class.bytes;
        leaving_bytes += (class.surplus + class.leaving.len()) * class.bytes;
        let there = class.count + class.surplus + class.leaving.len();
        assert_eq!(there + class.absent.len(), class.count_max);
        assert!(
            class.surplus == 0 || class.free.is_empty(),
            "a free buffer is kept, and one in use is to go"
        );
        ranges.extend(class.free.iter().map(|offset| (*offset, class.bytes)));
        ranges.extend(class.fenced.iter().map(|(offset, _)| (*offset, class.bytes)));
        fenced_bytes += class.fenced.len() * class.bytes;
    }
    ranges.sort_unstable();
    assert!(ranges.iter().all(|(offset, bytes)| (offset | bytes).is_multiple_of(PAGE_BYTES)));
    // Every byte of the arena is in exactly one of them.
    let end = ranges.iter().fold(0, |end, (offset, bytes)| {
        assert_eq!(*offset, end, "a gap or an overlap");
        offset + bytes
    });
    let counters = state.counters[0];
    assert_eq!(end, counters.reserved_bytes + absent_bytes);
    assert_eq!(counters.leaving_bytes, leaving_bytes);
    assert_eq!(counters.fenced_bytes, fenced_bytes);
    assert_eq!(counters.leased_bytes, live.iter().map(Lease::capacity).sum::<usize>());
    assert_eq!(counters.live_bytes, live.iter().map(|lease| lease.requested).sum::<usize>());
    assert!(counters.live_bytes <= counters.live_bytes_max && counters.live_bytes <= counters.leased_bytes);
}

#[test]
fn a_million_random_steps_keep_every_byte_accounted_for() {
    let mut mix = Mix(4);
    for _ in 0..100 {
        let classes: Vec<_> =
            (0..=mix.next(4)).map(|_| class(1 + mix.next(60_000), 1 + mix.next(6))).collect();
        let largest = classes.iter().map(|class| class.bytes).max().unwrap();
        let pool = pool(&classes);
        let (mut live, mut gates): (Vec<Lease>, Vec<Arc<Gate>>) = Default::default();
        for step in 0..10_000 {
            match mix.next(5) {
                0 | 1 => live.extend(pool.try_lease(1 + mix.next(largest)).unwrap()),
                2 if !live.is_empty() => drop(live.swap_remove(mix.next(live.len()))),
                3 if !live.is_empty() => {
                    let gate = Arc::new(Gate::default());
                    live[mix.next(live.len())].return_after(Arc::clone(&gate) as Arc<dyn Fence>);
                    gates.push(gate);
                }
                4 if !gates.is_empty() => gates.swap_remove(mix.next(gates.len())).open(),
                _ => {}
            }
            if step % 16 == 0 {
                check(&pool, &live);
            }
        }
        gates.iter().for_each(|gate| gate.open());
        live.clear();
        check(&pool, &live);
    }
}

#[test]
fn sixteen_threads_never_share_a_buffer() {
    let pool = pool(&[class(4096, 3), class(8192, 2)]);
    let workers: Vec<_> = (0..16_u64)
        .map(|worker| {
            let pool = pool.clone();
            std::thread::spawn(move || {
                let mut mix = Mix(worker);
                for turn in 0..2000 {
                    let bytes = [4096, 8192][mix.next(2)];
                    let lease = pool
                        .lease(bytes, Duration::from_secs(60))
                        .unwrap()
                        .expect("another thread returns one");
                    let slice = LeaseSlice::new(Arc::new(lease), 0, bytes);
                    let mark = (worker as u8).wrapping_mul(31).wrapping_add(turn as u8);
                    // SAFETY: the lease is this thread's alone, which is what is tested.
                    unsafe { slice.as_mut_slice() }.fill(mark);
                    std::thread::yield_now();
                    // SAFETY: as above.
                    assert!(unsafe { slice.as_slice() }.iter().all(|byte| *byte == mark));
                }
            })
        })
        .collect();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    let counters = pool.counters();
    assert_eq!(counters.hits + counters.waits, 16 * 2000);
    check(&pool, &[]);
}

/// Waits until every buffer that was to go is gone.
fn wait_for_leaving(pool: &Pool) {
    let begin = Instant::now();
    while pool.counters().leaving_bytes > 0 {
        assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", pool.counters());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn elastic(bytes: usize, count: usize, count_max: usize) -> Pool {
    pool(&[class(bytes, count).up_to(count_max)])
}

/// The lease's bytes. A pool that leased memory which is no memory would make this crash.
#[allow(clippy::mut_from_ref)]
fn bytes_of(lease: &Lease) -> &mut [u8] {
    // SAFETY: the tests write to a lease from one thread, and hold no other reference meanwhile.
    unsafe { std::slice::from_raw_parts_mut(lease.address().as_ptr(), lease.capacity()) }
}

#[test]
fn a_class_grows_and_shrinks_at_its_addresses() {
    let pool = elastic(3 * PAGE_BYTES, 1, 4);
    let bytes = 3 * PAGE_BYTES;
    assert!(pool.is_elastic());
    assert_eq!(pool.counters().reserved_bytes, bytes);
    let held = pool.try_lease(1).unwrap().unwrap();
    bytes_of(&held).fill(7);
    let address = held.address();
    assert!(pool.try_lease(1).unwrap().is_none());
    pool.resize(bytes, 4).unwrap();
    assert_eq!((pool.counters().reserved_bytes, pool.free_buffers(1)), (4 * bytes, 3));
    let others: Vec<_> = (0..3).map(|_| pool.try_lease(1).unwrap().unwrap()).collect();
    others.iter().for_each(|lease| bytes_of(lease).fill(9));
    drop(others);
    pool.resize(bytes, 1).unwrap();
    let counters = pool.counters();
    assert_eq!((counters.reserved_bytes, counters.leaving_bytes, pool.free_buffers(1)), (bytes, 0, 0));
    assert_eq!(held.address(), address);
    assert!(bytes_of(&held).iter().all(|byte| *byte == 7));
    pool.resize(bytes, 2).unwrap();
    let fresh = pool.try_lease(1).unwrap().unwrap();
    assert!(bytes_of(&fresh).iter().all(|byte| *byte == 0), "the old memory came back");
    check(&pool, &[held, fresh]);
}

#[test]
fn a_buffer_in_use_is_given_back_when_its_lease_and_its_fences_end() {
    let pool = elastic(PAGE_BYTES, 3, 3);
    let gate = Arc::new(Gate::default());
    let [first, second, third] = [(); 3].map(|()| pool.try_lease(1).unwrap().unwrap());
    second.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
    pool.resize(1, 1).unwrap();
    assert_eq!(pool.counters().leaving_bytes, 2 * PAGE_BYTES);
    assert_eq!(pool.counters().reserved_bytes, 3 * PAGE_BYTES);
    drop(first);
    drop(second);
    assert!(pool.try_lease(1).unwrap().is_none(), "a buffer that is to go was leased");
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(pool.counters().leaving_bytes, PAGE_BYTES, "the device is at work in the other one");
    gate.open();
    wait_for_leaving(&pool);
    assert_eq!(pool.counters().reserved_bytes, PAGE_BYTES);
    bytes_of(&third).fill(1);
    drop(third);
    assert!(pool.try_lease(1).unwrap().is_some());
}

#[test]
fn buffers_that_were_to_go_stay_if_the_class_grows_again() {
    let pool = elastic(PAGE_BYTES, 3, 5);
    let held: Vec<_> = (0..3).map(|_| pool.try_lease(1).unwrap().unwrap()).collect();
    held.iter().for_each(|lease| bytes_of(lease).fill(3));
    pool.resize(1, 0).unwrap();
    pool.resize(1, 2).unwrap();
    assert_eq!(pool.counters().leaving_bytes, PAGE_BYTES);
    pool.resize(1, 5).unwrap();
    assert_eq!((pool.counters().leaving_bytes, pool.free_buffers(1)), (0, 2));
    assert!(held.iter().all(|lease| bytes_of(lease).iter().all(|byte| *byte == 3)));
    check(&pool, &held);
    drop(held);
    assert_eq!(pool.free_buffers(1), 5);
}

#[test]
fn a_request_that_waits_gets_a_buffer_that_comes_by_growing() {
    let pool = elastic(PAGE_BYTES, 0, 1);
    assert!(pool.try_lease(1).unwrap().is_none());
    let waiter = std::thread::spawn({
        let pool = pool.clone();
        move || pool.lease(1, Duration::from_secs(30)).unwrap().is_some()
    });
    while pool.arena.lock().waiting == 0 {
        std::thread::yield_now();
    }
    pool.resize(1, 1).unwrap();
    assert!(waiter.join().unwrap());
}

#[test]
fn what_was_not_reserved_is_refused() {
    let pools = [vec![class(4096, 2), class(8192, 1).up_to(3)], vec![class(12_288, 1)]];
    let pools = Pool::carve(&PageableAllocator::default(), &pools).unwrap();
    for (pool, bytes, count, most) in [(0, 4096, 1, 2), (0, 8192, 4, 3), (0, 12_288, 1, 0), (1, 12_288, 2, 1)]
    {
        match pools[pool].resize(bytes, count) {
            Err(MemError::NotReserved { count_max, .. }) => assert_eq!(count_max, most),
            other => panic!("{other:?}"),
        }
    }
    pools[0].resize(8192, 3).unwrap();
    pools[0].resize(4096, 2).unwrap();
    let fixed = pool(&[class(4096, 1)]);
    assert!(!fixed.is_elastic() && fixed.resize(4096, 0).is_err());
}

#[test]
fn the_arena_is_freed_while_a_fence_holds_a_buffer_that_is_to_go() {
    let (pool, gate) = (elastic(PAGE_BYTES, 1, 1), Arc::new(Gate::default()));
    let arena = Arc::downgrade(&pool.arena);
    let lease = pool.try_lease(1).unwrap().unwrap();
    lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
    drop(lease);
    pool.resize(1, 0).unwrap();
    drop(pool);
    gate.open();
    let begin = Instant::now();
    while arena.strong_count() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Tracks resident memory from the calls, and rejects calls that may not come.
#[derive(Default)]
struct Noted(std::sync::Mutex<std::collections::BTreeSet<usize>>);

impl ResizeListener for Noted {
    fn committed(&self, parts: &[Range<usize>]) {
        let pages = parts.iter().flat_map(|part| part.clone().step_by(PAGE_BYTES));
        assert!(pages.into_iter().all(|page| self.0.locked().insert(page)), "committed twice");
    }

    fn leaving(&self, parts: &[Range<usize>]) {
        let pages = parts.iter().flat_map(|part| part.clone().step_by(PAGE_BYTES));
        assert!(pages.into_iter().all(|page| self.0.locked().remove(&page)), "left twice");
    }
}

#[test]
fn a_watcher_knows_at_every_moment_what_is_memory() {
    let (pool, mut mix) =
        (pool(&[class(4096, 2).up_to(5), class(8192, 1), class(12_288, 0).up_to(4)]), Mix(9));
    let noted = Arc::new(Noted::default());
    pool.add_resize_listener(Arc::downgrade(&noted) as std::sync::Weak<dyn ResizeListener>);
    let mut live = Vec::new();
    for _ in 0..2000 {
        match mix.next(4) {
            0 => live.extend(pool.try_lease(1 + mix.next(12_288)).unwrap()),
            1 if !live.is_empty() => drop(live.swap_remove(mix.next(live.len()))),
            2 => pool.resize(4096, mix.next(6)).unwrap(),
            _ => pool.resize(12_288, mix.next(5)).unwrap(),
        }
        let _resizing = pool.arena.resizing.locked();
        let memory: usize = pool.arena.lock().counters[0].reserved_bytes;
        assert_eq!(noted.0.locked().len() * PAGE_BYTES, memory);
        let arena = pool.arena.block.address().as_ptr().addr();
        let held = live.iter().map(|lease| lease.address().as_ptr().addr() - arena);
        assert!(held.into_iter().all(|offset| noted.0.locked().contains(&offset)));
    }
}

#[test]
fn threads_lease_while_their_classes_grow_and_shrink() {
    const SIZES: [usize; 2] = [2 * PAGE_BYTES, 5 * PAGE_BYTES];
    let pool = pool(&SIZES.map(|bytes| class(bytes, 2).up_to(6)));
    let working = Arc::new(std::sync::atomic::AtomicUsize::new(6));
    let workers: Vec<_> = (0..6_u64)
        .map(|worker| {
            let (pool, working) = (pool.clone(), Arc::clone(&working));
            std::thread::spawn(move || {
                let mut mix = Mix(worker);
                for turn in 0..3000 {
                    let size = SIZES[mix.next(2)];
                    // The class may have no buffer just now.
                    let Some(lease) = pool.lease(size, Duration::from_micros(200)).unwrap() else { continue };
                    let mark = (worker as u8).wrapping_mul(41).wrapping_add(turn as u8);
                    bytes_of(&lease).fill(mark);
                    if mix.next(8) == 0 {
                        let gate = Arc::new(Gate::default());
                        lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
                        std::thread::yield_now();
                        assert!(bytes_of(&lease).iter().all(|byte| *byte == mark));
                        drop(lease);
                        gate.open();
                    } else {
                        std::thread::yield_now();
                        assert!(bytes_of(&lease).iter().all(|byte| *byte == mark));
                    }
                }
                working.fetch_sub(1, Ordering::Release);
            })
        })
        .collect();
    let mut mix = Mix(77);
    while working.load(Ordering::Acquire) > 0 {
        pool.resize(SIZES[mix.next(2)], mix.next(7)).unwrap();
        std::thread::yield_now();
    }
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    let counters = pool.counters();
    assert!(counters.hits + counters.waits > 3000, "hardly anything was leased: {counters:?}");
    for count in [0, 6, 3] {
        SIZES.iter().for_each(|bytes| pool.resize(*bytes, count).unwrap());
        wait_for_leaving(&pool);
        assert_eq!(pool.counters().reserved_bytes, count * (SIZES[0] + SIZES[1]));
        check(&pool, &[]);
    }
}

proptest! {
    /// Any sequence of requests, drops, fences and changes of size leaves every buffer in one place,
    /// and each class with the number it was given last.
    #[test]
    fn every_buffer_is_in_one_place_whatever_the_sizes(
        classes in prop::collection::vec((1_usize..40_000, 0_usize..4, 0_usize..4), 1..4),
        actions in prop::collection::vec((0_u8..6, 1_usize..50_000, any::<prop::sample::Index>()), 1..120),
    ) {
        let classes: Vec<_> =
            classes.into_iter().map(|(bytes, count, more)| class(bytes, count).up_to(count + more)).collect();
        let pool = pool(&classes);
        let places = pool.arena_classes();
        let mut counts: Vec<usize> = pool.arena.lock().classes.iter().map(|class| class.count).collect();
        let (mut live, mut gates): (Vec<Lease>, Vec<Arc<Gate>>) = Default::default();
        for (mark, (action, bytes, pick)) in actions.into_iter().enumerate() {
            match action {
                0 | 5 => if let Ok(Some(mut lease)) = pool.try_lease(bytes) {
                    lease.requested = bytes;
                    bytes_of(&lease).fill(mark as u8);
                    live.push(lease);
                },
                1 if !live.is_empty() => {
                    let lease = live.swap_remove(pick.index(live.len()));
                    let first = bytes_of(&lease)[0];
                    prop_assert!(bytes_of(&lease).iter().all(|byte| *byte == first), "it was changed");
                }
                2 if !live.is_empty() => {
                    gates.push(Arc::new(Gate::default()));
                    let gate = Arc::clone(gates.last().unwrap());
                    live[pick.index(live.len())].return_after(gate);
                }
                3 if !gates.is_empty() => gates.swap_remove(pick.index(gates.len())).open(),
                4 if !places.is_empty() => {
                    let class = pick.index(places.len());
                    counts[class] = bytes % (places[class].count_max + 1);
                    pool.resize(places[class].bytes, counts[class]).unwrap();
                }
                _ => {}
            }
            check(&pool, &live);
            let now: Vec<usize> = pool.arena.lock().classes.iter().map(|class| class.count).collect();
            prop_assert_eq!(&now, &counts);
        }
        gates.iter().for_each(|gate| gate.open());
        live.clear();
        wait_for_leaving(&pool);
        let counted: usize = places.iter().zip(&counts).map(|(place, count)| place.bytes * count).sum();
        prop_assert_eq!(pool.counters().reserved_bytes, counted);
        check(&pool, &live);
    }

    /// Any sequence of requests, drops and fences leaves every byte live, free or fenced.
    #[test]
    fn every_byte_is_in_one_place(
        classes in prop::collection::vec((1_usize..40_000, 1_usize..5), 1..5),
        actions in prop::collection::vec((0_u8..4, 1_usize..50_000, any::<prop::sample::Index>()), 1..80),
    ) {
        let classes: Vec<_> = classes.into_iter().map(|(bytes, count)| class(bytes, count)).collect();
        let pool = pool(&classes);
        let (mut live, mut gates): (Vec<Lease>, Vec<Arc<Gate>>) = Default::default();
        for (action, bytes, pick) in actions {
            match action {
                0 => if let Ok(Some(lease)) = pool.try_lease(bytes) {
                    prop_assert!(lease.capacity() >= bytes);
                    live.push(lease);
                },
                1 if !live.is_empty() => drop(live.swap_remove(pick.index(live.len()))),
                2 if !live.is_empty() => {
                    gates.push(Arc::new(Gate::default()));
                    let gate = Arc::clone(gates.last().unwrap());
                    live[pick.index(live.len())].return_after(gate);
                }
                3 if !gates.is_empty() => gates.swap_remove(pick.index(gates.len())).open(),
                _ => {}
            }
            check(&pool, &live);
        }
        gates.iter().for_each(|gate| gate.open());
    }
}
