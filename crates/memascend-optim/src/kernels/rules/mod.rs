//! One fused optimizer step for every algorithm, format of the moments and kind of weight.
//!
//! A step goes through its elements in blocks of 256. A block of the weight, the gradient and each
//! state is widened to fp32 in the first-level cache, updated there and stored again in its format, so memory sees one
//! pass. Formats and algorithms are chosen per block, outside of the loops that are vectorised: code grows with
//! their sum, not with their product.
//!
//! - `formats.rs`: what lies in a plane, and blocks of it to and from fp32;
//! - `block8.rs`, `stochastic.rs`: 8-bit moments, stochastic rounding;
//! - `direct.rs`: two rules that are faster without staging, for the same bits;
//! - `elementwise.rs`, `scalars.rs`: the algorithms and their constants. A new one that works element by
//!   element is a variant of [`Algorithm`] and an arm there.
//!
//! An algorithm that needs a whole matrix at once gets a file of its own beside `elementwise.rs`: it walks the gradient and
//! its states with [`Plane::read`] and [`Plane::write`] as it likes, and ends with a [`step`] whose scale it has found.

mod block8;
mod direct;
mod elementwise;
mod formats;
mod scalars;
mod stochastic;

pub use formats::{Plane, PlaneFormat};
pub use scalars::StepScalars;

use super::dispatch::kernel;
use formats::PlaneBlock;
use stochastic::Randomness;

/// Elements that are staged at once, and that share a scale in 8 bits.
const BLOCK: usize = 256;
/// Most states an algorithm has, its master left out.
const STATES_MAX: usize = 3;
const PLANES_MAX: usize = STATES_MAX + 1;
/// Number of the weight among the planes, where random numbers are drawn.
const WEIGHT: usize = PLANES_MAX;

/// A block in fp32.
type Block = [f32; BLOCK];

/// What a step computes. L2 or decoupled weight decay, Nesterov's momentum, dampening and the direction are
/// [`StepScalars`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Adam and AdamW.
    AdamW {
        /// Whether the step is divided by the largest second moment so far.
        amsgrad: bool,
    },
    /// Lion: the sign of an average, one state.
    Lion,
    /// Stochastic gradient descent.
    Sgd {
        /// Whether there is a momentum buffer.
        momentum: bool,
    },
}

/// How the states of an algorithm are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Moments {
    /// fp32.
    F32,
    /// bf16, rounded stochastically.
    Bf16,
    /// 8 bits in blocks of 256, by bitsandbytes' dynamic map.
    Block8,
}

/// Element type of the weight and of its gradient, and how the master is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weight {
    /// bf16, the high half of an fp32 master whose low half is a plane (see [`split`](super::split())).
    Bf16Split,
    /// bf16 without a master, rounded stochastically.
    Bf16,
    /// fp16 beside an fp32 master.
    F16Master,
    /// fp32, its own master.
    F32,
}

impl Weight {
    /// Bytes of one weight or gradient element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16Split | Self::Bf16 | Self::F16Master => 2,
            Self::F32 => 4,
        }
    }

    /// The format of the weight and of the gradient.
    const fn format(self) -> PlaneFormat {
        match self {
            Self::Bf16Split | Self::Bf16 => PlaneFormat::Bf16,
            Self::F16Master => PlaneFormat::F16,
            Self::F32 => PlaneFormat::F32,
        }
    }
}

/// How a tensor is optimized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// What a step computes.
    pub algorithm: Algorithm,
    /// How its states are kept.
    pub moments: Moments,
    /// Element type and master.
    pub weight: Weight,
}

impl Rule {
    /// What is kept beside weight and gradient: the states, then the master. The names are those of PyTorch's
    /// `state_dict`, and `master`, or `master_low` for the low half of a split one.
    pub fn planes(self) -> Vec<Plane> {
        self.layout().into_iter().flatten().collect()
    }

    /// Makes `planes` those of a tensor before its first step: states are zeros, and a master is the weight.
    ///
    /// Bytes of zero are zeros in every format, so only an fp16 weight's master needs this.
    ///
    /// # Panics
    /// When the number of planes or a length is wrong.
    pub fn initialize(self, weight: &[u8], planes: &mut [&mut [u8]]) {
        let elements = weight.len() / self.weight.bytes();
        let layout = self.layout();
        self.check(&layout, weight.len(), planes, elements, 0);
        for (plane, bytes) in layout.into_iter().flatten().zip(planes) {
            bytes.fill(0);
            if plane.format == PlaneFormat::F32 && plane.name == "master" {
                let (weights, masters) = (weight.as_chunks::<2>().0, bytes.as_chunks_mut::<4>().0);
                for (master, &weight) in masters.iter_mut().zip(weights) {
                    *master = super::widen_f16(u16::from_ne_bytes(weight)).to_ne_bytes();
                }
            }
        }
    }

    /// [`Rule::planes`] without an allocation.
    fn layout(self) -> [Option<Plane>; PLANES_MAX] {
        let state = |name, signed| {
            let format = match (self.moments, signed) {
                (Moments::F32, _) => PlaneFormat::F32,
                (Moments::Bf16, _) => PlaneFormat::Bf16,
                (Moments::Block8, true) => PlaneFormat::Block8Signed,
                (Moments::Block8, false) => PlaneFormat::Block8Unsigned,
            };
            Some(Plane { name, format })
        };
        let master = match self.weight {
            Weight::Bf16Split => Some(Plane { name: "master_low", format: PlaneFormat::Low }),
            Weight::F16Master => Some(Plane { name: "master", format: PlaneFormat::F32 }),
            Weight::Bf16 | Weight::F32 => None,
        };
        match self.algorithm {
            Algorithm::AdamW { amsgrad } => [
                state("exp_avg", true),
                state("exp_avg_sq", false),
                if amsgrad { state("max_exp_avg_sq", false) } else { master },
                if amsgrad { master } else { None },
            ],
            Algorithm::Lion => [state("exp_avg", true), master, None, None],
            Algorithm::Sgd { momentum: true } => [state("momentum_buffer", true), master, None, None],
            Algorithm::Sgd { momentum: false } => [master, None, None, None],
        }
    }

