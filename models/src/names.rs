//! Canonical tensor names, and the tensors a configuration requires.
//!
//! A checkpoint's own names exist only in the readers' tables; all later code uses [`TensorId`].

mod hyper;
mod parts;
mod stored;

pub use crate::role::Role;
pub(crate) use crate::role::Spellings;
pub use crate::tensor_id::{TensorId, UnknownName};

use crate::config::{Bank, Mixture, ModelConfig, NGrams, Parallel, Streams};
use crate::tensor_id::split_index;
use hyper::hyper_roles;

/// The names of one checkpoint format: the prefix of layers and the name of each role.
pub(crate) struct NameTable {
    /// Prefix of the layer number: `model.layers.`.
    pub(crate) layer_prefix: &'static str,
    /// Roles outside the layers.
    pub(crate) globals: Spellings,
    /// Roles with several tensors outside the layers: the prefix of their number.
    pub(crate) numbered: Spellings,
    /// Roles inside a layer.
    pub(crate) layers: &'static [Spellings],
    /// Roles with a tensor for each head, inside a layer: the prefix of its number.
    pub(crate) by_head: Spellings,
    /// Tensors of experts, inside a layer.
    pub(crate) experts: ExpertNames,
    /// Tensors with several matrices, inside a layer.
    pub(crate) fused: &'static [(Fused, &'static str)],
    /// Tensors with rows of a matrix, inside a layer: the matrix, their number among those that it consists of, and
    /// their names.
    pub(crate) parts: &'static [(Role, u32, &'static str)],
}

/// Names under which every table knows what only heads for multi-token prediction have. No checkpoint uses them.
pub(crate) const MTP: Spellings = &[
    (Role::MtpIn, "head_input.weight"),
    (Role::MtpEmbedNorm, "head_input.embed_norm.weight"),
    (Role::MtpHiddenNorm, "head_input.hidden_norm.weight"),
];

/// Matrices stored as one, row after row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fused {
    /// Q, K and V.
    Qkv,
    /// The same, transposed.
    QkvColumns,
    /// Their biases.
    QkvBias,
    /// The same, group by group: the Q heads that share a K/V head, then that head.
    QkvByGroup,
    /// The biases of these.
    QkvBiasByGroup,
    /// Gate and Up.
    GateUp,
    /// Gate and Up of the shared expert, or of the dense FFN of a model without experts.
    SharedGateUp,
    /// Q and the output gates of attention, head by head.
    GatedQ,
    /// A DeltaNet's queries, keys, values and gates, key head by key head.
    DeltaQkvz,
    /// Its β and decay, key head by key head.
    DeltaBa,
    /// The key and value matrices of latent attention, head by head; that of keys is stored
    /// transposed.
    LatentKeysValues,
}

impl Fused {
    /// Whether it contains the matrix.
    fn holds(self, role: Role) -> bool {
        match self {
            Self::Qkv | Self::QkvColumns | Self::QkvByGroup => {
                matches!(role, Role::Q | Role::K | Role::V)
            }
            Self::QkvBias | Self::QkvBiasByGroup => {
                matches!(role, Role::QBias | Role::KBias | Role::VBias)
            }
            Self::GateUp | Self::SharedGateUp => matches!(role, Role::Gate | Role::Up),
            Self::GatedQ => matches!(role, Role::Q | Role::QGate),
            Self::DeltaQkvz => matches!(role, Role::DeltaIn | Role::DeltaGate),
            Self::DeltaBa => matches!(role, Role::DeltaBeta | Role::DeltaDecay),
            Self::LatentKeysValues => matches!(role, Role::LatentKeys | Role::LatentValues),
        }
    }
}

/// The names of a mixture's experts inside a layer.
pub(crate) struct ExpertNames {
    /// Prefix of an expert's number, and the names after it.
    pub(crate) one: (&'static str, Spellings),
    /// The shared expert.
    pub(crate) shared: Spellings,
    /// Tensors with a matrix for every expert.
    pub(crate) stacked: &'static [(Stack, &'static str)],
}

