//! How the address space is striped over the volumes.

use memascend_nvme::BLOCK_BYTES;

/// Consecutive bytes of the address space that lie on one volume before the next takes over.
pub const STRIPE_BYTES: u64 = 1 << 20;

/// Stripes of the longest pattern, unless there are more volumes. With rates within 1:20 it leaves
/// at most 3 % of their sum unused on four volumes and 5 % on six.
const PATTERN_STRIPES_MAX: usize = 64;

/// Part of the best pattern's throughput given up for a shorter pattern.
const THROUGHPUT_SPARED: f64 = 0.005;

/// A contiguous range of one volume, and the part of the caller's range that lies there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumePiece {
    /// Which volume.
    pub volume: usize,
    /// First byte on the volume.
    pub offset: u64,
    /// First byte within the requested range.
    pub start: usize,
    /// Length in bytes.
    pub bytes: usize,
}

/// Where each byte of the store's address space lies: RAID 0 with shares that may be unequal.
///
/// Stripes of [`STRIPE_BYTES`] go to the volumes in a pattern that repeats. Volume `i` has
/// `counts()[i]` stripes of every pattern, spread evenly over it, and keeps its stripes one after
/// another in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    counts: Vec<u32>,
    pattern: Vec<Slot>,
}

/// One stripe of the pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    volume: usize,
    /// How many stripes of the same volume come before it in the pattern.
    rank: u64,
}

impl Layout {
    /// Equal shares: stripes go to `volumes` volumes in turn.
    ///
    /// # Panics
    /// If there is no volume.
    pub fn even(volumes: usize) -> Self {
        Self::from_counts(&vec![1; volumes]).expect("a layout needs a volume")
    }

    /// Shares with which volumes of these rates (bytes per second) end together, as nearly as a
    /// pattern of at most 64 stripes allows: the total throughput is the pattern's length divided
    /// by the time of the slowest volume. The shortest of the patterns within half a percent of the
    /// best.
    ///
    /// A volume with less than 1/64 of the rates' sum gets no stripe, since one stripe of every
    /// pattern would make the others wait for it; every other volume gets at least one. (With more
    /// than 64 volumes, their number takes the place of 64.) A rate that is not a positive number
    /// counts as zero; if all are, shares are equal.
    ///
    /// # Panics
    /// If there is no volume.
    pub fn by_rates(rates: &[f64]) -> Self {
        let usable = |rate: &f64| rate.is_finite() && *rate > 0.0;
        let fastest = rates.iter().copied().filter(usable).fold(0.0, f64::max);
        if fastest == 0.0 {
            return Self::even(rates.len());
        }
        // Scaled, so that no sum overflows.
        let mut rates: Vec<f64> =
            rates.iter().map(|rate| if usable(rate) { rate / fastest } else { 0.0 }).collect();
        let longest = PATTERN_STRIPES_MAX.max(rates.len());
        let least = rates.iter().sum::<f64>() / longest as f64 * (1.0 - ROUNDING);
        rates.iter_mut().filter(|rate| **rate < least).for_each(|rate| *rate = 0.0);

        let patterns = good_patterns(&rates, longest);
        let best = patterns.iter().map(|pattern| pattern.throughput).fold(0.0, f64::max);
        let chosen = patterns
            .into_iter()
            .filter(|pattern| pattern.throughput >= best * (1.0 - THROUGHPUT_SPARED))
            .min_by(|a, b| a.stripes.cmp(&b.stripes).then(b.throughput.total_cmp(&a.throughput)))
            .expect("the slowest volume's one stripe gives a pattern that is not too long");
        Self::from_counts(&chosen.counts).expect("the pattern is not too long")
    }

