use crate::Dtype;
use crate::gradients::{cast, cast_mut};
use crate::kernels::{AdamwScalars, GRADIENT_BLOCK, adamw_bf16_split, adamw_f32};

/// A tensor in host memory to be updated in place. Lengths in bytes follow from `dtype`.
pub struct HostTensor<'a> {
    /// Element type of weight and gradient.
    pub dtype: Dtype,
    /// Weights.
    pub weight: &'a mut [u8],
    /// Low half of the master; empty where the weight is its own master.
    pub low: &'a mut [u8],
    /// First moment, fp32.
    pub exp_avg: &'a mut [u8],
    /// Second moment, fp32.
    pub exp_avg_sq: &'a mut [u8],
    /// Gradient.
    pub gradient: &'a [u8],
}

/// One AdamW step on a tensor in host memory, on up to `threads` threads: bit for bit what the executor
/// does to the same tensor on the SSD.
pub fn adamw_host(tensor: HostTensor<'_>, scalars: &AdamwScalars, threads: usize) {
    let HostTensor { dtype, weight, low, exp_avg, exp_avg_sq, gradient } = tensor;
    let elements = gradient.len() / dtype.bytes();
    let share = elements.div_ceil(threads.max(1)).max(1).next_multiple_of(GRADIENT_BLOCK);
    std::thread::scope(|scope| {
        // Zero-length pieces of the absent low half keep the iterators in step.
        let mut low_rest = low;
        let parts = weight
            .chunks_mut(share * dtype.bytes())
            .zip(exp_avg.chunks_mut(share * crate::MOMENT_BYTES))
            .zip(exp_avg_sq.chunks_mut(share * crate::MOMENT_BYTES))
            .zip(gradient.chunks(share * dtype.bytes()));
        for (((weight, exp_avg), exp_avg_sq), gradient) in parts {
            let taken = (share * dtype.low_bytes()).min(low_rest.len());
            let (low, rest) = std::mem::take(&mut low_rest).split_at_mut(taken);
            low_rest = rest;
            let mut run = move || match dtype {
                Dtype::Bf16 => adamw_bf16_split(
                    cast_mut(weight),
                    cast_mut(low),
                    cast_mut(exp_avg),
                    cast_mut(exp_avg_sq),
                    cast(gradient),
                    scalars,
                ),
                Dtype::F32 => {
                    adamw_f32(
                        cast_mut(weight),
                        cast_mut(exp_avg),
                        cast_mut(exp_avg_sq),
                        cast(gradient),
                        scalars,
                    );
                }
            };
            if elements <= share {
                run();
            } else {
                scope.spawn(run);
            }
        }
    });
}