    fn check(
        self,
        layout: &[Option<Plane>; PLANES_MAX],
        weight_bytes: usize,
        planes: &[&mut [u8]],
        elements: usize,
        first_element: u64,
    ) {
        assert_eq!(weight_bytes, elements * self.weight.bytes(), "weight");
        assert_eq!(planes.len(), layout.iter().flatten().count(), "planes");
        for (plane, bytes) in layout.iter().flatten().zip(planes) {
            assert_eq!(bytes.len(), plane.span_len(first_element, elements), "{}", plane.name);
        }
    }
}

kernel! {
    /// One step of `rule` on the elements `first_element ..` of a tensor, as many as `gradient` holds. `planes` are those
    /// of [`Rule::planes`], each the bytes of its [`Plane::span`].
    ///
    /// The bits do not depend on how a tensor is cut into steps, as long as every cut is a multiple of 256 where moments
    /// have 8 bits. A NaN or an infinity spoils its element, and in 8-bit moments its block.
    ///
    /// # Panics
    /// When the number of planes or a length is wrong, when `first_element` is no multiple of 256 and moments have 8 bits, and
    /// when the scalars are those of another algorithm.
    pub fn step / step_with(
        rule: Rule,
        weight: &mut [u8],
        planes: &mut [&mut [u8]],
        gradient: &[u8],
        first_element: u64,
        scalars: &StepScalars,
    ) = step_body;
}

#[inline(always)]
fn step_body(
    rule: Rule,
    weight: &mut [u8],
    planes: &mut [&mut [u8]],
    gradient: &[u8],
    first_element: u64,
    scalars: &StepScalars,
) {
    let element_bytes = rule.weight.bytes();
    let elements = gradient.len() / element_bytes;
    assert_eq!(gradient.len(), elements * element_bytes, "gradient");
    let layout = rule.layout();
    rule.check(&layout, weight.len(), planes, elements, first_element);
    if direct::step(rule, weight, planes, gradient, scalars) {
        return;
    }
    let states_count = layout.iter().flatten().filter(|plane| !plane.is_master()).count();
    let randomness: [Randomness; PLANES_MAX + 1] =
        std::array::from_fn(|plane| Randomness::new(scalars.seed, scalars.step, plane));

    let mut weights: Block = [0.0; BLOCK];
    let mut gradients: Block = [0.0; BLOCK];
    let mut states: [Block; STATES_MAX] = [[0.0; BLOCK]; STATES_MAX];
    let mut done = 0;
    while done < elements {
        let at = first_element + done as u64;
        // Blocks begin at multiples of 256, so that all elements of one have the same upper half of the index.
        let count = (BLOCK - at as usize % BLOCK).min(elements - done);
        let block = PlaneBlock { first_element, at, count };
        let flat = done * element_bytes..(done + count) * element_bytes;

        formats::load(rule.weight.format(), &gradient[flat.clone()], &mut gradients);
        match rule.weight {
            Weight::Bf16Split => {
                let low = &planes[states_count][block.range(PlaneFormat::Low)];
                formats::load_split(&weight[flat.clone()], low, &mut weights);
            }
            Weight::F16Master => {
                let master = &planes[states_count][block.range(PlaneFormat::F32)];
                formats::load(PlaneFormat::F32, master, &mut weights);
            }
            Weight::Bf16 | Weight::F32 => {
                formats::load(rule.weight.format(), &weight[flat.clone()], &mut weights);
            }
        }
        for (plane, (state, bytes)) in states.iter_mut().zip(planes.iter()).take(states_count).enumerate() {
            let format = layout[plane].expect("as many planes as states").format;
            formats::load_plane(format, bytes, block, state);
        }

        elementwise::prepare(&weights, &mut gradients, scalars);
        elementwise::apply(rule.algorithm, &mut weights, &gradients, &mut states, scalars);

        for (plane, (state, bytes)) in states.iter().zip(planes.iter_mut()).take(states_count).enumerate() {
            let format = layout[plane].expect("as many planes as states").format;
            formats::store_plane(format, bytes, block, state, Some(randomness[plane].keys(at)));
        }
        match rule.weight {
            Weight::Bf16Split => {
                let low = &mut planes[states_count][block.range(PlaneFormat::Low)];
                formats::store_split(&weights, &mut weight[flat], low);
            }
            Weight::F16Master => {
                let master = &mut planes[states_count][block.range(PlaneFormat::F32)];
                formats::store(PlaneFormat::F32, master, &weights, 0, None);
                formats::store(PlaneFormat::F16, &mut weight[flat], &weights, 0, None);
            }
            Weight::Bf16 | Weight::F32 => {
                let keys = randomness[WEIGHT].keys(at);
                formats::store(rule.weight.format(), &mut weight[flat], &weights, at as u32, Some(keys));
            }
        }
        done += count;
    }
}

#[cfg(test)]
mod tests;
