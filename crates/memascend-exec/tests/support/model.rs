//! Tensors whose gradients, steps and results are known: in memory, and as a unit of a store.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use memascend_exec::{
    Address, AppliedGradient, Applying, DeviceEvent, DeviceLink, Executor, GradientDtypes, GradientId,
    GradientSource, Gradients, InFlightCounter, ResidentStates, Segment, Staging, Ticket, UnitTensor,
    UnitWeights, UpdatePlane, UpdateTensor,
};
use memascend_kernels::{
    Algorithm, Dtype, GRADIENT_BLOCK, HostTensor, Plane, Rule, StepScalars, round_bf16, step_host,
};
use memascend_mem::{Lease, LeaseSlice, Pool, round_up_to_page};
use memascend_store::TensorId;

use super::*;

/// One tensor of a test's unit.
#[derive(Debug, Clone)]
pub struct Shape {
    pub rule: Rule,
    pub numel: usize,
    /// Pages of frozen weights before it in the unit.
    pub gap_pages: usize,
    /// `(start, numel)` of each segment. One that spans the tensor makes it a tensor of its own;
    /// otherwise it is a pack.
    pub segments: Vec<(usize, usize)>,
}

impl Shape {
    pub fn whole(rule: Rule, numel: usize, gap_pages: usize) -> Self {
        Self { rule, numel, gap_pages, segments: vec![(0, numel)] }
    }

    fn dtype(&self) -> Dtype {
        dtype_of(self.rule)
    }

    fn is_pack(&self) -> bool {
        self.segments != [(0, self.numel)]
    }
}

/// How a unit is run. Nothing in it may change a result.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub kind: Kind,
    pub volumes: usize,
    pub chunk_blocks: usize,
    pub slots: usize,
    pub compute_threads: usize,
    pub staging_chunks: usize,
    pub kept: Kept,
}

/// The most buffers for states.
const KEPT_BUFFERS_MAX: usize = 64;

/// The resident part between steps.
#[derive(Debug, Clone, Copy, Default)]
pub struct Kept {
    /// Buffers for states, as large as a chunk's moments.
    pub buffers: usize,
    /// How many quarters of each tensor's states may stay.
    pub quarters: usize,
    /// The weights, in one buffer for the whole run.
    pub weights: bool,
    /// Bit `n` says that step number `n` writes resident data, too.
    pub through: u64,
    /// Bit `n` says that step number `n` updates tensor by tensor in the buffer where the weights stay,
    /// from gradients in memory, as a backward pass does.
    pub beside: u64,
}

impl Kept {
    /// Everything stays, and nothing is written but by commits.
    pub const ALL: Self =
        Self { buffers: KEPT_BUFFERS_MAX, quarters: 4, weights: true, through: 0, beside: 0 };

    fn elements(self, numel: usize) -> usize {
        numel * self.quarters / 4
    }

    fn writes_through(self, step: u64) -> bool {
        self.through >> step & 1 == 1
    }
}

impl Setup {
    pub fn plain(kind: Kind) -> Self {
        Self {
            kind,
            volumes: 1,
            chunk_blocks: 1,
            slots: 2,
            compute_threads: 1,
            staging_chunks: 12,
            kept: Kept::default(),
        }
    }
}

/// Everything that an update changes, as bytes.
#[derive(PartialEq, Eq, Clone)]
pub struct State {
    /// The unit, frozen pages included.
    pub unit: Vec<u8>,
    /// The planes of each tensor.
    pub states: Vec<Vec<Vec<u8>>>,
}

impl State {
    /// Panics with the first place that differs.
    pub fn assert_same(&self, other: &Self, what: &str) {
        let first = |a: &[u8], b: &[u8]| a.iter().zip(b).position(|(a, b)| a != b);
        assert_eq!(first(&self.unit, &other.unit), None, "{what}: first wrong byte of the unit");
        for (tensor, (ours, theirs)) in self.states.iter().zip(&other.states).enumerate() {
            for (plane, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                assert_eq!(ours.len(), theirs.len(), "{what}: plane {plane} of tensor {tensor}");
                assert_eq!(
                    first(ours, theirs),
                    None,
                    "{what}: first wrong byte of plane {plane} of tensor {tensor}"
                );
            }
        }
        assert!(self == other, "{what}");
    }
}

