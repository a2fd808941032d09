//! Pools that grow and shrink, as the system sees them: resident, locked, and hidden from forks.

use std::env;
use std::process::Command;
use std::slice;

use memascend_mem::{HostAllocator, Lease, LockedAllocator, MemError, PageableAllocator, Pool, SizeClass};

const MIB: usize = 1 << 20;
const BUFFER: usize = MIB;
const MOST: usize = 16;

/// Bytes of the mappings within a pool's arena, as the system reports them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    mapped: usize,
    resident: usize,
    locked: usize,
    /// Bytes that a forked child would have.
    inherited: usize,
}

impl Seen {
    fn of(pool: &Pool) -> Self {
        let (start, bytes) = pool.arena();
        let arena = start.as_ptr().addr()..start.as_ptr().addr() + bytes;
        let mut seen = Self::default();
        let mut inside = None;
        for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let mut words = line.split_whitespace();
            let first = words.next().unwrap();
            let hex = |text: &str| usize::from_str_radix(text, 16).ok();
            if let Some((Some(from), Some(to))) = first.split_once('-').map(|(from, to)| (hex(from), hex(to)))
            {
                inside = (arena.contains(&from) && to <= arena.end).then_some(to - from);
                seen.mapped += inside.unwrap_or(0);
                continue;
            }
            let Some(bytes) = inside else { continue };
            let mut kib = || words.next().unwrap().parse::<usize>().unwrap() << 10;
            match first {
                "Rss:" => seen.resident += kib(),
                "Locked:" => seen.locked += kib(),
                "VmFlags:" if !words.any(|flag| flag == "dc") => seen.inherited += bytes,
                _ => {}
            }
        }
        seen
    }
}

fn elastic(allocator: &dyn HostAllocator, count: usize) -> memascend_mem::Result<Pool> {
    Pool::new(allocator, &[SizeClass::new("test", BUFFER, count).up_to(MOST)])
}

/// A lease filled with `value`.
fn filled(pool: &Pool, value: u8) -> Lease {
    let lease = pool.try_lease(BUFFER).unwrap().expect("a buffer is free");
    bytes_of(&lease).fill(value);
    lease
}

#[allow(clippy::mut_from_ref)]
fn bytes_of(lease: &Lease) -> &mut [u8] {
    // SAFETY: the tests use one slice of a lease at a time.
    unsafe { slice::from_raw_parts_mut(lease.address().as_ptr(), lease.capacity()) }
}

