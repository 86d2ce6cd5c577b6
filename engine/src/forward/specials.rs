//! What only some families have: weights and buffers that layers share.

use emberflow_kernels::Compute;
use emberflow_models::config::ModelConfig;

use super::embedding::Embedding;
use super::hyper::{Hyper, Reader};
use super::layer_inputs::LayerInputs;
use super::mtp::MtpInput;
use super::ngrams::NGramLayer;
use super::pass::Pass;
use super::streams::ResidualStreams;
use crate::error::Error;
use crate::scratch::Scratch;
use crate::state::Span;
use crate::store::{Layout, NeuronStore};

/// The specials of a model. A layer's list has steps for those that exist.
pub(crate) struct Specials {
    /// Per-layer inputs and further residual streams.
    pub layer_inputs: Option<LayerInputs>,
    pub streams: Option<ResidualStreams>,
    /// Hyper-connections between residual streams.
    pub hyper: Option<Hyper>,
    /// N-gram embedding rows.
    pub ngrams: Option<NGramLayer>,
    /// The model is a head for multi-token prediction.
    pub mtp: Option<MtpInput>,
}

impl Specials {
    /// Loads and verifies the weights, for passes of up to `rows` rows.
    pub fn load(layout: &Layout, c: &ModelConfig, rows: usize) -> Result<Self, Error> {
        Ok(Self {
            layer_inputs: LayerInputs::load(layout, c, rows)?,
            streams: ResidualStreams::load(&layout.container, c, rows)?,
            ngrams: NGramLayer::load(layout, c, rows)?,
            hyper: Hyper::load(&layout.container, c, rows)?,
            mtp: MtpInput::load(&layout.container, c, rows)?,
        })
    }

    /// Bytes of weights read per token.
    pub fn bytes_per_token(&self) -> u64 {
        let (streams, inputs) = (self.streams.as_ref(), self.layer_inputs.as_ref());
        streams.map_or(0, ResidualStreams::bytes_per_token)
            + inputs.map_or(0, LayerInputs::bytes_per_token)
            + self.hyper.as_ref().map_or(0, Hyper::bytes_per_token)
            + self.ngrams.as_ref().map_or(0, NGramLayer::bytes_per_token)
            + self.mtp.as_ref().map_or(0, MtpInput::bytes_per_token)
    }

    /// The tables of per-layer inputs and of n-grams, which may be resident.
    pub fn tables_mut(&mut self) -> [Option<&mut Embedding>; 2] {
        let inputs = self.layer_inputs.as_mut().map(LayerInputs::table_mut);
        [inputs, self.ngrams.as_mut().map(NGramLayer::table_mut)]
    }

    /// Resizes the buffers for another number of rows. Those of models with fixed chunks stay.
    pub fn set_rows(&mut self, c: &ModelConfig, rows: usize) {
        self.hyper.iter_mut().for_each(|hyper| hyper.set_rows(rows));
        (self.ngrams.iter_mut()).for_each(|ngrams| ngrams.set_rows(c, rows));
        self.mtp.iter_mut().for_each(|mtp| mtp.set_rows(rows));
    }

    /// Starts reading the table rows that the layers of a pass need.
    pub fn ask(&mut self, store: &mut NeuronStore, spans: &[Span<'_>]) -> Result<(), Error> {
        if let Some(inputs) = &mut self.layer_inputs {
            inputs.ask(store, spans.iter().flat_map(|span| span.tokens).copied())?;
        }
        let ngrams = self.ngrams.as_mut();
        ngrams.map_or(Ok(()), |ngrams| ngrams.ask(store, spans))
    }

    /// Computes the per-layer inputs of all layers from the embedding in `pass.x`.
    pub fn begin_inputs(
        &mut self,
        on: &Compute,
        store: &mut NeuronStore,
        spans: &[Span<'_>],
        pass: &mut Pass,
        s: &mut Scratch,
    ) -> Result<(), Error> {
        let Some(inputs) = &mut self.layer_inputs else {
            return Ok(());
        };
        let tokens = spans.iter().flat_map(|span| span.tokens).copied();
        inputs.read(on.cpu, store, tokens)?;
        inputs.begin(on, pass, s);
        Ok(())
    }

    /// Computes the further streams from the embedding in `pass.x`.
    pub fn begin_streams(&mut self, on: &Compute, pass: &mut Pass, s: &mut Scratch) {
        if let Some(streams) = &mut self.streams {
            streams.others(on, pass, s);
        }
        if let Some(hyper) = &self.hyper {
            hyper.begin(pass);
        }
    }

    /// Mixes the streams of `rows` for the head into the first rows of `pass.x`; returns how many rows were mixed.
    pub fn mix_for_head(
        &mut self,
        on: &Compute,
        rows: impl Iterator<Item = usize>,
        pass: &mut Pass,
        s: &mut Scratch,
    ) -> usize {
        let hyper = self.hyper.as_mut();
        hyper.map_or(0, |hyper| hyper.mix_rows(on, Reader::Head, rows, pass, s))
    }
}