/// A unit's tensors with their initial weights, and the gradients and hyper-parameters of every
/// step, from a seed.
pub struct Model {
    pub shapes: Vec<Shape>,
    pub offsets: Vec<usize>,
    pub start: State,
    /// Whether fp32 gradients are kept in bf16.
    rounded: bool,
    seed: u64,
    /// What was computed before: tests of power failures ask for the same steps a thousand times.
    gradients: Mutex<HashMap<(usize, u64), Vec<u8>>>,
    results: Mutex<HashMap<u64, State>>,
}

impl Model {
    pub fn new(shapes: Vec<Shape>, seed: u64) -> Self {
        let mut offsets = Vec::new();
        let mut bytes = 0;
        for shape in &shapes {
            bytes += shape.gap_pages * 4096;
            offsets.push(bytes);
            bytes += round_up_to_page(shape.numel * shape.dtype().bytes());
        }
        bytes += 4096; // frozen weights at the end
        let mut random = Random(seed);
        let mut unit: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let mut states = Vec::new();
        for (shape, offset) in shapes.iter().zip(&offsets) {
            let weights = random.values(shape.dtype(), shape.numel);
            unit[*offset..*offset + weights.len()].copy_from_slice(&weights);
            states.push(shape.rule.planes().iter().map(|plane| vec![0; plane.bytes(shape.numel)]).collect());
        }
        let start = State { unit, states };
        let (gradients, results) = (Mutex::default(), Mutex::default());
        Self { shapes, offsets, start, rounded: false, seed, gradients, results }
    }

    /// The same, with fp32 gradients stored in bf16 if `rounded`.
    pub fn with_gradients_rounded(self, rounded: bool) -> Self {
        Self { rounded, results: Mutex::default(), ..self }
    }

    /// Parts of the unit: its tensors, and the frozen ones between them.
    pub fn parts(&self) -> Vec<Range<usize>> {
        let mut parts = Vec::new();
        let mut end = 0;
        for (shape, offset) in self.shapes.iter().zip(&self.offsets) {
            parts.push(end..*offset);
            end = offset + round_up_to_page(shape.numel * shape.dtype().bytes());
            parts.push(*offset..end);
        }
        parts.push(end..self.start.unit.len());
        parts.retain(|part| !part.is_empty());
        parts
    }

    pub fn gradient(&self, tensor: usize, step: u64) -> Vec<u8> {
        let shape = &self.shapes[tensor];
        let seed = self.seed ^ (step << 32) ^ (tensor as u64) << 16;
        let mut known = self.gradients.lock().unwrap();
        known.entry((tensor, step)).or_insert_with(|| Random(seed).values(shape.dtype(), shape.numel)).clone()
    }

    /// The dtypes of a tensor's gradient.
    fn gradient_dtypes(&self, shape: &Shape) -> GradientDtypes {
        match shape.dtype() {
            Dtype::F32 if self.rounded => GradientDtypes::ROUNDED,
            dtype => dtype.into(),
        }
    }

