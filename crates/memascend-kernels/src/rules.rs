//! One fused optimizer step for every algorithm, format of the moments and kind of weight.
//!
//! A step reads each element, updates it in fp32 and writes it again in its format, so memory sees one pass.
//! There is one loop for each algorithm, format of the states and kind of weight, made of small parts, in a
//! function of its own for each instruction set. 8-bit states and fp16 values are staged, some blocks of 256
//! elements at a time, in the first-level cache: their loop is fp32's. Where all numbers have 16 bits, the
//! loop takes two at a time.
//!
//! - `fused.rs`: the loop, and its parts for each format and kind of weight;
//! - `elementwise.rs`, `scalars.rs`: the algorithms and their constants. A new one that works
//!   element by element is a variant of [`Algorithm`], an `Update` there, and an arm in `fused.rs`;
//! - `channels.rs`: the loop where each channel of a matrix has a factor (APOLLO);
//! - `stochastic.rs`, `block8.rs`: stochastic rounding, 8-bit states;
//! - `formats.rs`: the layout of planes, and whole planes to and from fp32.
//!
//! An algorithm that needs a whole matrix at once finds its constants beside the rules, as `apollo/`
//! does, and ends with a step whose factors it has found.

use std::marker::PhantomData;

mod block8;
mod channels;
mod elementwise;
mod formats;
mod fused;
mod scalars;
mod stochastic;

pub use channels::{ChannelFactors, step_channels, step_channels_with};
pub use formats::{Plane, PlaneFormat};
pub use scalars::StepScalars;
pub(super) use stochastic::mix;

use super::dispatch::{KernelBody, Level, Plain, half_kernel};
#[cfg(target_arch = "x86_64")]
use super::dispatch::{Narrow, Wide};
use super::format::{F16, Format};
use block8::Scale;
use elementwise::Update;
use formats::PlaneBlock;
use fused::UpdateLoop;
use stochastic::Randomness;

/// Elements that share a scale in 8 bits.
const BLOCK: usize = 256;
/// Most states an algorithm has, its master left out.
const STATES_MAX: usize = 3;
const PLANES_MAX: usize = STATES_MAX + 1;

/// A block in fp32.
type Block = [f32; BLOCK];
/// Blocks staged at once. Four keep Lion's step from waiting for the first results of each loop, in the
/// cache; but from memory a step then takes a tenth longer, since arrays are read in turns.
const STAGED: usize = 1;
/// Staged values, in fp32.
type Stage = [Block; STAGED];

/// The algorithm of a step. L2 or decoupled weight decay, Nesterov's momentum, dampening and the
/// direction are [`StepScalars`].
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
    /// APOLLO: each channel of a matrix has a factor, see [`step_channels`]. Its moments belong to a
    /// projected gradient (see [`channel_factors`](crate::channel_factors)), and no planes.
    Apollo,
}

impl Algorithm {
    /// Those that work element by element: all but APOLLO.
    pub const ELEMENTWISE: [Self; 5] = [
        Self::AdamW { amsgrad: false },
        Self::AdamW { amsgrad: true },
        Self::Lion,
        Self::Sgd { momentum: false },
        Self::Sgd { momentum: true },
    ];
}

/// How the states of an algorithm are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Moments {
    /// fp32.
    F32,
    /// bf16, rounded stochastically.
    Bf16,
    /// 8 bits in blocks of 256, by bitsandbytes' dynamic map and a scale that has the sign of the
    /// largest element.
    Block8,
}

/// Element type of the weight and of its gradient, and how the master is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weight {
    /// bf16, the high half of an fp32 master whose low half is a plane (see
    /// [`split`](super::split())).
    Bf16Split,
    /// bf16 without a master, rounded stochastically.
    Bf16,
    /// fp16 beside an fp32 master, which is the weight wherever the weight is not the master
    /// rounded.
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
}

/// How a tensor is optimized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The algorithm of a step.
    pub algorithm: Algorithm,
    /// How its states are kept.
    pub moments: Moments,
    /// Element type and master.
    pub weight: Weight,
}