/// Contents of a tensor with a matrix for every expert, expert by expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stack {
    /// One matrix: Gate, Up, or Down stored `[d_model × ffn]`.
    One(Role),
    /// Down stored `[d_model × ffn]` or `[ffn × d_model]`, as its shape shows.
    EitherDown,
    /// The rows of Gate, then those of Up.
    GateUp,
    /// Down stored `[ffn × d_model]`.
    Neurons,
    /// Alternating rows of Gate and Up, transposed.
    Pairs,
    /// The rows of Gate, then those of Up, transposed.
    Halves,
    /// Alternating rows of Gate and Up, in blocks of four bits.
    PairBlocks,
    /// Alternating biases of Gate and Up.
    PairBias,
    /// Down stored `[d_model × ffn]`, in blocks of four bits.
    DownBlocks,
}

impl Stack {
    /// Whether it contains a matrix, or a bias, of this role for each expert.
    fn holds(self, role: Role) -> bool {
        match self {
            Self::One(one) => role == one,
            Self::EitherDown | Self::Neurons | Self::DownBlocks => role == Role::Down,
            Self::GateUp | Self::Pairs | Self::Halves | Self::PairBlocks => {
                matches!(role, Role::Gate | Role::Up)
            }
            Self::PairBias => matches!(role, Role::GateBias | Role::UpBias),
        }
    }
}

impl Named {
    /// The same for this model, whose shared expert may not be a bank.
    pub(crate) fn of_model(self, config: &ModelConfig) -> Self {
        let Self::One(id) = self else {
            return self;
        };
        if id.role == Role::FfnNorm && config.form.late_norms && config.norms_of(id.layer).after {
            // a name of norms of inputs in some layers, and of outputs in others
            return Self::One(TensorId::layer(Role::AttnPostNorm, id.layer));
        }
        let mixture = config.mixture.as_ref();
        let apart = mixture.is_some_and(|m| m.width > 0) && id.expert == config.experts;
        let role = match id.role {
            Role::Gate if apart => Role::SharedIn,
            Role::Up if apart => Role::SharedUp,
            Role::Down if apart => Role::SharedOut,
            _ => return self,
        };
        Self::One(TensorId::layer(role, id.layer))
    }
}

/// Meaning of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named {
    /// One tensor.
    One(TensorId),
    /// One role for all experts of a layer.
    Stacked(Stack, u32),
    /// Several matrices of a layer.
    Fused(Fused, u32),
}

impl Named {
    /// Whether it is one tensor of this role.
    pub(crate) fn is(self, role: Role) -> bool {
        matches!(self, Self::One(id) if id.role == role)
    }
}

impl NameTable {
    /// The meaning of `name` in a model of `experts` experts per layer.
    pub(crate) fn parse(&self, name: &str, experts: u32) -> Option<Named> {
        fn find<T: Copy>(table: &[(T, &str)], name: &str) -> Option<T> {
            let mut entries = table.iter();
            entries
                .find(|(_, spelling)| *spelling == name)
                .map(|entry| entry.0)
        }
        if let Some(role) = find(self.globals, name).or_else(|| find(MTP, name)) {
            return Some(Named::One(TensorId::global(role)));
        }
        for (role, prefix) in self.numbered {
            if let Some((number, "weight")) = name.strip_prefix(prefix).and_then(split_index) {
                return Some(Named::One(TensorId::numbered(*role, number)));
            }
        }
        let (layer, rest) = split_index(name.strip_prefix(self.layer_prefix)?)?;
        let one = |role, expert| {
            Named::One(TensorId {
                role,
                layer,
                expert,
            })
        };
        // without experts, the same name may be that of a dense FFN
        let shared = find(self.experts.shared, rest).filter(|_| experts > 1);
        if let Some(role) = shared {
            return Some(one(role, experts));
        }
        if let Some(role) = self.layers.iter().find_map(|table| find(table, rest)) {
            return Some(Named::One(TensorId::layer(role, layer)));
        }
        for (role, prefix) in self.by_head {
            if let Some((head, "weight")) = rest.strip_prefix(prefix).and_then(split_index) {
                return Some(one(*role, head));
            }
        }
        let mut parts = self.parts.iter();
        if let Some((role, number, _)) = parts.find(|(.., name)| *name == rest) {
            return Some(one(*role, *number));
        }
        if let Some(fused) = find(self.fused, rest) {
            return Some(Named::Fused(fused, layer));
        }
        if let Some(stack) = find(self.experts.stacked, rest) {
            return Some(Named::Stacked(stack, layer));
        }
        let (prefix, names) = self.experts.one;
        let (expert, rest) = split_index(rest.strip_prefix(prefix)?)?;
        let role = find(names, rest).filter(|_| expert < experts)?;
        Some(one(role, expert))
    }