    /// The layout with these [`Layout::counts`], or none if there is no such layout: if there is no
    /// stripe at all, or more than 64 of them (or than the number of volumes, if that is larger).
    pub fn from_counts(counts: &[u32]) -> Option<Self> {
        let stripes: u64 = counts.iter().map(|count| u64::from(*count)).sum();
        if stripes == 0 || stripes > PATTERN_STRIPES_MAX.max(counts.len()) as u64 {
            return None;
        }
        // Smooth weighted round robin: every volume earns its count with each stripe, and the one
        // that is owed most gets the stripe and pays for the whole pattern.
        let mut owed = vec![0_i64; counts.len()];
        let mut ranks = vec![0; counts.len()];
        let mut pattern = Vec::new();
        for _ in 0..stripes {
            owed.iter_mut().zip(counts).for_each(|(owed, count)| *owed += i64::from(*count));
            let volumes = (0..counts.len()).filter(|volume| counts[*volume] > 0).rev();
            let volume = volumes.max_by_key(|volume| owed[*volume]).expect("a volume has a stripe");
            owed[volume] -= stripes as i64;
            pattern.push(Slot { volume, rank: ranks[volume] });
            ranks[volume] += 1;
        }
        Some(Self { counts: counts.to_vec(), pattern })
    }

    /// Stripes of each volume in every pattern.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// The volume ranges behind `bytes` bytes at `address`, in the order of the addresses. Stripes
    /// that follow one another on the same volume are one piece.
    pub fn pieces(&self, address: u64, bytes: u64) -> Vec<VolumePiece> {
        // A single volume holds the whole address space in order, so that a range is one piece of
        // any length.
        if let Some(volume) = self.only_volume() {
            return vec![VolumePiece { volume, offset: address, start: 0, bytes: bytes as usize }];
        }
        let mut pieces: Vec<VolumePiece> = Vec::new();
        let mut done = 0;
        while done < bytes {
            let (stripe, inside) = ((address + done) / STRIPE_BYTES, (address + done) % STRIPE_BYTES);
            let length = (STRIPE_BYTES - inside).min(bytes - done);
            let (repeat, slot) = self.slot(stripe);
            let own_stripe = repeat * u64::from(self.counts[slot.volume]) + slot.rank;
            match pieces.last_mut() {
                Some(last) if last.volume == slot.volume => last.bytes += length as usize,
                _ => pieces.push(VolumePiece {
                    volume: slot.volume,
                    offset: own_stripe * STRIPE_BYTES + inside,
                    start: done as usize,
                    bytes: length as usize,
                }),
            }
            done += length;
        }
        pieces
    }

    /// Bytes of `volume` that an address space of `end` bytes needs.
    pub fn share_bytes(&self, volume: usize, end: u64) -> u64 {
        let (whole, rest) = (end / STRIPE_BYTES, end % STRIPE_BYTES);
        let (repeat, next) = self.slot(whole);
        let begun = &self.pattern[..(whole % self.pattern.len() as u64) as usize];
        let stripes = repeat * u64::from(self.counts[volume])
            + begun.iter().filter(|slot| slot.volume == volume).count() as u64;
        stripes * STRIPE_BYTES + if next.volume == volume { rest } else { 0 }
    }

    /// The largest address space, in whole blocks, of which every volume can hold its share:
    /// volume `i` can hold `room[i]` bytes, `u64::MAX` if that is unknown. `u64::MAX`
    /// if nothing limits it.
    ///
    /// # Panics
    /// If `room` does not have one number for each volume.
    pub fn capacity(&self, room: &[u64]) -> u64 {
        assert_eq!(room.len(), self.counts.len(), "one number for each volume");
        let limited = (0..room.len()).filter(|volume| self.counts[*volume] > 0 && room[*volume] < u64::MAX);
        limited.map(|volume| self.end_of(volume, room[volume])).min().unwrap_or(u64::MAX)
    }

    /// End of the address space when `volume` has used `room` bytes, in whole blocks, and is asked for more.
    fn end_of(&self, volume: usize, room: u64) -> u64 {
        let room = room / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let (own_stripe, inside) = (room / STRIPE_BYTES, room % STRIPE_BYTES);
        let count = u64::from(self.counts[volume]);
        let wanted = Slot { volume, rank: own_stripe % count };
        let position =
            self.pattern.iter().position(|slot| *slot == wanted).expect("ranks are below the count");
        let stripe = u128::from(own_stripe / count) * self.pattern.len() as u128 + position as u128;
        let end = stripe * u128::from(STRIPE_BYTES) + u128::from(inside);
        end.try_into().unwrap_or(u64::MAX)
    }

