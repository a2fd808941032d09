//! One loop for each algorithm, format of the states and kind of weight: an element is read,
//! updated and written again without a detour through memory, and LLVM vectorises each loop for
//! each instruction set.

use std::marker::PhantomData;

use super::super::bf16::{canonical_nan, widen_bf16};
use super::super::dispatch::Level;
use super::super::split::{join_written, split};
use super::channels::{Matrix, MatrixPass};
use super::elementwise::{Adamw, Amsgrad, Descent, Lion, Momentum, Update, prepare};
use super::scalars::{Constants, StepScalars};
use super::stochastic::{Keys, round_stochastic, stochastic_bits};
use super::{Algorithm, Moments, Pass, Rule, STATES_MAX, Tensor, Weight};

/// One step, by the loop of its rule.
#[inline(always)]
pub(super) fn step<L: Level>(rule: Rule, tensor: Tensor<'_, '_>, scalars: &StepScalars) {
    match (rule.algorithm, scalars.constants) {
        (Algorithm::AdamW { amsgrad: false }, Constants::Adamw(s)) => {
            by_format::<L, _>(rule, tensor, Adamw(s), scalars);
        }
        (Algorithm::AdamW { amsgrad: true }, Constants::Adamw(s)) => {
            by_format::<L, _>(rule, tensor, Amsgrad(s), scalars);
        }
        (
            Algorithm::Lion,
            Constants::Lion { beta1, one_minus_beta1, beta2, one_minus_beta2, decay, negative_lr },
        ) => {
            let lion = Lion { beta1, one_minus_beta1, beta2, one_minus_beta2, decay, negative_lr };
            by_format::<L, _>(rule, tensor, lion, scalars);
        }
        (Algorithm::Sgd { momentum: true }, Constants::Sgd { momentum, undamped, nesterov, negative_lr }) => {
            let begins = scalars.step <= 1;
            let update = Momentum { momentum, undamped, nesterov, negative_lr, begins };
            by_format::<L, _>(rule, tensor, update, scalars);
        }
        (Algorithm::Sgd { momentum: false }, Constants::Sgd { negative_lr, .. }) => {
            by_format::<L, _>(rule, tensor, Descent { negative_lr }, scalars);
        }
        _ => panic!("the scalars are those of another algorithm"),
    }
}

#[inline(always)]
fn by_format<L: Level, U: Update>(rule: Rule, tensor: Tensor<'_, '_>, update: U, scalars: &StepScalars) {
    let common = !scalars.has_l2 && update.is_common();
    macro_rules! by {
        ($run:ty, $blocks:literal, $halves:literal) => {
            if common {
                by!($run, $blocks, $halves, true);
            } else {
                by!($run, $blocks, $halves, false);
            }
        };
        ($run:ty, $blocks:literal, $halves:literal, $common:literal) => {
            L::outlined(Pass::<L, U, $run, $blocks, $halves, $common> {
                tensor,
                update,
                scalars: *scalars,
                kinds: PhantomData,
            })
        };
    }
    match (rule.moments, rule.weight) {
        (Moments::F32, Weight::Bf16Split) => by!(Scalar<F32, Split>, false, false),
        (Moments::F32, Weight::Bf16) => by!(Scalar<F32, NoMaster<Bf16>>, false, false),
        (Moments::F32, Weight::F16Master) => by!(Scalar<F32, NoMaster<F32>>, false, true),
        (Moments::F32, Weight::F32) => by!(Scalar<F32, NoMaster<F32>>, false, false),
        (Moments::Bf16, Weight::Bf16Split) => by!(PackedPairs<Split>, false, false),
        (Moments::Bf16, Weight::Bf16) => by!(PackedPairs<NoMaster<Bf16>>, false, false),
        (Moments::Bf16, Weight::F16Master) => by!(Scalar<Bf16, NoMaster<F32>>, false, true),
        (Moments::Bf16, Weight::F32) => by!(Scalar<Bf16, NoMaster<F32>>, false, false),
        (Moments::Block8, Weight::Bf16Split) => by!(Scalar<F32, Split>, true, false),
        (Moments::Block8, Weight::Bf16) => by!(Scalar<F32, NoMaster<Bf16>>, true, false),
        (Moments::Block8, Weight::F16Master) => by!(Scalar<F32, NoMaster<F32>>, true, true),
        (Moments::Block8, Weight::F32) => by!(Scalar<F32, NoMaster<F32>>, true, false),
    }
}

