//! Roles of tensors in the decoder, and their names.

/// Roles and their names in a format.
pub(crate) type Spellings = &'static [(Role, &'static str)];

/// Location of a role's tensors.
pub(crate) enum Place {
    Global,
    Numbered,
    Layer,
    Expert,
}

/// Contents of a role's tensors.
#[derive(PartialEq, Eq)]
pub(crate) enum Kind {
    /// A norm's weight or a bias.
    Vector,
    /// The weights of a convolution.
    Conv,
    /// A matrix outside the FFN that a container stores in blocks.
    Projection,
    /// Another matrix.
    Matrix,
}

/// A role's properties.
pub(crate) struct RoleFacts {
    pub(crate) role: Role,
    pub(crate) place: Place,
    kind: Kind,
    /// Its canonical name.
    pub(crate) name: &'static str,
}

macro_rules! roles {
    ($($(#[$doc:meta])* $role:ident: $place:ident $kind:ident $name:literal,)*) => {
        /// Role of a tensor in the decoder. Shapes are `[rows × cols]`; a vector is one row.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Role {
            $($(#[$doc])* $role,)*
        }

        /// Every role, in order.
        pub(crate) const ROLES: &[RoleFacts] = &[$(RoleFacts {
            role: Role::$role,
            place: Place::$place,
            kind: Kind::$kind,
            name: $name,
        },)*];
    };
}

roles! {
    /// Token embedding, `[vocab × d_model]`.
    Embed: Global Matrix "embed",
    /// Output head, `[vocab × d_model]`; absent if tied to the embedding.
    Head: Global Matrix "head",
    /// Its bias, `[1 × vocab]`.
    HeadBias: Global Vector "head_bias",
    /// Weight of the last norm, `[1 × d_model]`.
    FinalNorm: Global Vector "final_norm",
    /// Its bias, `[1 × d_model]`.
    FinalNormBias: Global Vector "final_norm_bias",
    /// Projection from a token and a hidden state to the input of a head for multi-token prediction, `[d_model × 2·d_model]`.
    MtpIn: Global Projection "mtp_in",
    /// Weight of the norm of the token's embedding before it, `[1 × d_model]`.
    MtpEmbedNorm: Global Vector "mtp_embed_norm",
    /// Weight of the norm of the hidden state before it, `[1 × d_model]`.
    MtpHiddenNorm: Global Vector "mtp_hidden_norm",
    /// Learned positions, `[positions × d_model]`.
    Positions: Global Matrix "positions",
    /// Projection from the embedding to the start of a stream, `[d_model × d_model]`; one for each
    /// stream but the first, numbered like experts.
    StreamIn: Numbered Projection "stream_in",
    /// Projection from the end of a stream, as [`Role::StreamIn`].
    StreamOut: Numbered Projection "stream_out",
    /// A token's inputs to all layers, `[rows × layers·per_layer]`.
    LayerInputs: Global Matrix "layer_inputs",
    /// Projection from the embedding to these inputs, `[layers·per_layer × d_model]`.
    LayerInputsProj: Global Projection "layer_inputs_proj",
    /// Weight of the norm of a layer's input after this projection, `[1 × per_layer]`.
    LayerInputsNorm: Global Vector "layer_inputs_norm",
    /// Weight of the norm before the streams' router, `[1 × d_model]`.
    StreamRouterNorm: Layer Vector "stream.router_norm",
    /// The streams' router, `[streams × d_model]`.
    StreamRouter: Layer Matrix "stream.router",
    /// Projection from routes to the mixture of streams at the start of a layer,
    /// `[streams² × streams]`.
    StreamPredict: Layer Matrix "stream.predict",
    /// Projection from routes to each stream's share of a layer's change, `[streams × streams]`.
    StreamCorrect: Layer Matrix "stream.correct",
    /// Factors of the first stream before it is combined with the layer's input, `[1 × d_model]`.
    StreamScale: Layer Vector "stream.scale",
    /// Low-rank path parallel to attention: down, `[rank × d_model]`.
    LaurelLeft: Layer Projection "laurel.left",
    /// Low-rank path parallel to attention: up, `[d_model × rank]`.
    LaurelRight: Layer Projection "laurel.right",
    /// Weight of the norm of this path's output, `[1 × d_model]`.
    LaurelNorm: Layer Vector "laurel.norm",
    /// Projection from the residual stream to the gate of the layer's input,
    /// `[per_layer × d_model]`.
    InputGate: Layer Projection "input.gate",
    /// Projection from the gated input to its term in the residual streams,
    /// `[d_model × per_layer]`.
    InputProj: Layer Projection "input.proj",
    /// Weight of the norm of this term, `[1 × d_model]`.
    InputNorm: Layer Vector "input.norm",
    /// N-gram rows, `[rows × width]`; a checkpoint may split them into several tensors.
    NGramTable: Numbered Matrix "ngram_table",
    /// Projection of a token's n-gram rows to the keys of the streams' gates,
    /// `[streams·d_model × embedding]`.
    NGramKey: Layer Projection "ngram.key",
    /// Projection of a token's n-gram rows to the gated values, `[d_model × embedding]`.
    NGramValue: Layer Projection "ngram.value",
    /// Weights of the keys' norms, `[1 × streams·d_model]`.
    NGramKeyNorm: Layer Vector "ngram.key_norm",
    /// Weights of the norms of the streams before their product with keys, `[1 × streams·d_model]`.
    NGramQueryNorm: Layer Vector "ngram.query_norm",
    /// Weights of the norms of the convolution's input, `[1 × streams·d_model]`.
    NGramConvNorm: Layer Vector "ngram.conv_norm",
    /// Weights of the convolution, `[streams·d_model × taps]`, that of the token itself last.
    NGramConv: Layer Conv "ngram.conv",
    /// Hyper-connections before a mixer: weights of the streams' norms, `[1 × streams·d_model]`.
    HyperMixerNorm: Layer Vector "hyper.mixer_norm",
    /// Low-rank path to the gates of its input: down, `[rank × streams·d_model]`.
    HyperMixerDown: Layer Projection "hyper.mixer_down",
    /// Low-rank path to the gates of its input: up, `[streams·d_model × rank]`.
    HyperMixerUp: Layer Projection "hyper.mixer_up",
    /// Projection to each stream's share of its output, `[streams × streams·d_model]`.
    HyperMixerInject: Layer Matrix "hyper.mixer_inject",
    /// As [`Role::HyperMixerNorm`], before an FFN.
    HyperFfnNorm: Layer Vector "hyper.ffn_norm",
    /// As [`Role::HyperMixerDown`], before an FFN.
    HyperFfnDown: Layer Projection "hyper.ffn_down",
    /// As [`Role::HyperMixerUp`], before an FFN.
    HyperFfnUp: Layer Projection "hyper.ffn_up",
    /// As [`Role::HyperMixerInject`], after an FFN.
    HyperFfnInject: Layer Matrix "hyper.ffn_inject",
    /// As [`Role::HyperMixerNorm`], before the head.
    HyperHeadNorm: Global Vector "hyper_head_norm",
    /// As [`Role::HyperMixerDown`], before the head.
    HyperHeadDown: Global Projection "hyper_head_down",
    /// As [`Role::HyperMixerUp`], before the head.
    HyperHeadUp: Global Projection "hyper_head_up",
    /// Hyper-connections before a mixer (mHC): projection to the weights of the streams in its
    /// input, their shares of its output, and the matrix that mixes them,
    /// `[(2 + streams)·streams × streams·d_model]`.
    HyperMixerMix: Layer Matrix "hyper.mixer_mix",
    /// Added to these, `[1 × (2 + streams)·streams]`.
    HyperMixerBase: Layer Vector "hyper.mixer_base",
    /// Factors of the three parts before the addition, `[1 × 3]`.
    HyperMixerScale: Layer Vector "hyper.mixer_scale",
    /// As [`Role::HyperMixerMix`], before an FFN.
    HyperFfnMix: Layer Matrix "hyper.ffn_mix",
    /// As [`Role::HyperMixerBase`], before an FFN.
    HyperFfnBase: Layer Vector "hyper.ffn_base",
    /// As [`Role::HyperMixerScale`], before an FFN.
    HyperFfnScale: Layer Vector "hyper.ffn_scale",
    /// Projection to the weights of the streams in the head's input, `[streams × streams·d_model]`.
    HyperHeadMix: Global Matrix "hyper_head_mix",
    /// Added to these, `[1 × streams]`.
    HyperHeadBase: Global Vector "hyper_head_base",
    /// Their factor before the addition, `[1 × 1]`.
    HyperHeadScale: Global Vector "hyper_head_scale",
    /// Weight of the norm before attention, `[1 × d_model]`.
    AttnNorm: Layer Vector "attn.norm",
    /// Its bias, `[1 × d_model]`.
    AttnNormBias: Layer Vector "attn.norm_bias",
    /// Weight of the norm of attention's output, `[1 × d_model]`.
    AttnPostNorm: Layer Vector "attn.post_norm",
    /// Query projection, `[heads·head_dim × d_model]`, rotate-half row order.
    Q: Layer Projection "attn.q",
    /// Key projection, `[kv_heads·head_dim × d_model]`, rotate-half row order.
    K: Layer Projection "attn.k",
    /// Value projection, `[kv_heads·head_dim × d_model]`.
    V: Layer Projection "attn.v",
    /// Output projection, `[d_model × heads·head_dim]`.
    O: Layer Projection "attn.o",
    /// Bias of the query projection, `[1 × heads·head_dim]`.
    QBias: Layer Vector "attn.q_bias",
    /// Bias of the key projection, `[1 × kv_heads·head_dim]`.
    KBias: Layer Vector "attn.k_bias",
    /// Bias of the value projection, `[1 × kv_heads·head_dim]`.
    VBias: Layer Vector "attn.v_bias",
    /// Bias of the output projection, `[1 × d_model]`.
    OBias: Layer Vector "attn.o_bias",
    /// RMSNorm weight shared by all query heads, `[1 × head_dim]`, or over all heads together,
    /// `[1 × heads·head_dim]`.
    QNorm: Layer Vector "attn.q_norm",
    /// The same for the key heads.
    KNorm: Layer Vector "attn.k_norm",
    /// Attention sink by query head, `[1 × heads]`.
    Sinks: Layer Vector "attn.sinks",
    /// Input projection of a short convolution, `[3·d_model × d_model]`: rows of the input gate, the
    /// output gate, and the convolved values.
    ConvIn: Layer Projection "conv.in",
    /// Its weights, `[d_model × taps]`, the current token last.
    Conv: Layer Conv "conv.weight",
    /// Its output projection, `[d_model × d_model]`.
    ConvOut: Layer Projection "conv.out",
    /// Output gates of attention, `[heads·head_dim × d_model]`, of latent attention, `[heads × d_model]`, or
    /// of Kimi Delta Attention with a full-rank projection, `[heads·dim × d_model]`.
    QGate: Layer Projection "attn.q_gate",
    /// Projection of the layer's input to the input of experts of another width,
    /// `[width × d_model]`.
    ExpertsIn: Layer Projection "experts.in",
    /// Projection of their sum, `[d_model × width]`.
    ExpertsOut: Layer Projection "experts.out",
    /// Gate of a shared expert that is not a bank, `[neurons × d_model]`.
    SharedIn: Layer Projection "shared.in",
    /// Its Up, `[neurons × d_model]`.
    SharedUp: Layer Projection "shared.up",
    /// Its Down, `[d_model × neurons]`.
    SharedOut: Layer Projection "shared.out",
    /// Projection of latent attention to the latent vector of queries, `[query_rank × d_model]`.
    LatentQ: Layer Projection "latent.q",
    /// RMSNorm weight of this vector, `[1 × query_rank]`.
    LatentQNorm: Layer Vector "latent.q_norm",
    /// Projection of latent attention to the latent vector of keys and values and to the keys'
    /// rotated elements, `[rank + rotated × d_model]`, the latter in rotate-half order.
    LatentKv: Layer Projection "latent.kv",
    /// RMSNorm weight of the latent vector, `[1 × rank]`.
    LatentKvNorm: Layer Vector "latent.kv_norm",
    /// Transposed matrix of each head from latent vectors to keys, `[heads·rank × head_dim − rotated]`.
    LatentKeys: Layer Projection "latent.keys",
    /// Matrix of each head from latent vectors to values, `[heads·value_dim × rank]`.
    LatentValues: Layer Projection "latent.values",
    /// Projection of each group of heads of pooled attention to the input of [`Role::O`],
    /// `[groups·group_rank × heads·head_dim / groups]`.
    PooledOut: Layer Projection "pooled.out",
    /// Projection to the vectors of pools, `[series·head_dim × d_model]`.
    PoolKv: Layer Projection "pooled.kv",
    /// Projection to their gates, of the same shape.
    PoolGate: Layer Projection "pooled.gate",
    /// Added to the gates, by position in the pool, `[pool × series·head_dim]`.
    PoolBias: Layer Matrix "pooled.bias",
    /// RMSNorm weight of a pool's vector, `[1 × head_dim]`.
    PoolNorm: Layer Vector "pooled.norm",
    /// Projection of a DeltaNet to queries, keys and values, `[channels × d_model]`.
    DeltaIn: Layer Projection "delta.in",
    /// Projection to the gates of its output, `[values × d_model]`.
    DeltaGate: Layer Projection "delta.gate",
    /// Projection to the write strength β, `[value_heads × d_model]`.
    DeltaBeta: Layer Matrix "delta.beta",
    /// Projection to the decay of its state, `[value_heads × d_model]`.
    DeltaDecay: Layer Matrix "delta.decay",
    /// Added to the decay's projection, `[1 × value_heads]`, or in KDA `[1 × heads·dim]`.
    DeltaStep: Layer Vector "delta.step",
    /// Kimi Delta Attention (KDA), whose other tensors are those of attention and of a DeltaNet: low-rank
    /// input of [`Role::DeltaDecay`], which is then `[heads·dim × dim]`; `[dim × d_model]`.
    DeltaDecayIn: Layer Matrix "delta.decay_in",
    /// Low-rank input of [`Role::DeltaGate`], which is then `[heads·dim × dim]`; `[dim × d_model]`.
    DeltaGateIn: Layer Projection "delta.gate_in",
    /// Its decays with a full-rank projection, `[heads·dim × d_model]`.
    DeltaDecays: Layer Projection "delta.decays",
    /// Weights of the convolution of its queries, `[heads·dim × taps]`, the current token last.
    DeltaConvQ: Layer Conv "delta.conv_q",
    /// The same for its keys.
    DeltaConvK: Layer Conv "delta.conv_k",
    /// The same for its values.
    DeltaConvV: Layer Conv "delta.conv_v",
    /// Factor of the decay, below 0, `[1 × value_heads]`.
    DeltaRate: Layer Vector "delta.rate",
    /// Weights of its convolution, `[channels × taps]`, the current token last.
    DeltaConv: Layer Conv "delta.conv",
    /// RMSNorm weight shared by the heads of its output, `[1 × value_dim]`.
    DeltaNorm: Layer Vector "delta.norm",
    /// Its output projection, `[d_model × values]`.
    DeltaOut: Layer Projection "delta.out",
    /// Input projection of a Mamba-2 layer, `[inputs × d_model]`: rows of the output gates, of the
    /// convolved channels, of the steps of its heads.
    MambaIn: Layer Projection "mamba.in",
    /// Weights of its convolution, `[channels × taps]`, the current token last.
    MambaConv: Layer Conv "mamba.conv",
    /// Its bias, `[1 × channels]`.
    MambaConvBias: Layer Vector "mamba.conv_bias",
    /// Added to the steps of its heads, `[1 × heads]`.
    MambaStep: Layer Vector "mamba.step",
    /// Factor of the decay, below 0, `[1 × heads]`.
    MambaRate: Layer Vector "mamba.rate",
    /// Factor of a head's input in its output, `[1 × heads]`.
    MambaSkip: Layer Vector "mamba.skip",
    /// Weight of the RMSNorms of its output, `[1 × values]`.
    MambaNorm: Layer Vector "mamba.norm",
    /// Its output projection, `[d_model × values]`.
    MambaOut: Layer Projection "mamba.out",
    /// Mamba-1, whose other tensors are those of Mamba-2 with a head for each channel: projection of the channels to
    /// the input of their steps and to `B` and `C`, `[rank + 2·state_dim × channels]`.
    MambaMix: Layer Projection "mamba.mix",
    /// Its projection to the channels' steps, `[channels × rank]`.
    MambaSteps: Layer Projection "mamba.steps",
    /// Its factors of the decays, below 0, `[channels × state_dim]`.
    MambaRates: Layer Matrix "mamba.rates",
    /// RMSNorm weight of the input of its steps, `[1 × rank]`.
    MambaStepNorm: Layer Vector "mamba.step_norm",
    /// RMSNorm weight of its `B`, `[1 × state_dim]`.
    MambaWriteNorm: Layer Vector "mamba.write_norm",
    /// RMSNorm weight of its `C`, `[1 × state_dim]`.
    MambaReadNorm: Layer Vector "mamba.read_norm",
    /// Weight of the norm before the FFN, `[1 × d_model]`.
    FfnNorm: Layer Vector "ffn.norm",
    /// Its bias, `[1 × d_model]`.
    FfnNormBias: Layer Vector "ffn.norm_bias",
    /// Weight of the norm of the FFN's output, `[1 × d_model]`.
    FfnPostNorm: Layer Vector "ffn.post_norm",
    /// Scores of a mixture's experts, `[experts × d_model]`.
    Router: Layer Matrix "ffn.router",
    /// Bias of these scores, `[1 × experts]`.
    RouterBias: Layer Vector "ffn.router_bias",
    /// Added to these scores for choosing experts, `[1 × experts]`.
    ChoiceBias: Layer Vector "ffn.choice_bias",
    /// The experts of each token, as numbers, `[vocab × chosen]`.
    TokenExperts: Layer Matrix "ffn.token_experts",
    /// Gate of a mixture's shared expert, `[1 × d_model]`.
    SharedGate: Layer Vector "ffn.shared_gate",
    /// Weight of the norm of the router's input, `[1 × d_model]`.
    RouterScale: Layer Vector "ffn.router_scale",
    /// Factors of the experts' weights, `[1 × experts]`.
    ExpertScale: Layer Vector "ffn.expert_scale",
    /// Weight of the norm before the experts, if a parallel dense FFN has another, `[1 × d_model]`.
    ExpertsNorm: Layer Vector "ffn.experts_norm",
    /// Weight of the norm of that dense FFN's output, `[1 × d_model]`.
    DensePostNorm: Layer Vector "ffn.dense_post_norm",
    /// Weight of the norm of the experts' output, `[1 × d_model]`.
    ExpertsPostNorm: Layer Vector "ffn.experts_post_norm",
    /// Factor of the residual stream at a layer's end, `[1 × 1]`.
    LayerScale: Layer Vector "layer.scale",
    /// Biases of a layer's gate projections, `[neurons × 1]`: row i belongs to neuron i, expert after
    /// expert.
    GateBias: Layer Vector "ffn.gate_bias",
    /// Biases of a layer's up projections, `[neurons × 1]`: as those of Gate.
    UpBias: Layer Vector "ffn.up_bias",
    /// Biases of a layer's down projections, `[experts × d_model]`; one row for a dense FFN.
    DownBias: Layer Vector "ffn.down_bias",
    /// Gate projection, `[ffn × d_model]`: row i belongs to neuron i.
    Gate: Expert Matrix "gate",
    /// Up projection, `[ffn × d_model]`: row i belongs to neuron i.
    Up: Expert Matrix "up",
    /// Down projection, always presented transposed, `[ffn × d_model]`: row i
    /// is the column that neuron i adds to the residual stream.
    Down: Expert Matrix "down",
    /// First matrix of an imported predictor, `[rank × d_model]`. It reads the
    /// residual stream before the FFN norm (PowerInfer's convention).
    PredictorFc1: Expert Matrix "predictor.fc1",
    /// Second matrix of an imported predictor, `[ffn × rank]`.
    PredictorFc2: Expert Matrix "predictor.fc2",
}

impl Role {
    /// Its properties.
    pub(crate) fn facts(self) -> &'static RoleFacts {
        &ROLES[self as usize]
    }

    /// Whether its rows are neurons, which a container stores in packed order.
    pub fn is_by_neuron(self) -> bool {
        self.is_bundled() || matches!(self, Self::GateBias | Self::UpBias | Self::PredictorFc2)
    }

    /// Whether a container stores its rows in the neurons' bundles.
    pub fn is_bundled(self) -> bool {
        matches!(self, Self::Gate | Self::Up | Self::Down)
    }

    /// Whether it is a table of which a token needs few rows, read from flash individually; `tied`:
    /// the embedding is also the head, of which a token needs all rows.
    pub fn is_table(self, tied: bool) -> bool {
        match self {
            Self::Embed => !tied,
            _ => matches!(self, Self::LayerInputs | Self::NGramTable),
        }
    }

    /// Whether it contains the weights of a convolution.
    pub(crate) fn is_conv(self) -> bool {
        self.facts().kind == Kind::Conv
    }

    /// Whether it is a vector: a norm's weight or a bias.
    pub fn is_vector(self) -> bool {
        self.facts().kind == Kind::Vector
    }

    /// Whether it is a matrix outside the FFN that a container stores in blocks.
    pub fn is_projection(self) -> bool {
        self.facts().kind == Kind::Projection
    }

    /// Whether folders store logarithms of its negated numbers.
    pub(crate) fn is_rate(self) -> bool {
        matches!(self, Self::DeltaRate | Self::MambaRate | Self::MambaRates)
    }
}
