//! The steps that choose experts.

use std::sync::Arc;

use super::at::At;
use crate::error::Error;
use crate::input::Input;
use crate::norm::rows_or_copy;
use crate::router::Router;
use crate::trace;

/// What a router reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouterInput {
    /// The rows of `scratch.normed`.
    Normed,
    /// The residual stream.
    Stream,
    /// The residual stream after the router's own norm, in `scratch.parallel`.
    OwnNorm,
}

/// Chooses the experts of every row.
#[derive(Debug)]
pub(crate) struct Route {
    pub router: Arc<Router>,
    pub input: RouterInput,
    /// Starts reading the experts of a single row.
    pub reads: bool,
}

impl Route {
    pub fn run(&self, at: &mut At<'_, '_, '_, '_>) -> Result<(), Error> {
        let (rows, width) = (at.pass.rows, at.width());
        let Some(mixture) = &at.config.mixture else {
            return Ok(());
        };
        at.tracer.section(&trace::ROUTER, [at.layer as u64, 0]);
        let (s, cpu, residual) = (&mut *at.scratch, at.on.cpu, &at.pass.x[..width]);
        let x = match self.input {
            RouterInput::Normed => &s.normed[..width],
            RouterInput::Stream => residual,
            RouterInput::OwnNorm => {
                rows_or_copy(self.router.norm.as_ref(), cpu, residual, &mut s.parallel);
                &s.parallel[..width]
            }
        };
        let input = Input::new(cpu, x, rows, &mut s.input);
        (s.routes).choose(at.on, &self.router, mixture, input, &mut s.rows);
        if self.reads && rows == 1 && !at.hooks.held_only {
            read_chosen(at)?;
        }
        Ok(())
    }
}

/// Starts reading the experts that follow from the rows' tokens.
#[derive(Debug)]
pub(crate) struct RouteTokens {
    pub router: Arc<Router>,
}

impl RouteTokens {
    pub fn run(&self, at: &mut At<'_, '_, '_, '_>) -> Result<(), Error> {
        (at.scratch.routes).choose_by_token(at.on, &self.router, at.pass.rows);
        if at.hooks.held_only {
            return Ok(());
        }
        read_chosen(at)
    }
}

/// Starts reading the experts that at least one row visits, if they are in the store.
fn read_chosen(at: &mut At<'_, '_, '_, '_>) -> Result<(), Error> {
    if at.ffn.store.layout.banks() == 0 {
        return Ok(());
    }
    let place = at.config.ffn_place(at.layer as u32);
    let store = &mut at.ffn.store;
    let first = store.layout.banks_of(place).start;
    let units = at.scratch.routes.visited().map(|expert| first + expert);
    store.read_chosen(place, units)
}