impl Rule {
    /// The arrays beside weight and gradient: the states, then the master. The names are as in PyTorch's
    /// `state_dict`, and `master`, or `master_low` for the low half of a split one. All begin as bytes of
    /// zero.
    pub fn planes(self) -> Vec<Plane> {
        self.layout().into_iter().flatten().collect()
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
            Algorithm::Sgd { momentum: false } | Algorithm::Apollo => [master, None, None, None],
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

half_kernel! {
    /// One step of `rule` on the elements `first_element ..` of a tensor, as many as `gradient`
    /// holds. `planes` are as in [`Rule::planes`], each the bytes of its [`Plane::span`].
    ///
    /// The bits do not depend on how a tensor is cut into steps, as long as every cut is a multiple
    /// of 256 where moments have 8 bits. A NaN or an infinity spoils its element, and in 8-bit
    /// moments its block.
    ///
    /// # Panics
    /// When the number of planes or a length is wrong, when `first_element` is no multiple of 256
    /// and moments have 8 bits, and when the scalars belong to another algorithm.
    pub fn step / step_with(
        rule: Rule,
        weight: &mut [u8],
        planes: &mut [&mut [u8]],
        gradient: &[u8],
        first_element: u64,
        scalars: &StepScalars,
    ) = step_body::<Wide>, step_body::<Narrow>, step_body::<Plain>;
}

#[inline(always)]
fn step_body<L: Level>(
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
    fused::step::<L>(rule, Tensor { weight, planes, gradient, first_element, layout }, scalars);
}

/// The arrays of a step; lengths are checked.
struct Tensor<'a, 'b> {
    weight: &'a mut [u8],
    planes: &'a mut [&'b mut [u8]],
    gradient: &'a [u8],
    first_element: u64,
    layout: PlaneLayout,
}

/// A step of one rule. `BLOCKS` says that states have 8 bits, `HALVES` that the weight is fp16: both are
/// staged. `COMMON` says that there is no L2 weight decay and that the update is [`Update::common`].
struct Pass<'a, 'b, L, U, R, const BLOCKS: bool, const HALVES: bool, const COMMON: bool> {
    tensor: Tensor<'a, 'b>,
    // Values: behind references LLVM would read them again for every element.
    update: U,
    scalars: StepScalars,
    kinds: PhantomData<(L, R)>,
}

impl<L: Level, U: Update, R: UpdateLoop, const BLOCKS: bool, const HALVES: bool, const COMMON: bool>
    KernelBody for Pass<'_, '_, L, U, R, BLOCKS, HALVES, COMMON>
{
    #[inline(always)]
    fn run(self) {
        let Self { tensor, mut update, mut scalars, .. } = self;
        if COMMON {
            // Known already: said again for the compiler, which then leaves the branches out of the loop.
            scalars.has_l2 = false;
            update = update.common();
        }
        let Tensor { weight, planes, gradient, first_element, layout } = tensor;
        let element_bytes = if HALVES { 2 } else { R::WEIGHT_BYTES };
        let elements = gradient.len() / element_bytes;
        let randomness = Randomness::new(scalars.seed, scalars.step);
        let mut staged = [[[0.0; BLOCK]; STAGED]; STATES_MAX];
        let mut staged_gradient = [[0.0; BLOCK]; STAGED];
        let mut done = 0;
        while done < elements {
            let at = first_element + done as u64;
            // Random numbers need elements whose index has the same upper half.
            let unit = if BLOCKS || HALVES { (STAGED * BLOCK) as u64 } else { 1 << 32 };
            let count = (unit - at % unit).min((elements - done) as u64) as usize;
            let place = PlaneBlock { first_element, at, count };
            let flat = done * element_bytes..(done + count) * element_bytes;
            let (states, master) = planes.split_at_mut(U::STATES);
            let master = match (layout[U::STATES], master) {
                (Some(plane), [master]) => &mut master[place.range(plane.format)],
                _ => &mut [],
            };
            if BLOCKS {
                ask_ahead(&weight[flat.clone()]);
                ask_ahead(&gradient[flat.clone()]);
                ask_ahead(master);
                load_states::<L>(states, layout, place, &mut staged);
            }
            let states_views = match BLOCKS {
                true => staged.each_mut().map(|stage| &mut bytes_of(stage)[..count * 4]),
                false => views_of(states, layout, place),
            };
            let (index, keys) = (at as u32, randomness.keys(at));
            let (weight, gradient) = (&mut weight[flat.clone()], &gradient[flat]);
            let [first, second, third] = states_views;
            if HALVES {
                widen_block::<L::Half>(gradient, staged_gradient.as_flattened_mut());
                let gradient = &bytes_of(&mut staged_gradient)[..count * 4];
                follow::<L::Half>(master, weight);
                R::run(master, &mut [], gradient, first, second, third, index, keys, &update, &scalars);
                round_block::<L::Half>(master, weight);
            } else {
                R::run(weight, master, gradient, first, second, third, index, keys, &update, &scalars);
            }
            if BLOCKS {
                store_states::<L>(states, layout, place, &staged);
            }
            done += count;
        }
    }
}

/// Asks for the memory some way behind `bytes`. Processors do so by themselves where a loop reads on and on,
/// and less well where it reads a block of each array after the other.
#[inline(always)]
fn ask_ahead(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is allowed, and this needs SSE alone, which is everywhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast::<i8>().wrapping_add(4096)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// The planes that a rule may have.
type PlaneLayout = [Option<Plane>; PLANES_MAX];

/// The elements of the states in their planes.
#[inline(always)]
fn views_of<'a>(
    states: &'a mut [&mut [u8]],
    layout: PlaneLayout,
    place: PlaneBlock,
) -> [&'a mut [u8]; STATES_MAX] {
    let mut views: [&mut [u8]; STATES_MAX] = Default::default();
    for ((view, bytes), plane) in views.iter_mut().zip(states.iter_mut()).zip(layout) {
        *view = &mut bytes[place.range(plane.expect("a plane of each state").format)];
    }
    views
}

/// Reads the blocks of each 8-bit state into fp32.
#[inline(always)]
fn load_states<L: Level>(
    states: &[&mut [u8]],
    layout: PlaneLayout,
    place: PlaneBlock,
    staged: &mut [Stage; STATES_MAX],
) {
    for ((bytes, plane), stage) in states.iter().zip(layout).zip(staged) {
        let format = plane.expect("a plane of each state").format;
        for (place, block) in place.blocks().zip(stage) {
            formats::load_plane::<L>(format, bytes, place, block);
        }
    }
}

/// Writes the blocks of each 8-bit state back. All scales are found first: none has to be waited for.
#[inline(always)]
fn store_states<L: Level>(
    states: &mut [&mut [u8]],
    layout: PlaneLayout,
    place: PlaneBlock,
    staged: &[Stage; STATES_MAX],
) {
    let mut scales = [[Scale::default(); STAGED]; STATES_MAX];
    for ((scales, plane), stage) in scales.iter_mut().zip(layout).zip(staged).take(states.len()) {
        let signed = plane.expect("a plane of each state").format == PlaneFormat::Block8Signed;
        for ((scale, block), _) in scales.iter_mut().zip(stage).zip(place.blocks()) {
            *scale = Scale::of(block, signed);
        }
    }
    for (((bytes, plane), stage), scales) in states.iter_mut().zip(layout).zip(staged).zip(scales) {
        let format = plane.expect("a plane of each state").format;
        for ((place, block), scale) in place.blocks().zip(stage).zip(scales) {
            formats::store_block8::<L>(format, bytes, place, block, scale);
        }
    }
}

/// fp16 numbers of up to a block.
#[inline(always)]
fn widen_block<H: Format<Element = u16>>(bytes: &[u8], block: &mut [f32]) {
    // SAFETY: any bytes are numbers.
    if let ([], halves, []) = unsafe { bytes.align_to() } {
        return H::widen_all(halves, &mut block[..halves.len()]);
    }
    for (number, &bytes) in block.iter_mut().zip(bytes.as_chunks().0) {
        *number = F16::widen(u16::from_ne_bytes(bytes));
    }
}

/// fp16 weights of up to a block of masters, which have no NaN but the canonical one.
#[inline(always)]
fn round_block<H: Format<Element = u16>>(masters: &[u8], weights: &mut [u8]) {
    // SAFETY: any bytes are numbers, and the reverse.
    if let (([], numbers, []), ([], halves, [])) = unsafe { (masters.align_to(), weights.align_to_mut()) } {
        return H::round_all(numbers, halves);
    }
    for (half, &bytes) in weights.as_chunks_mut().0.iter_mut().zip(masters.as_chunks().0) {
        *half = F16::round(f32::from_ne_bytes(bytes)).to_ne_bytes();
    }
}

/// Makes a master of a weight that is not its rounded master: before the first step, and where the
/// weight was assigned.
#[inline(always)]
fn follow<H: Format<Element = u16>>(masters: &mut [u8], weights: &[u8]) {
    let mut rounded = [0; STAGED * BLOCK * 2];
    let rounded = &mut rounded[..weights.len()];
    round_block::<H>(masters, rounded);
    if rounded == weights {
        return;
    }
    let pairs = rounded.as_chunks::<2>().0.iter().zip(weights.as_chunks::<2>().0);
    for (master, (rounded, &weight)) in masters.as_chunks_mut::<4>().0.iter_mut().zip(pairs) {
        if *rounded != weight {
            *master = F16::widen(u16::from_ne_bytes(weight)).to_ne_bytes();
        }
    }
}

/// The numbers as the loops take them.
#[inline(always)]
fn bytes_of(stage: &mut Stage) -> &mut [u8] {
    // SAFETY: all bytes of fp32 numbers are initialised, any bytes are numbers, and the borrow is
    // passed on.
    unsafe { std::slice::from_raw_parts_mut(stage.as_mut_ptr().cast(), size_of::<Stage>()) }
}

#[cfg(test)]
mod tests;