    /// The gradient as the update takes it.
    fn gradient_kept(&self, tensor: usize, step: u64) -> Vec<u8> {
        let gradient = self.gradient(tensor, step);
        if self.gradient_dtypes(&self.shapes[tensor]) != GradientDtypes::ROUNDED {
            return gradient;
        }
        let values = gradient.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four));
        values.flat_map(|value| (u32::from(round_bf16(value)) << 16).to_le_bytes()).collect()
    }

    /// Other hyper-parameters for every segment.
    pub fn scalars(&self, tensor: usize, segment: usize, step: u64) -> StepScalars {
        scalars_of(self.shapes[tensor].rule.algorithm, 1 + tensor + 3 * segment, step)
    }

    /// The result of `steps` steps in host memory.
    pub fn in_memory(&self, steps: u64) -> State {
        let mut known = self.results.lock().unwrap();
        known.entry(steps).or_insert_with(|| self.compute(steps)).clone()
    }

    fn compute(&self, steps: u64) -> State {
        let mut state = self.start.clone();
        for step in 1..=steps {
            for (tensor, shape) in self.shapes.iter().enumerate() {
                let gradient = self.gradient_kept(tensor, step);
                for (index, (start, numel)) in shape.segments.iter().enumerate() {
                    let bytes = shape.dtype().bytes();
                    let range = start * bytes..(start + numel) * bytes;
                    let planes = shape.rule.planes().into_iter().zip(&mut state.states[tensor]);
                    let tensor_in_memory = HostTensor {
                        rule: shape.rule,
                        weight: &mut state.unit[self.offsets[tensor]..][range.clone()],
                        planes: planes.map(|(plane, bytes)| &mut bytes[plane.span(*start, *numel)]).collect(),
                        gradient: &gradient[range],
                    };
                    step_host(tensor_in_memory, &self.scalars(tensor, index, step), 1);
                }
            }
        }
        state
    }
}

/// Constants that differ with `which`.
pub fn scalars_of(algorithm: Algorithm, which: usize, step: u64) -> StepScalars {
    let (lr, decay) = (1e-2 * which as f64, 0.03 * which as f64);
    StepScalars::usual(algorithm, lr, decay, step).with_grad_scale(0.5).with_seed(which as u64)
}

/// A model's unit on a store, ready to train.
pub struct Unit {
    // Dropped before the bench: the executor's threads need the simulated engine's pump to end.
    pub executor: Option<Executor>,
    pub gradients: Gradients,
    pub pending: Arc<InFlightCounter>,
    pub slots: Pool,
    pub chunks: Pool,
    pub units: Pool,
    /// Buffers for states that stay.
    pub kept: Pool,
    kept_setup: Mutex<Kept>,
    /// The buffer of a unit whose weights stay.
    pub staying: Mutex<Option<Arc<Lease>>>,
    weights: Vec<UnitTensor>,
    tensors: Vec<Tensor>,
    pub model: Arc<Model>,
    pub bench: Bench,
}

/// Updates under way, and the gradients that they read.
pub struct Beside {
    tickets: Vec<Arc<Ticket>>,
    _gradients: Vec<Vec<u8>>,
}

impl Beside {
    /// Waits for all of them; gives the first error.
    pub fn wait(self) -> memascend_exec::Result<()> {
        let ended: Vec<_> = self.tickets.iter().map(|ticket| ticket.wait()).collect();
        ended.into_iter().collect()
    }
}

/// Gradients of a device on their way to their updates.
#[derive(Default)]
pub struct Applied {
    pub applying: Vec<Applying>,
    pub tickets: Vec<Arc<Ticket>>,
    pub gradients: Vec<Vec<u8>>,
}

struct Tensor {
    gradient: GradientId,
    planes: Vec<(Plane, TensorId)>,
}

impl Unit {
    /// Puts the model's unit on a new store.
    pub fn new(model: &Arc<Model>, setup: Setup) -> Self {
        Self::try_new(model, setup).unwrap()
    }

    /// As [`Unit::new`], where writing may fail.
    pub fn try_new(model: &Arc<Model>, setup: Setup) -> memascend_exec::Result<Self> {
        Self::put_on(Bench::new(setup.kind, setup.volumes), model, setup)
    }

    /// Puts the model's unit on a store.
    pub fn put_on(bench: Bench, model: &Arc<Model>, setup: Setup) -> memascend_exec::Result<Self> {
        let put = |(index, part): (usize, Range<usize>)| {
            bench.put(&format!("layer.0.{index}"), &model.start.unit[part])
        };
        let ids = model.parts().into_iter().enumerate().map(put).collect::<memascend_exec::Result<_>>()?;
        Ok(Self::on(bench, model, setup, ids))
    }