    /// How many patterns lie before a stripe of the address space, and which stripe of its pattern
    /// it is.
    fn slot(&self, stripe: u64) -> (u64, Slot) {
        let stripes = self.pattern.len() as u64;
        (stripe / stripes, self.pattern[(stripe % stripes) as usize])
    }

    fn only_volume(&self) -> Option<usize> {
        let volume = self.pattern[0].volume;
        (self.counts[volume] as usize == self.pattern.len()).then_some(volume)
    }
}

/// Rounding error of a quotient of rates that is a whole number.
const ROUNDING: f64 = 1e-9;

struct Pattern {
    counts: Vec<u32>,
    stripes: u64,
    throughput: f64,
}

/// Candidate patterns, the best one among them. The smallest nonzero rate has to be at least 1/`longest` of
/// the sum. If a pattern takes the time `t`, its slowest volume has `t * rate` stripes, a whole number, and
/// every other volume may have as many as it can move in `t`. It is therefore enough to try whole numbers for
/// each volume.
fn good_patterns(rates: &[f64], longest: usize) -> Vec<Pattern> {
    let mut patterns = Vec::new();
    for slowest in rates.iter().filter(|rate| **rate > 0.0) {
        for own in 1..=longest {
            let managed = |rate: &f64| (own as f64 * rate / slowest + ROUNDING) as u32;
            let counts: Vec<u32> = rates.iter().map(managed).collect();
            let stripes: u64 = counts.iter().map(|count| u64::from(*count)).sum();
            if stripes > longest as u64 {
                break;
            }
            if rates.iter().zip(&counts).all(|(rate, count)| *rate == 0.0 || *count > 0) {
                let throughput = throughput(&counts, rates);
                patterns.push(Pattern { counts, stripes, throughput });
            }
        }
    }
    patterns
}

