//! A store on simulated disks, seed by seed, against a model in memory: whatever the disks do, a
//! transfer that says all is well has moved the right bytes, one that fails says whose and why, and
//! no buffer is lost.
//!
//! `MEMASCEND_SEEDS` is how many seeds are run, `MEMASCEND_SEED` runs one of them alone.

mod seeds;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};
use memascend_nvme::testing::{Faults, SimDisk, SimEngine};
use memascend_nvme::{BLOCK_BYTES, Engine, OpenedEngine, Operation};
use memascend_store::{Extent, STRIPE_BYTES, Store, StoreError, StoreOptions};
use seeds::for_each_seed;

const SEEDS: u64 = 3_000;
const BLOCK: u64 = BLOCK_BYTES as u64;
/// The longest transfer, in blocks: two parts of a request and some more.
const BLOCKS_MAX: u64 = 20;
const BUFFER_BYTES: usize = BLOCKS_MAX as usize * BLOCK_BYTES;
const BUFFERS: usize = 8;
/// How often a read that fails is tried again before the test gives up on it.
const TRIES: usize = 1000;
/// How long a thread may take for its work before it counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// Random numbers from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn one_of(&mut self, choices: [u64; 4]) -> u64 {
        choices[self.below(4) as usize]
    }
}

/// Counts over all seeds: a test that tries nothing would pass too.
#[derive(Debug, Default)]
struct Tried {
    transfers: u64,
    across_volumes: u64,
    failed: u64,
    damaged: u64,
    blocks_verified: u64,
    crashes: u64,
    blocks_survived: u64,
    blocks_old_or_new: u64,
    dropped_in_flight: u64,
}

#[derive(Clone, Copy, Default)]
struct Block {
    /// Which write it holds; none where it cannot be known.
    now: Option<u64>,
    /// Which write it held at the last sync, if that is known.
    synced: Option<u64>,
    /// Written since, or perhaps.
    dirty: bool,
}

struct Tensor {
    name: String,
    extent: Extent,
    blocks: Vec<Block>,
    /// First block and number of each transfer under way, which no other may overlap.
    busy: Vec<(u64, u64)>,
}

/// Operations on the store's table, to be repeated after a crash.
enum Change {
    Allocated(String, u64),
    Freed(Extent),
}

struct Transfer {
    operation: Operation,
    tensor: usize,
    first: u64,
    count: u64,
    version: u64,
    /// The test's own handle, where there is something to look at.
    buffer: Option<LeaseSlice>,
}

type Ends = Arc<Mutex<Vec<(usize, Result<(), StoreError>)>>>;

