//! What a layer does, step by step.

use std::sync::Arc;

use emberflow_storage::trace::Kind;

use super::add::{Add, hold, join};
use super::at::At;
use super::feed::Feed;
use super::hyper::Reader;
use super::mix::Mix;
use super::narrow_experts::{ExpertsIn, ExpertsOut};
use super::route::{Route, RouteTokens};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::norm::{Norm, rows_or_copy};

/// A step of a layer, with its weights. Steps pass rows on in the buffers `normed` and `out` and in the residual
/// stream.
#[derive(Debug)]
pub(crate) enum Step {
    /// Names what follows in traces.
    Section(&'static Kind),
    Route(Route),
    RouteTokens(RouteTokens),
    /// `normed = norm(x)`, or `x` without a norm.
    Norm(Option<Arc<Norm>>),
    Mix(Box<Mix>),
    Feed(Box<Feed>),
    Add(Add),
    /// See [`hold`] and [`join`].
    Hold,
    Join,
    /// Projections before and after experts of another width.
    ExpertsIn(ExpertsIn),
    ExpertsOut(ExpertsOut),
    /// Mixes hyper-connected streams for a reader; adds its output to them.
    HyperMix(Reader),
    HyperAdd,
    AddNgrams,
    /// AltUp's prediction and correction, and LAuReL.
    PredictStreams,
    AddLaurel,
    CorrectStreams,
    /// Adds the layer's own input.
    AddInputs,
    /// Factor of the residual stream.
    Scale(f32),
}

impl Step {
    /// Runs the step.
    pub fn run(&self, at: &mut At<'_, '_, '_, '_>) -> Result<(), Error> {
        match self {
            Self::Section(kind) => at.tracer.section(kind, [at.layer as u64, 0]),
            Self::Route(route) => route.run(at)?,
            Self::RouteTokens(route) => route.run(at)?,
            Self::Norm(norm) => {
                let x = &at.pass.x[..at.width()];
                rows_or_copy(norm.as_deref(), at.on.cpu, x, &mut at.scratch.normed);
            }
            Self::Mix(mix) => mix.run(at),
            Self::Feed(feed) => feed.run(at)?,
            Self::Add(add) => add.run(at),
            Self::Hold => hold(at),
            Self::Join => join(at),
            Self::ExpertsIn(experts) => experts.run(at),
            Self::ExpertsOut(experts) => experts.run(at),
            Self::Scale(factor) => {
                let width = at.width();
                at.pass.x[..width].iter_mut().for_each(|x| *x *= factor);
            }
            special => special.run_special(at)?,
        }
        Ok(())
    }

    /// The steps of single families, whose weights layers share.
    fn run_special(&self, at: &mut At<'_, '_, '_, '_>) -> Result<(), Error> {
        let (on, layer, width) = (at.on, at.layer, at.width());
        let (specials, pass, s) = (&mut *at.specials, &mut *at.pass, &mut *at.scratch);
        let (streams, inputs) = (&mut specials.streams, &mut specials.layer_inputs);
        match (
            self,
            streams,
            inputs,
            &mut specials.hyper,
            &mut specials.ngrams,
        ) {
            (Self::HyperMix(reader), _, _, Some(hyper), _) => hyper.mix(on, *reader, pass, s),
            (Self::HyperAdd, _, _, Some(hyper), _) => hyper.add(on, &s.out[..width], pass),
            (Self::AddNgrams, _, _, _, Some(ngrams)) => {
                ngrams.add(on, &mut at.ffn.store, at.spans, pass, s)?;
            }
            (Self::PredictStreams, Some(streams), ..) => streams.predict(on, layer, pass, s),
            (Self::AddLaurel, Some(streams), ..) => streams.add_laurel(on, layer, pass, s),
            (Self::CorrectStreams, Some(streams), Some(inputs), ..) => {
                streams.correct(on, layer, inputs, pass, s);
            }
            (Self::AddInputs, _, Some(inputs), ..) => inputs.add(on, layer, pass, s),
            _ => {
                let first =
                    format!("layer {layer} has a step whose weights are not loaded: {self:?}");
                return Err(Error::Failed { first });
            }
        }
        Ok(())
    }

    /// Bytes of the step's resident weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        match self {
            Self::Mix(mix) => mix.mixer.matrices().iter().map(Matrix::len).sum(),
            Self::Route(route) => route.router.scores.len(),
            Self::ExpertsIn(experts) => experts.len(),
            Self::ExpertsOut(experts) => experts.len(),
            Self::Feed(feed) => feed
                .tiles
                .as_ref()
                .map_or(0, |tiles| tiles.bytes_per_token()),
            _ => 0,
        }
    }
}