    /// Without writing the weights: for stores whose writes fail.
    pub fn unwritten(model: &Arc<Model>, setup: Setup) -> Self {
        let bench = Bench::new(setup.kind, setup.volumes);
        let create = |(index, part): (usize, Range<usize>)| {
            bench.store.create_tensor(&format!("layer.0.{index}"), part.len() as u64).unwrap()
        };
        let ids = model.parts().into_iter().enumerate().map(create).collect();
        Self::on(bench, model, setup, ids)
    }

    /// The unit that a store has which was opened again.
    pub fn found_on(bench: Bench, model: &Arc<Model>, setup: Setup) -> Self {
        let find = |index: usize| bench.store.find_tensor(&format!("layer.0.{index}")).unwrap();
        let ids = (0..model.parts().len()).map(find).collect();
        Self::on(bench, model, setup, ids)
    }

    fn on(bench: Bench, model: &Arc<Model>, setup: Setup, ids: Vec<TensorId>) -> Self {
        let store = &bench.store;
        let chunk_elements = setup.chunk_blocks * GRADIENT_BLOCK;
        let slot_bytes = chunk_elements * SLOT_BYTES_PER_ELEMENT;
        let slots = pool(slot_bytes, setup.slots);
        let kept_bytes = chunk_elements * 8;
        let kept = SizeClass::new("test", kept_bytes, setup.kept.buffers).up_to(KEPT_BUFFERS_MAX);
        let kept = Pool::new(&PageableAllocator::default(), &[kept]).unwrap();
        let chunks = pool(chunk_elements * 4, setup.staging_chunks);
        let staging = Staging::new(Arc::clone(store), chunks.clone(), chunk_elements * 4);
        let gradients = Gradients::new(staging, chunk_elements);
        let pending = Arc::<InFlightCounter>::default();
        let mut tensors = Vec::new();
        for (index, shape) in model.shapes.iter().enumerate() {
            let name = |what: &str| format!("layer.0.{index}.{what}");
            let allocate = |plane: Plane| {
                let found = store.find_tensor(&name(plane.name));
                let create =
                    || store.create_tensor(&name(plane.name), plane.bytes(shape.numel) as u64).unwrap();
                (plane, found.unwrap_or_else(create))
            };
            let dtypes = model.gradient_dtypes(shape);
            let gradient = if shape.is_pack() {
                let bytes = shape.numel * dtypes.kept_bytes();
                let lease = pool(bytes, 1).try_lease(bytes).unwrap().unwrap();
                let buffer = LeaseSlice::new(Arc::new(lease), 0, round_up_to_page(bytes));
                gradients.create_packed(dtypes, shape.numel, buffer)
            } else {
                gradients.create(&name("gradient"), dtypes, shape.numel, Arc::clone(&pending)).unwrap()
            };
            tensors
                .push(Tensor { gradient, planes: shape.rule.planes().into_iter().map(allocate).collect() });
        }
        Self {
            executor: Some(
                Executor::new(
                    Arc::clone(store),
                    slots.clone(),
                    slot_bytes,
                    chunk_elements,
                    setup.compute_threads,
                    Some(ResidentStates::new(kept.clone(), kept_bytes)),
                )
                .unwrap(),
            ),
            kept_setup: Mutex::new(setup.kept),
            kept,
            staying: Mutex::default(),
            gradients,
            pending,
            slots,
            chunks,
            units: pool(model.start.unit.len(), 2),
            weights: model
                .parts()
                .into_iter()
                .zip(ids)
                .map(|(part, tensor)| UnitTensor { tensor, offset: part.start, bytes: part.len() })
                .collect(),
            tensors,
            model: Arc::clone(model),
            bench,
        }
    }

    /// Captures every gradient of a step.
    pub fn capture(&self, step: u64) -> memascend_exec::Result<()> {
        for (tensor, shape) in self.model.shapes.iter().enumerate() {
            let gradient = self.model.gradient(tensor, step);
            for (start, numel) in &shape.segments {
                let source = &gradient[start * shape.dtype().bytes()..];
                let id = self.tensors[tensor].gradient;
                // SAFETY: the gradient outlives the call, and is not written meanwhile.
                unsafe { self.gradients.capture(id, *start, source.as_ptr(), *numel, false)? };
            }
        }
        Ok(())
    }

