//! The CUDA backends against a runtime that really allocates and keeps books (`fake_cudart.c`), and
//! against the real one where there is one.

mod fake;

use std::ffi::{c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::{env, fs, io, mem, ptr, slice, thread};

use fake::Fake;

use memascend_mem::{
    CudaAllocator, CudaError, CudaEvents, Cudart, HostAllocator, HostBlock, LockedAllocator, MemError,
    PAGE_BYTES, PageableAllocator, Pool, RegisteredAllocator, SizeClass, allocator,
};

const MIB: usize = 1 << 20;
const LIBRARY_VARIABLE: &str = "MEMASCEND_CUDART";
const ALONE_VARIABLE: &str = "MEMASCEND_TEST_ALONE";

impl Fake {
    /// The backends that use CUDA.
    fn backends(&self) -> Vec<Box<dyn HostAllocator>> {
        let cudart = self.open().unwrap();
        vec![
            Box::new(CudaAllocator::with(Arc::clone(&cudart))),
            Box::new(RegisteredAllocator { cudart: Arc::clone(&cudart), huge_pages: false, threads: 1 }),
            Box::new(RegisteredAllocator { cudart, huge_pages: true, threads: 3 }),
        ]
    }

    fn live(&self) -> usize {
        self.get(c"fake_live_allocations") + self.get(c"fake_live_registrations")
    }
}

/// Whether this process runs the named test alone, with the variables set. If not, it starts a process that
/// does, and the caller returns, so that a test changes and measures only its own process.
fn alone(test: &str, variables: &[(&str, &Path)]) -> bool {
    if env::var_os(ALONE_VARIABLE).is_some() {
        return true;
    }
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env_remove(LIBRARY_VARIABLE)
        .env(ALONE_VARIABLE, "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{shown}{}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.contains("1 passed"), "{shown}");
    false
}

fn bytes_of(block: &mut HostBlock) -> &mut [u8] {
    // SAFETY: the block is borrowed mutably, and its memory is initialised.
    unsafe { slice::from_raw_parts_mut(block.address().as_ptr(), block.bytes()) }
}

fn is_mapped(address: usize) -> bool {
    let mut resident = 0_u8;
    // SAFETY: mincore looks at the mappings only, whatever the address.
    unsafe { libc::mincore(address as *mut c_void, PAGE_BYTES, &mut resident) == 0 }
}

/// Runs `check` in a forked child, which may call nothing that allocates or locks; whether it gave
/// true.
fn in_child(check: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs `check`, by the promise above, and ends without running anything else.
    match unsafe { libc::fork() } {
        0 => {
            let status = if check() { 0 } else { 1 };
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(status) }
        }
        -1 => panic!("{}", io::Error::last_os_error()),
        child => {
            let mut status = -1;
            // SAFETY: the child is ours, and `status` is writable.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            status == 0
        }
    }
}

#[test]
fn runtimes_12_and_13_are_accepted_and_others_refused() {
    for (definition, version) in [("FAKE_VERSION=12080", (12, 8)), ("FAKE_VERSION=13000", (13, 0))] {
        let fake = Fake::new(&[definition]);
        let cudart = fake.open().unwrap();
        assert_eq!(cudart.version(), version);
        assert_eq!(Path::new(cudart.library()), fake.path);
    }
    for (definition, found) in [("FAKE_VERSION=11080", "11.8"), ("FAKE_VERSION=14010", "14.1")] {
        let fake = Fake::new(&[definition]);
        let error = fake.open().unwrap_err();
        assert!(matches!(error, MemError::Cuda(CudaError::UnsupportedVersion { .. })), "{error:?}");
        for part in [found, "12 or 13", fake.path.to_str().unwrap(), LIBRARY_VARIABLE] {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert_eq!(fake.calls(c"cudaGetDeviceCount"), 0, "a runtime that is not known was used");
    }
}

#[test]
fn a_missing_function_is_named_with_its_library() {
    let fake = Fake::new(&["FAKE_WITHOUT_EVENT_QUERY"]);
    let error = fake.open().unwrap_err();
    assert!(matches!(error, MemError::Cuda(CudaError::MissingFunction { .. })), "{error:?}");
    for part in ["cudaEventQuery", fake.path.to_str().unwrap()] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn a_library_that_is_not_there_is_named() {
    let error = Cudart::open("/nowhere/libcudart.so.12").unwrap_err();
    assert!(matches!(error, MemError::Cuda(CudaError::LibraryNotFound { .. })), "{error:?}");
    assert!(error.to_string().contains("/nowhere/libcudart.so.12"), "{error}");
}

#[test]
fn no_device_is_told_from_an_unfit_driver() {
    for definition in ["FAKE_DEVICES=0", "FAKE_COUNT_ERROR=100"] {
        let fake = Fake::new(&[definition]);
        let error = fake.open().unwrap_err();
        assert!(matches!(error, MemError::Cuda(CudaError::NoDevice { .. })), "{error:?}");
        assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES"), "{error}");
        fake.assert_clean();
    }
    for (driver, says) in [("FAKE_DRIVER=12040", "up to 12.4"), ("FAKE_DRIVER=0", "no driver is loaded")] {
        let fake = Fake::new(&["FAKE_VERSION=13010", "FAKE_COUNT_ERROR=35", driver]);
        let error = fake.open().unwrap_err();
        assert!(matches!(error, MemError::Cuda(CudaError::Driver { .. })), "{error:?}");
        for part in ["13.1", says, "update the driver"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        fake.assert_clean();
    }
}

#[test]
fn an_error_of_no_kind_known_here_has_its_name_and_text() {
    let fake = Fake::new(&["FAKE_COUNT_ERROR=719"]);
    let error = fake.open().unwrap_err().to_string();
    for part in ["cudaGetDeviceCount", "719", "cudaErrorLaunchFailure", "unspecified launch failure"] {
        assert!(error.contains(part), "{error}");
    }
    fake.assert_clean();
}

#[test]
fn the_variable_names_the_runtime_and_nothing_else_is_tried() {
    const TEST: &str = "the_variable_names_the_runtime_and_nothing_else_is_tried";
    if env::var_os(ALONE_VARIABLE).is_none() {
        let fake = Fake::new(&[]);
        alone(TEST, &[(LIBRARY_VARIABLE, &fake.path)]);
        alone(TEST, &[(LIBRARY_VARIABLE, Path::new("/nowhere/libcudart.so.12"))]);
        return;
    }
    let named = PathBuf::from(env::var_os(LIBRARY_VARIABLE).unwrap());
    // Loaded already, but the variable names another library.
    let other = Fake::new(&[]);
    if named.exists() {
        assert_eq!(Path::new(Cudart::find().unwrap().library()), named);
        for name in ["auto", "cuda", "registered"] {
            let chosen = allocator(name, false).unwrap();
            assert_eq!(chosen.name(), if name == "auto" { "cuda" } else { name });
            assert_eq!(chosen.allocate(1).unwrap().bytes(), PAGE_BYTES);
        }
        // CUDA's own memory lies in pages that CUDA chooses.
        assert_eq!(allocator("auto", true).unwrap().name(), "registered");
        return;
    }
    assert!(Cudart::find().unwrap_err().to_string().contains(named.to_str().unwrap()));
    assert_eq!(allocator("auto", false).unwrap().name(), "locked");
    for name in ["cuda", "registered"] {
        assert!(matches!(
            allocator(name, false).err(),
            Some(MemError::Cuda(CudaError::LibraryNotFound { .. }))
        ));
    }
    assert_eq!(other.get(c"fake_all_calls"), 0);
}

#[test]
fn a_runtime_that_the_process_has_loaded_is_used() {
    if !alone("a_runtime_that_the_process_has_loaded_is_used", &[]) {
        return;
    }
    // In the order of their paths or not, the one of an old version is passed over.
    let old = Fake::named("libcudart.so.11", &["FAKE_VERSION=11080"]);
    assert!(matches!(
        Cudart::find(),
        Err(MemError::Cuda(CudaError::UnsupportedVersion { major: 11, .. })) | Ok(_)
    ));
    assert!(old.calls(c"cudaRuntimeGetVersion") > 0);
    let fake = Fake::named("libcudart-0123abcd.so.13.0.1", &["FAKE_VERSION=13000"]);
    let cudart = Cudart::find().unwrap();
    assert_eq!(Path::new(cudart.library()), fake.path);
    assert_eq!(fake.calls(c"cudaGetDeviceCount"), 1, "another copy of the library was loaded");
}

#[test]
fn no_context_is_made_on_a_device_that_is_not_used() {
    for driver in [true, false] {
        let definitions: &[&str] =
            if driver { &["FAKE_DEVICES=3"] } else { &["FAKE_DEVICES=3", "FAKE_WITHOUT_DRIVER"] };
        let fake = Fake::new(definitions);
        let contexts = || fake.get(c"fake_contexts");
        let cudart = fake.open().unwrap();
        assert_eq!(contexts(), 0, "opening makes one");
        let caller = thread::current().id();
        let here = || Ok((thread::current().id() == caller, fake.device()));

        // The calling thread's device is 0, which has no context: setting it again would make one.
        assert_eq!(cudart.on_device(1, here).unwrap(), (false, 1));
        assert_eq!((fake.device(), contexts()), (0, 0b10));
        assert_eq!(cudart.on_device(0, here).unwrap(), (true, 0));
        let error = cudart.on_device(7, here).unwrap_err();
        assert!(error.to_string().contains("cudaSetDevice"), "{error}");
        let failed: Result<(), _> =
            cudart.on_device(1, || Err(MemError::NotReserved { bytes: 1, count: 2, count_max: 3 }));
        assert!(matches!(failed, Err(MemError::NotReserved { .. })));

        // Memory for every device is no reason for a context on this thread's.
        if driver {
            let registered =
                RegisteredAllocator { cudart: Arc::clone(&cudart), huge_pages: false, threads: 1 };
            drop(registered.allocate(MIB).unwrap());
            drop(CudaAllocator::with(Arc::clone(&cudart)).allocate(MIB).unwrap());
            assert_eq!((fake.device(), contexts()), (0, 0b10));
        }

        // Where it has one, calls for another device start no thread.
        cudart.set_device(0).unwrap();
        assert_eq!(cudart.on_device(1, here).unwrap(), (driver, 1));
        assert_eq!((fake.device(), contexts()), (0, 0b11));
        fake.assert_clean();
    }
}

#[test]
fn blocks_are_zero_resident_portable_and_released_exactly_once() {
    let fake = Fake::new(&[]);
    for (index, backend) in fake.backends().into_iter().enumerate() {
        for (asked, given) in [
            (0, PAGE_BYTES),
            (1, PAGE_BYTES),
            (PAGE_BYTES, PAGE_BYTES),
            (PAGE_BYTES + 1, 2 * PAGE_BYTES),
            (17 * MIB + 1, 17 * MIB + PAGE_BYTES),
        ] {
            let mut block = backend.allocate(asked).unwrap();
            assert_eq!(block.bytes(), given, "{}", backend.name());
            assert_eq!(fake.get(c"fake_last_bytes"), given, "{}", backend.name());
            assert_eq!(fake.get(c"fake_last_flags"), 1, "{}: not portable", backend.name());
            assert_eq!(block.address().as_ptr().addr() % PAGE_BYTES, 0);
            assert_eq!(fake.live(), 1);
            assert!(bytes_of(&mut block).iter().all(|byte| *byte == 0), "{}", backend.name());
            bytes_of(&mut block).fill(0x5A);
            drop(block);
            fake.assert_clean();
        }
        let releases = fake.calls(c"cudaFreeHost") + fake.calls(c"cudaHostUnregister");
        assert_eq!(releases, 5 * (index + 1));
    }
    assert_eq!(fake.calls(c"cudaFreeHost"), 5);
    assert_eq!(fake.get(c"fake_cold_pages"), 0, "pages were registered before they were faulted in");
}

#[test]
fn a_request_beyond_four_gibibytes_is_rounded_to_the_page_alone() {
    let fake = Fake::new(&[]);
    fake.set(c"fake_set_shared_pages", 1);
    // 4.01 GiB: a power of two would be 8.
    let asked = 4_305_704_878;
    let block = CudaAllocator::with(fake.open().unwrap()).allocate(asked).unwrap();
    assert_eq!(block.bytes(), asked.next_multiple_of(PAGE_BYTES));
    assert_eq!(fake.get(c"fake_last_bytes"), asked.next_multiple_of(PAGE_BYTES));
    drop(block);
    fake.assert_clean();
}

#[test]
fn no_byte_more_than_the_block_stays_mapped() {
    if !alone("no_byte_more_than_the_block_stays_mapped", &[]) {
        return;
    }
    fn mapped_bytes() -> usize {
        let statm = fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').next().unwrap().parse::<usize>().unwrap() * PAGE_BYTES
    }
    let fake = Fake::new(&[]);
    let cudart = fake.open().unwrap();
    let bytes = 5 * MIB + 3 * PAGE_BYTES;
    for huge_pages in [false, true] {
        // One thread, so that no thread's stack is counted.
        let registered = RegisteredAllocator { cudart: Arc::clone(&cudart), huge_pages, threads: 1 };
        let locked = LockedAllocator { huge_pages, threads: 1 };
        for backend in [&registered as &dyn HostAllocator, &locked] {
            // The first round absorbs the allocations of the measurement itself.
            for _ in 0..2 {
                let before = mapped_bytes();
                let block = match backend.allocate(bytes) {
                    Ok(block) => block,
                    Err(MemError::Lock { .. }) => break,
                    Err(error) => panic!("{error}"),
                };
                let with_block = mapped_bytes();
                drop(block);
                assert_eq!(with_block - before, bytes, "{}, huge pages {huge_pages}", backend.name());
                assert_eq!(mapped_bytes(), before, "{}, huge pages {huge_pages}", backend.name());
            }
        }
    }
}

#[test]
fn out_of_memory_leaves_nothing_behind_and_less_still_fits() {
    if !alone("out_of_memory_leaves_nothing_behind_and_less_still_fits", &[]) {
        return;
    }
    let fake = Fake::new(&[]);
    fake.set(c"fake_set_limit", 4 * MIB);
    for backend in fake.backends() {
        let first = backend.allocate(MIB).unwrap();
        let error = backend.allocate(3 * MIB + 1).unwrap_err();
        let bytes = 3 * MIB + PAGE_BYTES;
        assert!(
            matches!(error, MemError::Cuda(CudaError::OutOfMemory { bytes: refused, .. }) if refused == bytes),
            "{error:?}"
        );
        for part in [bytes.to_string().as_str(), "host_memory", "allocator=\"locked\""] {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert_eq!(fake.live(), 1);
        if backend.name() == "registered" {
            assert!(!is_mapped(fake.get(c"fake_last_address")), "the refused block is still mapped");
        }
        let second = backend.allocate(3 * MIB).unwrap();
        assert_eq!(fake.live(), 2);
        drop((first, second));
        fake.assert_clean();
    }
}

#[test]
fn a_refused_registration_says_why_and_leaves_nothing_behind() {
    if !alone("a_refused_registration_says_why_and_leaves_nothing_behind", &[]) {
        return;
    }
    let fake = Fake::new(&[]);
    let cudart = fake.open().unwrap();
    for huge_pages in [false, true] {
        let backend = RegisteredAllocator { cudart: Arc::clone(&cudart), huge_pages, threads: 2 };
        for (code, parts) in [
            (712, ["registered already", "allocator=\"cuda\""]),
            (801, ["not supported", "allocator=\"cuda\""]),
            (1, ["cudaHostRegister refused its arguments", "allocator=\"locked\""]),
            (719, ["cudaHostRegister", "cudaErrorLaunchFailure"]),
        ] {
            fake.fail(c"cudaHostRegister", code);
            let error = backend.allocate(5 * MIB).unwrap_err();
            for part in parts {
                assert!(error.to_string().contains(part), "{error}");
            }
            assert!(!is_mapped(fake.get(c"fake_last_address")), "{error}");
            fake.assert_clean();
        }
        fake.fail(c"cudaHostRegister", 0);
        drop(backend.allocate(5 * MIB).unwrap());
        fake.assert_clean();
    }
    assert_eq!(fake.calls(c"cudaHostUnregister"), 2, "something was unregistered that never was registered");
}

#[test]
fn where_nothing_can_be_registered_cuda_allocates() {
    const TEST: &str = "where_nothing_can_be_registered_cuda_allocates";
    if env::var_os(ALONE_VARIABLE).is_none() {
        let fake = Fake::new(&[]);
        alone(TEST, &[(LIBRARY_VARIABLE, &fake.path)]);
        return;
    }
    let fake = Fake::at(PathBuf::from(env::var_os(LIBRARY_VARIABLE).unwrap()));
    let auto = allocator("auto", true).unwrap();
    fake.fail(c"cudaHostRegister", 801);
    let block = auto.allocate(5 * MIB).unwrap();
    assert_eq!((fake.get(c"fake_live_allocations"), fake.get(c"fake_live_registrations")), (1, 0));
    drop(block);
    // Another refusal is one of both kinds.
    fake.fail(c"cudaHostRegister", 2);
    assert!(auto.allocate(5 * MIB).unwrap_err().is_pinning_refused());
    fake.fail(c"cudaHostRegister", 0);
    drop(auto.allocate(5 * MIB).unwrap());
    assert_eq!(fake.calls(c"cudaHostUnregister"), 1);
    fake.assert_clean();
}

#[test]
fn a_pool_of_registered_memory_grows_and_shrinks() {
    if !alone("a_pool_of_registered_memory_grows_and_shrinks", &[]) {
        return;
    }
    let fake = Fake::new(&[]);
    let cudart = fake.open().unwrap();
    let classes = [SizeClass::new("fixed", PAGE_BYTES, 2), SizeClass::new("test", MIB, 2).up_to(6)];
    let refused = Pool::new(&CudaAllocator::with(Arc::clone(&cudart)), &classes).unwrap_err();
    assert!(matches!(refused, MemError::FixedMemory { allocator: "cuda" }), "{refused:?}");
    assert!(refused.to_string().contains("allocator=\"registered\""), "{refused}");
    fake.assert_clean();
    for huge_pages in [false, true] {
        let backend = RegisteredAllocator { cudart: Arc::clone(&cudart), huge_pages, threads: 2 };
        let pool = Pool::new(&backend, &classes).unwrap();
        assert_eq!(fake.live(), 4, "each buffer is registered by itself");
        let held = pool.try_lease(MIB).unwrap().unwrap();
        pool.resize(MIB, 5).unwrap();
        assert_eq!(fake.live(), 7);
        pool.resize(MIB, 1).unwrap();
        assert_eq!(fake.live(), 3);
        // The third registration is refused: the two before it are undone.
        fake.set(c"fake_set_limit", 3 * MIB + 2 * PAGE_BYTES);
        let error = pool.resize(MIB, 6).unwrap_err();
        assert!(matches!(error, MemError::Cuda(CudaError::OutOfMemory { bytes: MIB, .. })), "{error:?}");
        assert_eq!((fake.live(), pool.counters().reserved_bytes), (3, MIB + 2 * PAGE_BYTES));
        pool.resize(MIB, 3).unwrap();
        fake.set(c"fake_set_limit", 64 * MIB);
        // Memory that cannot be unregistered stays a buffer.
        fake.fail(c"cudaHostUnregister", 719);
        assert!(pool.resize(MIB, 1).is_err());
        fake.fail(c"cudaHostUnregister", 0);
        assert_eq!((fake.live(), pool.free_buffers(MIB), pool.counters().leaving_bytes), (5, 2, 0));
        pool.resize(MIB, 0).unwrap();
        assert_eq!(pool.counters().leaving_bytes, MIB);
        drop(held);
        while pool.counters().leaving_bytes > 0 {
            thread::yield_now();
        }
        assert_eq!(fake.live(), 2);
        pool.resize(MIB, 4).unwrap();
        assert_eq!(fake.get(c"fake_cold_pages"), 0, "pages were registered before they were faulted in");
        drop(pool);
        fake.assert_clean();
    }
}

#[test]
fn memory_that_somebody_registered_already_is_told_from_other_errors() {
    let fake = Fake::new(&[]);
    let backend = RegisteredAllocator { cudart: fake.open().unwrap(), huge_pages: false, threads: 1 };
    // Another library unmaps memory without unregistering it, and the next mapping comes to lie
    // there. Registering the whole address space stands for it. SAFETY: the function has this
    // signature, and the fake reads nothing of a range that it refuses or that is not mapped.
    let rc = unsafe {
        mem::transmute::<*mut c_void, extern "C" fn(*mut c_void, usize, u32) -> c_int>(
            fake.symbol(c"cudaHostRegister"),
        )(ptr::without_provenance_mut(PAGE_BYTES), 1 << 47, 1)
    };
    assert_eq!(rc, 0);
    let error = backend.allocate(MIB).unwrap_err();
    assert!(matches!(error, MemError::Cuda(CudaError::AlreadyRegistered { bytes: MIB })), "{error:?}");
    assert_eq!(fake.live(), 1);
    assert_eq!(fake.get(c"fake_pending_error"), 0);
}

#[test]
fn a_block_that_cannot_be_unregistered_stays_mapped() {
    if !alone("a_block_that_cannot_be_unregistered_stays_mapped", &[]) {
        return;
    }
    let fake = Fake::new(&[]);
    let backend = RegisteredAllocator { cudart: fake.open().unwrap(), huge_pages: false, threads: 1 };
    let block = backend.allocate(MIB).unwrap();
    let address = block.address().as_ptr().addr();
    fake.fail(c"cudaHostUnregister", 719);
    drop(block);
    assert!(is_mapped(address), "CUDA would copy from the old pages for whatever is mapped there next");
    fake.fail(c"cudaHostUnregister", 713);
    let block = backend.allocate(MIB).unwrap();
    let address = block.address().as_ptr().addr();
    drop(block);
    assert!(!is_mapped(address), "a device reset ends registrations, and the memory is free to go");
}

#[test]
fn a_block_begins_at_a_page_where_cuda_cuts_it_out_of_a_larger_one() {
    let fake = Fake::new(&[]);
    fake.set(c"fake_set_misalignment", 1024);
    let block = CudaAllocator::with(fake.open().unwrap()).allocate(MIB).unwrap();
    assert!(block.address().as_ptr().addr().is_multiple_of(PAGE_BYTES));
    assert_eq!(block.bytes(), MIB);
    // The whole block is CUDA's memory: zeros were written to its last byte.
    assert_eq!((fake.calls(c"cudaHostAlloc"), fake.calls(c"cudaFreeHost")), (2, 1));
    drop(block);
    assert_eq!(fake.calls(c"cudaFreeHost"), 2);
    fake.assert_clean();
}

#[test]
fn an_event_is_done_when_its_stream_has_reached_it() {
    let fake = Fake::new(&[]);
    let cudart = fake.open().unwrap();
    let stream = ptr::without_provenance_mut(0x5EA);
    fake.set(c"fake_set_busy", 1);
    // SAFETY: the fake takes any stream.
    let event = unsafe { CudaEvents::new(&cudart).record(stream) }.unwrap();
    assert_eq!(fake.get(c"fake_last_stream"), 0x5EA);
    assert_eq!(fake.get(c"fake_last_flags"), 3, "an event that measures time, or that waits by spinning");
    assert!(!event.is_done().unwrap());
    assert_eq!(fake.get(c"fake_pending_error"), 0, "not being ready was left as an error");
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            event.wait().unwrap();
            fake.get(c"fake_busy")
        });
        while fake.calls(c"cudaEventSynchronize") == 0 {
            thread::yield_now();
        }
        assert!(!event.is_done().unwrap());
        fake.set(c"fake_set_busy", 0);
        assert_eq!(waiting.join().unwrap(), 0, "the wait ended before the stream did");
    });
    assert!(event.is_done().unwrap());
    drop(event);
    assert_eq!(fake.calls(c"cudaEventDestroy"), 1);
    fake.assert_clean();
}

#[test]
fn an_event_that_fails_is_an_error_and_is_destroyed_all_the_same() {
    let fake = Fake::new(&[]);
    let cudart = fake.open().unwrap();
    // SAFETY: the null pointer is the default stream.
    let record = || unsafe { CudaEvents::new(&cudart).record(ptr::null_mut()) };
    fake.fail(c"cudaEventCreateWithFlags", 719);
    assert!(record().unwrap_err().to_string().contains("cudaEventCreateWithFlags"));
    assert_eq!(fake.calls(c"cudaEventDestroy"), 0);
    fake.fail(c"cudaEventRecord", 719);
    assert!(record().unwrap_err().to_string().contains("cudaEventRecord"));
    assert_eq!(fake.calls(c"cudaEventDestroy"), 1);
    fake.fail(c"cudaEventRecord", 0);
    let event = record().unwrap();
    fake.fail(c"cudaEventQuery", 719);
    assert!(matches!(event.is_done(), Err(MemError::Cuda(CudaError::Call { code: 719, .. }))));
    fake.fail(c"cudaEventSynchronize", 719);
    assert!(matches!(event.wait(), Err(MemError::Cuda(CudaError::Call { code: 719, .. }))));
    fake.fail(c"cudaEventDestroy", 719);
    drop(event);
    assert_eq!(fake.calls(c"cudaEventDestroy"), 2);
    fake.assert_clean();
}

#[test]
fn a_dropped_event_is_recorded_again_once_it_is_done() {
    let fake = Fake::new(&[]);
    let cudart = fake.open().unwrap();
    let events = CudaEvents::new(&cudart);
    // SAFETY: the null pointer is the default stream.
    let record = || unsafe { events.record(ptr::null_mut()) }.unwrap();
    let created = || fake.calls(c"cudaEventCreateWithFlags");
    for _ in 0..100 {
        record().wait().unwrap();
        assert!(record().is_done().unwrap());
    }
    assert_eq!(created(), 1, "one at a time, and known to be done");
    let queries = fake.calls(c"cudaEventQuery");
    let event = record();
    (0..10).for_each(|_| assert!(event.is_done().unwrap()));
    assert_eq!(fake.calls(c"cudaEventQuery"), queries + 1, "CUDA was asked again for what is known");
    drop(event);
    // Dropped unseen: the next one asks, and finds it busy, done or failed.
    drop(record());
    fake.set(c"fake_set_busy", 1);
    let (first, second) = (record(), record());
    assert_eq!(created(), 3, "an event that may not be done was recorded again");
    drop((first, second));
    fake.set(c"fake_set_busy", 0);
    fake.fail(c"cudaEventQuery", 719);
    let third = record();
    assert_eq!(created(), 4, "an event of a stream that failed was recorded again");
    fake.fail(c"cudaEventQuery", 0);
    let more: Vec<_> = (0..4).map(|_| record()).collect();
    assert_eq!(created(), 5, "three were dropped, and are done");
    drop((third, more));
    assert_eq!((fake.calls(c"cudaEventDestroy"), fake.get(c"fake_live_events")), (0, 5));
    // The last event ends them all; of many, most end at once.
    let many: Vec<_> = (0..300).map(|_| record()).collect();
    drop(many);
    assert_eq!(fake.get(c"fake_live_events"), 256);
    let last = record();
    drop(events);
    assert_eq!(fake.get(c"fake_live_events"), 256);
    drop(last);
    fake.assert_clean();
}

#[test]
fn a_forked_child_releases_nothing() {
    let fake = Fake::new(&[]);
    let cudart = fake.open().unwrap();
    let mut backends = fake.backends();
    backends.push(Box::new(LockedAllocator::default()));
    backends.push(Box::new(PageableAllocator::default()));
    for backend in backends {
        let block = match backend.allocate(MIB) {
            Ok(block) => block,
            Err(MemError::Lock { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        // SAFETY: the null pointer is the default stream.
        let event = unsafe { CudaEvents::new(&cudart).record(ptr::null_mut()) }.unwrap();
        let calls = fake.symbol(c"fake_all_calls");
        // SAFETY: the query takes nothing and gives a size_t.
        let calls = unsafe { mem::transmute::<*mut c_void, extern "C" fn() -> usize>(calls) };
        let (address, bytes) = (block.address().as_ptr(), block.bytes());
        let own_mapping = backend.name() != "cuda";
        // The child reads its own copy of the counts.
        let before = calls();
        // SAFETY: the originals are used no more before `forget` ends the copies' lives in the
        // parent, and the child never sees the originals dropped.
        let copies = unsafe { (ptr::read(&block), ptr::read(&event)) };
        let mut copies = Some(copies);
        let quiet = in_child(|| {
            if own_mapping {
                if is_mapped(address.addr()) {
                    return false;
                }
                // The block must not unmap the child's mapping at the same address.
                // SAFETY: nothing of the child's is mapped there.
                let placed = unsafe {
                    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                    libc::mmap(address.cast(), bytes, libc::PROT_READ, flags, -1, 0)
                };
                if placed != address.cast() {
                    return false;
                }
            }
            drop(copies.take());
            calls() == before && is_mapped(address.addr())
        });
        mem::forget(copies);
        assert!(quiet, "{}", backend.name());
        assert_eq!(fake.get(c"fake_misuses"), 0);
        drop((block, event));
    }
    fake.assert_clean();
}

#[test]
fn twenty_threads_allocate_and_free_at_once() {
    const THREADS: usize = 20;
    const ROUNDS: usize = 30;
    let fake = Fake::new(&[]);
    for backend in fake.backends() {
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let backend = &backend;
                scope.spawn(move || {
                    let mut held: Option<(HostBlock, u8)> = None;
                    for round in 0..ROUNDS {
                        let mark = (thread * ROUNDS + round) as u8 | 1;
                        let mut block =
                            backend.allocate((1 + (thread + 7 * round) % 40) * PAGE_BYTES - 9).unwrap();
                        assert!(bytes_of(&mut block).iter().all(|byte| *byte == 0));
                        bytes_of(&mut block).fill(mark);
                        if let Some((mut old, mark)) = held.replace((block, mark)) {
                            assert!(bytes_of(&mut old).iter().all(|byte| *byte == mark), "shared memory");
                        }
                    }
                });
            }
        });
        fake.assert_clean();
    }
    assert_eq!(fake.calls(c"cudaHostAlloc"), THREADS * ROUNDS);
    assert_eq!(fake.calls(c"cudaFreeHost"), THREADS * ROUNDS);
    assert_eq!(fake.calls(c"cudaHostRegister"), 2 * THREADS * ROUNDS);
    assert_eq!(fake.calls(c"cudaHostUnregister"), 2 * THREADS * ROUNDS);
}

#[test]
fn the_real_runtime_works_or_says_what_is_missing() {
    if !alone("the_real_runtime_works_or_says_what_is_missing", &[]) {
        return;
    }
    match Cudart::find() {
        Ok(cudart) => {
            let registered =
                RegisteredAllocator { cudart: Arc::clone(&cudart), huge_pages: true, threads: 0 };
            for backend in [&CudaAllocator::with(Arc::clone(&cudart)) as &dyn HostAllocator, &registered] {
                let mut block = backend.allocate(33 * MIB + 1).unwrap();
                assert_eq!(block.bytes(), 33 * MIB + PAGE_BYTES);
                assert!(bytes_of(&mut block).iter().all(|byte| *byte == 0));
            }
            let pool = Pool::new(&registered, &[SizeClass::new("test", 5 * MIB, 2).up_to(8)]).unwrap();
            for count in [8, 1, 5, 0, 3] {
                pool.resize(5 * MIB, count).unwrap();
                let counters = pool.counters();
                assert_eq!((counters.reserved_bytes, counters.leaving_bytes), (count * 5 * MIB, 0));
            }
            // SAFETY: the null pointer is the default stream.
            let event = unsafe { CudaEvents::new(&cudart).record(ptr::null_mut()) }.unwrap();
            event.wait().unwrap();
            assert!(event.is_done().unwrap());
        }
        Err(MemError::Cuda(CudaError::LibraryNotFound { tried })) => {
            eprintln!("the real runtime is not tested: {tried}")
        }
        Err(
            error @ (MemError::Cuda(CudaError::NoDevice { .. }) | MemError::Cuda(CudaError::Driver { .. })),
        ) => {
            eprintln!("without a device: {error}");
            assert!(error.to_string().contains("libcudart"), "{error}");
        }
        Err(error) => panic!("{error:?}"),
    }
}