/// One step with factors of channels, by the loop of its kind of weight.
#[inline(always)]
pub(super) fn step_matrix<L: Level>(weight: Weight, matrix: Matrix<'_>) {
    macro_rules! by {
        ($run:ty, $halves:literal) => {
            L::outlined(MatrixPass::<L, $run, $halves> { matrix, kinds: PhantomData })
        };
    }
    match weight {
        Weight::Bf16Split => by!(Scalar<F32, Split>, false),
        Weight::Bf16 => by!(Scalar<F32, NoMaster<Bf16>>, false),
        Weight::F16Master => by!(Scalar<F32, NoMaster<F32>>, true),
        Weight::F32 => by!(Scalar<F32, NoMaster<F32>>, false),
    }
}

/// Update loop over elements whose indices have the same upper half, the one in `keys`; `index` is the lower
/// half of the first one's. States of 8 bits are given in fp32, and so are master and gradient of an fp16
/// weight. The slices (`low` is a split master's) are parameters of their own, because only so LLVM knows
/// that they do not overlap.
pub(super) trait UpdateLoop {
    const WEIGHT_BYTES: usize;
    #[allow(clippy::too_many_arguments)]
    fn run<U: Update>(
        weight: &mut [u8],
        low: &mut [u8],
        gradient: &[u8],
        first: &mut [u8],
        second: &mut [u8],
        third: &mut [u8],
        index: u32,
        keys: Keys,
        update: &U,
        scalars: &StepScalars,
    );
}

/// Element by element.
struct Scalar<S, W>(PhantomData<(S, W)>);

/// Two 16-bit numbers at a time as one word, so that a lane of 32 bits holds an element from beginning to
/// end. One by one each would have to be moved to a lane of its own and back.
struct PackedPairs<W>(PhantomData<W>);

impl<S: Number, W: WeightLayout> UpdateLoop for Scalar<S, W> {
    const WEIGHT_BYTES: usize = size_of::<W::Element>();
    #[inline(always)]
    fn run<U: Update>(
        weight: &mut [u8],
        low: &mut [u8],
        gradient: &[u8],
        first: &mut [u8],
        second: &mut [u8],
        third: &mut [u8],
        index: u32,
        keys: Keys,
        update: &U,
        scalars: &StepScalars,
    ) {
        let weight = W::Element::of_mut(weight);
        let low = <[u8; 2]>::of_mut(low);
        let gradient = W::Element::of(gradient);
        let (first, second, third) =
            (S::Bytes::of_mut(first), S::Bytes::of_mut(second), S::Bytes::of_mut(third));
        let length = gradient.len();
        // Equal already: repeated for the compiler, which then omits the bounds checks.
        assert!(weight.len() == length && (!W::HAS_LOW || low.len() == length));
        assert!(U::STATES < 1 || first.len() == length);
        assert!(U::STATES < 2 || second.len() == length);
        assert!(U::STATES < 3 || third.len() == length);
        for i in 0..length {
            let mut states = [0.0; STATES_MAX];
            if U::STATES > 0 {
                states[0] = S::load(first[i]);
            }
            if U::STATES > 1 {
                states[1] = S::load(second[i]);
            }
            if U::STATES > 2 {
                states[2] = S::load(third[i]);
            }
            let w = W::load(weight[i], if W::HAS_LOW { low[i] } else { [0; 2] });
            let g = prepare(w, W::gradient(gradient[i]), scalars);
            let (w, states) = update.step(w, g, states);

            // Four numbers, for the most values that can be rounded. The compiler drops those that are
            // not used.
            let random = keys.numbers(index.wrapping_add(i as u32));
            weight[i] = W::store(w, random[3]);
            if W::HAS_LOW {
                low[i] = W::store_low(w);
            }
            if U::STATES > 0 {
                first[i] = S::store(states[0], random[0]);
            }
            if U::STATES > 1 {
                second[i] = S::store(states[1], random[1]);
            }
            if U::STATES > 2 {
                third[i] = S::store(states[2], random[2]);
            }
        }
    }
}

