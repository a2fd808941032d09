use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, unbounded};
use memascend_mem::{Lease, LeaseSlice, Origin, PAGE_BYTES, Pool, round_up_to_page};
use memascend_nvme::Operation;
use memascend_store::{Extent, Rewrite, Store, TensorId};

use crate::files::{FilePart, FileReader};
use crate::gradients::{Chunk, SourcePlace};
use crate::{GradientSource, OptimError, Pending, Result, Underway};
use memascend_kernels::{Dtype, GRADIENT_BLOCK, Plane, Rule, StepScalars, step};

/// How long an update slot may take to come free before the drive counts as hung, in seconds.
const PATIENCE_SECONDS: u64 = 120;

/// A raw address of host memory whose owner outlives the job it is given to.
#[derive(Debug, Clone, Copy)]
pub struct Address(pub *mut u8);

// SAFETY: an address is a number; whoever makes it vouches for the memory until the job has ended.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// The weights of a unit: the tensors that make them up and the lease they are read into.
pub struct UnitWeights {
    /// The tensors, in the order of their places in the lease.
    pub tensors: Vec<UnitTensor>,
    /// What lies outside of the store and is only read.
    pub files: Arc<[FilePart]>,
    /// A buffer that holds them all.
    pub lease: Arc<Lease>,
}

/// The weights of one tensor of a unit.
#[derive(Debug, Clone, Copy)]
pub struct UnitTensor {
    /// Which it is in the store.
    pub tensor: TensorId,
    /// Where it begins in the unit, in bytes: a multiple of the page.
    pub offset: usize,
    /// Length in bytes, whole pages.
    pub bytes: usize,
}

/// Elements of a tensor that one optimizer step updates with the same hyper-parameters: one parameter.
pub struct Segment {
    /// First element within the tensor.
    pub start: usize,
    /// Number of elements.
    pub numel: usize,
    /// What the step computes, on which of the tensor's planes. States of 8 bits take a tensor of one segment.
    pub rule: Rule,
    /// Hyper-parameters of this step.
    pub scalars: StepScalars,
    /// For each of the rule's planes, whether the parameter has no such state yet: it begins as zeros, whatever the plane
    /// holds.
    pub fresh: Vec<bool>,
    /// The segment's weights and gradients in host memory, for a tensor that is not part of a unit.
    pub host: Option<(Address, Address)>,
}

/// One array of states of a tensor, on the SSD.
pub struct UpdatePlane {
    /// What is kept, and how.
    pub plane: Plane,
    /// Where: [`Plane::bytes`] of the tensor's elements.
    pub tensor: TensorId,
    /// Whether it has been written; before, it is zeros and is not read.
    pub written: bool,
}

/// One tensor of the store to be updated: its states and what to do.
pub struct UpdateTensor {
    /// Element type of weight and gradient.
    pub dtype: Dtype,
    /// Elements, padding included.
    pub numel: usize,
    /// Where the weights begin in the unit, in bytes: that of one of its tensors; ignored for tensors in host memory.
    pub weight_offset: usize,
    /// The states of every segment's rule; segments whose rules agree on a plane share it.
    pub planes: Vec<UpdatePlane>,
    /// The gradient.
    pub gradient: GradientSource,
    /// What to update, in ascending order; elements in no segment stay as they are.
    pub segments: Vec<Segment>,
}

/// A job under way.
pub struct Ticket {
    ready: Arc<Pending>,
}

impl Ticket {
    /// Waits until the unit's (updated) weights are in the lease. Write-back may still be under way; the
    /// unit's [`Pending`] counts it.
    pub fn wait(&self) -> Result<()> {
        self.ready.wait()
    }

    /// Whether [`Ticket::wait`] would return at once.
    pub fn is_ready(&self) -> bool {
        self.ready.is_idle()
    }
}

/// Reads units, updating them on the way where asked, in a pipeline over bounded staging: while one chunk
/// is computed, the next are read and the last are written.
pub struct Executor {
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    compute_threads: usize,
    /// Nanoseconds that kernels ran, over all threads.
    busy: Arc<AtomicU64>,
    origin: Origin,
}

