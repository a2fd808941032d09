//! `cargo bench -p memascend-optim`: optimizer steps on 64 Mi elements, on one thread and on two, beside plain passes over memory.
//! Bytes per second count what a step reads and what it writes.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use memascend_optim::kernels::{
    AdamwScalars, Algorithm, GRADIENT_BLOCK, Moments, Rule, StepScalars, Weight, adamw_bf16_split, step,
};

const ELEMENTS: usize = 64 << 20;
const THREADS: [usize; 2] = [1, 2];

struct Tensor {
    rule: Rule,
    weight: Vec<u8>,
    planes: Vec<Vec<u8>>,
    gradient: Vec<u8>,
}

impl Tensor {
    fn new(rule: Rule) -> Self {
        // Alternating signs, exponents near one in each format.
        let pattern: &[u8] = match rule.weight {
            Weight::Bf16Split | Weight::Bf16 => &[0x3A, 0x3F, 0x91, 0xBE],
            Weight::F16Master => &[0x3A, 0x3C, 0x91, 0xB8],
            Weight::F32 => &[0x12, 0x34, 0x3A, 0x3F, 0x56, 0x78, 0x91, 0xBE],
        };
        let weight = pattern.repeat(ELEMENTS * rule.weight.bytes() / pattern.len());
        let mut planes: Vec<_> = rule.planes().iter().map(|plane| vec![1; plane.bytes(ELEMENTS)]).collect();
        rule.initialize(&weight, &mut planes.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
        Self { rule, gradient: weight.clone(), weight, planes }
    }

    /// Bytes that a step reads and writes.
    fn traffic_bytes(&self) -> usize {
        2 * self.weight.len() + 2 * self.planes.iter().map(Vec::len).sum::<usize>() + self.gradient.len()
    }

    fn step(&mut self, threads: usize, scalars: &StepScalars) {
        let (rule, bytes) = (self.rule, self.rule.weight.bytes());
        let share = (ELEMENTS / threads).next_multiple_of(GRADIENT_BLOCK);
        std::thread::scope(|scope| {
            let mut rest: Vec<&mut [u8]> = self.planes.iter_mut().map(Vec::as_mut_slice).collect();
            let parts = self.weight.chunks_mut(share * bytes).zip(self.gradient.chunks(share * bytes));
            for (index, (weight, gradient)) in parts.enumerate() {
                let elements = gradient.len() / bytes;
                let mut mine = Vec::new();
                for (plane, rest) in rule.planes().iter().zip(&mut rest) {
                    let (taken, left) =
                        std::mem::take(rest).split_at_mut(plane.span(index * share, elements).len());
                    mine.push(taken);
                    *rest = left;
                }
                scope.spawn(move || {
                    step(rule, weight, &mut mine, gradient, (index * share) as u64, scalars);
                });
            }
        });
    }
}

fn scalars(algorithm: Algorithm) -> StepScalars {
    match algorithm {
        Algorithm::AdamW { .. } => StepScalars::adamw(1e-5, (0.9, 0.999), 1e-8, 0.01, 10),
        Algorithm::Lion => StepScalars::lion(1e-6, (0.9, 0.99), 0.01, 10),
        Algorithm::Sgd { .. } => StepScalars::sgd(1e-4, 0.9, 0.0, 0.01, false, 10),
    }
}

fn plain(criterion: &mut Criterion) {
    const BYTES: usize = 512 << 20;
    let mut group = criterion.benchmark_group("plain");
    group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    for threads in THREADS {
        let mut source = vec![1u64; BYTES / 8];
        let mut target = vec![2u64; BYTES / 8];
        let share = source.len() / threads;
        group.throughput(Throughput::Bytes(BYTES as u64));
        group.bench_function(format!("read, {threads} threads"), |bencher| {
            bencher.iter(|| {
                std::thread::scope(|scope| {
                    for part in source.chunks(share) {
                        scope.spawn(move || black_box(part.iter().fold(0u64, |sum, x| sum.wrapping_add(*x))));
                    }
                });
            });
        });
        group.throughput(Throughput::Bytes(2 * BYTES as u64));
        group.bench_function(format!("copy, {threads} threads"), |bencher| {
            bencher.iter(|| {
                std::thread::scope(|scope| {
                    for (target, source) in target.chunks_mut(share).zip(source.chunks(share)) {
                        scope.spawn(move || target.copy_from_slice(black_box(source)));
                    }
                });
            });
        });
        group.bench_function(format!("add one in place, {threads} threads"), |bencher| {
            bencher.iter(|| {
                std::thread::scope(|scope| {
                    for part in source.chunks_mut(share) {
                        scope.spawn(move || part.iter_mut().for_each(|x| *x = x.wrapping_add(1)));
                    }
                });
            });
        });
    }
    group.finish();
}

fn variants(criterion: &mut Criterion) {
    let adamw = Algorithm::AdamW { amsgrad: false };
    let mut rules = Vec::new();
    for weight in [Weight::Bf16Split, Weight::Bf16, Weight::F16Master, Weight::F32] {
        for moments in [Moments::F32, Moments::Bf16, Moments::Block8] {
            rules.push(Rule { algorithm: adamw, moments, weight });
        }
    }
    for moments in [Moments::F32, Moments::Bf16, Moments::Block8] {
        rules.push(Rule { algorithm: Algorithm::Lion, moments, weight: Weight::Bf16Split });
    }
    for algorithm in [
        Algorithm::AdamW { amsgrad: true },
        Algorithm::Sgd { momentum: true },
        Algorithm::Sgd { momentum: false },
    ] {
        rules.push(Rule { algorithm, moments: Moments::F32, weight: Weight::Bf16Split });
    }
    let mut group = criterion.benchmark_group("step");
    group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    for rule in rules {
        let mut tensor = Tensor::new(rule);
        let scalars = scalars(rule.algorithm);
        group.throughput(Throughput::Bytes(tensor.traffic_bytes() as u64));
        for threads in THREADS {
            let Rule { algorithm, moments, weight } = rule;
            let name = format!("{algorithm:?}, {moments:?} moments, {weight:?}, {threads} threads");
            group.bench_function(name, |bencher| bencher.iter(|| tensor.step(threads, &scalars)));
        }
    }
    group.finish();
}

/// The kernel without staging, for comparison.
fn direct(criterion: &mut Criterion) {
    let scalars = AdamwScalars::new(1e-5, 0.9, 0.999, 1e-8, 0.01, 10, 1.0);
    let (mut high, mut low) = (vec![0x3F3Au16; ELEMENTS], vec![0x1234u16; ELEMENTS]);
    let (mut exp_avg, mut exp_avg_sq) = (vec![0.1f32; ELEMENTS], vec![0.1f32; ELEMENTS]);
    let gradient = vec![0x3E91u16; ELEMENTS];
    let mut group = criterion.benchmark_group("direct");
    group.sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    group.throughput(Throughput::Bytes(26 * ELEMENTS as u64));
    group.bench_function("adamw_bf16_split, 1 thread", |bencher| {
        bencher.iter(|| {
            adamw_bf16_split(&mut high, &mut low, &mut exp_avg, &mut exp_avg_sq, &gradient, &scalars)
        });
    });
    group.finish();
}

criterion_group!(benches, plain, direct, variants);
criterion_main!(benches);