    /// The tensor of several matrices that contains those of `role`, if any.
    pub(crate) fn fused_with(&self, role: Role) -> Option<Fused> {
        let mut fused = self.fused.iter();
        fused.find(|entry| entry.0.holds(role)).map(|entry| entry.0)
    }
}

/// A required tensor and its presented shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Required {
    /// Which tensor.
    pub id: TensorId,
    /// Rows (1 for a vector).
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// The matrices whose rows form a neuron's bundle, in its order.
pub fn bundled(config: &ModelConfig) -> &'static [Role] {
    if config.ffn_kind.ungated {
        &[Role::Gate, Role::Down]
    } else {
        &[Role::Gate, Role::Up, Role::Down]
    }
}

/// Every tensor required by a decoder with this configuration, in the order of the forward pass,
/// without the optional predictors. The configuration must have passed [`ModelConfig::validate`].
pub fn required(config: &ModelConfig) -> Vec<Required> {
    let d = config.d_model as usize;
    let vocab = config.vocab as usize;
    let form = &config.form;
    let mut list = Vec::new();
    let global = |role, rows, cols| Required {
        id: TensorId::global(role),
        rows,
        cols,
    };
    if !form.mtp || !config.tied_head {
        list.push(global(Role::Embed, vocab, d));
    }
    if form.mtp {
        list.push(global(Role::MtpIn, d, 2 * d));
        list.push(global(Role::MtpEmbedNorm, 1, d));
        list.push(global(Role::MtpHiddenNorm, 1, d));
    }
    if form.learned_positions.is_some() {
        list.push(global(Role::Positions, config.position_rows() as usize, d));
    }
    if let Some(streams) = form.streams {
        outside_layers(config, streams, &mut list);
    }
    if let Some(inputs) = form.inputs_by_layer() {
        let [layers, rows, each] = [config.layers, inputs.vocab, inputs.width].map(|n| n as usize);
        list.push(global(Role::LayerInputs, rows, layers * each));
        list.push(global(Role::LayerInputsProj, layers * each, d));
        list.push(global(Role::LayerInputsNorm, 1, each));
    }
    if let Some(of) = &form.ngrams {
        let [rows, width] = [of.rows, of.width].map(|n| n as usize);
        list.push(global(Role::NGramTable, rows, width));
    }
    for layer in 0..config.layers {
        outer_tensors(config, layer, &mut list);
        of_mixer(config, layer, &mut list);
        of_ffn(config, layer, &mut list);
    }
    if let Some(hyper) = form.hyper {
        let all = hyper_roles(hyper, config.d_model);
        let head = all[2].iter();
        list.extend(head.map(|&(role, rows, cols)| global(role, rows, cols)));
    }
    if form.has_final_norm() {
        list.push(global(Role::FinalNorm, 1, d));
    }
    if form.norm_bias {
        list.push(global(Role::FinalNormBias, 1, d));
    }
    // A head for multi-token prediction shares the model's.
    if !config.tied_head && !form.mtp {
        list.push(global(Role::Head, vocab, d));
    }
    if form.head_bias && !form.mtp {
        list.push(global(Role::HeadBias, 1, vocab));
    }
    list
}

/// The tensors of a layer outside its mixer and its FFN.
fn outer_tensors(config: &ModelConfig, layer: u32, list: &mut Vec<Required>) {
    let (form, d) = (&config.form, config.d_model as usize);
    if let Some(ngrams) = form.ngrams.as_ref().filter(|of| of.layer == layer) {
        of_ngrams(config, ngrams, list);
    }
    if let Some(streams) = form.streams {
        of_streams(config, streams, layer, list);
    }
    if let Some(inputs) = form.inputs_by_layer() {
        let each = inputs.width as usize;
        let all = [
            (Role::InputGate, each, d),
            (Role::InputProj, d, each),
            (Role::InputNorm, 1, d),
        ];
        push_all(list, layer, &all);
    }
    if let Some(hyper) = form.hyper {
        let [mixer, ffn, _] = hyper_roles(hyper, config.d_model);
        push_all(list, layer, &mixer);
        push_all(list, layer, &ffn);
    }
}