struct Job {
    pending: Arc<Pending>,
    weights: Option<UnitWeights>,
    updates: Vec<UpdateTensor>,
    ticket: Arc<Ticket>,
    ready: Underway,
}

/// A piece of a tensor on its way through the pipeline.
struct Work {
    tensor: Arc<UpdateTensor>,
    first: usize,
    numel: usize,
    areas: Areas,
    /// The piece's weights in the unit's lease.
    weights: Option<LeaseSlice>,
    targets: Arc<Targets>,
    gradient_chunk: Option<Chunk>,
    pending: Arc<Pending>,
    // Declared last, so that even a dropped piece returns its buffers before anybody hears of its end.
    /// Counted by the unit's [`Pending`], so that no later job reads the unit before this update.
    update: Underway,
    /// Counted by the job's ticket.
    ready: Underway,
}

/// Where a tensor's new values go: not where the old ones lie, as long as a generation needs those.
struct Targets {
    weights: Option<Extent>,
    /// In the order of the tensor's planes.
    planes: Vec<Extent>,
}

/// The reads of a piece under way; the last to end passes the piece on.
struct Reads {
    left: AtomicUsize,
    outcome: Mutex<(Option<OptimError>, Option<Work>)>,
    computed: Sender<Work>,
}

impl Executor {
    /// Starts the coordinator and `compute_threads` kernel threads. `slots` holds buffers of `slot_bytes` bytes, each for
    /// the states and the gradient of a piece of a tensor: a chunk of `chunk_elements`, that of the
    /// [`Gradients`](crate::Gradients), or where that is too much a half of it, or a quarter, and so on.
    ///
    /// # Panics
    /// If `chunk_elements` is not a multiple of [`GRADIENT_BLOCK`].
    pub fn new(
        store: Arc<Store>,
        slots: Pool,
        slot_bytes: usize,
        chunk_elements: usize,
        compute_threads: usize,
    ) -> Self {
        assert!(
            chunk_elements > 0 && chunk_elements.is_multiple_of(GRADIENT_BLOCK),
            "chunks of whole blocks"
        );
        let (jobs, accepted) = unbounded::<Job>();
        let (computed, work) = unbounded::<Work>();
        let mut threads = Vec::new();
        let compute_threads = compute_threads.max(1);
        let busy = Arc::new(AtomicU64::new(0));
        for index in 0..compute_threads {
            let (work, store, busy) = (work.clone(), Arc::clone(&store), Arc::clone(&busy));
            threads.push(spawn(format!("memascend-update-{index}"), move || {
                for work in work {
                    compute(&store, work, &busy);
                }
            }));
        }
        let files = OnceLock::new();
        let coordinator = Coordinator { store, slots, slot_bytes, chunk_elements, computed, files };
        threads.push(spawn("memascend-executor".into(), move || {
            for job in accepted {
                coordinator.run(job);
            }
        }));
        Self { jobs: Some(jobs), threads, compute_threads, busy, origin: Origin::here() }
    }

    /// How long the kernels have run so far: the mean of the kernel threads.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy.load(Ordering::Relaxed) / self.compute_threads as u64)
    }

    /// Starts reading `weights`, applying `updates` on the way. Waits first for whatever `pending` counts:
    /// earlier write-back of the same unit and spills of its gradients.
    pub fn fetch(
        &self,
        pending: Arc<Pending>,
        weights: Option<UnitWeights>,
        updates: Vec<UpdateTensor>,
    ) -> Arc<Ticket> {
        let ticket = Arc::new(Ticket { ready: Arc::default() });
        let job = Job { pending, weights, updates, ticket: Arc::clone(&ticket), ready: ticket.ready.begin() };
        if let Err(refused) = self.jobs.as_ref().expect("open until dropped").send(job) {
            refused.0.ready.end(Err(OptimError::Closed));
        }
        ticket
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // The threads did not come along into a forked child.
        if !self.origin.is_here() {
            return;
        }
        self.jobs = None;
        // The coordinator is last: when it ends, its channel closes and the kernel threads follow.
        for thread in self.threads.drain(..).rev() {
            let _ = thread.join();
        }
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    std::thread::Builder::new().name(name).spawn(run).expect("the system can start a thread")
}

