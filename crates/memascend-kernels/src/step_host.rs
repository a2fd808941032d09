//! One optimizer step on a tensor in host memory, on several threads.

use crate::{ChannelFactors, GRADIENT_BLOCK, Rule, StepScalars, step, step_channels};

/// A tensor in host memory to be updated in place. Lengths in bytes follow from the rule.
pub struct HostTensor<'a> {
    /// The algorithm of a step, and its planes.
    pub rule: Rule,
    /// Weights.
    pub weight: &'a mut [u8],
    /// The planes of [`Rule::planes`].
    pub planes: Vec<&'a mut [u8]>,
    /// Gradient.
    pub gradient: &'a [u8],
}

/// One optimizer step on a tensor in host memory, on up to `threads` threads: with the bits of the executor
/// on the same tensor on the SSD.
///
/// # Panics
/// As [`step`].
pub fn step_host(tensor: HostTensor<'_>, scalars: &StepScalars, threads: usize) {
    run(tensor, scalars, None, threads);
}

/// [`step_host`] with the factors of a matrix's channels.
///
/// # Panics
/// As [`step_channels`].
pub fn step_host_channels(
    tensor: HostTensor<'_>,
    scalars: &StepScalars,
    factors: &ChannelFactors,
    threads: usize,
) {
    run(tensor, scalars, Some(factors), threads);
}

fn run(tensor: HostTensor<'_>, scalars: &StepScalars, factors: Option<&ChannelFactors>, threads: usize) {
    let HostTensor { rule, weight, planes: mut rest, gradient } = tensor;
    let element = rule.weight.bytes();
    let elements = gradient.len() / element;
    let share = elements.div_ceil(threads.max(1)).max(1).next_multiple_of(GRADIENT_BLOCK);
    let rule_planes = rule.planes();
    std::thread::scope(|scope| {
        let parts = weight.chunks_mut(share * element).zip(gradient.chunks(share * element));
        for (index, (weight, gradient)) in parts.enumerate() {
            let first = index * share;
            let mut planes = Vec::with_capacity(rule_planes.len());
            for (plane, rest) in rule_planes.iter().zip(&mut rest) {
                // Shares begin at records, so that the spans follow one another.
                let span = plane.span(first, gradient.len() / element);
                let (taken, left) = std::mem::take(rest).split_at_mut(span.len());
                planes.push(taken);
                *rest = left;
            }
            let mut run = move || match factors {
                None => step(rule, weight, &mut planes, gradient, first as u64, scalars),
                Some(factors) => {
                    step_channels(rule, weight, &mut planes, gradient, first as u64, scalars, factors);
                }
            };
            if elements <= share {
                run();
            } else {
                crate::threads::spawn_or_run(scope, run);
            }
        }
    });
}
