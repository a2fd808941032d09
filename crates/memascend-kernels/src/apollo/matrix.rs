//! The random matrix of a projection.
//!
//! Every element is a function of a key and of its index. It takes nothing but additions, products,
//! quotients and square roots of fp64, which round alike everywhere: `ln` of the C library does not.

// The coefficients have the digits that were published.
#![allow(clippy::excessive_precision)]

use super::super::dispatch::kernel;
use super::super::rules::mix;

/// Numbers that are made together.
pub(super) const BLOCK: usize = 128;
/// Of those in the tails, 15 in 100, as many are computed together.
const TAILS: usize = 8;

/// Normal with mean 0 and variance 1, from the upper half of 64 random bits.
pub(super) fn normal(bits: u64) -> f64 {
    let p = uniform(bits);
    if is_central(p) { centre(p) } else { tail(p) }
}

kernel! {
    /// Numbers `indices` of the random matrix of a key, divided by `divisor`, as [`normal`] gives them.
    pub fn normals / normals_with(
        key: u64,
        divisor: f64,
        indices: &[u64; BLOCK],
        numbers: &mut [f32; BLOCK],
    ) = normals_body;
}

/// In loops without branches, which compilers turn into vectors: the centre's formula for all numbers, then
/// the tails' where it does not fit.
#[inline(always)]
fn normals_body(key: u64, divisor: f64, indices: &[u64; BLOCK], numbers: &mut [f32; BLOCK]) {
    let mut uniforms = [0.0; BLOCK];
    for (p, &index) in uniforms.iter_mut().zip(indices) {
        *p = uniform(mix(key ^ index));
    }
    let mut normals = [0.0; BLOCK];
    for (normal, &p) in normals.iter_mut().zip(&uniforms) {
        *normal = centre(p);
    }
    let (mut tails, mut places, mut count) = ([0.25; BLOCK], [0; BLOCK], 0);
    for (place, &p) in uniforms.iter().enumerate() {
        if !is_central(p) {
            (tails[count], places[count]) = (p, place);
            count += 1;
        }
    }
    for group in tails[..count.next_multiple_of(TAILS)].as_chunks_mut::<TAILS>().0 {
        for p in group {
            *p = tail(*p);
        }
    }
    for (&place, &tail) in places[..count].iter().zip(&tails) {
        normals[place] = tail;
    }
    for (number, normal) in numbers.iter_mut().zip(&normals) {
        *number = (normal / divisor) as f32;
    }
}

/// From 2^-33 to 1 - 2^-33.
#[inline(always)]
fn uniform(bits: u64) -> f64 {
    (f64::from((bits >> 32) as u32) + 0.5) / 4_294_967_296.0
}

// The normal distribution's quantile function is algorithm AS241 of Wichura 1988, whose outermost branch begins below
// the least of `uniform`.

/// Whether `centre` is the quantile function there.
#[inline(always)]
fn is_central(p: f64) -> bool {
    (p - 0.5).abs() <= 0.425
}

#[inline(always)]
fn centre(p: f64) -> f64 {
    let q = p - 0.5;
    let r = 0.180_625 - q * q;
    q * polynomial(&CENTRE_NUMERATOR, r) / polynomial(&CENTRE_DENOMINATOR, r)
}

#[inline(always)]
fn tail(p: f64) -> f64 {
    let below = p < 0.5;
    let r = (-ln(if below { p } else { 1.0 - p })).sqrt() - 1.6;
    let x = polynomial(&TAIL_NUMERATOR, r) / polynomial(&TAIL_DENOMINATOR, r);
    if below { -x } else { x }
}

/// By Horner's rule, coefficients from the highest power down.
#[inline(always)]
fn polynomial(coefficients: &[f64; 8], x: f64) -> f64 {
    coefficients.iter().fold(0.0, |sum, coefficient| sum * x + coefficient)
}

/// The natural logarithm of a normal positive number.
#[inline(always)]
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    // Exponents are of 32 bits, since AVX2 cannot convert longer integers.
    let exponent = (bits >> 52) as i32 - 1023;
    let mantissa = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    let above = mantissa > std::f64::consts::SQRT_2;
    let (mantissa, exponent) = if above { (mantissa * 0.5, exponent + 1) } else { (mantissa, exponent) };
    // 2 artanh(s), where s is below 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, term| sum * square + 1.0 / f64::from(2 * term + 1));
    2.0 * s * series + f64::from(exponent) * std::f64::consts::LN_2
}

const CENTRE_NUMERATOR: [f64; 8] = [
    2.509_080_928_730_122_672_7e3,
    3.343_057_558_358_812_810_5e4,
    6.726_577_092_700_870_085_3e4,
    4.592_195_393_154_987_145_7e4,
    1.373_169_376_550_946_112_5e4,
    1.971_590_950_306_551_442_7e3,
    1.331_416_678_917_843_774_5e2,
    3.387_132_872_796_366_608_0,
];
const CENTRE_DENOMINATOR: [f64; 8] = [
    5.226_495_278_852_854_561_0e3,
    2.872_908_573_572_194_267_4e4,
    3.930_789_580_009_271_061_0e4,
    2.121_379_430_158_659_586_7e4,
    5.394_196_021_424_751_107_7e3,
    6.871_870_074_920_579_083_0e2,
    4.231_333_070_160_091_125_2e1,
    1.0,
];
const TAIL_NUMERATOR: [f64; 8] = [
    7.745_450_142_783_414_076_40e-4,
    2.272_384_498_926_918_458_33e-2,
    2.417_807_251_774_506_117_70e-1,
    1.270_458_252_452_368_382_58,
    3.647_848_324_763_204_605_04,
    5.769_497_221_460_691_405_50,
    4.630_337_846_156_545_295_90,
    1.423_437_110_749_683_577_34,
];
const TAIL_DENOMINATOR: [f64; 8] = [
    1.050_750_071_644_416_843_24e-9,
    5.475_938_084_995_344_946_00e-4,
    1.519_866_656_361_645_719_66e-2,
    1.481_039_764_274_800_745_90e-1,
    6.897_673_349_851_000_045_50e-1,
    1.676_384_830_183_803_849_40,
    2.053_191_626_637_758_821_87,
    1.0,
];
