//! Shared parts of the integration tests: stores on every engine, pools, random numbers and a watchdog.
#![allow(dead_code)] // every test binary uses its part

pub mod gradients;
mod model;

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use memascend_exec::{ExecError, Staging};
use memascend_kernels::{Algorithm, Dtype, Moments, Rule, Weight, round_bf16, round_f16};
use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass, round_up_to_page};
use memascend_nvme::testing::Faults;
use memascend_nvme::{EngineChoice, EngineOptions, Operation};
use memascend_store::{Store, StoreOptions, TensorId};

#[allow(unused_imports)] // as above
pub use self::model::{Kept, Model, Setup, Shape, State, Unit, by_address, scalars_of};

/// How long anything in a test may take before it counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of an update slot for each element of a chunk: enough for AdamW with fp32 moments on bf16
/// or fp32 weights.
pub const SLOT_BYTES_PER_ELEMENT: usize = 12;

/// AdamW with fp32 moments and whole masters.
pub fn adamw(weight: Weight) -> Rule {
    Rule { algorithm: Algorithm::AdamW { amsgrad: false }, moments: Moments::F32, weight }
}

/// Every rule there is.
pub fn every_rule() -> Vec<Rule> {
    let mut rules = Vec::new();
    for algorithm in Algorithm::ELEMENTWISE {
        for moments in [Moments::F32, Moments::Bf16, Moments::Block8] {
            for weight in [Weight::Bf16Split, Weight::Bf16, Weight::F16Master, Weight::F32] {
                rules.push(Rule { algorithm, moments, weight });
            }
        }
    }
    rules
}

pub fn dtype_of(rule: Rule) -> Dtype {
    match rule.weight {
        Weight::Bf16Split | Weight::Bf16 => Dtype::Bf16,
        Weight::F16Master => Dtype::F16,
        Weight::F32 => Dtype::F32,
    }
}

/// Which engine a store runs on.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    Ring,
    Threads,
    Sim(Faults),
}

impl Kind {
    /// Every engine this machine has, the simulated one reordering from `seed`.
    pub fn all(seed: u64) -> Vec<Self> {
        let mut kinds = vec![Self::Threads, Self::Sim(Faults { seed, reorder: 7, ..Faults::default() })];
        let directory = tempfile::tempdir().unwrap();
        let options = StoreOptions {
            engine: EngineOptions { choice: EngineChoice::Ring, ..EngineOptions::default() },
            ..StoreOptions::default()
        };
        match Store::create(&[directory.path().to_owned()], &options) {
            Ok(_) => kinds.push(Self::Ring),
            Err(error) => eprintln!("ring engine not tested: {error}"),
        }
        kinds
    }
}

/// A store in temporary directories.
pub struct Bench {
    pub store: Arc<Store>,
    _root: Option<tempfile::TempDir>,
}

impl Bench {
    pub fn new(kind: Kind, volumes: usize) -> Self {
        let root = match kind {
            // Nothing is written to it, but making and removing files takes a disk long.
            Kind::Sim(_) => tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap(),
            Kind::Ring | Kind::Threads => tempfile::tempdir().unwrap(),
        };
        let directories: Vec<PathBuf> =
            (0..volumes).map(|index| root.path().join(index.to_string())).collect();
        let choice = match kind {
            Kind::Ring => EngineChoice::Ring,
            Kind::Threads => EngineChoice::Threads,
            Kind::Sim(faults) => EngineChoice::Sim(faults),
        };
        let engine = EngineOptions { choice, ..EngineOptions::default() };
        let options = StoreOptions { engine, ..StoreOptions::default() };
        Self { store: Arc::new(Store::create(&directories, &options).unwrap()), _root: Some(root) }
    }

    /// A store of the caller's.
    pub fn on(store: Store) -> Self {
        Self { store: Arc::new(store), _root: None }
    }

    /// Writes `bytes` to a new tensor.
    pub fn put(&self, name: &str, bytes: &[u8]) -> memascend_exec::Result<TensorId> {
        let id = self.store.create_tensor(name, bytes.len() as u64)?;
        let pending = Arc::default();
        self.staging().write(self.store.current(id), bytes, &pending)?;
        pending.wait()?;
        Ok(id)
    }

    /// Reads the first `bytes` bytes of a tensor.
    pub fn get(&self, id: TensorId, bytes: usize) -> memascend_exec::Result<Vec<u8>> {
        let mut target = vec![0; bytes];
        self.staging().read(self.store.current(id), &mut target)?;
        Ok(target)
    }

    /// As [`Bench::get`], where reading may fail: piece by piece until each succeeds.
    pub fn get_at_last(&self, id: TensorId, bytes: usize) -> Vec<u8> {
        let (extent, piece_bytes) = (self.store.current(id), 64 << 10);
        let mut target = vec![0; bytes];
        let pool = pool(piece_bytes, 1);
        for (index, part) in target.chunks_mut(piece_bytes).enumerate() {
            let lease = Arc::new(pool.try_lease(piece_bytes).unwrap().expect("the last was returned"));
            let buffer = LeaseSlice::new(lease, 0, round_up_to_page(part.len()));
            let offset = (index * piece_bytes) as u64;
            while self.store.transfer_wait(Operation::Read, extent, offset, buffer.clone()).is_err() {}
            // SAFETY: the transfer has ended.
            part.copy_from_slice(&unsafe { buffer.as_slice() }[..part.len()]);
        }
        target
    }

    fn staging(&self) -> Staging {
        Staging::new(Arc::clone(&self.store), pool(1 << 20, 3), 1 << 20)
    }
}

pub fn pool(bytes: usize, count: usize) -> Pool {
    Pool::new(&PageableAllocator::default(), &[SizeClass::new("test", bytes, count)]).unwrap()
}

/// Whether the message says which tensor of the unit failed.
pub fn names_a_tensor(error: &ExecError) -> bool {
    error.to_string().starts_with("layer.0")
}

/// Runs `body` and panics if it neither ends nor panics in time: a test must fail, not hang.
pub fn within_patience(what: &str, body: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        let _ = sender.send(());
    });
    match receiver.recv_timeout(PATIENCE) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: hung for {PATIENCE:?}"),
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {
            if let Err(panic) = thread.join() {
                eprintln!("failed: {what}");
                std::panic::resume_unwind(panic);
            }
        }
    }
}

/// Random numbers from a seed (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// `numel` values between -1 and 1, as the bytes of `dtype`.
    pub fn values(&mut self, dtype: Dtype, numel: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(numel * dtype.bytes());
        for _ in 0..numel {
            let value = (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0;
            match dtype {
                Dtype::Bf16 => bytes.extend(round_bf16(value).to_le_bytes()),
                Dtype::F16 => bytes.extend(round_f16(value).to_le_bytes()),
                Dtype::F32 => bytes.extend(value.to_le_bytes()),
            }
        }
        bytes
    }
}
