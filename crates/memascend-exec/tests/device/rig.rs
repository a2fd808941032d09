//! A simulated device, and the storage for its gradients.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use memascend_exec::{
    Capture, DeviceEvent, DeviceGradient, DeviceLink, ExecError, GradientId, Gradients, InFlightCounter,
    Restore, Staging, Stash,
};
use memascend_kernels::{Dtype, GRADIENT_BLOCK, GradientStats};
use memascend_mem::{CudaAllocator, Lease, LeaseSlice, Pool, SizeClass};

use crate::fake::Fake;
use crate::support::gradients::{create, read, stats};
use crate::support::{Bench, Kind};

pub const BLOCK: usize = GRADIENT_BLOCK;
/// Elements of the chunks of these tests.
pub const CHUNK_ELEMENTS: usize = BLOCK;
/// Chunks that stored gradients leave free for transfers.
pub const RESERVE: usize = 8;
/// The stream that computes: its work is done at once.
pub const COMPUTE: usize = 0;

/// A device, and the storage for its gradients.
pub struct Rig {
    pub link: Arc<DeviceLink>,
    pub gradients: Arc<Gradients>,
    pub staging: Arc<Staging>,
    pub chunks: Pool,
    pub packs: Pool,
    pub bench: Bench,
    // Dropped last: the pools are its memory.
    pub fake: Arc<Fake>,
}

/// How a device runs its work. Nothing in it may change a result.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    pub lazy: bool,
    pub seed: usize,
    pub lateness: usize,
}

impl Timing {
    pub const AT_ONCE: Self = Self { lazy: false, seed: 1, lateness: 0 };

    pub fn all() -> [Self; 3] {
        [Self::AT_ONCE, Self { lazy: true, seed: 1, lateness: 0 }, Self { lazy: true, seed: 2, lateness: 40 }]
    }
}

impl Rig {
    pub fn new(staging_chunks: usize, timing: Timing) -> Self {
        Self::on(Arc::new(Fake::new(&[])), 0, staging_chunks, timing)
    }

    pub fn on(fake: Arc<Fake>, device: i32, staging_chunks: usize, timing: Timing) -> Self {
        Self::with(fake, device, staging_chunks, 1, timing)
    }

    /// Gradients are added in so many threads.
    pub fn adding_in(staging_chunks: usize, threads: usize, timing: Timing) -> Self {
        Self::with(Arc::new(Fake::new(&[])), 0, staging_chunks, threads, timing)
    }

    fn with(fake: Arc<Fake>, device: i32, staging_chunks: usize, threads: usize, timing: Timing) -> Self {
        fake.set(c"fake_set_seed", timing.seed);
        fake.set(c"fake_set_lateness", timing.lateness);
        fake.set(c"fake_set_lazy", usize::from(timing.lazy));
        let cudart = fake.open().unwrap();
        // First, as a runtime opens it: the arena is then pinned in the device's context.
        let link = Arc::new(DeviceLink::open(Arc::clone(&cudart), device).unwrap());
        let bench = Bench::new(Kind::Threads, 1);
        let class = |bytes, count| vec![SizeClass::new("test", bytes, count)];
        let groups = [class(CHUNK_ELEMENTS * 4, staging_chunks), class(1 << 20, 2)];
        let pools = Pool::carve(&CudaAllocator::with(cudart), &groups).unwrap();
        let [chunks, packs] = <[Pool; 2]>::try_from(pools).unwrap();
        let staging = Staging::new(Arc::clone(&bench.store), chunks.clone(), CHUNK_ELEMENTS * 4);
        let gradients = Arc::new(Gradients::new(staging.clone(), CHUNK_ELEMENTS).adding_in(threads));
        Self { link, gradients, staging: Arc::new(staging), chunks, packs, bench, fake }
    }

    pub fn create(&self, dtype: Dtype, numel: usize) -> (GradientId, Arc<InFlightCounter>) {
        create(&self.gradients, dtype, numel)
    }

    /// An event behind the computation of `values`.
    pub fn computed(&self, values: &[u8]) -> DeviceEvent {
        self.fake.access(values, true);
        // SAFETY: the stream is the default one.
        unsafe { self.link.record(COMPUTE) }.unwrap()
    }

    /// Has the computation go on after `event` and use `values`.
    pub fn use_after(&self, event: &DeviceEvent, values: &[u8]) {
        // SAFETY: as above.
        unsafe { self.link.wait(COMPUTE, event) }.unwrap();
        self.fake.access(values, false);
    }