/// The stream tensors outside the layers.
fn outside_layers(config: &ModelConfig, streams: Streams, list: &mut Vec<Required>) {
    let d = config.d_model as usize;
    for role in [Role::StreamIn, Role::StreamOut] {
        list.extend((0..streams.count - 1).map(|number| Required {
            id: TensorId::numbered(role, number),
            rows: d,
            cols: d,
        }));
    }
}

/// The tensors of the layer that reads n-gram rows.
fn of_ngrams(config: &ModelConfig, ngrams: &NGrams, list: &mut Vec<Required>) {
    let width = config.form.further_streams(config.d_model);
    let (d, embedding) = (config.d_model as usize, ngrams.embedding());
    let all = [
        (Role::NGramKey, width, embedding),
        (Role::NGramValue, d, embedding),
        (Role::NGramKeyNorm, 1, width),
        (Role::NGramQueryNorm, 1, width),
        (Role::NGramConvNorm, 1, width),
        (Role::NGramConv, width, ngrams.taps as usize),
    ];
    push_all(list, ngrams.layer, &all);
}

/// The tensors of a layer.
fn of_streams(config: &ModelConfig, streams: Streams, layer: u32, list: &mut Vec<Required>) {
    let Streams { count, laurel, .. } = streams;
    let [d, n, rank] = [config.d_model, count, laurel].map(|n| n as usize);
    let all = [
        (Role::StreamRouterNorm, 1, d),
        (Role::StreamRouter, n, d),
        (Role::StreamPredict, n * n, n),
        (Role::StreamCorrect, n, n),
        (Role::StreamScale, 1, d),
        (Role::LaurelLeft, rank, d),
        (Role::LaurelRight, d, rank),
        (Role::LaurelNorm, 1, d),
    ];
    push_all(list, layer, &all);
}

/// The tensors of a layer's mixer, with the norms around it.
fn of_mixer(config: &ModelConfig, layer: u32, list: &mut Vec<Required>) {
    let (d, form) = (config.d_model as usize, &config.form);
    let norm = |role| Required {
        id: TensorId::layer(role, layer),
        rows: 1,
        cols: d,
    };
    if config.norms_of(layer).before {
        list.push(norm(Role::AttnNorm));
    }
    if config.norms_of(layer).before && form.norm_bias {
        list.push(norm(Role::AttnNormBias));
    }
    let mixer = config.mixer_of(layer);
    if mixer.has_attention() {
        of_attention(config, layer, list);
    }
    push_all(list, layer, &mixer.tensors(config.sizes()));
    if config.norms_of(layer).after {
        list.push(norm(Role::AttnPostNorm));
    }
}

/// Tensors of a layer, each with its rows and columns.
fn push_all(list: &mut Vec<Required>, layer: u32, all: &[(Role, usize, usize)]) {
    list.extend(all.iter().map(|&(role, rows, cols)| Required {
        id: TensorId::layer(role, layer),
        rows,
        cols,
    }));
}

/// The tensors of a layer's attention.
fn of_attention(config: &ModelConfig, layer: u32, list: &mut Vec<Required>) {
    let heads = config.heads_of(layer);
    let [d, head_dim] = [config.d_model, heads.head_dim].map(|n| n as usize);
    let [q, kv] = [config.heads, heads.kv_heads].map(|n| n as usize * head_dim);
    let form = &config.form;
    let mut push = |role, rows, cols| {
        let id = TensorId::layer(role, layer);
        list.push(Required { id, rows, cols });
    };
    let own = config.kv_layer(layer) == layer;
    push(Role::Q, q, d);
    if own {
        push(Role::K, kv, d);
    }
    if own && !heads.key_is_value {
        push(Role::V, kv, d);
    }
    if config.qkv_bias {
        push(Role::QBias, 1, q);
    }
    if config.qkv_bias && own {
        push(Role::KBias, 1, kv);
    }
    if config.qkv_bias && own && !heads.key_is_value {
        push(Role::VBias, 1, kv);
    }
    if config.qk_norm {
        let [of_q, of_k] = match form.qk_layer_norms {
            true => [q, kv].map(|all| [all / head_dim, head_dim]),
            false if config.qk_norm_whole => [[1, q], [1, kv]],
            false => [[1, head_dim]; 2],
        };
        push(Role::QNorm, of_q[0], of_q[1]);
        if own {
            push(Role::KNorm, of_k[0], of_k[1]);
        }
    }
    if form.output_gate {
        push(Role::QGate, q, d);
    }
    push(Role::O, d, q);
    if config.o_bias {
        push(Role::OBias, 1, d);
    }
    if form.sinks {
        push(Role::Sinks, 1, config.heads as usize);
    }
}

