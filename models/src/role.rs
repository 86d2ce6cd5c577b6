//! Roles of tensors in the decoder, and their names.

/// Role of a tensor in the decoder. Shapes are `[rows × cols]`; a vector is one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Token embedding, `[vocab × d_model]`.
    Embed,
    /// Output head, `[vocab × d_model]`; absent if tied to the embedding.
    Head,
    /// Its bias, `[1 × vocab]`.
    HeadBias,
    /// Weight of the last norm, `[1 × d_model]`.
    FinalNorm,
    /// Its bias, `[1 × d_model]`.
    FinalNormBias,
    /// Learned positions, `[positions × d_model]`.
    Positions,
    /// Projection from the embedding to the start of a stream, `[d_model × d_model]`; one for each
    /// stream but the first, numbered like experts.
    StreamIn,
    /// Projection from the end of a stream, as [`Role::StreamIn`].
    StreamOut,
    /// A token's inputs to all layers, `[rows × layers·per_layer]`.
    LayerInputs,
    /// Projection from the embedding to these inputs, `[layers·per_layer × d_model]`.
    LayerInputsProj,
    /// Weight of the norm of a layer's input after this projection, `[1 × per_layer]`.
    LayerInputsNorm,
    /// Weight of the norm before the streams' router, `[1 × d_model]`.
    StreamRouterNorm,
    /// The streams' router, `[streams × d_model]`.
    StreamRouter,
    /// Projection from routes to the mixture of streams at the start of a layer,
    /// `[streams² × streams]`.
    StreamPredict,
    /// Projection from routes to each stream's share of a layer's change, `[streams × streams]`.
    StreamCorrect,
    /// Factors of the first stream before it is combined with the layer's input, `[1 × d_model]`.
    StreamScale,
    /// Low-rank path parallel to attention: down, `[rank × d_model]`.
    LaurelLeft,
    /// Low-rank path parallel to attention: up, `[d_model × rank]`.
    LaurelRight,
    /// Weight of the norm of this path's output, `[1 × d_model]`.
    LaurelNorm,
    /// Projection from the residual stream to the gate of the layer's input,
    /// `[per_layer × d_model]`.
    InputGate,
    /// Projection from the gated input to its term in the residual streams,
    /// `[d_model × per_layer]`.
    InputProj,
    /// Weight of the norm of this term, `[1 × d_model]`.
    InputNorm,
    /// N-gram rows, `[rows × width]`; a checkpoint may split them into several tensors.
    NGramTable,
    /// Projection of a token's n-gram rows to the keys of the streams' gates,
    /// `[streams·d_model × embedding]`.
    NGramKey,
    /// Projection of a token's n-gram rows to the gated values, `[d_model × embedding]`.
    NGramValue,
    /// Weights of the keys' norms, `[1 × streams·d_model]`.
    NGramKeyNorm,
    /// Weights of the norms of the streams before their product with keys, `[1 × streams·d_model]`.
    NGramQueryNorm,
    /// Weights of the norms of the convolution's input, `[1 × streams·d_model]`.
    NGramConvNorm,
    /// Weights of the convolution, `[streams·d_model × taps]`, that of the token itself last.
    NGramConv,
    /// Hyper-connections before a mixer: weights of the streams' norms, `[1 × streams·d_model]`.
    HyperMixerNorm,
    /// Low-rank path to the gates of its input: down, `[rank × streams·d_model]`.
    HyperMixerDown,
    /// Low-rank path to the gates of its input: up, `[streams·d_model × rank]`.
    HyperMixerUp,
    /// Projection to each stream's share of its output, `[streams × streams·d_model]`.
    HyperMixerInject,
    /// As [`Role::HyperMixerNorm`], before an FFN.
    HyperFfnNorm,
    /// As [`Role::HyperMixerDown`], before an FFN.
    HyperFfnDown,
    /// As [`Role::HyperMixerUp`], before an FFN.
    HyperFfnUp,
    /// As [`Role::HyperMixerInject`], after an FFN.
    HyperFfnInject,
    /// As [`Role::HyperMixerNorm`], before the head.
    HyperHeadNorm,
    /// As [`Role::HyperMixerDown`], before the head.
    HyperHeadDown,
    /// As [`Role::HyperMixerUp`], before the head.
    HyperHeadUp,
    /// Hyper-connections before a mixer (mHC): projection to the weights of the streams in its
    /// input, their shares of its output, and the matrix that mixes them,
    /// `[(2 + streams)·streams × streams·d_model]`.
    HyperMixerMix,
    /// Added to these, `[1 × (2 + streams)·streams]`.
    HyperMixerBase,
    /// Factors of the three parts before the addition, `[1 × 3]`.
    HyperMixerScale,
    /// As [`Role::HyperMixerMix`], before an FFN.
    HyperFfnMix,
    /// As [`Role::HyperMixerBase`], before an FFN.
    HyperFfnBase,
    /// As [`Role::HyperMixerScale`], before an FFN.
    HyperFfnScale,
    /// Projection to the weights of the streams in the head's input, `[streams × streams·d_model]`.
    HyperHeadMix,
    /// Added to these, `[1 × streams]`.
    HyperHeadBase,
    /// Their factor before the addition, `[1 × 1]`.
    HyperHeadScale,
    /// Weight of the norm before attention, `[1 × d_model]`.
    AttnNorm,
    /// Its bias, `[1 × d_model]`.
    AttnNormBias,
    /// Weight of the norm of attention's output, `[1 × d_model]`.
    AttnPostNorm,
    /// Query projection, `[heads·head_dim × d_model]`, rotate-half row order.
    Q,
    /// Key projection, `[kv_heads·head_dim × d_model]`, rotate-half row order.
    K,
    /// Value projection, `[kv_heads·head_dim × d_model]`.
    V,
    /// Output projection, `[d_model × heads·head_dim]`.
    O,
    /// Bias of the query projection, `[1 × heads·head_dim]`.
    QBias,
    /// Bias of the key projection, `[1 × kv_heads·head_dim]`.
    KBias,
    /// Bias of the value projection, `[1 × kv_heads·head_dim]`.
    VBias,
    /// Bias of the output projection, `[1 × d_model]`.
    OBias,
    /// RMSNorm weight shared by all query heads, `[1 × head_dim]`, or over all heads together,
    /// `[1 × heads·head_dim]`.
    QNorm,
    /// The same for the key heads.
    KNorm,
    /// Attention sink by query head, `[1 × heads]`.
    Sinks,
    /// Input projection of a short convolution, `[3·d_model × d_model]`: rows of the input gate, the
    /// output gate, and the convolved values.
    ConvIn,
    /// Its weights, `[d_model × taps]`, the current token last.
    Conv,
    /// Its output projection, `[d_model × d_model]`.
    ConvOut,
    /// Output gates of attention, `[heads·head_dim × d_model]`, of latent attention, `[heads × d_model]`, or
    /// of Kimi Delta Attention with a full-rank projection, `[heads·dim × d_model]`.
    QGate,
    /// Projection of the layer's input to the input of experts of another width,
    /// `[width × d_model]`.
    ExpertsIn,
    /// Projection of their sum, `[d_model × width]`.
    ExpertsOut,
    /// Gate of a shared expert that is not a bank, `[neurons × d_model]`.
    SharedIn,
    /// Its Up, `[neurons × d_model]`.
    SharedUp,
    /// Its Down, `[d_model × neurons]`.
    SharedOut,
    /// Projection of latent attention to the latent vector of queries, `[query_rank × d_model]`.
    LatentQ,
    /// RMSNorm weight of this vector, `[1 × query_rank]`.
    LatentQNorm,
    /// Projection of latent attention to the latent vector of keys and values and to the keys'
    /// rotated elements, `[rank + rotated × d_model]`, the latter in rotate-half order.
    LatentKv,
    /// RMSNorm weight of the latent vector, `[1 × rank]`.
    LatentKvNorm,
    /// Transposed matrix of each head from latent vectors to keys, `[heads·rank × head_dim − rotated]`.
    LatentKeys,
    /// Matrix of each head from latent vectors to values, `[heads·value_dim × rank]`.
    LatentValues,
    /// Projection of each group of heads of pooled attention to the input of [`Role::O`],
    /// `[groups·group_rank × heads·head_dim / groups]`.
    PooledOut,
    /// Projection to the vectors of pools, `[series·head_dim × d_model]`.
    PoolKv,
    /// Projection to their gates, of the same shape.
    PoolGate,
    /// Added to the gates, by position in the pool, `[pool × series·head_dim]`.
    PoolBias,
    /// RMSNorm weight of a pool's vector, `[1 × head_dim]`.
    PoolNorm,
    /// Projection of a DeltaNet to queries, keys and values, `[channels × d_model]`.
    DeltaIn,
    /// Projection to the gates of its output, `[values × d_model]`.
    DeltaGate,
    /// Projection to the write strength β, `[value_heads × d_model]`.
    DeltaBeta,
    /// Projection to the decay of its state, `[value_heads × d_model]`.
    DeltaDecay,
    /// Added to the decay's projection, `[1 × value_heads]`, or in KDA `[1 × heads·dim]`.
    DeltaStep,
    /// Kimi Delta Attention (KDA), whose other tensors are those of attention and of a DeltaNet: low-rank
    /// input of [`Role::DeltaDecay`], which is then `[heads·dim × dim]`; `[dim × d_model]`.
    DeltaDecayIn,
    /// Low-rank input of [`Role::DeltaGate`], which is then `[heads·dim × dim]`; `[dim × d_model]`.
    DeltaGateIn,
    /// Its decays with a full-rank projection, `[heads·dim × d_model]`.
    DeltaDecays,
    /// Weights of the convolution of its queries, `[heads·dim × taps]`, the current token last.
    DeltaConvQ,
    /// The same for its keys.
    DeltaConvK,
    /// The same for its values.
    DeltaConvV,
    /// Factor of the decay, below 0, `[1 × value_heads]`.
    DeltaRate,
    /// Weights of its convolution, `[channels × taps]`, the current token last.
    DeltaConv,
    /// RMSNorm weight shared by the heads of its output, `[1 × value_dim]`.
    DeltaNorm,
    /// Its output projection, `[d_model × values]`.
    DeltaOut,
    /// Input projection of a Mamba-2 layer, `[inputs × d_model]`: rows of the output gates, of the
    /// convolved channels, of the steps of its heads.
    MambaIn,
    /// Weights of its convolution, `[channels × taps]`, the current token last.
    MambaConv,
    /// Its bias, `[1 × channels]`.
    MambaConvBias,
    /// Added to the steps of its heads, `[1 × heads]`.
    MambaStep,
    /// Factor of the decay, below 0, `[1 × heads]`.
    MambaRate,
    /// Factor of a head's input in its output, `[1 × heads]`.
    MambaSkip,
    /// Weight of the RMSNorms of its output, `[1 × values]`.
    MambaNorm,
    /// Its output projection, `[d_model × values]`.
    MambaOut,
    /// Mamba-1, whose other tensors are those of Mamba-2 with a head for each channel: projection of the channels to
    /// the input of their steps and to `B` and `C`, `[rank + 2·state_dim × channels]`.
    MambaMix,
    /// Its projection to the channels' steps, `[channels × rank]`.
    MambaSteps,
    /// Its factors of the decays, below 0, `[channels × state_dim]`.
    MambaRates,
    /// RMSNorm weight of the input of its steps, `[1 × rank]`.
    MambaStepNorm,
    /// RMSNorm weight of its `B`, `[1 × state_dim]`.
    MambaWriteNorm,
    /// RMSNorm weight of its `C`, `[1 × state_dim]`.
    MambaReadNorm,
    /// Weight of the norm before the FFN, `[1 × d_model]`.
    FfnNorm,
    /// Its bias, `[1 × d_model]`.
    FfnNormBias,
    /// Weight of the norm of the FFN's output, `[1 × d_model]`.
    FfnPostNorm,
    /// Scores of a mixture's experts, `[experts × d_model]`.
    Router,
    /// Bias of these scores, `[1 × experts]`.
    RouterBias,
    /// Added to these scores for choosing experts, `[1 × experts]`.
    ChoiceBias,
    /// The experts of each token, as numbers, `[vocab × chosen]`.
    TokenExperts,
    /// Gate of a mixture's shared expert, `[1 × d_model]`.
    SharedGate,
    /// Weight of the norm of the router's input, `[1 × d_model]`.
    RouterScale,
    /// Factors of the experts' weights, `[1 × experts]`.
    ExpertScale,
    /// Weight of the norm before the experts, if a parallel dense FFN has another, `[1 × d_model]`.
    ExpertsNorm,
    /// Weight of the norm of that dense FFN's output, `[1 × d_model]`.
    DensePostNorm,
    /// Weight of the norm of the experts' output, `[1 × d_model]`.
    ExpertsPostNorm,
    /// Factor of the residual stream at a layer's end, `[1 × 1]`.
    LayerScale,
    /// Biases of a layer's gate projections, `[neurons × 1]`: row i belongs to neuron i, expert after
    /// expert.
    GateBias,
    /// Biases of a layer's up projections, `[neurons × 1]`: as those of Gate.
    UpBias,
    /// Biases of a layer's down projections, `[experts × d_model]`; one row for a dense FFN.
    DownBias,
    /// Gate projection, `[ffn × d_model]`: row i belongs to neuron i.
    Gate,
    /// Up projection, `[ffn × d_model]`: row i belongs to neuron i.
    Up,
    /// Down projection, always presented transposed, `[ffn × d_model]`: row i
    /// is the column that neuron i adds to the residual stream.
    Down,
    /// First matrix of an imported predictor, `[rank × d_model]`. It reads the
    /// residual stream before the FFN norm (PowerInfer's convention).
    PredictorFc1,
    /// Second matrix of an imported predictor, `[ffn × rank]`.
    PredictorFc2,
}