impl<W: PackedWeightLayout> UpdateLoop for PackedPairs<W> {
    const WEIGHT_BYTES: usize = 2;
    #[inline(always)]
    fn run<U: Update>(
        weight: &mut [u8],
        low: &mut [u8],
        gradient: &[u8],
        first: &mut [u8],
        second: &mut [u8],
        third: &mut [u8],
        index: u32,
        keys: Keys,
        update: &U,
        scalars: &StepScalars,
    ) {
        let (weight, weight_rest) = weight.as_chunks_mut::<4>();
        let (low, low_rest) = low.as_chunks_mut::<4>();
        let (gradient, gradient_rest) = gradient.as_chunks::<4>();
        let (first, first_rest) = first.as_chunks_mut::<4>();
        let (second, second_rest) = second.as_chunks_mut::<4>();
        let (third, third_rest) = third.as_chunks_mut::<4>();
        let length = gradient.len();
        // As above.
        assert!(weight.len() == length && (!W::HAS_LOW || low.len() == length));
        assert!(U::STATES < 1 || first.len() == length);
        assert!(U::STATES < 2 || second.len() == length);
        assert!(U::STATES < 3 || third.len() == length);
        for i in 0..length {
            let (weights, gradients) = (halves(weight[i]), halves(gradient[i]));
            let lows = if W::HAS_LOW { halves(low[i]) } else { [0; 2] };
            let firsts = if U::STATES > 0 { halves(first[i]) } else { [0; 2] };
            let seconds = if U::STATES > 1 { halves(second[i]) } else { [0; 2] };
            let thirds = if U::STATES > 2 { halves(third[i]) } else { [0; 2] };
            let (mut weights_after, mut lows_after) = ([0; 2], [0; 2]);
            let mut states_after = [[0; 2]; STATES_MAX];
            for k in 0..2 {
                let states =
                    [f32::from_bits(firsts[k]), f32::from_bits(seconds[k]), f32::from_bits(thirds[k])];
                let w = W::load_upper(weights[k], lows[k]);
                let g = prepare(w, f32::from_bits(gradients[k]), scalars);
                let (w, states) = update.step(w, g, states);
                let random = keys.numbers(index.wrapping_add(2 * i as u32).wrapping_add(k as u32));
                (weights_after[k], lows_after[k]) = W::store_upper(w, random[3]);
                for which in 0..STATES_MAX {
                    states_after[which][k] = stochastic_bits(states[which], random[which]);
                }
            }
            weight[i] = word(weights_after);
            if W::HAS_LOW {
                low[i] = word(lows_after);
            }
            if U::STATES > 0 {
                first[i] = word(states_after[0]);
            }
            if U::STATES > 1 {
                second[i] = word(states_after[1]);
            }
            if U::STATES > 2 {
                third[i] = word(states_after[2]);
            }
        }
        Scalar::<Bf16, W>::run(
            weight_rest,
            low_rest,
            gradient_rest,
            first_rest,
            second_rest,
            third_rest,
            index.wrapping_add(2 * length as u32),
            keys,
            update,
            scalars,
        );
    }
}

/// A bf16 where fp32 has its bits: in the upper half.
const UPPER: u32 = 0xFFFF_0000;

/// The two 16-bit numbers of a word, by address, each in the upper half of its own, with zeros below.
#[inline(always)]
fn halves(word: [u8; 4]) -> [u32; 2] {
    let word = u32::from_ne_bytes(word);
    let (lower, upper) = (word << 16, word & UPPER);
    if cfg!(target_endian = "little") { [lower, upper] } else { [upper, lower] }
}

/// The word of two 16-bit numbers in the upper halves; the lower halves are left out.
#[inline(always)]
fn word([first, second]: [u32; 2]) -> [u8; 4] {
    let (lower, upper) = if cfg!(target_endian = "little") { (first, second) } else { (second, first) };
    (lower >> 16 | upper & UPPER).to_ne_bytes()
}