    /// The updates of a step, which takes the gradients.
    pub fn updates(&self, step: u64) -> Vec<UpdateTensor> {
        let captured =
            |(index, tensor): (usize, &Tensor)| (index, step, self.gradients.take(tensor.gradient), None);
        let captured = self.tensors.iter().enumerate().map(captured);
        captured.map(|(index, step, gradient, host)| self.update(index, step, gradient, host)).collect()
    }

    /// The update of one tensor, whose weight and gradient are at `host` if that is given.
    fn update(
        &self,
        index: usize,
        step: u64,
        gradient: GradientSource,
        host: Option<(Address, Address)>,
    ) -> UpdateTensor {
        let (model, kept) = (&self.model, self.kept_setup());
        let shape = &model.shapes[index];
        let segments = shape.segments.iter().enumerate().map(|(segment, (start, numel))| Segment {
            start: *start,
            first_element: 0,
            numel: *numel,
            rule: shape.rule,
            scalars: model.scalars(index, segment, step),
            fresh: vec![step == 1; shape.rule.planes().len()],
            host: host.map(|(weight, gradient)| {
                let at = |address: Address| Address(address.0.wrapping_add(start * shape.dtype().bytes()));
                (at(weight), at(gradient))
            }),
            factors: None,
        });
        UpdateTensor {
            dtype: shape.dtype(),
            numel: shape.numel,
            weight_offset: model.offsets[index],
            planes: update_planes(&self.tensors[index].planes, step),
            kept_elements: kept.elements(shape.numel),
            write_through: kept.writes_through(step),
            gradient,
            segments: segments.collect(),
        }
    }

    /// Whether a step updates tensor by tensor: see [`Unit::update_beside`].
    pub fn goes_beside(&self, step: u64) -> bool {
        let kept = self.kept_setup();
        kept.weights && kept.beside >> step & 1 == 1
    }

    /// Updates the tensors one by one, the last first, in a buffer in which the weights stay.
    pub fn update_beside(&self, lease: &Arc<Lease>, step: u64) -> Beside {
        let executor = self.executor.as_ref().expect("not dropped by the test");
        let (mut tickets, mut gradients) = (Vec::new(), Vec::new());
        for index in (0..self.tensors.len()).rev() {
            let offset = self.model.offsets[index];
            let part = *self.weights.iter().find(|part| part.offset == offset).expect("a part of its own");
            let weight = LeaseSlice::new(Arc::clone(lease), offset, part.bytes).address().as_ptr();
            let mut gradient = self.model.gradient_kept(index, step);
            let host = Some((Address(weight), Address(gradient.as_mut_ptr())));
            let updates = vec![self.update(index, step, GradientSource::addresses(), host)];
            gradients.push(gradient);
            let write_through = (step as usize + index).is_multiple_of(2);
            let weights = UnitWeights {
                tensors: vec![part],
                files: Arc::default(),
                lease: Some(Arc::clone(lease)),
                resident: true,
                write_through,
            };
            let pending = Arc::clone(&self.pending);
            tickets.push(if tickets.is_empty() {
                executor.fetch(pending, Some(weights), updates)
            } else {
                executor.update_beside(pending, weights, updates)
            });
        }
        Beside { tickets, _gradients: gradients }
    }