/// Runs the named test in a process of its own; false in the one that starts it.
fn alone(test: &str) -> bool {
    if env::var_os("MEMASCEND_TEST_ALONE").is_some() {
        return true;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command.args([test, "--exact", "--nocapture"]).env("MEMASCEND_TEST_ALONE", "1").output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

#[test]
fn what_is_given_back_is_neither_resident_nor_locked() {
    let locked = |huge_pages| LockedAllocator { huge_pages, threads: 2 };
    let pageable = |huge_pages| PageableAllocator { huge_pages };
    for allocator in [&locked(false) as &dyn HostAllocator, &locked(true), &pageable(false), &pageable(true)]
    {
        let pool = match elastic(allocator, 2) {
            Err(MemError::Lock { .. }) => continue,
            pool => pool.unwrap(),
        };
        let locks = allocator.name() == "locked";
        let seen = |count: usize| Seen {
            mapped: MOST * BUFFER,
            resident: count * BUFFER,
            locked: if locks { count * BUFFER } else { 0 },
            inherited: 0,
        };
        assert_eq!(Seen::of(&pool), seen(2));
        let first = filled(&pool, 1);
        pool.resize(BUFFER, MOST).unwrap();
        assert_eq!(Seen::of(&pool), seen(MOST));
        let mut held: Vec<_> = (2..=MOST).map(|value| filled(&pool, value as u8)).collect();
        assert_eq!(Seen::of(&pool), seen(MOST));
        // Every other buffer is free, so the others are scattered.
        held = held
            .into_iter()
            .enumerate()
            .filter(|(index, _)| index % 2 == 1)
            .map(|(_, lease)| lease)
            .collect();
        pool.resize(BUFFER, 1 + held.len()).unwrap();
        assert_eq!(Seen::of(&pool), seen(1 + held.len()));
        for lease in held.iter().chain([&first]) {
            let value = bytes_of(lease)[0];
            assert!(value > 0 && bytes_of(lease).iter().all(|byte| *byte == value));
        }
        pool.resize(BUFFER, 0).unwrap();
        drop((held, first));
        while pool.counters().leaving_bytes > 0 {
            std::thread::yield_now();
        }
        assert_eq!(Seen::of(&pool), seen(0));
        pool.resize(BUFFER, 3).unwrap();
        let fresh = pool.try_lease(1).unwrap().unwrap();
        assert!(bytes_of(&fresh).iter().all(|byte| *byte == 0));
    }
}

/// Huge pages are for classes that begin whole. They go with the buffers, but for one that a buffer which stays
/// has a part of.
#[test]
fn what_is_given_back_of_a_whole_class_lies_side_by_side() {
    const BYTES: usize = 5 * MIB / 2;
    const HUGE: usize = 2 * MIB;
    for huge_pages in [false, true] {
        let class = SizeClass::new("test", BYTES, MOST).up_to(MOST);
        let pool = Pool::new(&PageableAllocator { huge_pages }, &[class]).unwrap();
        assert_eq!(Seen::of(&pool).resident, MOST * BYTES);
        let mut leases: Vec<_> = (0..MOST).map(|_| pool.try_lease(BYTES).unwrap().unwrap()).collect();
        // They return in any order.
        for place in [7, 2, 11, 0] {
            leases.swap_remove(place);
        }
        drop(leases);
        for count in [11, 10, 3] {
            pool.resize(BYTES, count).unwrap();
            let resident = Seen::of(&pool).resident;
            assert!((count * BYTES..count * BYTES + HUGE).contains(&resident), "{count}: {resident}");
        }
        let (start, _) = pool.arena();
        let stay: Vec<_> = (0..3).map(|_| pool.try_lease(BYTES).unwrap().unwrap()).collect();
        let end =
            stay.iter().map(|lease| lease.address().as_ptr().addr() - start.as_ptr().addr() + BYTES).max();
        assert_eq!(end, Some(3 * BYTES));
    }
}

#[test]
fn a_forked_child_has_no_part_of_the_arena() {
    let pool = elastic(&PageableAllocator::default(), 1).unwrap();
    pool.resize(BUFFER, 3).unwrap();
    pool.resize(BUFFER, 0).unwrap();
    pool.resize(BUFFER, 5).unwrap();
    let held: Vec<_> = (0..5).map(|_| filled(&pool, 1)).collect();
    // SAFETY: the child makes system calls alone, and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut resident = 0_u8;
        let mapped = held.iter().filter(|lease| {
            // SAFETY: a byte for the one page that is asked for.
            unsafe { libc::mincore(lease.address().as_ptr().cast(), 4096, &raw mut resident) == 0 }
        });
        let mapped = mapped.count() as i32;
        // SAFETY: leaves without running anything of the parent's.
        unsafe { libc::_exit(mapped) };
    }
    let mut status = -1;
    // SAFETY: `status` is a writable int.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child has buffers");
}

/// Lowers a limit of this process.
fn limit(resource: libc::__rlimit_resource_t, bytes: usize) {
    let limit = libc::rlimit { rlim_cur: bytes as u64, rlim_max: bytes as u64 };
    // SAFETY: `limit` is a whole rlimit.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const limit) }, 0);
}

/// Takes the right to lock memory beyond the limit from this thread and those that it starts.
fn drop_ipc_lock() {
    const VERSION_3: u32 = 0x2008_0522;
    const IPC_LOCK: u32 = 14;
    let header = [VERSION_3, 0];
    let mut sets = [0_u32; 6];
    // SAFETY: the header and two times three sets, as version 3 has them.
    unsafe {
        assert_eq!(libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()), 0);
        sets[..3].iter_mut().for_each(|set| *set &= !(1 << IPC_LOCK));
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
    }
}

/// A pool of 2 buffers that the system lets grow to fewer than 8, and the error then.
fn grows_within_its_limit(pool: &Pool, set_limit: impl Fn(), most: usize) -> MemError {
    let held = [filled(pool, 1), filled(pool, 2)];
    set_limit();
    let before = (Seen::of(pool), pool.counters());
    let error = pool.resize(BUFFER, 12).unwrap_err();
    assert_eq!((Seen::of(pool), pool.counters()), before, "{error}");
    assert!(pool.try_lease(1).unwrap().is_none());
    for (value, lease) in [1, 2].into_iter().zip(&held) {
        assert!(bytes_of(lease).iter().all(|byte| *byte == value));
    }
    // Less than the limit still fits, and returned buffers make room again.
    for count in [most, 1, most] {
        pool.resize(BUFFER, count).unwrap();
        assert_eq!(pool.counters().reserved_bytes - pool.counters().leaving_bytes, count * BUFFER);
    }
    error
}

#[test]
fn a_lock_that_is_refused_leaves_everything_as_it_was() {
    if !alone("a_lock_that_is_refused_leaves_everything_as_it_was") {
        return;
    }
    drop_ipc_lock();
    limit(libc::RLIMIT_MEMLOCK, 8 * BUFFER);
    let pool = elastic(&LockedAllocator::default(), 2).unwrap();
    match grows_within_its_limit(&pool, || {}, 8) {
        MemError::Lock { bytes, limit_bytes, .. } => {
            assert_eq!((bytes, limit_bytes), (10 * BUFFER, 8 * BUFFER as u64));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn memory_that_is_refused_leaves_everything_as_it_was() {
    if !alone("memory_that_is_refused_leaves_everything_as_it_was") {
        return;
    }
    let pool = elastic(&PageableAllocator::default(), 2).unwrap();
    let set_limit = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let data = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
        let kib: usize = data.trim().strip_suffix(" kB").unwrap().parse().unwrap();
        limit(libc::RLIMIT_DATA, (kib << 10) + 6 * BUFFER);
    };
    let error = grows_within_its_limit(&pool, set_limit, 4);
    assert!(matches!(error, MemError::Reserve { bytes, .. } if bytes == 10 * BUFFER), "{error}");
}
