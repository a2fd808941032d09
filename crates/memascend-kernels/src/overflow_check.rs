//! The overflow check over a list of tensors, on several threads.
//!
//! The work is cut into blocks of [`GRADIENT_BLOCK`] elements. Threads take blocks in order, some
//! at a time. The sums of the blocks are added in order too, so that the result does not depend on
//! the number of threads. A sum whose predecessors are not there yet waits in a ring of fixed size:
//! apart from the threads nothing is allocated.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::Dtype;
use crate::{
    GRADIENT_BLOCK, GradientStats, check_bf16, check_f16, check_f32, stats_f16, stats_f32, sum_bf16,
    unscale_bf16, unscale_f16, unscale_f32,
};

/// Blocks by which a thread may run ahead of the slowest one before it waits.
const RING: usize = 256;

/// Blocks that make a further thread worth its cost.
const BLOCKS_PER_THREAD: usize = 4;

/// Blocks that a thread takes at a time while there are many: memory is read faster in long
/// stretches.
const BLOCKS_AT_ONCE: usize = 16;

/// A tensor to be checked, or checked and unscaled.
#[derive(Clone, Copy, Debug)]
pub struct CheckedTensor<'a> {
    dtype: Dtype,
    numel: usize,
    address: *mut u8,
    tensor: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for slices, which threads may share; what is written is divided between them by
// `Blocks`.
unsafe impl Send for CheckedTensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for CheckedTensor<'_> {}

impl CheckedTensor<'_> {
    /// `numel` elements from `address` on.
    ///
    /// # Safety
    /// The elements are initialised, aligned as their type and live for `'a`; they are not written
    /// during a check. If they are unscaled, no other code reads them either, and no other tensor
    /// of the list overlaps them.
    pub unsafe fn new(dtype: Dtype, numel: usize, address: *mut u8) -> Self {
        CheckedTensor { dtype, numel, address, tensor: PhantomData }
    }

    fn blocks(&self) -> usize {
        self.numel.div_ceil(GRADIENT_BLOCK)
    }

    /// The elements of one block.
    ///
    /// # Safety
    /// As [`CheckedTensor::new`], and the address is aligned for `T`, the type that `dtype` says.
    unsafe fn block<T>(&self, block: usize) -> &[T] {
        let start = block * GRADIENT_BLOCK;
        let numel = GRADIENT_BLOCK.min(self.numel - start);
        // SAFETY: within the tensor, as the caller of `new` promised.
        unsafe { std::slice::from_raw_parts(self.address.cast::<T>().add(start), numel) }
    }

    /// The elements of one block, to write.
    ///
    /// # Safety
    /// As [`CheckedTensor::block`], and no other code uses this block.
    #[allow(clippy::mut_from_ref)]
    unsafe fn block_mut<T>(&self, block: usize) -> &mut [T] {
        let start = block * GRADIENT_BLOCK;
        let numel = GRADIENT_BLOCK.min(self.numel - start);
        // SAFETY: within the tensor, as the caller of `new` promised, and this block's alone.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast::<T>().add(start), numel) }
    }

    /// One block's sum is taken of the written values, while they are in the cache.
    fn run(&self, block: usize, work: CheckedWork, sum: bool) -> GradientStats {
        let mut stats = GradientStats::default();
        let mut found = false;
        // SAFETY: the type is that of `dtype`. Each block is taken by one thread, which alone
        // unscales it.
        unsafe {
            if let CheckedWork::Unscale(scale) = work {
                match self.dtype {
                    Dtype::F32 => unscale_f32(self.block_mut(block), scale, &mut found),
                    Dtype::F16 => unscale_f16(self.block_mut(block), scale, &mut found),
                    Dtype::Bf16 => unscale_bf16(self.block_mut(block), scale, &mut found),
                }
            }
            match (sum, self.dtype) {
                (true, Dtype::F32) => stats_f32(self.block(block), &mut stats),
                (true, Dtype::F16) => stats_f16(self.block(block), &mut stats),
                (true, Dtype::Bf16) => sum_bf16(self.block(block), &mut stats),
                (false, _) if work != CheckedWork::Look => {}
                (false, Dtype::F32) => check_f32(self.block(block), &mut stats.non_finite),
                (false, Dtype::F16) => check_f16(self.block(block), &mut stats.non_finite),
                (false, Dtype::Bf16) => check_bf16(self.block(block), &mut stats.non_finite),
            }
        }
        if work != CheckedWork::Look {
            stats.non_finite = found;
        }
        stats
    }
}

/// The operation of a check in its single pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CheckedWork {
    /// Look, and stop at the first block with an infinity or a NaN.
    Look,
    /// Multiply by this factor, in place. This goes on to the end even if an element is not finite.
    /// Sums are of the products.
    Unscale(f32),
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedOutcome {
    /// Whether an element is infinite or NaN (was, before it was unscaled).
    pub non_finite: bool,
    /// Blocks that were read: fewer than there are if the check stopped early.
    pub blocks: usize,
}

