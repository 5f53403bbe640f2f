//! How many values there were of each size.
//!
//! A size is kept to a thousandth, rounded up, so that no share is told one that is too small. Room is taken for the sizes
//! that came, and not for all that could: where overrides have thousands of limits, most of them see few.

use std::collections::BTreeMap;

/// So many binary digits of a size are kept: all of those below 2048, and of others enough for a thousandth.
const DIGITS: u32 = 11;

/// Values by their sizes.
#[derive(Clone, Debug, Default)]
pub struct Sizes {
    counts: BTreeMap<u64, u64>,
    count: u64,
    largest: u64,
}

impl Sizes {
    /// Counts a value, of which zero is taken for the least that there is, one.
    pub fn add(&mut self, value: u64) {
        let value = value.max(1);
        let dropped = (u64::BITS - value.leading_zeros()).saturating_sub(DIGITS);
        *self.counts.entry(value | ((1 << dropped) - 1)).or_default() += 1;
        self.count += 1;
        self.largest = self.largest.max(value);
    }

    /// The size that so many of a thousand values do not exceed; that of all is exact. Zero where there are none.
    pub fn at(&self, per_mille: u64) -> u64 {
        let wanted = (u128::from(self.count) * u128::from(per_mille)).div_ceil(1000);
        let mut passed = 0;
        let reached = self.counts.iter().find(|(_, count)| {
            passed += u128::from(**count);
            passed >= wanted
        });
        reached.map_or(self.largest, |(size, _)| (*size).min(self.largest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(values: impl IntoIterator<Item = u64>) -> Sizes {
        let mut sizes = Sizes::default();
        values.into_iter().for_each(|value| sizes.add(value));
        sizes
    }

    #[test]
    fn a_share_of_the_values_is_no_larger_than_what_is_told_and_hardly_smaller() {
        let mut random = fastrand::Rng::with_seed(5);
        for digits in [4, 11, 12, 30, 53] {
            let mut values = (0..3000).map(|_| 1 + random.u64(..1 << digits)).collect::<Vec<_>>();
            let sizes = sizes(values.iter().copied());
            values.sort_unstable();
            for per_mille in [1, 500, 990, 999, 1000] {
                let (told, exact) = (sizes.at(per_mille), values[per_mille as usize * 3 - 1]);
                assert!(exact <= told && told <= exact + exact / 1000, "{digits} {per_mille}: {exact} {told}");
            }
            assert_eq!(sizes.at(1000), *values.last().unwrap());
        }
    }

    #[test]
    fn a_share_that_falls_between_two_values_is_the_larger_one() {
        assert_eq!((sizes([1, 7]).at(500), sizes([1, 7]).at(501), sizes([1, 7]).at(0)), (1, 7, 1));
        assert_eq!((sizes([]).at(990), sizes([0]).at(990), sizes([u64::MAX]).at(990)), (0, 1, u64::MAX));
    }

    #[test]
    fn room_is_taken_for_the_sizes_that_came_alone() {
        let sizes = sizes((0..100_000).map(|value| (1 << 40) + value));
        assert_eq!(sizes.counts.len(), 1);
    }
}
