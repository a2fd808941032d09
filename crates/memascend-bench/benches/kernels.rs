//! `cargo bench -p memascend-bench --bench kernels`: optimizer steps on 64 Mi elements, on one thread and on two,
//! beside plain passes over memory. Bytes per second count reads and writes of a step.

use std::hint::black_box;

use memascend_bench::measure;
use memascend_kernels::{
    Algorithm, GRADIENT_BLOCK, GradientStats, Moments, Rule, StepScalars, Weight, add_bf16, add_f16,
    copy_bf16, copy_f16, step,
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
        let mut planes: Vec<_> = rule.planes().iter().map(|plane| vec![0; plane.bytes(ELEMENTS)]).collect();
        // Zeros of the allocator's have no memory of their own before they are written.
        planes.iter_mut().for_each(|plane| black_box(plane).fill(0));
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

fn plain() {
    const BYTES: usize = 512 << 20;
    for threads in THREADS {
        let mut source = vec![1u64; BYTES / 8];
        let mut target = vec![2u64; BYTES / 8];
        let share = source.len() / threads;
        measure(&format!("plain/read, {threads} threads"), BYTES, || {
            std::thread::scope(|scope| {
                for part in source.chunks(share) {
                    scope.spawn(move || black_box(part.iter().fold(0u64, |sum, x| sum.wrapping_add(*x))));
                }
            });
        });
        measure(&format!("plain/copy, {threads} threads"), 2 * BYTES, || {
            std::thread::scope(|scope| {
                for (target, source) in target.chunks_mut(share).zip(source.chunks(share)) {
                    scope.spawn(move || target.copy_from_slice(black_box(source)));
                }
            });
        });
        measure(&format!("plain/add one in place, {threads} threads"), 2 * BYTES, || {
            std::thread::scope(|scope| {
                for part in source.chunks_mut(share) {
                    scope.spawn(move || part.iter_mut().for_each(|x| *x = x.wrapping_add(1)));
                }
            });
        });
    }
}

fn variants() {
    let adamw = Algorithm::AdamW { amsgrad: false };
    let mut rules = Vec::new();
    for weight in [Weight::Bf16Split, Weight::Bf16, Weight::F16Master, Weight::F32] {
        for moments in [Moments::F32, Moments::Bf16, Moments::Block8] {
            rules.push(Rule { algorithm: adamw, moments, weight });
        }
    }
    for algorithm in Algorithm::ELEMENTWISE.into_iter().filter(|&algorithm| algorithm != adamw) {
        for moments in [Moments::F32, Moments::Bf16, Moments::Block8] {
            rules.push(Rule { algorithm, moments, weight: Weight::Bf16Split });
        }
    }
    for rule in rules {
        let mut tensor = Tensor::new(rule);
        let scalars = StepScalars::usual(rule.algorithm, 1e-5, 0.01, 10);
        let bytes = tensor.traffic_bytes();
        for threads in THREADS {
            let Rule { algorithm, moments, weight } = rule;
            let name = format!("step/{algorithm:?}, {moments:?} moments, {weight:?}, {threads} threads");
            measure(&name, bytes, || tensor.step(threads, &scalars));
        }
    }
}

/// Capture of gradients, on one thread. A format is its kernels for copying and for adding.
fn gradients() {
    type Kernel = fn(&mut [u16], &[u16], &mut GradientStats);
    let source = vec![0x2E91u16; ELEMENTS];
    let mut target = vec![0x0102u16; ELEMENTS];
    let kernels: [(&str, usize, Kernel); 4] = [
        ("copy_bf16", 4, copy_bf16),
        ("copy_f16", 4, copy_f16),
        ("add_bf16", 6, add_bf16),
        ("add_f16", 6, add_f16),
    ];
    for (name, bytes, kernel) in kernels {
        let mut stats = GradientStats::default();
        measure(&format!("gradient/{name}"), bytes * ELEMENTS, || {
            kernel(&mut target, black_box(&source), &mut stats)
        });
        black_box(stats);
    }
}

fn main() {
    plain();
    gradients();
    variants();
}