/// Sums of blocks on their way into the sums of their tensors, in order.
struct Fold<'a> {
    sums: &'a mut [f64],
    /// The next block to add, its tensor, and the number of blocks of that tensor still to come
    /// (`left`).
    next: usize,
    tensor: usize,
    left: usize,
    ring: [Option<f64>; RING],
}

/// The list as one row of blocks.
struct Blocks<'a> {
    tensors: &'a [CheckedTensor<'a>],
    work: CheckedWork,
    sum: bool,
    total: usize,
    next: AtomicUsize,
    read: AtomicUsize,
    found: AtomicBool,
    fold: Mutex<Fold<'a>>,
    moved: Condvar,
}

/// Checks a list of tensors on up to `threads` threads.
///
/// `sums` has one value for each tensor, which is overwritten with the tensor's sum of squares, as
/// the gradients' kernels compute it; it is empty if no sums are wanted. All are NaN if an element
/// is not finite, since the check stops then.
///
/// # Panics
/// When `sums` is neither empty nor as long as `tensors`.
pub fn check_overflow(
    tensors: &[CheckedTensor<'_>],
    work: CheckedWork,
    threads: usize,
    sums: &mut [f64],
) -> CheckedOutcome {
    assert!(sums.is_empty() || sums.len() == tensors.len(), "one sum for each tensor");
    sums.fill(0.0);
    let total = tensors.iter().map(CheckedTensor::blocks).sum();
    let sum = !sums.is_empty();
    let fold = Fold { sums: &mut *sums, next: 0, tensor: 0, left: 0, ring: [None; RING] };
    let blocks = Blocks {
        tensors,
        work,
        sum,
        total,
        next: AtomicUsize::new(0),
        read: AtomicUsize::new(0),
        found: AtomicBool::new(false),
        fold: Mutex::new(fold),
        moved: Condvar::new(),
    };
    let threads = threads.min(total.div_ceil(BLOCKS_PER_THREAD)).max(1);
    if threads == 1 {
        blocks.work();
    } else {
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // If the system starts no more threads, those that run do all the work.
                if std::thread::Builder::new().spawn_scoped(scope, || blocks.work()).is_err() {
                    break;
                }
            }
            blocks.work();
        });
    }
    let outcome = CheckedOutcome {
        non_finite: blocks.found.load(Ordering::Relaxed),
        blocks: blocks.read.load(Ordering::Relaxed),
    };
    if outcome.non_finite {
        sums.fill(f64::NAN);
    }
    outcome
}

impl<'a> Blocks<'a> {
    fn work(&self) {
        let goes_on = matches!(self.work, CheckedWork::Unscale(_));
        let stops = || !goes_on && self.found.load(Ordering::Relaxed);
        // A thread's blocks ascend, so that the next one belongs to this tensor or a later one.
        let (mut tensor, mut first, mut read) = (0, 0, 0);
        while !stops() {
            // Towards the end one block at a time, so that the last one ends soon.
            let left = self.total.saturating_sub(self.next.load(Ordering::Relaxed));
            let taken = (left / BLOCKS_PER_THREAD).clamp(1, BLOCKS_AT_ONCE);
            let begin = self.next.fetch_add(taken, Ordering::Relaxed);
            if begin >= self.total {
                break;
            }
            for block in begin..(begin + taken).min(self.total) {
                if stops() {
                    break;
                }
                while block >= first + self.tensors[tensor].blocks() {
                    first += self.tensors[tensor].blocks();
                    tensor += 1;
                }
                let stats = self.tensors[tensor].run(block - first, self.work, self.sum);
                read += 1;
                if stats.non_finite {
                    self.found.store(true, Ordering::Relaxed);
                }
                if self.sum {
                    self.add(block, stats.sum_squares);
                }
            }
        }
        self.read.fetch_add(read, Ordering::Relaxed);
        // Wake threads that wait for a block which will not be read any more.
        let _fold = self.fold();
        self.moved.notify_all();
    }

    /// Locks the fold. No change to it panics half-way, so a poisoned lock guards a sound state.
    fn fold(&self) -> MutexGuard<'_, Fold<'a>> {
        self.fold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, block: usize, sum: f64) {
        let mut fold = self.fold();
        while block >= fold.next + RING {
            // The sums are not needed any more, and blocks may be missing.
            if self.found.load(Ordering::Relaxed) {
                return;
            }
            fold = self.moved.wait(fold).unwrap_or_else(PoisonError::into_inner);
        }
        fold.ring[block % RING] = Some(sum);
        let before = fold.next;
        while let Some(sum) = {
            let slot = fold.next % RING;
            fold.ring[slot].take()
        } {
            while fold.left == 0 {
                fold.left = self.tensors[fold.tensor].blocks();
                fold.tensor += 1;
            }
            let tensor = fold.tensor - 1;
            fold.sums[tensor] += sum;
            fold.left -= 1;
            fold.next += 1;
        }
        if fold.next > before {
            self.moved.notify_all();
        }
    }
}

#[cfg(test)]
mod tests;
