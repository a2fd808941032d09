//! What a runtime is made of, and how its parts are put together.

use std::path::PathBuf;
use std::sync::Arc;

use memascend_exec::{DeviceLink, Executor, Gradients, KeptStates, Staging};
use memascend_kernels::Scratch;
use memascend_mem::{Cudart, HostAllocator, OutsideMemory, Pool, SizeClass};
use memascend_store::{Store, StoreOptions};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::errors::{device_error, exec_error, memory_error, store_error};

/// A line of the plan: consumer, bytes of a buffer, number of buffers; and how many there can be, if
/// that number may change.
#[derive(FromPyObject)]
pub(crate) enum PlanLine {
    Fixed(String, usize, usize),
    Elastic(String, usize, usize, usize),
}

impl PlanLine {
    fn class(&self) -> SizeClass {
        match self {
            Self::Fixed(consumer, bytes, count) => SizeClass::new(consumer, *bytes, *count),
            Self::Elastic(consumer, bytes, count, most) => {
                SizeClass::new(consumer, *bytes, *count).up_to(*most)
            }
        }
    }
}

/// The arguments of a runtime's constructor.
pub(crate) struct RuntimeOptions {
    pub store: StorePlan,
    pub memory: MemoryPlan,
    pub allocator: AllocatorChoice,
    pub compute_threads: usize,
    /// Number of the CUDA device.
    pub device: Option<i32>,
}

/// Where the store lies, and how it is opened.
pub(crate) struct StorePlan {
    pub paths: Vec<PathBuf>,
    pub options: StoreOptions,
    /// Open an existing store instead of creating one.
    pub resume: bool,
}

/// What the arena holds: a `memascend.plan.arena.Arena`, which says what each number is.
#[derive(FromPyObject)]
pub(crate) struct MemoryPlan {
    units: Vec<PlanLine>,
    packs: Vec<PlanLine>,
    chunk_bytes: usize,
    chunk_count: usize,
    chunk_count_max: Option<usize>,
    chunk_elements: usize,
    slot_bytes: usize,
    slot_count: usize,
    states_bytes: usize,
    states_count: usize,
    states_count_max: Option<usize>,
}

impl MemoryPlan {
    /// The size classes of the pools: units, packs, staging chunks, update slots, states.
    fn groups(&self) -> [Vec<SizeClass>; 5] {
        let classes = |lines: &[PlanLine]| lines.iter().map(PlanLine::class).collect();
        let class = |consumer: &str, bytes, count, count_max: Option<usize>| {
            let class = SizeClass::new(consumer, bytes, count);
            vec![if let Some(most) = count_max { class.up_to(most) } else { class }]
        };
        [
            classes(&self.units),
            classes(&self.packs),
            class("staging", self.chunk_bytes, self.chunk_count, self.chunk_count_max),
            class("update slots", self.slot_bytes, self.slot_count, None),
            class("states", self.states_bytes, self.states_count, self.states_count_max),
        ]
    }
}

/// How the arena's memory is allocated.
pub(crate) struct AllocatorChoice {
    pub name: String,
    pub huge_pages: bool,
}

impl AllocatorChoice {
    /// The allocators to try, the preferred one first, for memory that grows and shrinks if `elastic`.
    fn allocators(&self, device: Option<i32>, elastic: bool) -> PyResult<Vec<Box<dyn HostAllocator>>> {
        let names: &[&str] = match (self.name.as_str(), device) {
            // Without a device, pages locked by the system do what CUDA's do, and cost less.
            ("auto", None) => &["locked", "pageable"],
            // A device copies from other memory through a buffer of its own, and the caller waits
            // for that copy.
            // CUDA gives no part of what it allocated back.
            ("auto", Some(_)) if elastic => &["registered"],
            ("auto", Some(_)) => &memascend_mem::kinds_for_a_device(self.huge_pages),
            (name, _) => &[name],
        };
        let allocators = names.iter().map(|name| memascend_mem::allocator(name, self.huge_pages));
        allocators.collect::<Result<_, _>>().map_err(|error| memory_error(&error))
    }
}

/// Store, arena, gradients and step executor of a runtime.
pub(crate) struct Parts {
    pub link: Option<Arc<DeviceLink>>,
    pub executor: Executor,
    pub gradients: Arc<Gradients>,
    pub staging: Arc<Staging>,
    pub store: Arc<Store>,
    pub units: Pool,
    pub packs: Pool,
    /// Units, packs, staging chunks, update slots, states.
    pub pools: [Pool; 5],
    pub chunk_bytes: usize,
    pub states_bytes: usize,
    pub outside: Arc<OutsideMemory>,
    /// Bytes of the arena in huge pages when it was reserved; None where the system does not tell.
    pub huge_page_bytes: Option<usize>,
}

