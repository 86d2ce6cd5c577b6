//! How few tokens a text can have.
//!
//! A token of n bytes covers n bytes of the text. So a byte that is in no token of more than n bytes
//! counts as 1/n token at least. What a component may drop, join or change depending on what stands
//! around it counts nothing.

/// A whole token, in the unit of the shares.
pub(super) const ONE: u64 = 1 << 32;

/// The least tokens of a text.
#[derive(Debug)]
pub(super) struct Least {
    /// What each byte counts.
    pub shares: [u64; 256],
    /// Only ASCII before ASCII counts: a normaliser may change the rest.
    pub ascii: bool,
}

impl Least {
    /// A lower bound for the tokens of `text`, whatever stands around it.
    pub fn tokens(&self, text: &str) -> usize {
        let pairs = text.bytes().zip(text.bytes().skip(1));
        let counted = pairs.filter(|(a, b)| !self.ascii || (a.is_ascii() && b.is_ascii()));
        let sum: u64 = counted.map(|(a, _)| self.shares[usize::from(a)]).sum();
        usize::try_from(sum / ONE).unwrap_or(usize::MAX)
    }
}
