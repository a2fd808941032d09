//! Gradients, and their expected statistics.

use std::sync::Arc;

use memascend_exec::{GradientId, Gradients, InFlightCounter};
use memascend_kernels::{Dtype, GradientStats, stats_bf16, stats_f16, stats_f32};

/// A gradient of its own, and the counter of its writes.
pub fn create(gradients: &Gradients, dtype: Dtype, numel: usize) -> (GradientId, Arc<InFlightCounter>) {
    let pending = Arc::default();
    (gradients.create("w.gradient", dtype, numel, Arc::clone(&pending)).unwrap(), pending)
}

/// The `bytes` bytes of a gradient.
pub fn read(gradients: &Gradients, id: GradientId, bytes: usize) -> Vec<u8> {
    let mut target = vec![0xEE; bytes];
    gradients.read(id, &mut target).unwrap();
    target
}

pub fn words(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

/// Expected measurements of a capture of the values `bytes`.
pub fn stats(dtype: Dtype, bytes: &[u8]) -> GradientStats {
    let mut stats = GradientStats::default();
    match dtype {
        Dtype::Bf16 => stats_bf16(&words(bytes), &mut stats),
        Dtype::F16 => stats_f16(&words(bytes), &mut stats),
        Dtype::F32 => stats_f32(&floats(bytes), &mut stats),
    }
    stats
}