/// How a weight is kept, in the upper halves of words.
trait PackedWeightLayout: WeightLayout<Element = [u8; 2]> {
    fn load_upper(weight: u32, low: u32) -> f32;
    fn store_upper(value: f32, random: u32) -> (u32, u32);
}

impl PackedWeightLayout for Split {
    /// As [`join_written`].
    #[inline(always)]
    fn load_upper(high: u32, low: u32) -> f32 {
        let low = low as i32 >> 16;
        let low = if high << 1 == 0 { low.max(0) } else { low };
        f32::from_bits(high.wrapping_add(low as u32))
    }
    /// As [`split`].
    #[inline(always)]
    fn store_upper(value: f32, _: u32) -> (u32, u32) {
        let bits = canonical_nan(value).to_bits();
        (bits.wrapping_add(0x8000), bits << 16)
    }
}

impl PackedWeightLayout for NoMaster<Bf16> {
    #[inline(always)]
    fn load_upper(weight: u32, _: u32) -> f32 {
        f32::from_bits(weight)
    }
    #[inline(always)]
    fn store_upper(value: f32, random: u32) -> (u32, u32) {
        (stochastic_bits(value, random), 0)
    }
}

/// The bytes of one number.
trait Bytes: Copy + Default {
    fn of(bytes: &[u8]) -> &[Self];
    fn of_mut(bytes: &mut [u8]) -> &mut [Self];
}

impl<const N: usize> Bytes for [u8; N]
where
    [u8; N]: Default,
{
    #[inline(always)]
    fn of(bytes: &[u8]) -> &[Self] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn of_mut(bytes: &mut [u8]) -> &mut [Self] {
        bytes.as_chunks_mut().0
    }
}

/// A format in which a number is kept by itself; `random` is below 2^16.
trait Number {
    type Bytes: Bytes;
    fn load(bytes: Self::Bytes) -> f32;
    fn store(value: f32, random: u32) -> Self::Bytes;
}

struct F32;

impl Number for F32 {
    type Bytes = [u8; 4];
    #[inline(always)]
    fn load(bytes: [u8; 4]) -> f32 {
        f32::from_ne_bytes(bytes)
    }
    #[inline(always)]
    fn store(value: f32, _: u32) -> [u8; 4] {
        canonical_nan(value).to_ne_bytes()
    }
}

/// bf16, rounded stochastically.
struct Bf16;

impl Number for Bf16 {
    type Bytes = [u8; 2];
    #[inline(always)]
    fn load(bytes: [u8; 2]) -> f32 {
        widen_bf16(u16::from_ne_bytes(bytes))
    }
    #[inline(always)]
    fn store(value: f32, random: u32) -> [u8; 2] {
        round_stochastic(value, random).to_ne_bytes()
    }
}

/// How a weight is kept; its gradient has the same format.
trait WeightLayout {
    const HAS_LOW: bool;
    type Element: Bytes;
    fn gradient(bytes: Self::Element) -> f32;
    fn load(weight: Self::Element, low: [u8; 2]) -> f32;
    fn store(value: f32, random: u32) -> Self::Element;
    fn store_low(value: f32) -> [u8; 2];
}

struct Split;

impl WeightLayout for Split {
    const HAS_LOW: bool = true;
    type Element = [u8; 2];
    #[inline(always)]
    fn gradient(bytes: [u8; 2]) -> f32 {
        Bf16::load(bytes)
    }
    #[inline(always)]
    fn load(high: [u8; 2], low: [u8; 2]) -> f32 {
        join_written(u16::from_ne_bytes(high), u16::from_ne_bytes(low))
    }
    #[inline(always)]
    fn store(value: f32, _: u32) -> [u8; 2] {
        split(canonical_nan(value).to_bits()).0.to_ne_bytes()
    }
    #[inline(always)]
    fn store_low(value: f32) -> [u8; 2] {
        split(canonical_nan(value).to_bits()).1.to_ne_bytes()
    }
}

/// By itself: its own master, or without one.
struct NoMaster<N>(PhantomData<N>);

