//! The plan that a runtime is opened with: its store, the content of its arena, and the arena's allocator.

use std::path::PathBuf;

use memascend_mem::{HostAllocator, SizeClass};
use memascend_store::StoreOptions;
use pyo3::prelude::*;

use crate::errors::memory_error;

/// A line of the plan: consumer, bytes of a buffer, number of buffers; and how many there can be, if
/// that number may change.
#[derive(FromPyObject)]
pub(super) enum PlanLine {
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
pub(super) struct RuntimeOptions {
    pub(super) store: StorePlan,
    pub(super) memory: MemoryPlan,
    pub(super) allocator: AllocatorChoice,
    pub(super) compute_threads: usize,
    /// Number of the CUDA device.
    pub(super) device: Option<i32>,
}

/// Where the store lies, and how it is opened.
pub(super) struct StorePlan {
    pub(super) paths: Vec<PathBuf>,
    pub(super) options: StoreOptions,
    /// Open an existing store instead of creating one.
    pub(super) resume: bool,
}

/// The content of the arena: a `memascend.memory_plan.arena.Arena`, which describes each number.
#[derive(FromPyObject)]
pub(super) struct MemoryPlan {
    pub(super) units: Vec<PlanLine>,
    pub(super) packs: Vec<PlanLine>,
    pub(super) chunk_bytes: usize,
    pub(super) chunk_count: usize,
    pub(super) chunk_count_max: Option<usize>,
    pub(super) chunk_elements: usize,
    pub(super) slot_bytes: usize,
    pub(super) slot_count: usize,
    pub(super) states_bytes: usize,
    pub(super) states_count: usize,
    pub(super) states_count_max: Option<usize>,
}

impl MemoryPlan {
    /// The size classes of the pools: units, packs, staging chunks, update slots, states.
    pub(super) fn groups(&self) -> [Vec<SizeClass>; 5] {
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
pub(super) struct AllocatorChoice {
    pub(super) name: String,
    pub(super) huge_pages: bool,
}

impl AllocatorChoice {
    /// The allocators to try, the preferred one first, for memory that grows and shrinks if `elastic`.
    pub(super) fn allocators(
        &self,
        device: Option<i32>,
        elastic: bool,
    ) -> PyResult<Vec<Box<dyn HostAllocator>>> {
        let names: &[&str] = match (self.name.as_str(), device) {
            // Without a device, pages locked by the system serve as well as CUDA's, and cost less.
            ("auto", None) => &["locked", "pageable"],
            // A device copies from other memory through a buffer of its own, and the caller waits
            // for that copy.
            // CUDA gives no part of an allocation back.
            ("auto", Some(_)) if elastic => &["registered"],
            ("auto", Some(_)) => &memascend_mem::kinds_for_a_device(self.huge_pages),
            (name, _) => &[name],
        };
        let allocators = names.iter().map(|name| memascend_mem::allocator(name, self.huge_pages));
        allocators.collect::<Result<_, _>>().map_err(|error| memory_error(&error))
    }
}