/// Stripes per unit of time when every volume works at its rate and the slowest ends last.
fn throughput(counts: &[u32], rates: &[f64]) -> f64 {
    let stripes: u32 = counts.iter().sum();
    let used = counts.iter().zip(rates).filter(|(count, _)| **count > 0);
    f64::from(stripes) / used.map(|(count, rate)| f64::from(*count) / rate).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCK: u64 = BLOCK_BYTES as u64;

    fn layouts() -> impl Strategy<Value = Layout> {
        let counts = prop_oneof![
            prop::collection::vec(0_u32..=10, 1..7),
            prop::collection::vec(0_u32..=40, 1..4),
            prop::collection::vec(1_u32..2, 1..9),
        ];
        counts.prop_filter_map("no pattern", |counts| Layout::from_counts(&counts))
    }

    /// Any address in whole blocks, those near the ends of stripes as often as the others.
    fn addresses() -> impl Strategy<Value = u64> {
        let stripe_blocks = STRIPE_BYTES / BLOCK;
        (0_u64..200, prop_oneof![0..stripe_blocks, Just(0), Just(stripe_blocks - 1)])
            .prop_map(|(stripe, block)| stripe * STRIPE_BYTES + block * BLOCK)
    }

    fn bytes_by_volume(layout: &Layout, pieces: &[VolumePiece]) -> Vec<u64> {
        let mut bytes = vec![0; layout.counts().len()];
        pieces.iter().for_each(|piece| bytes[piece.volume] += piece.bytes as u64);
        bytes
    }

    proptest! {
        /// Pieces cover the address space in order, and each volume's from its first byte on
        /// without a gap: so every byte has one place, and no place has two.
        #[test]
        fn every_byte_of_the_address_space_has_one_place(layout in layouts(), end in addresses()) {
            let pieces = layout.pieces(0, end.max(BLOCK));
            let mut used = vec![0; layout.counts().len()];
            let mut covered = 0;
            for piece in &pieces {
                prop_assert_eq!(piece.start as u64, covered);
                prop_assert_eq!(piece.offset, used[piece.volume], "stripes of a volume follow one another");
                prop_assert!(piece.bytes > 0);
                covered += piece.bytes as u64;
                used[piece.volume] += piece.bytes as u64;
            }
            prop_assert_eq!(covered, end.max(BLOCK));
            prop_assert!(pieces.windows(2).all(|pair| pair[0].volume != pair[1].volume), "not merged");
            for (volume, bytes) in used.into_iter().enumerate() {
                prop_assert_eq!(layout.share_bytes(volume, end.max(BLOCK)), bytes);
            }
        }

        /// A range lies where it lies in the whole, wherever it begins and ends.
        #[test]
        fn a_range_lies_where_it_lies_in_the_whole(layout in layouts(), a in addresses(), b in addresses()) {
            let (first, end) = (a.min(b), a.max(b) + BLOCK);
            let mut clipped = Vec::new();
            for piece in layout.pieces(0, end) {
                let (start, after) = (piece.start as u64, (piece.start + piece.bytes) as u64);
                if after > first {
                    let skipped = first.saturating_sub(start);
                    clipped.push(VolumePiece {
                        volume: piece.volume,
                        offset: piece.offset + skipped,
                        start: (start + skipped - first) as usize,
                        bytes: (after - start - skipped) as usize,
                    });
                }
            }
            prop_assert_eq!(layout.pieces(first, end - first), clipped);
        }

        #[test]
        fn a_pattern_length_anywhere_is_split_exactly_by_counts(layout in layouts(), first in addresses()) {
            let stripes: u64 = layout.counts().iter().map(|count| u64::from(*count)).sum();
            let bytes = bytes_by_volume(&layout, &layout.pieces(first, stripes * STRIPE_BYTES));
            let counted: Vec<u64> = layout.counts().iter().map(|count| u64::from(*count) * STRIPE_BYTES).collect();
            prop_assert_eq!(bytes, counted);
        }

        /// However many stripes a transfer has, and wherever it begins, no volume is two stripes
        /// off its share.
        #[test]
        fn stripes_are_spread_over_the_pattern(layout in layouts(), first in 0_u64..64, count in 1_u64..64) {
            let stripes: u32 = layout.counts().iter().sum();
            let bytes = bytes_by_volume(&layout, &layout.pieces(first * STRIPE_BYTES, count * STRIPE_BYTES));
            for (volume, bytes) in bytes.into_iter().enumerate() {
                let fair = f64::from(layout.counts()[volume]) * count as f64 / f64::from(stripes);
                let off = (bytes / STRIPE_BYTES) as f64 - fair;
                prop_assert!(off.abs() < 2.0, "volume {volume} of {:?} is {off} off", layout.counts());
            }
        }

        /// The space fits on every volume, and one block more does not.
        #[test]
        fn capacity_is_the_last_end_that_fits(
            layout in layouts(),
            room in prop::collection::vec(
                prop_oneof![3 => 0_u64..200 << 20, 1 => any::<u64>(), 1 => Just(u64::MAX)], 8
            )
        ) {
            let room = &room[..layout.counts().len()];
            let capacity = layout.capacity(room);
            let fits = |end| (0..room.len()).all(|volume| layout.share_bytes(volume, end) <= room[volume]);
            prop_assert!(fits(capacity), "{capacity}");
            if capacity < u64::MAX {
                prop_assert_eq!(capacity % BLOCK, 0);
                prop_assert!(!capacity.checked_add(BLOCK).is_some_and(fits), "more than {capacity} fits");
            }
        }

        /// Bounds with slack: the worst rates that a search by hill climbing found use 0.971 of the
        /// sum on up to four volumes, and 0.957 on up to six.
        #[test]
        fn shares_by_rates_use_nearly_all_of_them(rates in prop::collection::vec(1.0_f64..20.0, 2..7)) {
            let layout = Layout::by_rates(&rates);
            let used = throughput(layout.counts(), &rates) / rates.iter().sum::<f64>();
            let least = if rates.len() <= 4 { 0.97 } else { 0.95 };
            prop_assert!(used >= least, "{used} of {rates:?} with {:?}", layout.counts());
            prop_assert_eq!(Layout::from_counts(layout.counts()), Some(layout));
        }

        /// Against all patterns of three volumes, one by one.
        #[test]
        fn the_pattern_is_the_shortest_of_the_best(rates in prop::collection::vec(1.0_f64..20.0, 3)) {
            let mut best_by_length = [0.0_f64; 65];
            for a in 1..=62 {
                for b in 1..=63 - a {
                    for c in 1..=64 - a - b {
                        let best = &mut best_by_length[(a + b + c) as usize];
                        *best = best.max(throughput(&[a, b, c], &rates));
                    }
                }
            }
            let enough = best_by_length.iter().copied().fold(0.0, f64::max) * (1.0 - THROUGHPUT_SPARED);
            let shortest = best_by_length.iter().position(|best| *best >= enough).unwrap();
            let layout = Layout::by_rates(&rates);
            prop_assert_eq!(layout.counts().iter().sum::<u32>() as usize, shortest);
            prop_assert!(throughput(layout.counts(), &rates) >= best_by_length[shortest] * (1.0 - ROUNDING));
        }
    }

    #[test]
    fn equal_shares_are_plain_raid_0() {
        for volumes in [1, 2, 3, 5, 100] {
            let layout = Layout::even(volumes as usize);
            for stripe in 0..3 * volumes {
                let place = layout.pieces(stripe * STRIPE_BYTES + BLOCK, BLOCK)[0];
                assert_eq!(place.volume as u64, stripe % volumes);
                assert_eq!(place.offset, stripe / volumes * STRIPE_BYTES + BLOCK);
            }
        }
    }

    #[test]
    fn equal_rates_give_equal_shares() {
        for volumes in [1, 2, 3, 7, 64, 65, 100] {
            assert_eq!(Layout::by_rates(&vec![3.3e9 / 7.0; volumes]), Layout::even(volumes));
        }
        assert_eq!(Layout::by_rates(&[7e9, 3.5e9]).counts(), [2, 1]);
        assert_eq!(Layout::by_rates(&[3.0e9, 6.01e9, 1.5e9]).counts(), [2, 4, 1], "as good as longer ones");
    }

    #[test]
    fn a_volume_gets_no_stripe_only_below_a_64th_of_the_sum() {
        assert_eq!(Layout::by_rates(&[62.9, 1.0]).counts(), [63, 1]);
        assert_eq!(Layout::by_rates(&[63.0, 1.0]).counts(), [63, 1]);
        assert_eq!(Layout::by_rates(&[63.1, 1.0]).counts(), [1, 0]);
        assert_eq!(Layout::by_rates(&[31.4, 1.0, 31.4]).counts(), [31, 1, 31]);
    }

    #[test]
    fn rates_that_are_none_get_no_stripe() {
        let layout = Layout::by_rates(&[f64::NAN, 2e9, 0.0, 1e9, -5e9, f64::INFINITY]);
        assert_eq!(layout.counts(), [0, 2, 0, 1, 0, 0]);
        assert_eq!(layout.share_bytes(0, 1 << 40), 0);
        assert_eq!(Layout::by_rates(&[0.0, f64::NAN]), Layout::even(2));
        assert_eq!(Layout::by_rates(&[f64::MAX, f64::MAX, f64::MIN_POSITIVE]).counts(), [1, 1, 0]);
    }

    #[test]
    fn the_only_volume_with_stripes_has_everything_in_one_piece() {
        for (counts, volume) in [(vec![1], 0), (vec![0, 3], 1)] {
            let layout = Layout::from_counts(&counts).unwrap();
            let piece = VolumePiece { volume, offset: BLOCK, start: 0, bytes: 1 << 60 };
            assert_eq!(layout.pieces(BLOCK, 1 << 60), [piece]);
            assert_eq!(layout.share_bytes(volume, 1 << 60), 1 << 60);
        }
    }

    #[test]
    fn counts_of_no_layout_are_refused() {
        for counts in [vec![], vec![0, 0], vec![60, 5], vec![u32::MAX, u32::MAX]] {
            assert_eq!(Layout::from_counts(&counts), None);
        }
        assert!(Layout::from_counts(&[60, 4]).is_some());
    }

    #[test]
    fn capacity_leaves_out_what_does_not_limit_it() {
        let layout = Layout::from_counts(&[2, 0, 1]).unwrap();
        assert_eq!(layout.capacity(&[u64::MAX, 0, u64::MAX]), u64::MAX);
        assert_eq!(layout.capacity(&[u64::MAX, 0, STRIPE_BYTES + 5000]), 4 * STRIPE_BYTES + BLOCK);
    }
}