/// Name and location of a role.
pub(crate) enum Place {
    Global,
    Numbered,
    Layer,
    Expert,
}

/// Every role with its name, the only such list.
pub(crate) const ROLES: [(Role, Place, &str); 134] = [
    (Role::Embed, Place::Global, "embed"),
    (Role::Head, Place::Global, "head"),
    (Role::HeadBias, Place::Global, "head_bias"),
    (Role::FinalNorm, Place::Global, "final_norm"),
    (Role::FinalNormBias, Place::Global, "final_norm_bias"),
    (Role::Positions, Place::Global, "positions"),
    (Role::StreamIn, Place::Numbered, "stream_in"),
    (Role::StreamOut, Place::Numbered, "stream_out"),
    (Role::LayerInputs, Place::Global, "layer_inputs"),
    (Role::LayerInputsProj, Place::Global, "layer_inputs_proj"),
    (Role::LayerInputsNorm, Place::Global, "layer_inputs_norm"),
    (Role::StreamRouterNorm, Place::Layer, "stream.router_norm"),
    (Role::StreamRouter, Place::Layer, "stream.router"),
    (Role::StreamPredict, Place::Layer, "stream.predict"),
    (Role::StreamCorrect, Place::Layer, "stream.correct"),
    (Role::StreamScale, Place::Layer, "stream.scale"),
    (Role::LaurelLeft, Place::Layer, "laurel.left"),
    (Role::LaurelRight, Place::Layer, "laurel.right"),
    (Role::LaurelNorm, Place::Layer, "laurel.norm"),
    (Role::InputGate, Place::Layer, "input.gate"),
    (Role::InputProj, Place::Layer, "input.proj"),
    (Role::InputNorm, Place::Layer, "input.norm"),
    (Role::NGramTable, Place::Numbered, "ngram_table"),
    (Role::NGramKey, Place::Layer, "ngram.key"),
    (Role::NGramValue, Place::Layer, "ngram.value"),
    (Role::NGramKeyNorm, Place::Layer, "ngram.key_norm"),
    (Role::NGramQueryNorm, Place::Layer, "ngram.query_norm"),
    (Role::NGramConvNorm, Place::Layer, "ngram.conv_norm"),
    (Role::NGramConv, Place::Layer, "ngram.conv"),
    (Role::HyperMixerNorm, Place::Layer, "hyper.mixer_norm"),
    (Role::HyperMixerDown, Place::Layer, "hyper.mixer_down"),
    (Role::HyperMixerUp, Place::Layer, "hyper.mixer_up"),
    (Role::HyperMixerInject, Place::Layer, "hyper.mixer_inject"),
    (Role::HyperFfnNorm, Place::Layer, "hyper.ffn_norm"),
    (Role::HyperFfnDown, Place::Layer, "hyper.ffn_down"),
    (Role::HyperFfnUp, Place::Layer, "hyper.ffn_up"),
    (Role::HyperFfnInject, Place::Layer, "hyper.ffn_inject"),
    (Role::HyperHeadNorm, Place::Global, "hyper_head_norm"),
    (Role::HyperHeadDown, Place::Global, "hyper_head_down"),
    (Role::HyperHeadUp, Place::Global, "hyper_head_up"),
    (Role::HyperMixerMix, Place::Layer, "hyper.mixer_mix"),
    (Role::HyperMixerBase, Place::Layer, "hyper.mixer_base"),
    (Role::HyperMixerScale, Place::Layer, "hyper.mixer_scale"),
    (Role::HyperFfnMix, Place::Layer, "hyper.ffn_mix"),
    (Role::HyperFfnBase, Place::Layer, "hyper.ffn_base"),
    (Role::HyperFfnScale, Place::Layer, "hyper.ffn_scale"),
    (Role::HyperHeadMix, Place::Global, "hyper_head_mix"),
    (Role::HyperHeadBase, Place::Global, "hyper_head_base"),
    (Role::HyperHeadScale, Place::Global, "hyper_head_scale"),
    (Role::AttnNorm, Place::Layer, "attn.norm"),
    (Role::AttnNormBias, Place::Layer, "attn.norm_bias"),
    (Role::AttnPostNorm, Place::Layer, "attn.post_norm"),
    (Role::Q, Place::Layer, "attn.q"),
    (Role::K, Place::Layer, "attn.k"),
    (Role::V, Place::Layer, "attn.v"),
    (Role::O, Place::Layer, "attn.o"),
    (Role::QBias, Place::Layer, "attn.q_bias"),
    (Role::KBias, Place::Layer, "attn.k_bias"),
    (Role::VBias, Place::Layer, "attn.v_bias"),
    (Role::OBias, Place::Layer, "attn.o_bias"),
    (Role::QNorm, Place::Layer, "attn.q_norm"),
    (Role::KNorm, Place::Layer, "attn.k_norm"),
    (Role::Sinks, Place::Layer, "attn.sinks"),
    (Role::ConvIn, Place::Layer, "conv.in"),
    (Role::Conv, Place::Layer, "conv.weight"),
    (Role::ConvOut, Place::Layer, "conv.out"),
    (Role::QGate, Place::Layer, "attn.q_gate"),
    (Role::ExpertsIn, Place::Layer, "experts.in"),
    (Role::ExpertsOut, Place::Layer, "experts.out"),
    (Role::SharedIn, Place::Layer, "shared.in"),
    (Role::SharedUp, Place::Layer, "shared.up"),
    (Role::SharedOut, Place::Layer, "shared.out"),
    (Role::LatentQ, Place::Layer, "latent.q"),
    (Role::LatentQNorm, Place::Layer, "latent.q_norm"),
    (Role::LatentKv, Place::Layer, "latent.kv"),
    (Role::LatentKvNorm, Place::Layer, "latent.kv_norm"),
    (Role::LatentKeys, Place::Layer, "latent.keys"),
    (Role::LatentValues, Place::Layer, "latent.values"),
    (Role::PooledOut, Place::Layer, "pooled.out"),
    (Role::PoolKv, Place::Layer, "pooled.kv"),
    (Role::PoolGate, Place::Layer, "pooled.gate"),
    (Role::PoolBias, Place::Layer, "pooled.bias"),
    (Role::PoolNorm, Place::Layer, "pooled.norm"),
    (Role::DeltaIn, Place::Layer, "delta.in"),
    (Role::DeltaGate, Place::Layer, "delta.gate"),
    (Role::DeltaBeta, Place::Layer, "delta.beta"),
    (Role::DeltaDecay, Place::Layer, "delta.decay"),
    (Role::DeltaStep, Place::Layer, "delta.step"),
    (Role::DeltaDecayIn, Place::Layer, "delta.decay_in"),
    (Role::DeltaGateIn, Place::Layer, "delta.gate_in"),
    (Role::DeltaDecays, Place::Layer, "delta.decays"),
    (Role::DeltaConvQ, Place::Layer, "delta.conv_q"),
    (Role::DeltaConvK, Place::Layer, "delta.conv_k"),
    (Role::DeltaConvV, Place::Layer, "delta.conv_v"),
    (Role::DeltaRate, Place::Layer, "delta.rate"),
    (Role::DeltaConv, Place::Layer, "delta.conv"),
    (Role::DeltaNorm, Place::Layer, "delta.norm"),
    (Role::DeltaOut, Place::Layer, "delta.out"),
    (Role::MambaIn, Place::Layer, "mamba.in"),
    (Role::MambaConv, Place::Layer, "mamba.conv"),
    (Role::MambaConvBias, Place::Layer, "mamba.conv_bias"),
    (Role::MambaStep, Place::Layer, "mamba.step"),
    (Role::MambaRate, Place::Layer, "mamba.rate"),
    (Role::MambaSkip, Place::Layer, "mamba.skip"),
    (Role::MambaNorm, Place::Layer, "mamba.norm"),
    (Role::MambaOut, Place::Layer, "mamba.out"),
    (Role::MambaMix, Place::Layer, "mamba.mix"),
    (Role::MambaSteps, Place::Layer, "mamba.steps"),
    (Role::MambaRates, Place::Layer, "mamba.rates"),
    (Role::MambaStepNorm, Place::Layer, "mamba.step_norm"),
    (Role::MambaWriteNorm, Place::Layer, "mamba.write_norm"),
    (Role::MambaReadNorm, Place::Layer, "mamba.read_norm"),
    (Role::FfnNorm, Place::Layer, "ffn.norm"),
    (Role::FfnNormBias, Place::Layer, "ffn.norm_bias"),
    (Role::FfnPostNorm, Place::Layer, "ffn.post_norm"),
    (Role::Router, Place::Layer, "ffn.router"),
    (Role::RouterBias, Place::Layer, "ffn.router_bias"),
    (Role::ChoiceBias, Place::Layer, "ffn.choice_bias"),
    (Role::TokenExperts, Place::Layer, "ffn.token_experts"),
    (Role::SharedGate, Place::Layer, "ffn.shared_gate"),
    (Role::RouterScale, Place::Layer, "ffn.router_scale"),
    (Role::ExpertScale, Place::Layer, "ffn.expert_scale"),
    (Role::ExpertsNorm, Place::Layer, "ffn.experts_norm"),
    (Role::DensePostNorm, Place::Layer, "ffn.dense_post_norm"),
    (Role::ExpertsPostNorm, Place::Layer, "ffn.experts_post_norm"),
    (Role::LayerScale, Place::Layer, "layer.scale"),
    (Role::GateBias, Place::Layer, "ffn.gate_bias"),
    (Role::UpBias, Place::Layer, "ffn.up_bias"),
    (Role::DownBias, Place::Layer, "ffn.down_bias"),
    (Role::Gate, Place::Expert, "gate"),
    (Role::Up, Place::Expert, "up"),
    (Role::Down, Place::Expert, "down"),
    (Role::PredictorFc1, Place::Expert, "predictor.fc1"),
    (Role::PredictorFc2, Place::Expert, "predictor.fc2"),
];

