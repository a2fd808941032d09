//! The random matrix of a projection.
//!
//! Every element is a function of a key and of its index. It takes nothing but additions, products,
//! quotients and square roots of fp64, which round alike everywhere: `ln` of the C library does not.

// The coefficients have the digits that were published.
#![allow(clippy::excessive_precision)]

/// Normal with mean 0 and variance 1, from 64 random bits of which the upper half is used.
pub(super) fn normal(bits: u64) -> f64 {
    let uniform = ((bits >> 32) as f64 + 0.5) / 4_294_967_296.0;
    quantile(uniform)
}

/// The normal distribution's quantile function for `p` from 2^-33 to 1 - 2^-33: algorithm AS241 of
/// Wichura 1988, whose outermost branch begins below those.
fn quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180_625 - q * q;
        return q * polynomial(&CENTRE_NUMERATOR, r) / polynomial(&CENTRE_DENOMINATOR, r);
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    let r = (-ln(tail)).sqrt() - 1.6;
    let x = polynomial(&TAIL_NUMERATOR, r) / polynomial(&TAIL_DENOMINATOR, r);
    if q < 0.0 { -x } else { x }
}

/// By Horner's rule, coefficients from the highest power down.
fn polynomial(coefficients: &[f64; 8], x: f64) -> f64 {
    coefficients.iter().fold(0.0, |sum, coefficient| sum * x + coefficient)
}

/// The natural logarithm of a normal positive number.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // 2 artanh(s), where s is below 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, term| sum * square + 1.0 / f64::from(2 * term + 1));
    2.0 * s * series + exponent as f64 * std::f64::consts::LN_2
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