struct Coordinator {
    store: Arc<Store>,
    slots: Pool,
    slot_bytes: usize,
    chunk_elements: usize,
    computed: Sender<Work>,
    /// Made when a unit first has weights outside of the store.
    files: OnceLock<FileReader>,
}

impl Coordinator {
    fn run(&self, job: Job) {
        let Job { pending, weights, updates, ticket, ready } = job;
        let started = pending.wait().and_then(|()| self.start(&pending, weights.as_ref(), updates, &ticket));
        // Returned before anybody hears of the end, so that who waited finds the buffer free.
        drop(weights);
        ready.end(started);
    }

    fn start(
        &self,
        pending: &Arc<Pending>,
        weights: Option<&UnitWeights>,
        mut updates: Vec<UpdateTensor>,
        ticket: &Arc<Ticket>,
    ) -> Result<()> {
        updates.sort_by_key(|tensor| tensor.weight_offset);
        if let Some(weights) = weights {
            let updated: Vec<usize> = updates.iter().map(|tensor| tensor.weight_offset).collect();
            for tensor in &weights.tensors {
                if updated.binary_search(&tensor.offset).is_err() {
                    self.read_weights(&weights.lease, tensor, ticket);
                }
            }
        }
        for mut tensor in updates {
            let places = self.places(weights, &tensor).inspect_err(|error| {
                // Updated in part, the unit on the SSD must not be taken for whole.
                pending.begin().end(Err(error.clone()));
            })?;
            // Each chunk of the gradient goes with its last piece, to return to the pool as soon as it is consumed.
            let mut gradient_chunks = match &mut tensor.gradient.place {
                SourcePlace::Chunks { chunks, .. } => std::mem::take(chunks),
                SourcePlace::Packed { .. } | SourcePlace::Addresses => Vec::new(),
            };
            let tensor = Arc::new(tensor);
            let layout = SlotLayout::new(&tensor, self.slot_bytes, self.chunk_elements);
            for first in (0..tensor.numel).step_by(layout.elements) {
                let numel = layout.elements.min(tensor.numel - first);
                let chunk = gradient_chunks.get_mut(first / self.chunk_elements).map(|chunk| {
                    let last = (first + layout.elements).is_multiple_of(self.chunk_elements);
                    if last { std::mem::replace(chunk, Chunk::Empty) } else { chunk.clone() }
                });
                self.start_piece(pending, weights, &tensor, &places, &layout, first, numel, chunk, ticket)?;
            }
        }
        // Last: it may fail, and the updates are taken.
        match weights {
            Some(weights) if !weights.files.is_empty() => self.read_files(weights, ticket),
            _ => Ok(()),
        }
    }

    /// Where a tensor's values lie and where its new ones go.
    fn places(&self, weights: Option<&UnitWeights>, tensor: &UpdateTensor) -> Result<Places> {
        let of_weights = weights.map(|weights| {
            let found = weights.tensors.iter().find(|part| part.offset == tensor.weight_offset);
            found.expect("an update is of one of the unit's tensors").tensor
        });
        let weights = of_weights.map(|id| self.store.rewrite(id)).transpose()?;
        let planes = tensor.planes.iter().map(|state| self.store.rewrite(state.tensor));
        let planes: Vec<Rewrite> = planes.collect::<std::result::Result<_, _>>()?;
        let targets = Targets {
            weights: weights.as_ref().map(|place| place.target),
            planes: planes.iter().map(|place| place.target).collect(),
        };
        Ok(Places { weights: weights.map(|place| place.source), planes, targets: Arc::new(targets) })
    }