impl Role {
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
        use Role::*;
        matches!(
            self,
            Conv | DeltaConv | MambaConv | DeltaConvQ | DeltaConvK | DeltaConvV | NGramConv
        )
    }

    /// Whether it is a vector: a norm's weight or a bias.
    pub fn is_vector(self) -> bool {
        use Role::*;
        match self {
            Embed | Head | Positions | Q | K | V | O | Router | Gate | Up | Down | PredictorFc1
            | PredictorFc2 | StreamIn | StreamOut | LayerInputs | LayerInputsProj
            | StreamRouter | StreamPredict | StreamCorrect | LaurelLeft | LaurelRight
            | InputGate | InputProj | ConvIn | Conv | ConvOut | QGate | DeltaIn | DeltaGate
            | DeltaBeta | DeltaDecay | DeltaConv | DeltaOut | LatentQ | LatentKv | LatentKeys
            | LatentValues | DeltaDecayIn | DeltaGateIn | DeltaDecays | DeltaConvQ | DeltaConvK
            | DeltaConvV | MambaIn | MambaConv | MambaOut | MambaMix | MambaSteps | MambaRates
            | ExpertsIn | ExpertsOut | SharedIn | SharedUp | SharedOut | NGramTable | NGramKey
            | NGramValue | NGramConv | HyperMixerDown | HyperMixerUp | HyperMixerInject
            | HyperFfnDown | HyperFfnUp | HyperFfnInject | HyperHeadDown | HyperHeadUp
            | PooledOut | PoolKv | PoolGate | PoolBias | TokenExperts | HyperMixerMix
            | HyperFfnMix | HyperHeadMix => false,
            HeadBias | FinalNorm | FinalNormBias | AttnNorm | AttnNormBias | AttnPostNorm
            | QBias | KBias | VBias | OBias | QNorm | KNorm | FfnNorm | FfnNormBias
            | LayerInputsNorm | StreamRouterNorm | StreamScale | LaurelNorm | InputNorm
            | FfnPostNorm | SharedGate | Sinks | RouterBias | ChoiceBias | GateBias | UpBias
            | DownBias | DeltaStep | DeltaRate | DeltaNorm | LatentQNorm | LatentKvNorm
            | MambaStepNorm | MambaWriteNorm | MambaReadNorm | MambaConvBias | MambaStep
            | MambaRate | MambaSkip | MambaNorm | RouterScale | ExpertScale | ExpertsNorm
            | DensePostNorm | ExpertsPostNorm | LayerScale | NGramKeyNorm | NGramQueryNorm
            | NGramConvNorm | HyperMixerNorm | HyperFfnNorm | HyperHeadNorm | PoolNorm
            | HyperMixerBase | HyperMixerScale | HyperFfnBase | HyperFfnScale | HyperHeadBase
            | HyperHeadScale => true,
        }
    }
}