/// The words of a block of a tensor as a certain write left it: others at every place and after
/// every write.
fn words(tensor: usize, version: u64, block: u64) -> impl Iterator<Item = u64> {
    let base = (tensor as u64) << 48 ^ version << 24 ^ block << 12;
    (base..base + BLOCK / 8).map(|word| word.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

fn fill(bytes: &mut [u8], tensor: usize, version: u64, block: u64) {
    for (eight, word) in bytes.as_chunks_mut().0.iter_mut().zip(words(tensor, version, block)) {
        *eight = word.to_le_bytes();
    }
}

fn holds(bytes: &[u8], tensor: usize, version: u64, block: u64) -> bool {
    let mut words = words(tensor, version, block);
    bytes.as_chunks().0.iter().all(|eight| Some(u64::from_le_bytes(*eight)) == words.next())
}

/// Faults of every volume, which differ only in their seeds.
fn faults(random: &mut Random) -> Faults {
    let mut faults = Faults { reorder: random.below(9) as usize, ..Faults::default() };
    let kind = random.below(10);
    if kind > 0 {
        faults.short_one_in = random.one_of([0, 1, 2, 5]);
        faults.again_one_in = random.one_of([0, 2, 5, 20]);
    }
    if kind > 3 {
        faults.read_error_one_in = random.one_of([0, 6, 15, 60]);
        faults.write_error_one_in = random.one_of([0, 6, 15, 60]);
    }
    faults.torn = random.one_in(2);
    faults.lost_flush_one_in = u64::from(random.one_in(4)) * 2;
    faults.misdirected_one_in = u64::from(random.one_in(12)) * 20;
    faults
}

struct Trial<'a> {
    random: Random,
    faults: Faults,
    /// Engines with a thread each, instead of the test's.
    running: bool,
    directories: Vec<PathBuf>,
    rates: Vec<f64>,
    disks: Vec<Arc<SimDisk>>,
    engines: Vec<Arc<SimEngine>>,
    store: Option<Arc<Store>>,
    pool: Pool,
    /// By their number in the order in which they were made.
    tensors: BTreeMap<usize, Tensor>,
    made: usize,
    history: Vec<Change>,
    transfers: Vec<Transfer>,
    /// Indices of the transfers whose end was not seen yet.
    under_way: Vec<usize>,
    ends: Ends,
    versions: u64,
    /// Errors that the disks gave, and transfers that failed, up to the last time that nothing was
    /// under way.
    accounted: (u64, u64),
    tried: &'a mut Tried,
}

impl<'a> Trial<'a> {
    fn new(seed: u64, root: &Path, tried: &'a mut Tried) -> Self {
        let mut random = Random(seed);
        let volumes = 1 + random.below(3);
        let faults = faults(&mut random);
        let disk = |index| SimDisk::new(Faults { seed: seed * 3 + index, ..faults });
        let unequal = random.one_in(2);
        let rate = |_| 1.0 + random.below(4) as f64;
        let rates = if unequal { (0..volumes).map(rate).collect() } else { Vec::new() };
        let class = SizeClass::new("test", BUFFER_BYTES, BUFFERS);
        let mut trial = Self {
            random,
            faults,
            running: seed.is_multiple_of(20),
            directories: (0..volumes).map(|index| root.join(index.to_string())).collect(),
            rates,
            disks: (0..volumes).map(disk).collect(),
            engines: Vec::new(),
            store: None,
            pool: Pool::new(&PageableAllocator::default(), &[class]).unwrap(),
            tensors: BTreeMap::new(),
            made: 0,
            history: Vec::new(),
            transfers: Vec::new(),
            under_way: Vec::new(),
            ends: Ends::default(),
            versions: 0,
            accounted: (0, tried.failed),
            tried,
        };
        trial.open();
        trial
    }

    /// Opens a store on the disks, which may have been in use before.
    fn open(&mut self) {
        // Not direct: it makes no difference to the simulation, and works everywhere.
        let options = StoreOptions { direct: false, rates: self.rates.clone(), ..StoreOptions::default() };
        let engines = RefCell::new(Vec::new());
        let store = Store::create_with(&self.directories, &options, &|file| {
            let disk = Arc::clone(&self.disks[engines.borrow().len()]);
            let open = if self.running { SimEngine::running } else { SimEngine::new };
            let engine = Arc::new(open(file, disk));
            engines.borrow_mut().push(Arc::clone(&engine));
            Ok(OpenedEngine { engine, notice: None })
        });
        self.store = Some(Arc::new(store.unwrap()));
        self.engines = engines.into_inner();
    }

    fn close(&mut self) {
        self.engines.clear();
        self.store = None;
    }

    fn store(&self) -> &Store {
        self.store.as_ref().expect("open")
    }

    /// Whether blocks hold the bytes that the disks reported.
    fn trusted(&self) -> bool {
        self.disks.iter().all(|disk| disk.injected().misdirected == 0)
    }

    fn run(&mut self) {
        let operations = 30 + self.random.below(71);
        self.operate(operations);
        if self.random.one_in(2) {
            self.crash();
            self.operate(10);
        }
        self.end();
    }

    fn operate(&mut self, operations: u64) {
        for _ in 0..operations {
            match self.random.below(20) {
                0..3 => self.allocate(),
                3 => self.free(),
                4..10 => self.transfer(Operation::Write),
                10..17 => self.transfer(Operation::Read),
                17 => self.sync(),
                _ => self.settle(),
            }
        }
    }

    fn allocate(&mut self) {
        // Up to a little before the end of a stripe, so that the next lies across it.
        if self.random.one_in(2) {
            let used = self.tensors.values().map(|tensor| tensor.extent.end()).max().unwrap_or(0);
            let before = (1 + self.random.below(BLOCKS_MAX)) * BLOCK;
            let bytes = (used + before).next_multiple_of(STRIPE_BYTES) - used - before;
            if bytes > 0 {
                self.make(bytes);
            }
        }
        // Lengths need not be whole blocks.
        let bytes = (1 + self.random.below(BLOCKS_MAX)) * BLOCK - self.random.below(3);
        self.make(bytes);
    }

    fn make(&mut self, bytes: u64) {
        let name = format!("tensor {}", self.made);
        let extent = self.store().allocate(&name, bytes).unwrap();
        assert_eq!(extent.bytes, bytes.next_multiple_of(BLOCK));
        let apart =
            |tensor: &Tensor| tensor.extent.end() <= extent.offset || extent.end() <= tensor.extent.offset;
        assert!(self.tensors.values().all(apart), "{name} lies on another tensor");
        self.history.push(Change::Allocated(name.clone(), bytes));
        let blocks = vec![Block::default(); (extent.bytes / BLOCK) as usize];
        self.tensors.insert(self.made, Tensor { name, extent, blocks, busy: Vec::new() });
        self.made += 1;
    }

    fn some_tensor(&mut self) -> Option<usize> {
        let count = self.tensors.len();
        let number = (count > 0).then(|| self.random.below(count as u64) as usize)?;
        self.tensors.keys().nth(number).copied()
    }

    fn free(&mut self) {
        let Some(index) = self.some_tensor() else { return };
        if self.tensors[&index].busy.is_empty() {
            let tensor = self.tensors.remove(&index).expect("it was just found");
            self.store().free(tensor.extent);
            self.history.push(Change::Freed(tensor.extent));
        }
    }

    /// A buffer, after whatever has to end before there is one.
    fn buffer(&mut self, blocks: u64) -> LeaseSlice {
        let lease = self.pool.try_lease(BUFFER_BYTES).unwrap().unwrap_or_else(|| {
            self.settle();
            self.pool.try_lease(BUFFER_BYTES).unwrap().expect("nothing is under way: every buffer is free")
        });
        LeaseSlice::new(Arc::new(lease), 0, blocks as usize * BLOCK_BYTES)
    }

    /// Starts moving some blocks of some tensor.
    fn transfer(&mut self, operation: Operation) {
        let Some(index) = self.some_tensor() else { return };
        let blocks = self.tensors[&index].blocks.len() as u64;
        // Often the whole of it, so that there is something to be read again.
        let first = if self.random.one_in(2) { 0 } else { self.random.below(blocks) };
        let most = (blocks - first).min(BLOCKS_MAX);
        let count = if self.random.one_in(2) { most } else { 1 + self.random.below(most) };
        let overlaps = |(other, length): &(u64, u64)| first < other + length && *other < first + count;
        if self.tensors[&index].busy.iter().any(overlaps) {
            return;
        }
        let buffer = self.buffer(count);
        self.versions += 1;
        let version = self.versions;
        // SAFETY: the only handle to the buffer.
        let bytes = unsafe { buffer.as_mut_slice() };
        match operation {
            Operation::Read => bytes.fill(0xEE),
            Operation::Write => {
                for (block, bytes) in (first..).zip(bytes.chunks_mut(BLOCK_BYTES)) {
                    fill(bytes, index, version, block);
                }
            }
        }
        let kept = (operation == Operation::Read).then(|| buffer.clone());
        let tensor = self.tensors.get_mut(&index).expect("it was just found");
        tensor.busy.push((first, count));
        let extent = tensor.extent;
        let (start, end) = (extent.offset + first * BLOCK, extent.offset + (first + count) * BLOCK - 1);
        let across = self.disks.len() > 1 && start / STRIPE_BYTES != end / STRIPE_BYTES;
        self.tried.across_volumes += u64::from(across);
        self.tried.transfers += 1;
        let id = self.transfers.len();
        self.transfers.push(Transfer { operation, tensor: index, first, count, version, buffer: kept });
        self.under_way.push(id);
        let ends = Arc::clone(&self.ends);
        let done = Box::new(move |result| ends.lock().unwrap().push((id, result)));
        self.store().transfer(operation, extent, first * BLOCK, buffer, done);
        self.harvest();
    }

    /// Takes note of the transfers that have ended.
    fn harvest(&mut self) {
        let ends = std::mem::take(&mut *self.ends.lock().unwrap());
        for (id, result) in ends {
            let at = self.under_way.iter().position(|under_way| *under_way == id);
            self.under_way.swap_remove(at.expect("a transfer ends once"));
            self.ended(id, &result);
        }
    }

    fn ended(&mut self, id: usize, result: &Result<(), StoreError>) {
        let trusted = self.trusted();
        let Transfer { operation, tensor: index, first, count, version, ref mut buffer } = self.transfers[id];
        let buffer = buffer.take();
        let tensor = self.tensors.get_mut(&index).expect("not freed while busy");
        tensor.busy.retain(|busy| *busy != (first, count));
        if let Err(StoreError::Damaged(damage)) = result {
            // Bytes that another write overwrote.
            assert!(!trusted && operation == Operation::Read && damage.tensor == tensor.name, "{damage}");
            self.tried.damaged += 1;
        } else if let Err(error) = result {
            self.tried.failed += 1;
            let (one_in, errnos): (_, &[i32]) = match operation {
                Operation::Read => (self.faults.read_error_one_in, &[libc::EIO]),
                Operation::Write => (self.faults.write_error_one_in, &[libc::EIO, libc::ENOSPC]),
            };
            assert!(one_in > 0, "an error out of nowhere: {error}");
            assert!(error.errno().is_some_and(|errno| errnos.contains(&errno)), "{error}");
            let StoreError::Tensor { tensor: named, .. } = error else { panic!("of no tensor: {error}") };
            assert_eq!(*named, tensor.name);
        }
        let blocks = &mut tensor.blocks[first as usize..(first + count) as usize];
        if operation == Operation::Write {
            for block in blocks {
                *block = Block { now: result.is_ok().then_some(version), dirty: true, ..*block };
            }
        } else if result.is_ok() && trusted {
            let buffer = buffer.expect("kept for reads");
            // SAFETY: the transfer has ended.
            let bytes = unsafe { buffer.as_slice() };
            for ((number, block), bytes) in (first..).zip(blocks).zip(bytes.chunks(BLOCK_BYTES)) {
                if let Some(version) = block.now {
                    self.tried.blocks_verified += 1;
                    let right = holds(bytes, index, version, number);
                    assert!(right, "block {number} of {} does not hold write {version}", tensor.name);
                }
            }
        }
    }

    /// Waits until nothing is under way.
    fn settle(&mut self) {
        if self.running {
            self.wait_for("transfers", |trial| trial.ends.lock().unwrap().len() == trial.under_way.len());
        } else {
            self.engines.iter().for_each(|engine| engine.drain());
        }
        self.harvest();
        self.nothing_is_under_way();
        let in_flight = |engine: &Arc<SimEngine>| engine.counters().in_flight;
        assert!(self.engines.iter().all(|engine| in_flight(engine) == 0));
    }

    fn nothing_is_under_way(&mut self) {
        assert!(self.under_way.is_empty(), "transfers without an end: {:?}", self.under_way);
        assert_eq!(self.pool.counters().live_bytes, 0, "buffers of transfers that have ended");
        let (errors, failed) = (self.errors(), self.tried.failed);
        let (errors_before, failed_before) = std::mem::replace(&mut self.accounted, (errors, failed));
        assert_eq!(
            errors > errors_before,
            failed > failed_before,
            "an error of a part is one of its transfer"
        );
    }

    fn wait_for(&self, what: &str, ended: impl Fn(&Self) -> bool) {
        let begun = std::time::Instant::now();
        while !ended(self) {
            assert!(begun.elapsed() < PATIENCE, "waited for {what} for {PATIENCE:?}");
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Errors that the disks have given.
    fn errors(&self) -> u64 {
        let injected = self.disks.iter().map(|disk| disk.injected());
        injected.map(|injected| injected.read_errors + injected.write_errors).sum()
    }

    fn sync(&mut self) {
        self.harvest();
        self.store().sync().unwrap();
        for tensor in self.tensors.values_mut() {
            for (number, block) in (0..).zip(&mut tensor.blocks) {
                let busy = tensor.busy.iter().any(|(first, count)| (*first..first + count).contains(&number));
                *block = Block { synced: if busy { None } else { block.now }, dirty: busy, ..*block };
            }
        }
    }

    /// The power fails. Synced blocks are there afterwards; each block written since is old or new.
    fn crash(&mut self) {
        self.settle();
        self.disks.iter().for_each(|disk| disk.crash());
        self.close();
        self.open();
        self.tried.crashes += 1;
        let mut made = 0..;
        for change in &self.history {
            match change {
                Change::Allocated(name, bytes) => {
                    let extent = self.store().allocate(name, *bytes).unwrap();
                    let index = made.next().expect("there is no last number");
                    let same = self.tensors.get(&index).is_none_or(|tensor| tensor.extent == extent);
                    assert!(same, "{name} lies elsewhere the second time");
                }
                Change::Freed(extent) => self.store().free(*extent),
            }
        }
        let lost = self.disks.iter().any(|disk| disk.injected().lost_flushes > 0);
        let known = self.trusted() && !lost;
        let mut tensors = std::mem::take(&mut self.tensors);
        for (index, tensor) in &mut tensors {
            let ranges = (0..tensor.blocks.len()).step_by(BLOCKS_MAX as usize);
            for first in ranges {
                let last = tensor.blocks.len().min(first + BLOCKS_MAX as usize);
                let blocks = &mut tensor.blocks[first..last];
                if known && blocks.iter().any(|block| block.synced.is_some()) {
                    let buffer = self.read_at_last(tensor.extent, first as u64, blocks.len() as u64);
                    // SAFETY: the transfer has ended.
                    let bytes = unsafe { buffer.as_slice() };
                    for ((number, block), bytes) in
                        (first as u64..).zip(&*blocks).zip(bytes.chunks(BLOCK_BYTES))
                    {
                        self.survived(*index, number, block, bytes, &tensor.name);
                    }
                }
                blocks.fill(Block::default());
            }
        }
        self.tensors = tensors;
        self.accounted.0 = self.errors();
    }

    fn survived(&mut self, index: usize, number: u64, block: &Block, bytes: &[u8], name: &str) {
        let Some(synced) = block.synced else { return };
        if !block.dirty {
            self.tried.blocks_survived += 1;
            assert!(holds(bytes, index, synced, number), "block {number} of {name} was synced and is lost");
        } else if let Some(now) = block.now {
            self.tried.blocks_old_or_new += 1;
            let (mut old, mut new) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
            fill(&mut old, index, synced, number);
            fill(&mut new, index, now, number);
            let whole = if self.faults.torn { 512 } else { BLOCK_BYTES };
            let pieces = bytes.chunks(whole).zip(old.chunks(whole)).zip(new.chunks(whole));
            for ((piece, old), new) in pieces {
                assert!(piece == old || piece == new, "block {number} of {name} is neither old nor new");
            }
        }
    }

    /// Blocks of a tensor, read until that succeeds.
    fn read_at_last(&mut self, extent: Extent, first: u64, count: u64) -> LeaseSlice {
        for _ in 0..TRIES {
            let buffer = self.buffer(count);
            let (sender, receiver) = mpsc::channel();
            let done = Box::new(move |result| sender.send(result).unwrap());
            self.store().transfer(Operation::Read, extent, first * BLOCK, buffer.clone(), done);
            if !self.running {
                self.engines.iter().for_each(|engine| engine.drain());
            }
            match receiver.recv_timeout(PATIENCE).expect("every transfer ends") {
                Ok(()) => return buffer,
                Err(error) => assert!(self.faults.read_error_one_in > 0, "{error}"),
            }
        }
        panic!("{TRIES} reads failed");
    }

    /// Lets go of the store, often with transfers in flight, which end all the same.
    fn end(&mut self) {
        if self.random.one_in(3) {
            self.settle();
        } else {
            for operation in [Operation::Write, Operation::Read, Operation::Write] {
                self.transfer(operation);
            }
            self.tried.dropped_in_flight += self.under_way.len() as u64;
        }
        // The thread that is told of a transfer's end may be the last to know the store: it then
        // goes from the engine's thread.
        if self.running && self.random.one_in(2) {
            self.make(BLOCK);
            let extent = self.tensors[&(self.made - 1)].extent;
            let buffer = self.buffer(1);
            let store = self.store.take().expect("open");
            self.engines.clear();
            let (sender, receiver) = mpsc::channel();
            let holder = Arc::clone(&store);
            let done = Box::new(move |result: Result<(), StoreError>| {
                drop(holder);
                sender.send(result.is_err()).unwrap();
            });
            store.transfer(Operation::Write, extent, 0, buffer, done);
            drop(store);
            let failed = receiver.recv_timeout(PATIENCE).expect("every transfer ends");
            self.tried.failed += u64::from(failed);
            self.wait_for("the store's files to go", |trial| {
                trial.directories.iter().all(|directory| !directory.exists())
            });
            self.wait_for("transfers", |trial| trial.ends.lock().unwrap().len() == trial.under_way.len());
        }
        self.close();
        self.harvest();
        self.nothing_is_under_way();
    }
}

#[test]
fn a_store_moves_the_right_bytes_or_says_what_failed() {
    // In memory where that is possible: the volumes' files stay empty, but making and removing them
    // takes a disk long.
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let mut tried = Tried::default();
    for_each_seed(SEEDS, |seed| Trial::new(seed, root.path(), &mut tried).run());
    eprintln!("{tried:?}");
    // Of all seeds or none: a few may well not do everything.
    if tried.transfers > 10_000 {
        let Tried { failed, across_volumes, blocks_verified, dropped_in_flight, .. } = tried;
        let Tried { crashes, blocks_survived, blocks_old_or_new, .. } = tried;
        assert!(tried.damaged > 0, "{tried:?}");
        for count in [failed, across_volumes, blocks_verified, dropped_in_flight] {
            assert!(count > tried.transfers / 100, "{tried:?}");
        }
        for count in [crashes, blocks_survived, blocks_old_or_new] {
            assert!(count > tried.transfers / 500, "{tried:?}");
        }
    }
}