    /// Has a device apply the gradients of a step tensor by tensor, the last first: in a buffer in which the
    /// weights stay, or on the store without one. `computed` gives the event after which the device has a
    /// gradient.
    pub fn apply(
        &self,
        (link, staging): (&DeviceLink, &Arc<Staging>),
        lease: Option<&Arc<Lease>>,
        step: u64,
        computed: impl Fn(&[u8]) -> DeviceEvent,
    ) -> Applied {
        let executor = self.executor.as_ref().expect("not dropped by the test");
        let mut applied = Applied::default();
        for index in (0..self.tensors.len()).rev() {
            let offset = self.model.offsets[index];
            let part = *self.weights.iter().find(|part| part.offset == offset).expect("a part of its own");
            let weights = UnitWeights {
                tensors: vec![part],
                files: Arc::default(),
                lease: lease.cloned(),
                resident: true,
                write_through: true,
            };
            let update = self.update(index, step, GradientSource::addresses(), None);
            let (pending, beside) = (Arc::clone(&self.pending), !applied.tickets.is_empty());
            let (ticket, arriving) = executor.update_arriving(pending, weights, update, beside);
            let gradient = self.model.gradient(index, step);
            let (address, bytes) = (gradient.as_ptr().addr(), gradient.len());
            let source = AppliedGradient {
                address,
                bytes,
                ready: computed(&gradient),
                unread: Some(computed(&[])),
                projected: None,
            };
            // SAFETY: the gradient lives as long as what is returned, and nothing writes to it.
            applied.applying.push(unsafe { link.apply(staging, source, arriving) }.unwrap());
            applied.tickets.push(ticket);
            applied.gradients.push(gradient);
        }
        applied
    }

    /// A buffer for the unit: the same one each time, if its weights stay in memory.
    pub fn lease(&self) -> Arc<Lease> {
        if !self.kept_setup().weights {
            return self.fresh_lease();
        }
        let mut staying = self.staying.lock().unwrap();
        Arc::clone(staying.get_or_insert_with(|| self.fresh_lease()))
    }

    fn kept_setup(&self) -> Kept {
        *self.kept_setup.lock().unwrap()
    }

    /// Changes how many quarters of each tensor's states may stay, and in how many buffers. States that
    /// may not stay any more are released: nothing of them is in memory when this returns.
    pub fn change_kept(&self, quarters: usize, buffers: usize) -> memascend_exec::Result<()> {
        let before = self.kept_setup();
        *self.kept_setup.lock().unwrap() = Kept { quarters, buffers, ..before };
        let planes = self.tensors.iter().zip(&self.model.shapes).flat_map(|(tensor, shape)| {
            let elements = before.elements(shape.numel).min(self.kept_setup().elements(shape.numel));
            tensor.planes.iter().map(move |(plane, id)| (*id, plane.span(0, elements).len() as u64))
        });
        let executor = self.executor.as_ref().expect("not dropped by the test");
        executor.release_states(Arc::clone(&self.pending), planes.collect()).wait()?;
        let bytes = self.kept.arena_classes()[0].bytes;
        self.kept.resize(bytes, buffers)?;
        if quarters == 0 {
            assert_eq!((self.kept.counters().leaving_bytes, self.kept.counters().leased_bytes), (0, 0));
        }
        Ok(())
    }

    fn fresh_lease(&self) -> Arc<Lease> {
        let bytes = self.model.start.unit.len();
        let lease = self.units.try_lease(bytes).unwrap().expect("a unit buffer is free");
        let lease = Arc::new(lease);
        // Old bytes in the buffer must never pass for the unit's.
        let slice = LeaseSlice::new(Arc::clone(&lease), 0, lease.capacity());
        // SAFETY: the lease is fresh.
        unsafe { slice.as_mut_slice() }.fill(0xAB);
        lease
    }

    pub fn fetch(&self, lease: &Arc<Lease>, updates: Vec<UpdateTensor>) -> Arc<Ticket> {
        self.fetch_into(Some(Arc::clone(lease)), updates)
    }

    /// Updates the weights in the slots, without a buffer for the unit.
    pub fn update_in_slots(&self, updates: Vec<UpdateTensor>) -> Arc<Ticket> {
        self.fetch_into(None, updates)
    }

    fn fetch_into(&self, lease: Option<Arc<Lease>>, updates: Vec<UpdateTensor>) -> Arc<Ticket> {
        let (tensors, resident) = (self.weights.clone(), self.kept_setup().weights);
        let weights = UnitWeights { tensors, files: Arc::default(), lease, resident, write_through: false };
        let executor = self.executor.as_ref().expect("not dropped by the test");
        executor.fetch(Arc::clone(&self.pending), Some(weights), updates)
    }

