//! Threads that add gradients up and measure them, block by block.

use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use memascend_kernels::{GRADIENT_BLOCK, GradientStats};
use memascend_mem::{LeaseSlice, Origin};

use super::GradientDtypes;
use crate::{ExecError, Result};

/// The operation on elements of a gradient.
pub(super) enum AdderWork {
    /// Copy them, without measuring.
    Copy { source: LeaseSlice, target: LeaseSlice },
    /// Copy them, or add them to the stored gradient, and measure the result.
    Merge { source: LeaseSlice, target: LeaseSlice, add: bool },
    /// Measure the stored gradient.
    Measure { kept: LeaseSlice },
}

/// Threads beside the one that calls them. Sums of squares are taken by blocks, and added in their order by the caller:
/// the number of threads changes no bit.
pub(super) struct Adders {
    tasks: Option<Sender<Task>>,
    accepted: Receiver<Task>,
    threads: Vec<JoinHandle<()>>,
    origin: Origin,
}

/// A block, and where its statistics go.
struct Task {
    dtypes: GradientDtypes,
    work: AdderWork,
    number: usize,
    measured: Sender<(usize, GradientStats)>,
}

impl Task {
    fn run(self) {
        let mut stats = GradientStats::default();
        // SAFETY: `Adders::run`'s caller vouches for the memory until all tasks have ended.
        unsafe { self.work.run(self.dtypes, &mut stats) };
        // Drop the buffers before telling, so that the caller is the last to hold them.
        let Self { work, number, measured, .. } = self;
        drop(work);
        let _ = measured.send((number, stats));
    }
}

impl AdderWork {
    /// # Safety
    /// Nothing else writes what is read, or uses what is written.
    unsafe fn run(&self, dtypes: GradientDtypes, stats: &mut GradientStats) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Copy { source, target } => target.as_mut_slice().copy_from_slice(source.as_slice()),
                Self::Merge { source, target, add } => {
                    dtypes.merge(target.as_mut_slice(), source.as_slice(), *add, stats);
                }
                Self::Measure { kept } => dtypes.measure(kept.as_slice(), stats),
            }
        }
    }

    /// The work on each gradient block, in order.
    fn blocks(self, dtypes: GradientDtypes) -> impl Iterator<Item = Self> {
        let (kept, made) = (dtypes.kept_bytes(), dtypes.made_bytes());
        let numel = match &self {
            Self::Copy { target, .. } | Self::Merge { target, .. } => target.bytes() / kept,
            Self::Measure { kept: all } => all.bytes() / kept,
        };
        (0..numel).step_by(GRADIENT_BLOCK).map(move |first| {
            let count = GRADIENT_BLOCK.min(numel - first);
            let of = |all: &LeaseSlice, element| all.narrow(first * element, count * element);
            match &self {
                Self::Copy { source, target } => {
                    Self::Copy { source: of(source, made), target: of(target, kept) }
                }
                Self::Merge { source, target, add } => {
                    Self::Merge { source: of(source, made), target: of(target, kept), add: *add }
                }
                Self::Measure { kept: all } => Self::Measure { kept: of(all, kept) },
            }
        })
    }
}

impl Adders {
    /// At most `threads` threads, the caller included: as many as the system starts.
    pub(super) fn new(threads: usize) -> Self {
        let (tasks, accepted) = unbounded::<Task>();
        let thread = |index| {
            let accepted = accepted.clone();
            let run = move || accepted.into_iter().for_each(Task::run);
            std::thread::Builder::new().name(format!("memascend-adder-{index}")).spawn(run)
        };
        let threads = (1..threads).map_while(|index| thread(index).ok()).collect();
        Self { tasks: Some(tasks), accepted, threads, origin: Origin::here() }
    }

    /// Whether the caller does all work by itself.
    pub(super) fn is_one(&self) -> bool {
        self.threads.is_empty()
    }

    /// Does all work, and adds the statistics of its blocks to `stats`, in order.
    ///
    /// # Errors
    /// If a thread failed.
    ///
    /// # Safety
    /// Until this returns nothing else writes what is read, or uses what is written; no two works write the same bytes.
    pub(super) unsafe fn run(
        &self,
        dtypes: GradientDtypes,
        works: Vec<AdderWork>,
        stats: &mut GradientStats,
    ) -> Result<()> {
        if self.threads.is_empty() {
            // SAFETY: the caller's promise.
            works.iter().for_each(|work| unsafe { work.run(dtypes, stats) });
            return Ok(());
        }
        let tasks = self.tasks.as_ref().expect("open until dropped");
        let (measured, told) = unbounded();
        let mut count = 0;
        for work in works.into_iter().flat_map(|work| work.blocks(dtypes)) {
            let _ = tasks.send(Task { dtypes, work, number: count, measured: measured.clone() });
            count += 1;
        }
        drop(measured);
        while let Ok(task) = self.accepted.try_recv() {
            task.run();
        }
        // All tasks have ended when the last sender is gone, also where a thread has failed.
        let mut blocks = vec![None; count];
        told.into_iter().for_each(|(number, block)| blocks[number] = Some(block));
        for block in blocks {
            let block = block.ok_or(ExecError::Abandoned)?;
            stats.add_block(block.sum_squares);
            stats.non_finite |= block.non_finite;
        }
        Ok(())
    }
}

impl Drop for Adders {
    fn drop(&mut self) {
        // A forked child has no such threads.
        if !self.origin.is_here() {
            return;
        }
        self.tasks = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
