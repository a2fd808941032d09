//! Matrices of 16-bit elements, transposed.

use super::dispatch::kernel;

kernel! {
    /// Writes the columns of `src`, which is rows of `columns`, one after the other.
    ///
    /// # Panics
    /// When the lengths differ, or `src` has no whole rows.
    pub fn transpose / transpose_with(dst: &mut [u16], src: &[u16], columns: usize) = body;
}

/// Rows and columns that are transposed at once, in registers.
const SIDE: usize = 8;

#[inline(always)]
fn body(dst: &mut [u16], src: &[u16], columns: usize) {
    assert_eq!(dst.len(), src.len(), "lengths");
    assert!(src.len().is_multiple_of(columns), "rows of {columns}");
    let rows = src.len() / columns;
    let whole = |count: usize| count / SIDE * SIDE;
    for column in (0..whole(columns)).step_by(SIDE) {
        for row in (0..whole(rows)).step_by(SIDE) {
            // Functions of the library are not compiled for the instruction set: a loop.
            let mut square = [[0; SIDE]; SIDE];
            for (at, part) in square.iter_mut().enumerate() {
                *part = *src[(row + at) * columns + column..].first_chunk().expect("eight columns");
            }
            for (at, made) in transposed(square).iter().enumerate() {
                *dst[(column + at) * rows + row..].first_chunk_mut().expect("eight rows") = *made;
            }
        }
    }
    let mut by_one = |rows_left: std::ops::Range<usize>, columns_left: std::ops::Range<usize>| {
        for column in columns_left {
            for row in rows_left.clone() {
                dst[column * rows + row] = src[row * columns + column];
            }
        }
    };
    by_one(0..rows, whole(columns)..columns);
    by_one(whole(rows)..rows, 0..whole(columns));
}

/// Eight elements of a row.
type Row = [u16; SIDE];

/// A square, transposed: each of three rounds puts the elements of rows that are four apart between each other.
#[inline(always)]
fn transposed(mut rows: [Row; SIDE]) -> [Row; SIDE] {
    for _ in 0..3 {
        let mut made = [[0; SIDE]; SIDE];
        for at in 0..SIDE / 2 {
            [made[2 * at], made[2 * at + 1]] = interleave(rows[at], rows[at + 4]);
        }
        rows = made;
    }
    rows
}

/// The elements of two rows, one of each after the other.
#[inline(always)]
fn interleave(early: Row, late: Row) -> [Row; 2] {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_unpackhi_epi16, _mm_unpacklo_epi16};
        // SAFETY: SSE2 is on every x86-64, and a register has the bytes of eight elements.
        unsafe {
            let [early, late] = std::mem::transmute::<[Row; 2], [__m128i; 2]>([early, late]);
            std::mem::transmute([_mm_unpacklo_epi16(early, late), _mm_unpackhi_epi16(early, late)])
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        use std::arch::aarch64::{uint16x8_t, vzip1q_u16, vzip2q_u16};
        // SAFETY: NEON is on every arm64, and a register has the bytes of eight elements.
        unsafe {
            let [early, late] = std::mem::transmute::<[Row; 2], [uint16x8_t; 2]>([early, late]);
            std::mem::transmute([vzip1q_u16(early, late), vzip2q_u16(early, late)])
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let pick = |first: usize| {
            std::array::from_fn(|at| if at % 2 == 0 { early[first + at / 2] } else { late[first + at / 2] })
        };
        [pick(0), pick(SIDE / 2)]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Isa;
    use super::*;

    proptest! {
        #[test]
        fn every_isa_moves_each_element(rows in 0usize..70, columns in 1usize..70, begin in 0usize..9) {
            let src: Vec<u16> = (0..begin + rows * columns).map(|at| at as u16).collect();
            let src = &src[begin..];
            let expected: Vec<u16> =
                (0..rows * columns).map(|at| src[at % rows * columns + at / rows]).collect();
            for isa in Isa::available() {
                let mut made = vec![7; begin + expected.len()];
                transpose_with(isa, &mut made[begin..], src, columns);
                prop_assert_eq!(&made[begin..], &expected, "{:?}", isa);
            }
        }
    }
}
