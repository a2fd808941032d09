//! `cargo bench -p memascend-bench --bench memory`: a lease taken and returned, and 1 GiB from each allocator that
//! works here.

use std::time::Duration;

use memascend_bench::measure;
use memascend_mem::{PageableAllocator, Pool, SizeClass, allocator};

fn leases() {
    let class = |bytes, count| SizeClass::new("bench", bytes, count);
    let pool =
        Pool::new(&PageableAllocator::default(), &[class(4096, 4), class(1 << 20, 4), class(1 << 24, 2)])
            .unwrap();
    measure("lease/acquire and release", 0, || pool.try_lease(1 << 20).unwrap().expect("free"));
    measure("lease/acquire and release, by the waiting call", 0, || {
        pool.lease(1 << 20, Duration::from_secs(1)).unwrap().expect("free")
    });
    let held: Vec<_> = (0..2).map(|_| pool.try_lease(1 << 24).unwrap().expect("free")).collect();
    measure("lease/a refusal", 0, || assert!(pool.try_lease(1 << 24).unwrap().is_none()));
    drop(held);
}

fn allocations() {
    const BYTES: usize = 1 << 30;
    for (name, huge_pages) in [
        ("pageable", false),
        ("locked", false),
        ("locked", true),
        ("registered", false),
        ("registered", true),
        ("cuda", false),
    ] {
        let title = format!("1 GiB/{name}{}", if huge_pages { ", huge pages" } else { "" });
        let source = match allocator(name, huge_pages) {
            Ok(source) => source,
            Err(error) => {
                println!("{title}: not here: {error}");
                continue;
            }
        };
        // The system maps pageable memory at once and finds pages on first use: one byte a page is
        // written.
        measure(&title, BYTES, || {
            let block = source.allocate(BYTES).unwrap();
            if name == "pageable" {
                for page in (0..BYTES).step_by(4096) {
                    // SAFETY: the page is within the block, which only this benchmark knows.
                    unsafe { block.address().add(page).write_volatile(1) };
                }
            }
            block
        });
    }
}

fn main() {
    leases();
    allocations();
}
