//! A layer as a list of steps, built once from the configuration.

use std::sync::Arc;

use emberflow_models::config::{ModelConfig, Parallel};

use super::add::{Add, Term};
use super::at::At;
use super::feed::{Feed, Through, Units};
use super::hyper::Reader;
use super::layer_weights::LayerWeights;
use super::mix::Mix;
use super::route::{Route, RouteTokens, RouterInput};
use super::router_ahead::Upcoming;
use super::step::Step;
use crate::error::Error;
use crate::mixer::Mixer;
use crate::norm::Norm;
use crate::router::Router;
use crate::trace;

/// A layer.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Up to the FFN's input, and from the FFN on.
    mixing: Vec<Step>,
    feeding: Vec<Step>,
    /// Outliers of its inputs are pruned, where tokens have one scale.
    pub pruned: bool,
}

impl Layer {
    /// Layer `number`; `next` is the next one with an FFN.
    pub(super) fn new(
        c: &ModelConfig,
        number: usize,
        weights: LayerWeights,
        next: Option<&Upcoming>,
    ) -> Self {
        let mut weights = weights;
        Self {
            mixing: mixing(c, number, &mut weights),
            feeding: feeding(c, number, weights, next),
            pruned: false,
        }
    }

    /// Runs the steps up to the FFN.
    pub fn mix(&self, at: &mut At<'_, '_, '_, '_>) -> Result<(), Error> {
        self.mixing.iter().try_for_each(|step| step.run(at))
    }

    /// Runs the steps from the FFN on.
    pub fn feed(&self, at: &mut At<'_, '_, '_, '_>) -> Result<(), Error> {
        self.feeding.iter().try_for_each(|step| step.run(at))
    }

    /// The mixer, if the layer has one.
    pub fn mixer(&self) -> Option<&Mixer> {
        self.mixing.iter().find_map(|step| match step {
            Step::Mix(mix) => Some(&mix.mixer),
            _ => None,
        })
    }

    /// See [`Layer::mixer`].
    pub fn mixer_mut(&mut self) -> Option<&mut Mixer> {
        self.mixing.iter_mut().find_map(|step| match step {
            Step::Mix(mix) => Some(&mut mix.mixer),
            _ => None,
        })
    }

    /// Bytes of resident weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let steps = self.mixing.iter().chain(&self.feeding);
        steps.map(Step::bytes_per_token).sum()
    }
}

/// The steps up to the FFN's input; they take the mixer from `weights`.
fn mixing(c: &ModelConfig, number: usize, weights: &mut LayerWeights) -> Vec<Step> {
    let layer = number as u32;
    let (hyper, streams) = (c.form.hyper.is_some(), c.form.streams.is_some());
    let mut steps = Vec::new();
    if let (Some(router), Some(mixture)) = (&weights.router, c.mixture_of(layer)) {
        let router = Arc::clone(router);
        if router.by_token.is_some() {
            steps.push(Step::RouteTokens(RouteTokens { router }));
        } else if mixture.early_router {
            steps.push(route(router, RouterInput::Stream, true));
        }
    }
    if streams {
        steps.push(Step::PredictStreams);
    }
    if c.form
        .ngrams
        .as_ref()
        .is_some_and(|ngrams| ngrams.layer == layer)
    {
        steps.push(Step::AddNgrams);
    }
    if hyper {
        steps.push(Step::HyperMix(Reader::Mixer(number)));
    }
    steps.push(Step::Section(&trace::ATTENTION));
    steps.push(Step::Norm(weights.attn_norm.clone()));
    // Without a mixer the FFN reads the same norm.
    let Some(mixer) = weights.mixer.take() else {
        return steps;
    };
    steps.push(Step::Mix(Box::new(Mix { mixer })));
    let norm = weights.ffn_norm.clone();
    if c.form.parallel != Parallel::No {
        steps.extend(norm.map(|norm| Step::Norm(Some(norm))));
        steps.push(Step::Hold);
        return steps;
    }
    if hyper {
        steps.push(Step::HyperAdd);
        steps.push(Step::HyperMix(Reader::Ffn(number)));
    } else {
        steps.push(add(c, Term::Out, weights.attn_post_norm.take()));
    }
    if streams {
        steps.push(Step::AddLaurel);
    }
    if c.has_ffn(layer) {
        steps.push(Step::Norm(norm));
    }
    steps
}

/// The steps from the FFN on.
fn feeding(
    c: &ModelConfig,
    number: usize,
    weights: LayerWeights,
    next: Option<&Upcoming>,
) -> Vec<Step> {
    let (layer, scale, post) = (number as u32, weights.scale, weights.ffn_post_norm);
    let tiles = weights.tiles.map(Arc::new);
    let feed = |units, through| Feed {
        place: c.ffn_place(layer),
        units,
        through,
        biases: None,
        norm: None,
        next: next.cloned(),
        guesses: false,
        tiles: tiles.clone(),
    };
    let mut steps = Vec::new();
    match (weights.parallel_dense, weights.narrow, weights.router) {
        _ if !c.has_ffn(layer) => {}
        (Some(norms), _, Some(router)) => {
            let dense = Feed {
                norm: Some(norms.dense_post),
                next: None,
                ..feed(Units::Beside, Through::Parallel)
            };
            let experts = Feed {
                norm: Some(norms.experts_post),
                ..feed(Units::Experts, Through::Out)
            };
            steps.extend([
                route(router, RouterInput::OwnNorm, true),
                Step::Feed(Box::new(dense)),
                Step::Norm(Some(Arc::new(norms.experts))),
                Step::Feed(Box::new(experts)),
                Step::Join,
            ]);
        }
        (_, Some((before, after)), Some(router)) => {
            let experts = feed(Units::Routed, Through::Narrow(before.buffers()));
            steps.extend([
                route(router, RouterInput::Normed, true),
                Step::ExpertsIn(before),
                Step::Feed(Box::new(experts)),
                Step::ExpertsOut(after),
            ]);
        }
        (_, _, router) => {
            let units = router.as_ref().map_or(Units::Dense, |_| Units::Routed);
            let early = c
                .mixture
                .as_ref()
                .is_some_and(|mixture| mixture.early_router);
            let router = router.filter(|_| !early);
            steps.extend(router.map(|router| route(router, RouterInput::Normed, false)));
            steps.push(Step::Feed(Box::new(Feed {
                biases: weights.ffn_bias,
                guesses: true,
                ..feed(units, Through::Out)
            })));
        }
    }
    if c.form.parallel != Parallel::No && c.has_mixer(layer) {
        steps.push(add(c, Term::Held, None));
    }
    match (c.has_ffn(layer), c.form.hyper) {
        (true, Some(_)) => steps.push(Step::HyperAdd),
        (true, None) => steps.push(add(c, Term::Out, post)),
        (false, _) => {}
    }
    match (c.form.streams, c.form.inputs_by_layer()) {
        (Some(_), Some(_)) => steps.push(Step::CorrectStreams),
        (None, Some(_)) => steps.push(Step::AddInputs),
        (_, None) => {}
    }
    if scale != 1.0 {
        steps.push(Step::Scale(scale));
    }
    steps
}

fn route(router: Arc<Router>, input: RouterInput, reads: bool) -> Step {
    Step::Route(Route {
        router,
        input,
        reads,
    })
}

fn add(c: &ModelConfig, term: Term, norm: Option<Norm>) -> Step {
    let scale = c.form.residual_scale;
    Step::Add(Add { term, norm, scale })
}