    /// The weights in a buffer whose fetch has ended.
    pub fn weights(&self, lease: &Arc<Lease>) -> Vec<u8> {
        let slice = LeaseSlice::new(Arc::clone(lease), 0, self.model.start.unit.len());
        // SAFETY: the fetch has ended; write-back only reads.
        unsafe { slice.as_slice() }.to_vec()
    }

    /// The contents of the SSD, once nothing is under way.
    pub fn on_ssd(&self) -> memascend_exec::Result<State> {
        self.pending.wait()?;
        self.read_by(|id, bytes| self.bench.get(id, bytes))
    }

    /// As [`Unit::on_ssd`], where reading may fail: until it succeeds.
    pub fn on_ssd_at_last(&self) -> memascend_exec::Result<State> {
        self.pending.wait()?;
        self.read_by(|id, bytes| Ok(self.bench.get_at_last(id, bytes)))
    }

    fn read_by(
        &self,
        get: impl Fn(TensorId, usize) -> memascend_exec::Result<Vec<u8>>,
    ) -> memascend_exec::Result<State> {
        let states = self.tensors.iter().zip(&self.model.shapes).map(|(tensor, shape)| {
            tensor.planes.iter().map(|(plane, id)| get(*id, plane.bytes(shape.numel))).collect()
        });
        let states = states.collect::<memascend_exec::Result<_>>()?;
        let weights = self.weights.iter().map(|part| get(part.tensor, part.bytes));
        Ok(State { unit: weights.collect::<memascend_exec::Result<Vec<_>>>()?.concat(), states })
    }

    /// Bytes still leased from the pools, without resident ones.
    pub fn live_bytes(&self) -> [usize; 3] {
        let [slots, chunks, units] =
            [&self.slots, &self.chunks, &self.units].map(|pool| pool.counters().live_bytes);
        let stay = self.staying.lock().unwrap().as_ref().map_or(0, |_| self.model.start.unit.len());
        [slots, chunks, units - stay]
    }

    /// Trains `steps` steps; returns the contents of the SSD.
    pub fn train(&self, steps: u64) -> memascend_exec::Result<State> {
        for step in 1..=steps {
            self.capture(step)?;
            let lease = self.lease();
            let ticket = self.fetch(&lease, self.updates(step));
            ticket.wait()?;
            let expected = self.model.in_memory(step);
            assert!(self.weights(&lease) == expected.unit, "step {step}: weights in the buffer");
            drop(lease);
            self.pending.wait()?;
            // Who waited finds every buffer free: returned before the end is told.
            assert_eq!(self.live_bytes(), [0; 3], "step {step}: leases of slots, staging, units");
        }
        self.on_ssd()
    }
}

fn update_planes(planes: &[(Plane, TensorId)], step: u64) -> Vec<UpdatePlane> {
    planes.iter().map(|&(plane, tensor)| UpdatePlane { plane, tensor, written: step > 1 }).collect()
}

/// A tensor in host memory with its states on a store, as an [`UpdateTensor`] by address. Parts are
/// `(start, weight, gradient)`.
pub fn by_address(
    rule: Rule,
    numel: usize,
    planes: &[(Plane, TensorId)],
    parts: &mut [(usize, Vec<u8>, Vec<u8>)],
    step: u64,
) -> UpdateTensor {
    let segments = parts.iter_mut().map(|(start, weight, gradient)| Segment {
        start: *start,
        first_element: 0,
        numel: weight.len() / rule.weight.bytes(),
        rule,
        scalars: scalars_of(rule.algorithm, 1, step),
        fresh: vec![step == 1; planes.len()],
        host: Some((Address(weight.as_mut_ptr()), Address(gradient.as_mut_ptr()))),
        factors: None,
    });
    UpdateTensor {
        dtype: dtype_of(rule),
        numel,
        weight_offset: 0,
        planes: update_planes(planes, step),
        kept_elements: 0,
        write_through: true,
        gradient: GradientSource::addresses(),
        segments: segments.collect(),
    }
}