impl Parts {
    /// Opens the store and reserves the arena. Returns the parts, and what the user should know.
    pub(crate) fn open(options: RuntimeOptions) -> PyResult<(Self, Vec<String>)> {
        let RuntimeOptions {
            store: StorePlan { paths, options, resume },
            memory,
            allocator,
            compute_threads,
            device,
        } = options;
        let rates = options.rates.len();
        if rates != 0 && rates != paths.len() {
            return Err(PyValueError::new_err(format!(
                "rates has {rates} values, but the store has {} locations: give one rate for each location, or none",
                paths.len()
            )));
        }
        let link = device.map(open_link).transpose()?.map(Arc::new);
        let groups = memory.groups();
        let elastic = groups.iter().flatten().any(|class| class.count_max.is_some());
        let allocators = allocator.allocators(device, elastic)?;
        let opened = if resume { Store::open(&paths, &options) } else { Store::create(&paths, &options) };
        let store = Arc::new(opened.map_err(|error| store_error(&error))?);
        store.settle_manifests().and_then(|()| store.fill_holes()).map_err(|error| store_error(&error))?;
        let mut notices = store.notices().to_vec();
        let pools = carve(&allocators, &groups, &mut notices).map_err(|error| memory_error(&error))?;
        let pools = <[Pool; 5]>::try_from(pools).expect("five groups, five pools");
        let huge_page_bytes = pools[0].huge_page_bytes();
        // The pools are parts of one arena.
        store.register(&pools[0]);
        let [units, packs, chunks, slots, states] = pools.clone();
        let MemoryPlan { chunk_bytes, chunk_elements, slot_bytes, states_bytes, .. } = memory;
        let staging =
            Staging::new(Arc::clone(&store), chunks, chunk_bytes).lending(slots.clone(), slot_bytes);
        let keeps = memory.states_count.max(memory.states_count_max.unwrap_or(0)) > 0;
        let kept = keeps.then(|| KeptStates::new(states, states_bytes));
        let executor =
            Executor::new(Arc::clone(&store), slots, slot_bytes, chunk_elements, compute_threads, kept)
                .map_err(|error| exec_error(&error))?;
        let gradients = Arc::new(Gradients::new(staging.clone(), chunk_elements).adding_in(compute_threads));
        let (staging, outside) = (Arc::new(staging), Arc::default());
        let parts = Self {
            link,
            executor,
            gradients,
            staging,
            store,
            units,
            packs,
            pools,
            chunk_bytes,
            states_bytes,
            outside,
            huge_page_bytes,
        };
        Ok((parts, notices))
    }

    /// Makes the numbers of buffers those given, for each size of unit buffers that is named. What
    /// shrinks does so before anything grows.
    pub(crate) fn resize(
        &self,
        units: Vec<(usize, usize)>,
        chunk_count: Option<usize>,
        states_count: Option<usize>,
    ) -> memascend_mem::Result<()> {
        let [unit_buffers, _, chunks, _, states] = &self.pools;
        let changes = units.into_iter().map(|(bytes, count)| (unit_buffers, bytes, count));
        let chunk_count = chunk_count.map(|count| (chunks, self.chunk_bytes, count));
        let states_count = states_count.map(|count| (states, self.states_bytes, count));
        let mut changes: Vec<_> = changes.chain(chunk_count).chain(states_count).collect();
        changes.sort_by_key(|(pool, bytes, count)| *count > pool.count(*bytes));
        changes.into_iter().try_for_each(|(pool, bytes, count)| pool.resize(bytes, count))
    }

    /// What moments of projected gradients are read, changed and written with.
    pub(crate) fn projecting(&self) -> (&Staging, &Arc<Scratch>) {
        (&self.staging, self.gradients.scratch())
    }

    /// The link to the device.
    ///
    /// # Errors
    /// If the runtime has no device.
    pub(crate) fn link(&self) -> PyResult<&Arc<DeviceLink>> {
        self.link.as_ref().ok_or_else(|| PyRuntimeError::new_err("the runtime was made without a device"))
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        // Other handles may hold the link too, and its copies read and write the pools.
        if let Some(link) = &self.link {
            link.close();
        }
    }
}

fn open_link(device: i32) -> PyResult<DeviceLink> {
    let cudart = Cudart::find().map_err(|error| device_error(&error))?;
    DeviceLink::open(cudart, device).map_err(|error| exec_error(&error))
}

/// Carves the pools from the first allocator that may lock enough memory. Adds a notice if an
/// allocator before it may not.
fn carve(
    sources: &[Box<dyn HostAllocator>],
    groups: &[Vec<SizeClass>],
    notices: &mut Vec<String>,
) -> memascend_mem::Result<Vec<Pool>> {
    let (last, others) = sources.split_last().expect("an allocator is named");
    let mut refusal = None;
    for source in others {
        match Pool::carve(&**source, groups) {
            Err(error) if error.is_pinning_refused() => refusal = refusal.or(Some(error)),
            other => return other,
        }
    }
    let carved = Pool::carve(&**last, groups);
    if let (Ok(_), Some(refusal)) = (&carved, &refusal) {
        notices.push(format!("{refusal}; using {} memory instead", last.name()));
    }
    carved.map_err(|error| refusal.unwrap_or(error))
}