    /// Captures `source`, which its caller keeps, unchanged, until the capture has ended.
    pub fn capture(
        &self,
        id: GradientId,
        start: usize,
        dtype: Dtype,
        source: &[u8],
        accumulate: bool,
        sums: Option<&Sums>,
    ) -> memascend_exec::Result<Capture> {
        let (ready, numel) = (self.computed(source), source.len() / dtype.bytes());
        let sums = sums.map(|sums| (sums.bytes.as_ptr().addr(), sums.count));
        let address = source.as_ptr().addr();
        let source = DeviceGradient { start, address, numel, accumulate, sums, ready };
        // SAFETY: the caller's promise.
        unsafe { self.link.capture(&self.gradients, id, source) }
    }

    /// Captures bf16 `values`, which its caller keeps, after an event that is recorded already.
    pub fn capture_after(&self, id: GradientId, values: &[u8], sums: &Sums, ready: DeviceEvent) -> Capture {
        let (address, numel) = (values.as_ptr().addr(), values.len() / 2);
        let sums = Some((sums.bytes.as_ptr().addr(), sums.count));
        let source = DeviceGradient { start: 0, address, numel, accumulate: false, sums, ready };
        // SAFETY: the caller's promise.
        unsafe { self.link.capture(&self.gradients, id, source) }.unwrap()
    }

    /// Puts `source` aside, which its caller keeps, unchanged, until it is copied.
    pub fn stash(&self, source: &[u8], spill: bool) -> Stash {
        let ready = self.computed(source);
        // SAFETY: the caller's promise.
        unsafe { self.link.stash(&self.staging, source.as_ptr().addr(), source.len(), &ready, spill) }
            .unwrap()
    }

    /// Has a stash copied to `target`, which its caller leaves alone until the event of the end.
    pub fn restore(&self, stash: &Stash, target: &mut [u8]) -> Restore {
        let after = self.computed(target);
        // SAFETY: the caller's promise.
        unsafe { self.link.restore(stash, target.as_mut_ptr().addr(), &after) }.unwrap()
    }

    /// Keeps every event from being done until [`Rig::go_on`].
    pub fn hold(&self) {
        self.fake.set(c"fake_set_busy", 1);
    }

    pub fn go_on(&self) {
        self.fake.set(c"fake_set_busy", 0);
    }

    pub fn read(&self, id: GradientId, bytes: usize) -> Vec<u8> {
        read(&self.gradients, id, bytes)
    }

    pub fn chunks_live(&self) -> usize {
        self.chunks.counters().live_bytes / (CHUNK_ELEMENTS * 4)
    }

    /// Ends everything and looks at the books.
    pub fn end(self) {
        self.link.close();
        let Self { link, gradients, staging, chunks, packs, bench, fake } = self;
        drop((link, gradients, staging));
        // Writes of gradients and stashes that were dropped have their chunks until they end.
        until("all chunks are returned", || chunks.counters().live_bytes == 0);
        drop((chunks, packs, bench));
        fake.assert_clean();
    }
}

/// Measurements of a gradient by a device: the sums of squares of its blocks, and the flag behind
/// them.
pub struct Sums {
    bytes: Vec<u8>,
    count: usize,
}

impl Sums {
    pub fn of(dtype: Dtype, values: &[u8]) -> Self {
        let blocks: Vec<_> = values.chunks(BLOCK * dtype.bytes()).map(|block| stats(dtype, block)).collect();
        let mut bytes: Vec<u8> = blocks.iter().flat_map(|block| block.sum_squares.to_ne_bytes()).collect();
        let flag = u32::from(blocks.iter().any(|block| block.non_finite));
        bytes.extend(flag.to_ne_bytes());
        Self { bytes, count: blocks.len() }
    }
}

pub fn assert_same(found: GradientStats, expected: GradientStats, what: &str) {
    assert_eq!(found.sum_squares.to_bits(), expected.sum_squares.to_bits(), "{what}: sum of squares");
    assert_eq!(found.non_finite, expected.non_finite, "{what}: whether all are finite");
}

/// Fills a lease that only this test uses.
pub fn fill(lease: &Arc<Lease>, value: u8) {
    let all = LeaseSlice::new(Arc::clone(lease), 0, lease.capacity());
    // SAFETY: the caller's promise.
    unsafe { all.as_mut_slice() }.fill(value);
}

/// Waits until something that another thread does has happened.
pub fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !happened() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The text of an [`ExecError::Device`].
pub fn device_failure<T>(result: memascend_exec::Result<T>) -> String {
    match result {
        Err(ExecError::Device(error)) => error.to_string(),
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("no error"),
    }
}
