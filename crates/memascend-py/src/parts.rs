//! What a runtime is made of, and how its parts are put together.

use std::path::PathBuf;
use std::sync::Arc;

use memascend_exec::{DeviceLink, Executor, Gradients, Staging};
use memascend_mem::{Cudart, HostAllocator, OutsideMemory, Pool, SizeClass};
use memascend_store::{Store, StoreOptions};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::errors::{device_error, exec_error, memory_error, store_error};

/// A line of the plan: consumer, bytes of a buffer, number of buffers.
pub(crate) type PlanLine = (String, usize, usize);

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

/// What the arena holds.
pub(crate) struct MemoryPlan {
    pub units: Vec<PlanLine>,
    pub packs: Vec<PlanLine>,
    pub chunk_bytes: usize,
    pub chunk_count: usize,
    pub chunk_elements: usize,
    pub slot_bytes: usize,
    pub slot_count: usize,
}

impl MemoryPlan {
    /// The size classes of the pools: units, packs, staging chunks, update slots.
    fn groups(&self) -> [Vec<SizeClass>; 4] {
        let class = |consumer: &str, bytes, count| SizeClass { consumer: consumer.to_owned(), bytes, count };
        let classes = |lines: &[PlanLine]| {
            lines.iter().map(|(consumer, bytes, count)| class(consumer, *bytes, *count)).collect()
        };
        [
            classes(&self.units),
            classes(&self.packs),
            vec![class("staging", self.chunk_bytes, self.chunk_count)],
            vec![class("update slots", self.slot_bytes, self.slot_count)],
        ]
    }
}

/// How the arena's memory is allocated.
pub(crate) struct AllocatorChoice {
    pub name: String,
    pub huge_pages: bool,
}

impl AllocatorChoice {
    /// The allocators to try, the preferred one first.
    fn allocators(&self, device: Option<i32>) -> PyResult<Vec<Box<dyn HostAllocator>>> {
        let names: &[&str] = match (self.name.as_str(), device) {
            // Without a device, pages locked by the system do what CUDA's do, and cost less.
            ("auto", None) => &["locked", "pageable"],
            // A device copies from other memory through a buffer of its own, and the caller waits
            // for that copy.
            ("auto", Some(_)) => &["cuda", "registered"],
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
    pub pools: Vec<Pool>,
    pub outside: Arc<OutsideMemory>,
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
        let allocators = allocator.allocators(device)?;
        let opened = if resume { Store::open(&paths, &options) } else { Store::create(&paths, &options) };
        let store = Arc::new(opened.map_err(|error| store_error(&error))?);
        let mut notices = store.notices().to_vec();
        let pools =
            carve(&allocators, &memory.groups(), &mut notices).map_err(|error| memory_error(&error))?;
        // The pools are parts of one arena.
        store.register(&pools[0]);
        let [units, packs, chunks, slots] =
            <[Pool; 4]>::try_from(pools.clone()).expect("four groups, four pools");
        let MemoryPlan { chunk_bytes, chunk_elements, slot_bytes, .. } = memory;
        let staging = Staging::new(Arc::clone(&store), chunks, chunk_bytes);
        let executor = Executor::new(Arc::clone(&store), slots, slot_bytes, chunk_elements, compute_threads);
        let gradients = Arc::new(Gradients::new(staging.clone(), chunk_elements));
        let (staging, outside) = (Arc::new(staging), Arc::default());
        let parts = Self { link, executor, gradients, staging, store, units, packs, pools, outside };
        Ok((parts, notices))
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