    /// Reads weights that no update touches.
    fn read_weights(&self, lease: &Arc<Lease>, tensor: &UnitTensor, ticket: &Ticket) {
        let buffer = LeaseSlice::new(Arc::clone(lease), tensor.offset, tensor.bytes);
        let read = ticket.ready.begin();
        let done =
            Box::new(move |result: std::result::Result<(), _>| read.end(result.map_err(OptimError::from)));
        self.store.transfer(Operation::Read, self.store.current(tensor.tensor), 0, buffer, done);
    }

    fn read_files(&self, weights: &UnitWeights, ticket: &Ticket) -> Result<()> {
        let reader = match self.files.get() {
            Some(reader) => reader,
            None => {
                let reader = FileReader::new()?;
                self.files.get_or_init(|| reader)
            }
        };
        for part in &*weights.files {
            let buffer = LeaseSlice::new(Arc::clone(&weights.lease), part.offset, part.bytes);
            reader.read(part, &buffer, || ticket.ready.begin());
        }
        Ok(())
    }

    fn slot(&self) -> Result<Arc<Lease>> {
        let slot = self.slots.lease(self.slot_bytes, Duration::from_secs(PATIENCE_SECONDS))?;
        slot.map(Arc::new).ok_or(OptimError::Stalled { seconds: PATIENCE_SECONDS })
    }

    #[allow(clippy::too_many_arguments)]
    fn start_piece(
        &self,
        pending: &Arc<Pending>,
        weights: Option<&UnitWeights>,
        tensor: &Arc<UpdateTensor>,
        places: &Places,
        layout: &SlotLayout,
        first: usize,
        numel: usize,
        gradient_chunk: Option<Chunk>,
        ticket: &Ticket,
    ) -> Result<()> {
        let update = pending.begin();
        let slot = match self.slot() {
            Ok(slot) => slot,
            Err(error) => {
                // Half-updated, the unit on the SSD must not be taken for whole.
                update.end(Err(error.clone()));
                return Err(error);
            }
        };
        let areas = Areas::new(slot, tensor, layout, numel);
        let element = tensor.dtype.bytes();
        let mut reads: Vec<(Extent, usize, LeaseSlice)> = Vec::new();
        for ((state, area), place) in tensor.planes.iter().zip(&areas.planes).zip(&places.planes) {
            if state.written {
                reads.push((place.source, state.plane.span(first, numel).start, area.clone()));
            } else {
                // SAFETY: the slot is fresh: nobody else knows it yet.
                unsafe { area.as_mut_slice() }.fill(0);
            }
        }
        if let (SourcePlace::Chunks { extent, .. }, Some(Chunk::Ssd)) =
            (&tensor.gradient.place, &gradient_chunk)
        {
            reads.push((*extent, first * element, areas.gradient.clone()));
        }
        let weights = weights.zip(places.weights).map(|(weights, source)| {
            let offset = tensor.weight_offset + first * element;
            let bytes = round_up_to_page(numel * element);
            let range = LeaseSlice::new(Arc::clone(&weights.lease), offset, bytes);
            reads.push((source, first * element, range.clone()));
            range
        });
        let work = Work {
            tensor: Arc::clone(tensor),
            first,
            numel,
            areas,
            weights,
            targets: Arc::clone(&places.targets),
            gradient_chunk,
            pending: Arc::clone(pending),
            update,
            ready: ticket.ready.begin(),
        };
        let join = Arc::new(Reads {
            left: AtomicUsize::new(reads.len() + 1),
            outcome: Mutex::new((None, Some(work))),
            computed: self.computed.clone(),
        });
        for (extent, offset, buffer) in reads {
            let join = Arc::clone(&join);
            let done = Box::new(move |result: std::result::Result<(), _>| {
                join.ended(result.map_err(OptimError::from));
            });
            self.store.transfer(Operation::Read, extent, offset as u64, buffer, done);
        }
        join.ended(Ok(()));
        Ok(())
    }
}

