//! Lower bound of the number of tokens of a text.
//!
//! A token of n bytes covers n bytes of the text, so a byte that occurs only in tokens of up to n
//! bytes counts as at least 1/n token. Bytes that a component may drop, join or change depending on
//! context count 0.

/// One token, in units of the shares.
pub(super) const ONE: u64 = 1 << 32;

/// The lower bound of a text's tokens.
#[derive(Debug)]
pub(super) struct Least {
    /// Share of each byte.
    pub shares: [u64; 256],
    /// Only ASCII followed by ASCII counts: a normaliser may change the rest.
    pub ascii: bool,
}

impl Least {
    /// A lower bound for the tokens of `text` in any context.
    pub fn tokens(&self, text: &str) -> usize {
        let pairs = text.bytes().zip(text.bytes().skip(1));
        let counted = pairs.filter(|(a, b)| !self.ascii || (a.is_ascii() && b.is_ascii()));
        let sum: u64 = counted.map(|(a, _)| self.shares[usize::from(a)]).sum();
        usize::try_from(sum / ONE).unwrap_or(usize::MAX)
    }
}
