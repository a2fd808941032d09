//! One loop for each algorithm, format of the states and kind of weight: an element is read,
//! updated and written again without a detour through memory, and LLVM vectorises each loop for
//! each instruction set.

use super::super::bf16::{canonical_nan, widen_bf16};
use super::super::split::{join_written, split};
use super::elementwise::{Adamw, Amsgrad, Descent, Lion, Momentum, Update, prepare};
use super::scalars::{Constants, StepScalars};
use super::stochastic::{Keys, round_stochastic};
use super::{Algorithm, Moments, Rule, STATES_MAX, Weight};

/// Consecutive elements of a tensor: the bytes of weight, low half of its master (if it is split),
/// gradient and states (as many as there are).
pub(super) struct Elements<'a> {
    pub weight: &'a mut [u8],
    pub low: &'a mut [u8],
    pub gradient: &'a [u8],
    pub states: [&'a mut [u8]; STATES_MAX],
    /// Lower half of the first element's index; all have the same upper half, that of `keys`.
    pub index: u32,
    pub keys: Keys,
}

/// One step. Lengths are checked; states of 8 bits are given in fp32, and of an fp16 weight its
/// master and its gradient in fp32.
#[inline(always)]
pub(super) fn step(rule: Rule, elements: Elements<'_>, scalars: &StepScalars) {
    match (rule.algorithm, scalars.constants) {
        (Algorithm::AdamW { amsgrad: false }, Constants::Adamw(s)) => {
            by_moments(rule, elements, &Adamw(s), scalars);
        }
        (Algorithm::AdamW { amsgrad: true }, Constants::Adamw(s)) => {
            by_moments(rule, elements, &Amsgrad(s), scalars);
        }
        (
            Algorithm::Lion,
            Constants::Lion { beta1, one_minus_beta1, beta2, one_minus_beta2, decay, negative_lr },
        ) => {
            let lion = Lion { beta1, one_minus_beta1, beta2, one_minus_beta2, decay, negative_lr };
            by_moments(rule, elements, &lion, scalars);
        }
        (Algorithm::Sgd { momentum: true }, Constants::Sgd { momentum, undamped, nesterov, negative_lr }) => {
            let begins = scalars.step <= 1;
            let update = Momentum { momentum, undamped, nesterov, negative_lr, begins };
            by_moments(rule, elements, &update, scalars);
        }
        (Algorithm::Sgd { momentum: false }, Constants::Sgd { negative_lr, .. }) => {
            by_weight::<_, F32>(rule, elements, &Descent { negative_lr }, scalars);
        }
        _ => panic!("the scalars are those of another algorithm"),
    }
}

#[inline(always)]
fn by_moments<U: Update>(rule: Rule, elements: Elements<'_>, update: &U, scalars: &StepScalars) {
    match rule.moments {
        Moments::F32 | Moments::Block8 => by_weight::<U, F32>(rule, elements, update, scalars),
        Moments::Bf16 => by_weight::<U, Bf16>(rule, elements, update, scalars),
    }
}

#[inline(always)]
fn by_weight<U: Update, S: Number>(rule: Rule, elements: Elements<'_>, update: &U, scalars: &StepScalars) {
    let Elements { weight, low, gradient, states: [first, second, third], index, keys } = elements;
    match rule.weight {
        Weight::Bf16Split => {
            run::<U, S, Split>(weight, low, gradient, first, second, third, index, keys, update, scalars);
        }
        Weight::Bf16 => {
            run::<U, S, Alone<Bf16>>(
                weight, low, gradient, first, second, third, index, keys, update, scalars,
            );
        }
        Weight::F16Master | Weight::F32 => {
            run::<U, S, Alone<F32>>(
                weight, low, gradient, first, second, third, index, keys, update, scalars,
            );
        }
    }
}

/// The loop. The slices are parameters of their own, because only so LLVM knows that they do not
/// overlap.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn run<U: Update, S: Number, W: Kept>(
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
    let (first, second, third) = (S::Bytes::of_mut(first), S::Bytes::of_mut(second), S::Bytes::of_mut(third));
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
trait Kept {
    const HAS_LOW: bool;
    type Element: Bytes;
    fn gradient(bytes: Self::Element) -> f32;
    fn load(weight: Self::Element, low: [u8; 2]) -> f32;
    fn store(value: f32, random: u32) -> Self::Element;
    fn store_low(value: f32) -> [u8; 2];
}

struct Split;

impl Kept for Split {
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
struct Alone<N>(std::marker::PhantomData<N>);

impl<N: Number> Kept for Alone<N> {
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
