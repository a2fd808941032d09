//! `cargo bench -p memascend-bench --bench memory`: a lease taken and returned, and 1 GiB from each allocator that
//! works here.

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use memascend_mem::{PageableAllocator, Pool, SizeClass, allocator};

fn leases(criterion: &mut Criterion) {
    let class = |bytes, count| SizeClass::new("bench", bytes, count);
    let pool =
        Pool::new(&PageableAllocator::default(), &[class(4096, 4), class(1 << 20, 4), class(1 << 24, 2)])
            .unwrap();
    let mut group = criterion.benchmark_group("lease");
    group.throughput(Throughput::Elements(1));
    group.bench_function("acquire and release", |bencher| {
        bencher.iter(|| pool.try_lease(1 << 20).unwrap().expect("free"));
    });
    group.bench_function("acquire and release, by the waiting call", |bencher| {
        bencher.iter(|| pool.lease(1 << 20, Duration::from_secs(1)).unwrap().expect("free"));
    });
    group.bench_function("a refusal", |bencher| {
        let held: Vec<_> = (0..2).map(|_| pool.try_lease(1 << 24).unwrap().expect("free")).collect();
        bencher.iter(|| assert!(pool.try_lease(1 << 24).unwrap().is_none()));
        drop(held);
    });
    group.finish();
}

fn allocations(criterion: &mut Criterion) {
    const BYTES: usize = 1 << 30;
    let mut group = criterion.benchmark_group("1 GiB");
    group.throughput(Throughput::Bytes(BYTES as u64)).sample_size(10);
    for (name, huge_pages) in [
        ("pageable", false),
        ("locked", false),
        ("locked", true),
        ("registered", false),
        ("registered", true),
        ("cuda", false),
    ] {
        let title = if huge_pages { format!("{name}, huge pages") } else { name.to_owned() };
        let source = match allocator(name, huge_pages) {
            Ok(source) => source,
            Err(error) => {
                println!("1 GiB/{title}: not here: {error}");
                continue;
            }
        };
        // The system maps pageable memory at once and finds pages on first use: one byte a page is
        // written.
        group.bench_function(title, |bencher| {
            bencher.iter(|| {
                let block = source.allocate(BYTES).unwrap();
                if name == "pageable" {
                    for page in (0..BYTES).step_by(4096) {
                        // SAFETY: the page is within the block, which only this benchmark knows.
                        unsafe { block.address().add(page).write_volatile(1) };
                    }
                }
                block
            });
        });
    }
    group.finish();
}

criterion_group!(benches, leases, allocations);
criterion_main!(benches);
