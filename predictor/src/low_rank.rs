//! Low-rank predictor: `score = fc2 · f(fc1 · x)`, two thin factors of a gate matrix. A neuron is
//! selected if its score reaches its threshold (PowerInfer; Deja Vu).

use emberflow_kernels::{Columns, Compute, Cpu, DType, GROUP};

use crate::bytes::SharedBytes;
use crate::predict::{Features, Predictor, RANGE, Reads, Shared, SharedShape, blocks};
use crate::products::{Inputs, with_multiplier};
use crate::thresholds::Thresholds;

/// Sizes and options of a low-rank predictor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LowRankSpec {
    /// Elements of the input.
    pub d: usize,
    /// Neurons of the layer.
    pub neurons: usize,
    /// Width of the hidden layer.
    pub rank: usize,
    /// Format of the first matrix, `[rank × d]`.
    pub fc1: DType,
    /// Format of the second matrix, `[neurons × rank]`.
    pub fc2: DType,
    /// The vector it reads.
    pub reads: Reads,
    /// Whether the hidden layer has a ReLU.
    pub relu: bool,
}

impl LowRankSpec {
    /// The format of a matrix with this [`code`](DType::code).
    ///
    /// # Errors
    /// An unknown format, or one with a scale per row: such rows need inputs with one scale, and predictors read inputs
    /// with a scale for each group.
    pub fn format(code: u32) -> Result<DType, String> {
        match DType::from_code(code) {
            None => Err(format!("unknown block format {code}")),
            Some(dtype) if dtype.is_per_channel() || dtype.is_blocks() => Err(format!(
                "block format {dtype}, which predictors cannot have: train them again with \
                 emberflow train-predictor"
            )),
            Some(dtype) => Ok(dtype),
        }
    }

    /// Bytes of the first matrix; saturates.
    pub fn fc1_bytes(&self) -> usize {
        self.rank.saturating_mul(self.fc1.row_bytes(self.d))
    }

    /// Bytes of the second matrix; saturates.
    pub fn fc2_bytes(&self) -> usize {
        self.neurons.saturating_mul(self.fc2.row_bytes(self.rank))
    }

    /// Products per token.
    pub fn products(&self) -> f64 {
        self.rank as f64 * (self.d as f64 + self.neurons as f64)
    }

    fn stride(&self) -> usize {
        self.rank.next_multiple_of(GROUP)
    }

    /// Per-token memory.
    pub fn shared_shape(&self) -> SharedShape {
        let residual = self.reads == Reads::Residual && self.fc1.is_grouped();
        SharedShape {
            hidden: self.stride(),
            quantized: if residual { self.d } else { 0 },
            row: self.d.max(self.rank),
            ..SharedShape::default()
        }
    }
}

/// The predictor of one layer.
pub struct LowRank {
    spec: LowRankSpec,
    fc1: SharedBytes,
    fc2: SharedBytes,
    thresholds: Thresholds,
}

impl LowRank {
    /// Assembles matrices and thresholds.
    ///
    /// # Panics
    /// If a length does not match `spec`. Validate sizes from files first.
    pub fn new(
        spec: LowRankSpec,
        fc1: SharedBytes,
        fc2: SharedBytes,
        thresholds: Thresholds,
    ) -> Self {
        assert_eq!(fc1.len(), spec.fc1_bytes(), "bytes of fc1");
        assert_eq!(fc2.len(), spec.fc2_bytes(), "bytes of fc2");
        Self {
            spec,
            fc1,
            fc2,
            thresholds,
        }
    }

    /// Sizes and options.
    pub fn spec(&self) -> LowRankSpec {
        self.spec
    }

    /// Hidden layers of all tokens, as inputs of products with the second matrix; `None` if they
    /// are not contiguous in the required form.
    fn hidden<'a>(&self, shared: &'a Shared, tokens: usize) -> Option<Inputs<'a>> {
        let s = &self.spec;
        if s.fc2.is_grouped() {
            Some(Inputs::Quantized(shared.hidden_q.all()))
        } else {
            (s.stride() == s.rank || tokens == 1).then(|| Inputs::Floats {
                x: &shared.hidden[..tokens * s.rank],
                n: s.rank,
            })
        }
    }
}

impl Predictor for LowRank {
    fn shape(&self) -> SharedShape {
        self.spec.shared_shape()
    }

    fn bytes(&self) -> u64 {
        (self.fc1.len() + self.fc2.len()) as u64 + self.thresholds.bytes()
    }

    fn prepare(&self, on: &Compute, input: Features<'_>, shared: &mut Shared) {
        let cpu = on.cpu;
        let s = &self.spec;
        let (tokens, stride) = (input.tokens(), s.stride());
        let quantized = match s.reads {
            Reads::Normed => input.quantized,
            Reads::Residual if s.fc1.is_grouped() => {
                // The marks of layers are for the inputs of their products.
                cpu.pruning(false).quantize_activations(
                    &input.residual[..tokens * s.d],
                    tokens,
                    &mut shared.input_q,
                );
                shared.input_q.all()
            }
            Reads::Residual => input.quantized,
        };
        let input = if s.fc1.is_grouped() {
            Inputs::Quantized(quantized)
        } else {
            Inputs::Floats {
                x: input.all(s.reads),
                n: s.d,
            }
        };
        let hidden = &mut shared.hidden[..tokens * stride];
        hidden.fill(0.0);
        let (row, fc1) = (s.fc1.row_bytes(s.d), self.fc1.as_slice());
        let all = Columns::new(hidden, tokens, stride, s.rank);
        let states = &mut vec![(); on.workers.threads()];
        (on.workers).for_each_column_block(all, GROUP, states, &|(), first, mut out| {
            let rows = &fc1[first * row..(first + out.width()) * row];
            with_multiplier(|multiplier| multiplier.by_token(cpu, s.fc1, rows, input, &mut out));
            for t in (0..tokens).filter(|_| s.relu) {
                out.row_mut(t).iter_mut().for_each(|h| *h = h.max(0.0));
            }
        });
        if s.fc2.is_grouped() {
            shared.hidden_q.reshape(s.rank, tokens);
            let chunks = shared.hidden_q.chunks_per_token();
            for (h, q) in hidden
                .chunks_exact(stride)
                .zip(shared.hidden_q.chunks_mut().chunks_exact_mut(chunks))
            {
                cpu.quantize_token(&h[..s.rank], q);
            }
        }
    }

    fn scores(
        &self,
        cpu: Cpu,
        input: Features<'_>,
        shared: &Shared,
        first: usize,
        scores: &mut [f32],
    ) {
        let (s, tokens) = (&self.spec, input.tokens());
        let row = s.fc2.row_bytes(s.rank);
        let rows = &self.fc2.as_slice()[first * row..][..scores.len() / tokens * row];
        if let Some(hidden) = self.hidden(shared, tokens) {
            return with_multiplier(|multiplier| {
                multiplier.by_row(cpu, s.fc2, rows, hidden, scores)
            });
        }
        for (block, scores) in blocks(0, scores, tokens) {
            let mut token = [0.0; RANGE];
            let token = &mut token[..scores.len() / tokens];
            let rows = &rows[block * row..][..token.len() * row];
            for t in 0..tokens {
                let hidden = &shared.hidden[t * s.stride()..][..s.rank];
                cpu.matvec(s.fc2, rows, row, s.rank, hidden, token);
                for (i, &score) in token.iter().enumerate() {
                    scores[i * tokens + t] = score;
                }
            }
        }
    }

    fn thresholds(&self, cpu: Cpu, first: usize, thresholds: &mut [f32]) {
        self.thresholds.get(cpu, first, thresholds);
    }
}
