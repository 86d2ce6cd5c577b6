//! The steps that add outputs to the residual stream.

use super::at::At;
use crate::norm::{Norm, add_output, add_rows};

/// What is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Term {
    /// `scratch.out`.
    Out,
    /// `scratch.parallel`, where [`hold`] has put it.
    Held,
}

/// `x += scale × norm(term)`.
#[derive(Debug)]
pub(crate) struct Add {
    pub term: Term,
    pub norm: Option<Norm>,
    pub scale: f32,
}

impl Add {
    pub fn run(&self, at: &mut At<'_, '_, '_, '_>) {
        let width = at.width();
        let output = match self.term {
            Term::Out => &mut at.scratch.out[..width],
            Term::Held => &mut at.scratch.parallel[..width],
        };
        let norm = self.norm.as_ref();
        add_output(at.on.cpu, norm, self.scale, output, &mut at.pass.x);
    }
}

/// Keeps `scratch.out` in `scratch.parallel`, while the residual stream must not change.
pub(super) fn hold(at: &mut At<'_, '_, '_, '_>) {
    std::mem::swap(&mut at.scratch.out, &mut at.scratch.parallel);
}

/// Adds the held output to `scratch.out`.
pub(super) fn join(at: &mut At<'_, '_, '_, '_>) {
    let width = at.width();
    add_rows(&mut at.scratch.out, &at.scratch.parallel, width);
}
