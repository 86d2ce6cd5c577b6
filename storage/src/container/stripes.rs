//! Checksums of parts of a tensor, so that some of its rows can be read and checked without the others.
//!
//! ```text
//! tensor     row 0 ‖ row 1 ‖ … ‖ row n−1 │ row n ‖ …        stripes of n rows, at most 16 KiB or one row
//! CHECKSUMS  crc32 of stripe 0 u32       │ crc32 of stripe 1 u32 │ …
//! ```
//!
//! n is a power of two, so that tiles of 32 rows, or of a multiple, begin and end with stripes. The division follows from the
//! tensor's shape and length alone.

use std::path::Path;
use std::sync::Arc;

use crc32fast::Hasher;

use super::error::Error;

/// Most bytes of a stripe, unless a row has more. Smaller ones would take more memory: these take 1/4096 of the weights.
const STRIPE: u64 = 16 << 10;

/// Bytes of a stripe's checksum.
pub(super) const STRIPE_CHECKSUM: usize = size_of::<u32>();

/// How a tensor is divided into stripes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stripes {
    /// Index of the first one's checksum among those of all tensors.
    pub first: u64,
    /// Bytes of a stripe; the last one may have fewer.
    pub len: u64,
    /// Bytes of the tensor.
    of: u64,
    rows: u64,
}

impl Stripes {
    /// The stripes of a tensor of this shape and length. One whose length is not a multiple of its rows has stripes of bytes.
    pub(super) fn new(dims: &[u64], len: u64, first: u64) -> Self {
        let rows = dims.first().copied().unwrap_or(1).max(1);
        let row = if len.is_multiple_of(rows) {
            (len / rows).max(1)
        } else {
            1
        };
        let most = (STRIPE / row).max(1);
        let rows = 1 << most.ilog2();
        Self {
            first,
            len: rows * row,
            of: len,
            rows,
        }
    }

    /// Number of stripes.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.of.div_ceil(self.len)
    }

    /// Rows of a stripe, a power of two.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows as usize
    }
}

/// The checksums of the stripes of all tensors.
#[derive(Debug, Clone)]
pub struct StripeChecksums(Arc<[u32]>);

/// A stripe whose bytes are not those that were packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DamagedStripe {
    /// First byte of it in the tensor.
    pub at: u64,
    /// Its checksum in the container.
    pub expected: u32,
    /// The checksum of its bytes.
    pub found: u32,
}

impl StripeChecksums {
    pub(super) fn new(sums: Vec<u32>) -> Self {
        Self(sums.into())
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    pub(super) fn get(&self, index: u64) -> Option<u32> {
        self.0.get(usize::try_from(index).ok()?).copied()
    }

    /// Checks `bytes`, which are whole stripes of a tensor, the first of which is number `first`.
    ///
    /// # Errors
    /// The first one that is damaged.
    pub fn check(&self, stripes: Stripes, first: u64, bytes: &[u8]) -> Result<(), DamagedStripe> {
        for (number, bytes) in (first..).zip(bytes.chunks(stripes.len as usize)) {
            let found = crc32fast::hash(bytes);
            let expected = self.get(stripes.first + number);
            if number >= stripes.count() || expected != Some(found) {
                return Err(DamagedStripe {
                    at: number * stripes.len,
                    expected: expected.unwrap_or(0),
                    found,
                });
            }
        }
        Ok(())
    }
}

impl DamagedStripe {
    /// The error for a tensor that begins at `begin` of the container at `path`.
    #[must_use]
    pub fn of(self, path: &Path, name: &str, begin: u64) -> Error {
        Error::TensorChecksum {
            path: path.to_path_buf(),
            name: name.to_owned(),
            offset: begin + self.at,
            expected: self.expected.into(),
            found: self.found.into(),
        }
    }
}

/// Computes the checksums of a tensor whose bytes come in parts of any size.
pub(super) struct StripeSums {
    stripes: Stripes,
    /// The stripe that is being hashed, and how many bytes of it were.
    number: u64,
    hashed: u64,
    hash: Hasher,
}

impl StripeSums {
    pub fn new(stripes: Stripes) -> Self {
        Self {
            stripes,
            number: 0,
            hashed: 0,
            hash: Hasher::new(),
        }
    }

    /// Hashes the next bytes and calls `put` with the index and the checksum of each stripe that is complete.
    pub fn update(&mut self, mut bytes: &[u8], mut put: impl FnMut(u64, u32)) {
        while !bytes.is_empty() {
            let done = self.number * self.stripes.len;
            let len = self.stripes.len.min(self.stripes.of.saturating_sub(done));
            let left = len.saturating_sub(self.hashed).max(1);
            let (head, rest) = bytes.split_at((bytes.len() as u64).min(left) as usize);
            self.hash.update(head);
            self.hashed += head.len() as u64;
            if self.hashed >= len {
                let hash = std::mem::take(&mut self.hash);
                put(self.stripes.first + self.number, hash.finalize());
                self.number += 1;
                self.hashed = 0;
            }
            bytes = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stripes are whole rows, as many as 16 KiB hold, and cover the tensor; their checksums do not depend on the parts in which
    /// its bytes come.
    #[test]
    fn stripes_cover_a_tensor_in_whole_rows() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..300 {
            let (rows, row) = (random.u64(1..200), random.u64(1..40_000));
            let stripes = Stripes::new(&[rows, 7], rows * row, 5);
            assert_eq!(stripes.len, stripes.rows() as u64 * row);
            assert!(stripes.rows().is_power_of_two());
            assert!(stripes.len <= STRIPE || stripes.rows() == 1);
            assert!(2 * stripes.len > STRIPE);
            let mut bytes = vec![0; (rows * row) as usize];
            random.fill(&mut bytes);
            let each = bytes.chunks(stripes.len as usize).map(crc32fast::hash);
            let expected: Vec<(u64, u32)> = (5..).zip(each).collect();
            assert_eq!(expected.len() as u64, stripes.count());
            let (mut sums, mut found) = (StripeSums::new(stripes), Vec::new());
            let mut left = &bytes[..];
            while !left.is_empty() {
                let (head, rest) = left.split_at(random.usize(1..=left.len()));
                sums.update(head, |index, sum| found.push((index, sum)));
                left = rest;
            }
            assert_eq!(found, expected);
            let sums = vec![0; 5]
                .into_iter()
                .chain(found.iter().map(|(_, sum)| *sum));
            let sums = StripeChecksums::new(sums.collect());
            let first = random.u64(0..stripes.count());
            let tail = (first * stripes.len) as usize;
            assert_eq!(sums.check(stripes, first, &bytes[tail..]), Ok(()));
            let damaged = random.usize(tail..bytes.len());
            bytes[damaged] ^= 1 << random.u32(0..8);
            let fault = sums.check(stripes, first, &bytes[tail..]).unwrap_err();
            assert_eq!(fault.at, damaged as u64 / stripes.len * stripes.len);
        }
        // Not whole rows.
        let stripes = Stripes::new(&[1 << 60, 2], 100, 0);
        assert_eq!((stripes.count(), stripes.rows()), (1, STRIPE as usize));
    }
}