/// The matrices around experts of another width, and those of the shared expert.
fn around_experts(config: &ModelConfig, mixture: &Mixture) -> Vec<(Role, usize, usize)> {
    let sizes = [config.d_model, mixture.width, mixture.shared];
    let [d, width, shared] = sizes.map(|n| n as usize);
    let mut all = Vec::new();
    if width > 0 {
        all.extend([(Role::ExpertsIn, width, d), (Role::ExpertsOut, d, width)]);
    }
    if width > 0 && shared > 0 {
        all.extend([(Role::SharedIn, shared, d), (Role::SharedOut, d, shared)]);
        let up = (Role::SharedUp, shared, d);
        all.extend((!config.ffn_kind.ungated).then_some(up));
    }
    all
}

/// The tensors of a layer's FFN.
fn of_ffn(config: &ModelConfig, layer: u32, list: &mut Vec<Required>) {
    if !config.has_ffn(layer) {
        return;
    }
    let (d, form) = (config.d_model as usize, &config.form);
    let own_norm = config.norms_of(layer).before && form.parallel != Parallel::OneNorm;
    let mut push = |id, rows, cols| list.push(Required { id, rows, cols });
    let at = |role| TensorId::layer(role, layer);
    if own_norm {
        push(at(Role::FfnNorm), 1, d);
    }
    if own_norm && form.norm_bias {
        push(at(Role::FfnNormBias), 1, d);
    }
    if let Some(mixture) = config.mixture_of(layer) {
        push(at(Role::Router), config.experts as usize, d);
        if mixture.router_bias {
            push(at(Role::RouterBias), 1, config.experts as usize);
        }
        if mixture.is_by_token(layer) {
            let (rows, cols) = (config.vocab as usize, mixture.chosen as usize);
            push(at(Role::TokenExperts), rows, cols);
        } else if mixture.choice_bias {
            push(at(Role::ChoiceBias), 1, config.experts as usize);
        }
        if mixture.shared > 0 && !mixture.shared_is_plain {
            push(at(Role::SharedGate), 1, d);
        }
        if mixture.parallel_dense {
            push(at(Role::RouterScale), 1, d);
            push(at(Role::ExpertScale), 1, config.experts as usize);
            push(at(Role::ExpertsNorm), 1, d);
            push(at(Role::DensePostNorm), 1, d);
            push(at(Role::ExpertsPostNorm), 1, d);
        }
        for (role, rows, cols) in around_experts(config, mixture) {
            push(at(role), rows, cols);
        }
    }
    for Bank {
        expert, neurons, ..
    } in config.banks_of(layer)
    {
        for &role in bundled(config) {
            let id = TensorId {
                role,
                layer,
                expert,
            };
            push(id, neurons as usize, config.bundle_width() as usize);
        }
    }
    if form.ffn_bias {
        let (banks, neurons) = config.banks_of(layer).fold((0, 0), |(banks, sum), bank| {
            (banks + 1, sum + bank.neurons as usize)
        });
        push(at(Role::GateBias), neurons, 1);
        if !config.ffn_kind.ungated {
            push(at(Role::UpBias), neurons, 1);
        }
        push(at(Role::DownBias), banks, d);
    }
    if config.norms_of(layer).after {
        push(at(Role::FfnPostNorm), 1, d);
    }
    if form.layer_scale {
        push(at(Role::LayerScale), 1, 1);
    }
}
