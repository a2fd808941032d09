//! Dtypes in which a gradient is made and stored, and accumulation between them.
//!
//! A gradient may be stored in fewer bits than it is made in. It is rounded to bf16 in the pass that checks
//! and sums it, so both are of the stored values. Each piece is widened in the update slot before the kernel
//! runs: kernels know one dtype for weight and gradient.

use memascend_kernels::{
    Dtype, GradientStats, add_bf16, add_f16, add_f32, copy_bf16, copy_f16, copy_f32, round_gradient,
    round_gradient_sum, stats_bf16, stats_f16, stats_f32, widen_bf16_slice,
};

/// Elements that are widened together.
const MAX_WIDENED_ELEMENTS: usize = 1024;

/// In which dtype a gradient comes, and in which it is kept until the update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GradientDtypes {
    /// As autograd makes it, and as the update takes it: the dtype of the weight.
    made: Dtype,
    kept: Dtype,
}

impl From<Dtype> for GradientDtypes {
    /// Kept as it is made.
    fn from(dtype: Dtype) -> Self {
        Self { made: dtype, kept: dtype }
    }
}

impl GradientDtypes {
    /// Made in fp32, and rounded to bf16 when it is put aside.
    pub const ROUNDED: Self = Self { made: Dtype::F32, kept: Dtype::Bf16 };

    /// A gradient that is made and kept in these dtypes; None if there is no such.
    pub fn of(made: Dtype, kept: Dtype) -> Option<Self> {
        let dtypes = Self { made, kept };
        (made == kept || dtypes == Self::ROUNDED).then_some(dtypes)
    }

    /// Bytes of an element as it comes.
    pub fn made_bytes(self) -> usize {
        self.made.bytes()
    }

    /// Bytes of an element as it is kept.
    pub fn kept_bytes(self) -> usize {
        self.kept.bytes()
    }

    /// The dtype in which it is kept.
    pub(super) fn kept(self) -> Dtype {
        self.kept
    }

    /// Whether it is rounded when it is put aside, and widened for the update.
    pub(crate) fn rounded(self) -> bool {
        self.made != self.kept
    }

    /// Adds the statistics of a gradient that is kept.
    pub(super) fn measure(self, kept: &[u8], stats: &mut GradientStats) {
        match self.kept {
            Dtype::Bf16 => stats_bf16(cast(kept), stats),
            Dtype::F16 => stats_f16(cast(kept), stats),
            Dtype::F32 => stats_f32(cast(kept), stats),
        }
    }

    /// `kept = source` or `kept += source`, with the statistics of the result. Rounded once, after
    /// the addition in fp32.
    pub(super) fn merge(self, kept: &mut [u8], source: &[u8], add: bool, stats: &mut GradientStats) {
        if self.rounded() {
            let (kept, source) = (cast_mut::<u16>(kept), cast::<f32>(source));
            return if add {
                round_gradient_sum(kept, source, stats);
            } else {
                round_gradient(kept, source, stats);
            };
        }
        match self.made {
            Dtype::Bf16 => {
                let (kept, source) = (cast_mut::<u16>(kept), cast::<u16>(source));
                if add { add_bf16(kept, source, stats) } else { copy_bf16(kept, source, stats) }
            }
            Dtype::F16 => {
                let (kept, source) = (cast_mut::<u16>(kept), cast::<u16>(source));
                if add { add_f16(kept, source, stats) } else { copy_f16(kept, source, stats) }
            }
            Dtype::F32 => {
                let (kept, source) = (cast_mut::<f32>(kept), cast::<f32>(source));
                if add { add_f32(kept, source, stats) } else { copy_f32(kept, source, stats) }
            }
        }
    }
}

/// Widens `numel` bf16 elements at `source` to fp32 at `target`.
///
/// # Safety
/// Only the caller uses both ranges, which are of allocated memory and aligned. They may overlap if
/// the source lies in the last half of the target, or behind it.
pub(crate) unsafe fn widen(source: *const u8, target: *mut u8, numel: usize) {
    let mut group = [0_u16; MAX_WIDENED_ELEMENTS];
    for first in (0..numel).step_by(MAX_WIDENED_ELEMENTS) {
        let group = &mut group[..MAX_WIDENED_ELEMENTS.min(numel - first)];
        // SAFETY: the caller's promise. Element `i` is written to the bytes `4 i ..`, and is read
        // from `2 numel + 2 i ..` at least: a group ends before the next one is read from.
        let target = unsafe {
            let source = source.add(first * size_of::<u16>()).cast::<u16>();
            std::ptr::copy_nonoverlapping(source, group.as_mut_ptr(), group.len());
            std::slice::from_raw_parts_mut(target.add(first * size_of::<f32>()).cast::<f32>(), group.len())
        };
        widen_bf16_slice(target, group);
    }
}

/// Numbers for which every bit pattern is a value.
trait Plain: Copy {}
impl Plain for u16 {}
impl Plain for f32 {}

fn cast<T: Plain>(bytes: &[u8]) -> &[T] {
    // SAFETY: every bit pattern is a valid T.
    let (before, values, after) = unsafe { bytes.align_to::<T>() };
    assert!(before.is_empty() && after.is_empty(), "a buffer of whole, aligned elements");
    values
}

fn cast_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: every bit pattern is a valid T.
    let (before, values, after) = unsafe { bytes.align_to_mut::<T>() };
    assert!(before.is_empty() && after.is_empty(), "a buffer of whole, aligned elements");
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The read of a spilled gradient lands in the last half of the place where it is widened.
    #[test]
    fn a_gradient_is_widened_in_place() {
        for numel in [
            1,
            2,
            3,
            MAX_WIDENED_ELEMENTS - 1,
            MAX_WIDENED_ELEMENTS,
            MAX_WIDENED_ELEMENTS + 1,
            3 * MAX_WIDENED_ELEMENTS + 7,
        ] {
            for room in [numel, numel + 1, 2 * numel] {
                let value = |index: usize| (index * 7 + 0x3F80) as u16;
                let mut words = vec![0_u16; 2 * room];
                (0..numel).for_each(|index| words[room + index] = value(index));
                let mut area: Vec<f32> =
                    words.as_chunks().0.iter().map(|[low, high]| pair(*low, *high)).collect();
                let start = area.as_mut_ptr().cast::<u8>();
                // SAFETY: the area is ours, and holds `room` elements of either kind behind `room`
                // of bf16.
                unsafe { widen(start.add(2 * room), start, numel) };
                for (index, widened) in area[..numel].iter().enumerate() {
                    assert_eq!(widened.to_bits(), u32::from(value(index)) << 16, "{index} of {numel}");
                }
            }
        }
    }

    fn pair(low: u16, high: u16) -> f32 {
        let ([a, b], [c, d]) = (low.to_ne_bytes(), high.to_ne_bytes());
        f32::from_ne_bytes([a, b, c, d])
    }

    #[test]
    fn only_fp32_is_rounded_and_only_to_bf16() {
        assert_eq!(GradientDtypes::of(Dtype::F32, Dtype::Bf16), Some(GradientDtypes::ROUNDED));
        assert_eq!(GradientDtypes::of(Dtype::F16, Dtype::F16), Some(Dtype::F16.into()));
        for (made, kept) in [(Dtype::Bf16, Dtype::F32), (Dtype::F16, Dtype::Bf16), (Dtype::F32, Dtype::F16)] {
            assert_eq!(GradientDtypes::of(made, kept), None);
        }
    }
}
