//! Allocations of the overflow check: none, whatever the size, but the threads it is allowed.
//!
//! Counted by the allocator of this test's process, which has this one test: nothing else allocates
//! meanwhile.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use memascend_kernels::{CheckedTensor, CheckedWork, Dtype, check_overflow};

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work; counting changes nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: forwarded.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocated(values: &mut [u32], dtype: Dtype, work: CheckedWork, threads: usize) -> usize {
    let numel = if dtype == Dtype::F32 { values.len() } else { 2 * values.len() };
    // SAFETY: the slice is borrowed throughout, and 4 bytes are aligned for either type.
    let tensor = unsafe { CheckedTensor::new(dtype, numel, values.as_mut_ptr().cast()) };
    let mut sums = [0.0];
    let before = BYTES.load(Ordering::Relaxed);
    let outcome = check_overflow(&[tensor], work, threads, &mut sums);
    let bytes = BYTES.load(Ordering::Relaxed) - before;
    assert!(!outcome.non_finite);
    bytes
}

#[test]
fn nothing_is_allocated_but_threads() {
    let mut values = vec![0u32; 40 << 20];
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for work in [CheckedWork::Look, CheckedWork::Unscale(0.5)] {
            allocated(&mut values[..1 << 20], dtype, work, 4); // set-up of a process's first threads
            assert_eq!(allocated(&mut values, dtype, work, 1), 0, "{dtype:?} {work:?}");
            let small = allocated(&mut values[..2 << 20], dtype, work, 4);
            let large = allocated(&mut values, dtype, work, 4);
            assert_eq!(small, large, "{dtype:?} {work:?}: it grows with the tensor");
            assert!(large < 4096, "{dtype:?} {work:?}: three threads took {large} bytes");
        }
    }
}
