//! Builds a predictor from newly trained weights.

use crate::bytes::SharedBytes;
use crate::coarse::CoarseGate;
use crate::low_rank::LowRank;
use crate::predict::Predictor;
use crate::section::Kind;
use crate::sign::SignBit;
use crate::thresholds::Thresholds;
use crate::top;

/// A predictor of `kind` for `neurons` neurons from its stored parts, with other thresholds.
pub(super) fn assemble(
    kind: &Kind,
    [d, neurons]: [usize; 2],
    parts: &[Vec<u8>],
    thresholds: Thresholds,
) -> Option<Box<dyn Predictor>> {
    let part = |i: usize| Some(SharedBytes::from(parts.get(i)?.clone()));
    Some(match *kind {
        Kind::None | Kind::Magnitude { .. } => return None,
        Kind::Sign { limit } => Box::new(SignBit::new(part(0)?, d, limit)),
        Kind::LowRank(spec) => Box::new(LowRank::new(spec, part(0)?, part(1)?, thresholds)),
        Kind::Coarse(narrow) => Box::new(CoarseGate::new(narrow, part(0)?, d, thresholds)),
        Kind::CoarseTop(narrow) => {
            let gate = CoarseGate::new(narrow, part(0)?, d, thresholds);
            return top::assemble(gate, neurons, parts.get(1)?);
        }
    })
}
