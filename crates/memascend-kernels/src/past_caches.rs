//! Copies past the caches, to memory that is not read soon. An ordinary store fetches its line before it fills it: where
//! rows of one or two lines are written far from each other, the writer waits for most of them.

/// Bytes of a line of the caches.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies past the caches. [`past_caches`] makes it.
#[derive(Debug)]
pub struct PastCaches(());

/// Calls `write`. What it copies past the caches is in memory, for all threads, when this function returns.
pub fn past_caches<T>(write: impl FnOnce(&mut PastCaches) -> T) -> T {
    // Fences when it is dropped: after a panic too.
    let mut copies = PastCaches(());
    write(&mut copies)
}

impl PastCaches {
    /// Copies `src` to `dst`: whole lines past the caches on x86-64, and everything else by ordinary stores.
    ///
    /// # Panics
    /// When the lengths differ.
    #[inline]
    pub fn copy(&mut self, dst: &mut [u16], src: &[u16]) {
        assert_eq!(dst.len(), src.len(), "lengths");
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};

            let start = dst.as_ptr().align_offset(LINE).min(dst.len());
            let (head, rest) = dst.split_at_mut(start);
            let (of_head, of_rest) = src.split_at(start);
            let (lines, tail) = rest.as_chunks_mut::<{ LINE / 2 }>();
            let (of_lines, of_tail) = of_rest.as_chunks::<{ LINE / 2 }>();
            head.copy_from_slice(of_head);
            for (line, of_line) in lines.iter_mut().zip(of_lines) {
                let (to, from): (*mut __m128i, *const __m128i) =
                    (line.as_mut_ptr().cast(), of_line.as_ptr().cast());
                for part in 0..LINE / size_of::<__m128i>() {
                    // SAFETY: SSE2 is on every x86-64. The parts are those of a line, which begins at a multiple of
                    // its length. Dropping `self` fences before another thread may know of them.
                    unsafe { _mm_stream_si128(to.add(part), _mm_loadu_si128(from.add(part))) };
                }
            }
            tail.copy_from_slice(of_tail);
        }
        #[cfg(not(target_arch = "x86_64"))]
        dst.copy_from_slice(src);
    }
}

impl Drop for PastCaches {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is on every x86-64.
        unsafe {
            std::arch::x86_64::_mm_sfence()
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_part_is_copied_and_nothing_beside_it(begin in 0usize..70, count in 0usize..200, from in 0usize..9) {
            let src: Vec<u16> = (0..(from + count) as u16).map(|at| at + 1).collect();
            let mut dst = vec![0; begin + count + 40];
            past_caches(|copies| copies.copy(&mut dst[begin..][..count], &src[from..]));
            prop_assert!(dst[..begin].iter().chain(&dst[begin + count..]).all(|&value| value == 0));
            prop_assert_eq!(&dst[begin..][..count], &src[from..]);
        }
    }

    #[test]
    fn another_thread_sees_what_was_copied() {
        for round in 0..200 {
            let (mut made, src) = (vec![0; 4096], vec![round + 1; 4096]);
            let (told, waits) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    past_caches(|copies| copies.copy(&mut made, &src));
                    told.send(made).expect("a receiver");
                });
                assert_eq!(waits.recv().expect("a sender"), src);
            });
        }
    }
}
