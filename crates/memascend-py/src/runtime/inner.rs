//! The content of a runtime, and how it is put together.

use std::sync::{Arc, OnceLock};

use memascend_exec::{DeviceLink, Executor, Gradients, ResidentStates, Staging};
use memascend_kernels::Scratch;
use memascend_mem::{Cudart, HostAllocator, OutsideMemory, Pool, SizeClass};
use memascend_store::Store;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::plan::{MemoryPlan, RuntimeOptions, StorePlan};
use crate::errors::{device_error, exec_error, memory_error, store_error};

/// Store, arena, gradients and step executor of a runtime.
pub(crate) struct RuntimeInner {
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
    /// Bytes of the arena in huge pages when that was first asked; see `huge_page_bytes`.
    in_huge_pages: OnceLock<Option<usize>>,
}

impl RuntimeInner {
    /// Opens the store and reserves the arena. Returns the runtime, and notices for the user.
    pub(super) fn open(options: RuntimeOptions) -> PyResult<(Self, Vec<String>)> {
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
        // The pools are parts of one arena.
        store.register(&pools[0]);
        let [units, packs, chunks, slots, states] = pools.clone();
        let MemoryPlan { chunk_bytes, chunk_elements, slot_bytes, states_bytes, .. } = memory;
        let staging =
            Staging::new(Arc::clone(&store), chunks, chunk_bytes).lending(slots.clone(), slot_bytes);
        let keeps = memory.states_count.max(memory.states_count_max.unwrap_or(0)) > 0;
        let kept = keeps.then(|| ResidentStates::new(states, states_bytes));
        let executor =
            Executor::new(Arc::clone(&store), slots, slot_bytes, chunk_elements, compute_threads, kept)
                .map_err(|error| exec_error(&error))?;
        let gradients = Arc::new(Gradients::new(staging.clone(), chunk_elements).adding_in(compute_threads));
        let (staging, outside) = (Arc::new(staging), Arc::default());
        let inner = Self {
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
            in_huge_pages: OnceLock::new(),
        };
        Ok((inner, notices))
    }

    /// Bytes of the arena in huge pages; None where the system does not tell. Looked at once, and not before
    /// the statistics are asked for: the system walks through all pages of the process.
    pub fn huge_page_bytes(&self) -> Option<usize> {
        *self.in_huge_pages.get_or_init(|| self.units.huge_page_bytes())
    }

    /// Sets the numbers of buffers, for each size of unit buffers that is named. Shrinking goes before
    /// growing.
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

    /// Staging and scratch memory for moments of projected gradients.
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

impl Drop for RuntimeInner {
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