impl<N: Number> WeightLayout for NoMaster<N> {
    const HAS_LOW: bool = false;
    type Element = N::Bytes;
    #[inline(always)]
    fn gradient(bytes: N::Bytes) -> f32 {
        N::load(bytes)
    }
    #[inline(always)]
    fn load(weight: N::Bytes, _: [u8; 2]) -> f32 {
        N::load(weight)
    }
    #[inline(always)]
    fn store(value: f32, random: u32) -> N::Bytes {
        N::store(value, random)
    }
    #[inline(always)]
    fn store_low(_: f32) -> [u8; 2] {
        [0; 2]
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::Isa;
    use super::super::super::dispatch::{KernelBody, Level, Plain};
    #[cfg(target_arch = "x86_64")]
    use super::super::super::dispatch::{Narrow, Wide};
    use super::super::super::testing::any_bits;
    use super::super::stochastic::Randomness;
    use super::*;
    use proptest::prelude::*;

    /// 16-bit planes: weight, low half, gradient, states.
    type Planes = [Vec<u8>; 6];

    struct Task<'a, R, U> {
        planes: &'a mut Planes,
        index: u32,
        update: &'a U,
        scalars: &'a StepScalars,
        kind: PhantomData<R>,
    }

    impl<R: UpdateLoop, U: Update> KernelBody for Task<'_, R, U> {
        #[inline(always)]
        fn run(self) {
            let [weight, low, gradient, first, second, third] = self.planes;
            let keys = Randomness::new(3, 5).keys(7 << 32);
            R::run(weight, low, gradient, first, second, third, self.index, keys, self.update, self.scalars);
        }
    }

    fn run<R: UpdateLoop, U: Update>(
        isa: Isa,
        begin: &Planes,
        index: u32,
        update: &U,
        scalars: &StepScalars,
    ) -> Planes {
        let mut planes = begin.clone();
        let task = Task::<R, U> { planes: &mut planes, index, update, scalars, kind: PhantomData };
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Wide::outlined(task),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Narrow::outlined(task),
            _ => Plain::outlined(task),
        }
        planes
    }

    proptest! {
        /// A weight that a program wrote beside any low half, a zero among them; indices that begin again.
        #[test]
        fn pairs_have_the_bits_of_single_elements(
            bits in any_bits(0..600),
            zeros in prop::collection::vec(0..100usize, 0..20),
            before_end in 0..60u32,
        ) {
            let length = bits.len() / 3;
            let plane = |shift: u32, from: usize| -> Vec<u8> {
                bits[from..][..length].iter().flat_map(|&b| ((b >> shift) as u16).to_ne_bytes()).collect()
            };
            let mut begin =
                [plane(16, 0), plane(0, 0), plane(16, length), plane(16, 2 * length), plane(0, length), plane(0, 2 * length)];
            for at in zeros.into_iter().filter(|&at| at < length) {
                let zero = if at % 2 == 0 { 0u16 } else { 0x8000 };
                begin[0][2 * at..][..2].copy_from_slice(&zero.to_ne_bytes());
            }
            let scalars = StepScalars::adam(1e-3, (0.9, 0.99), 1e-8, 0.1, 2).with_grad_scale(0.7);
            let Constants::Adamw(constants) = scalars.constants else { unreachable!() };
            let momentum = Momentum { momentum: 0.9, undamped: 0.8, nesterov: true, negative_lr: -1e-3, begins: false };
            let index = before_end.wrapping_neg();
            macro_rules! compare {
                ($weight:ty, $update:expr) => {
                    let update = $update;
                    let expected = run::<Scalar<Bf16, $weight>, _>(Isa::Baseline, &begin, index, &update, &scalars);
                    for isa in Isa::available() {
                        let pairs = run::<PackedPairs<$weight>, _>(isa, &begin, index, &update, &scalars);
                        prop_assert!(pairs == expected, "{isa:?}");
                    }
                };
            }
            compare!(Split, Adamw(constants));
            compare!(Split, Amsgrad(constants));
            compare!(Split, momentum);
            compare!(NoMaster<Bf16>, Adamw(constants));
            compare!(NoMaster<Bf16>, Amsgrad(constants));
        }
    }
}