/// Where a tensor to be updated is read from, and where it is written to.
struct Places {
    weights: Option<Extent>,
    planes: Vec<Rewrite>,
    targets: Arc<Targets>,
}

impl Reads {
    fn ended(&self, result: Result<()>) {
        if let Err(error) = result {
            self.lock().0.get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let (error, work) = std::mem::take(&mut *self.lock());
        let work = work.expect("the last read ends once");
        match error {
            None => {
                // Refused, the piece comes back, and its dropping tells those who wait for it.
                let _ = self.computed.send(work);
            }
            Some(error) => work.fail(error),
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Option<OptimError>, Option<Work>)> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work {
    /// Returns the buffers and reports `error`, to the unit too: its other pieces may have been updated.
    fn fail(self, error: OptimError) {
        let Self { tensor, areas, weights, gradient_chunk, update, ready, .. } = self;
        drop((tensor, areas, weights, gradient_chunk));
        update.end(Err(error.clone()));
        ready.end(Err(error));
    }
}

/// How the pieces of a tensor lie in an update slot: its planes one after the other, then the gradient.
struct SlotLayout {
    /// Elements of a piece.
    elements: usize,
    /// Where each plane begins, and last the gradient.
    offsets: Vec<usize>,
}

impl SlotLayout {
    /// The largest pieces that a slot holds.
    fn new(tensor: &UpdateTensor, slot_bytes: usize, chunk_elements: usize) -> Self {
        let mut elements = chunk_elements;
        loop {
            let mut offsets = vec![0];
            for state in &tensor.planes {
                offsets
                    .push(offsets[offsets.len() - 1] + round_up_to_page(state.plane.span(0, elements).len()));
            }
            let gradient = offsets[offsets.len() - 1];
            if gradient + elements * tensor.dtype.bytes() <= slot_bytes {
                return Self { elements, offsets };
            }
            elements /= 2;
            // Every area begins at a page, and 8-bit states are cut between records.
            let smallest = if tensor.planes.iter().any(|state| state.plane.has_records()) {
                GRADIENT_BLOCK
            } else {
                PAGE_BYTES
            };
            assert!(
                elements.is_multiple_of(smallest),
                "slots of {slot_bytes} bytes hold no piece of a tensor"
            );
        }
    }
}

/// The parts of an update slot that one piece takes.
struct Areas {
    planes: Vec<LeaseSlice>,
    gradient: LeaseSlice,
}

impl Areas {
    fn new(slot: Arc<Lease>, tensor: &UpdateTensor, layout: &SlotLayout, numel: usize) -> Self {
        let area = |index: usize, bytes| {
            LeaseSlice::new(Arc::clone(&slot), layout.offsets[index], round_up_to_page(bytes))
        };
        let planes = tensor.planes.iter().enumerate();
        Self {
            planes: planes.map(|(index, state)| area(index, state.plane.span(0, numel).len())).collect(),
            gradient: area(tensor.planes.len(), numel * tensor.dtype.bytes()),
        }
    }
}

/// Runs the kernel on a piece whose reads have ended and starts its write-back.
fn compute(store: &Store, work: Work, busy: &AtomicU64) {
    let began = Instant::now();
    for segment in &work.tensor.segments {
        let start = segment.start.max(work.first);
        let end = (segment.start + segment.numel).min(work.first + work.numel);
        if start < end {
            update(&work, segment, start, end - start);
        }
    }
    busy.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    let Work { tensor, first, numel, areas, weights, targets, gradient_chunk, pending, update, ready } = work;
    let Areas { planes, gradient } = areas;
    let mut writes = Vec::with_capacity(planes.len() + 1);
    for ((state, area), target) in tensor.planes.iter().zip(planes).zip(&targets.planes) {
        writes.push((*target, state.plane.span(first, numel).start, area));
    }
    if let Some((range, target)) = weights.zip(targets.weights) {
        writes.push((target, first * tensor.dtype.bytes(), range));
    }
    // From here on the writes alone hold the buffers.
    drop((gradient, gradient_chunk));
    for (extent, offset, buffer) in writes {
        // Counted before the ticket is ready: whoever sees the weights also sees their write-back pending.
        let write = pending.begin();
        let done =
            Box::new(move |result: std::result::Result<(), _>| write.end(result.map_err(OptimError::from)));
        store.transfer(Operation::Write, extent, offset as u64, buffer, done);
    }
    drop(tensor);
    update.end(Ok(()));
    ready.end(Ok(()));
}

/// Updates the elements `start .. start + numel` of the tensor, which lie in `segment` and in the piece.
fn update(work: &Work, segment: &Segment, start: usize, numel: usize) {
    let tensor = &work.tensor;
    let element = tensor.dtype.bytes();
    let local = start - work.first;
    // SAFETY (this and the following): the chunk's reads have ended, and until its writes are submitted this
    // thread alone knows the slot's areas and the piece's weights; segments do not overlap. Addresses of host
    // memory are vouched for by whoever made the segment, until the ticket is ready.
    let weight: &mut [u8] = match (&segment.host, &work.weights) {
        (Some((weight, _)), _) => {
            let offset = (start - segment.start) * element;
            // SAFETY: see above.
            unsafe { std::slice::from_raw_parts_mut(weight.0.add(offset), numel * element) }
        }
        (None, Some(range)) => {
            let range = range.narrow(local * element, numel * element);
            // SAFETY: see above.
            unsafe { std::slice::from_raw_parts_mut(range.address().as_ptr(), range.bytes()) }
        }
        (None, None) => unreachable!("a segment without an address belongs to a unit"),
    };
    let gradient: &[u8] = match (&segment.host, &tensor.gradient.place, &work.gradient_chunk) {
        (Some((_, gradient)), SourcePlace::Addresses, _) => {
            let offset = (start - segment.start) * element;
            // SAFETY: see above.
            unsafe { std::slice::from_raw_parts(gradient.0.add(offset), numel * element) }
        }
        (_, SourcePlace::Packed { buffer }, _) => {
            let range = buffer.narrow(start * element, numel * element);
            // SAFETY: see above; captures into the pack wait for this update.
            unsafe { std::slice::from_raw_parts(range.address().as_ptr(), range.bytes()) }
        }
        (_, SourcePlace::Chunks { chunk_elements, .. }, Some(Chunk::Host(lease))) => {
            let offset = start % chunk_elements * element;
            let range = LeaseSlice::new(Arc::clone(lease), offset, numel * element);
            // SAFETY: see above; the chunk was handed over by the gradient's record.
            unsafe { std::slice::from_raw_parts(range.address().as_ptr(), range.bytes()) }
        }
        (_, SourcePlace::Chunks { .. }, Some(Chunk::Ssd)) => {
            let range = work.areas.gradient.narrow(local * element, numel * element);
            // SAFETY: see above.
            unsafe { std::slice::from_raw_parts(range.address().as_ptr(), range.bytes()) }
        }
        _ => unreachable!("a segment is updated only where its gradient was captured"),
    };
    let areas: Vec<LeaseSlice> = segment
        .rule
        .planes()
        .into_iter()
        .map(|plane| {
            let index = tensor.planes.iter().position(|state| state.plane == plane);
            let area = &work.areas.planes[index.expect("the tensor has the planes of its segments' rules")];
            let span = plane.span(local, numel);
            area.narrow(span.start, span.len())
        })
        .collect();
    let mut planes: Vec<&mut [u8]> = areas
        .iter()
        // SAFETY: see above; the planes of a rule are different ones.
        .map(|area| unsafe { area.as_mut_slice() })
        .collect();
    for (plane, _) in planes.iter_mut().zip(&segment.fresh).filter(|(_, fresh)| **fresh) {
        plane.fill(0);
    }
    step(segment.rule, weight, &mut planes, gradient, (start - segment.start) as u64, &segment.scalars);
}
