//! Whether a device computes the attention of layers: what it knows, whether its results have the CPU's bits, and how
//! fast it is beside the CPU, with this model's weights.

use std::time::Instant;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use emberflow_kernels::{Compute, Cpu};
use emberflow_models::config::ModelConfig;
use emberflow_storage::trace::Tracer;

use super::AttentionLayer;
use super::on_device::{Layer, OnDevice};
use crate::device::Dots;
use crate::device::attend::{AttentionShape, unsupported};
use crate::device::check::{deviation, wrong};
use crate::device::numbers::Numbers;
use crate::device::products::{Both, Sample};
use crate::device::{
    AttentionLayer as OfDevice, AttentionTimes, Found, InUse, KvMemory, OfAttention, RowNorm,
};
use crate::error::Error;
use crate::kv::KvPool;
use crate::norm::Norm;
use crate::options::{DeviceAttention, Options};
use crate::rope::Ropes;
use crate::scratch::Scratch;
use crate::sequence::{Sequence, Span};
use crate::weights::{LayerWeights, Weights};

/// Numbers of texts with a next token for which times are taken, and the most, up to the last.
const TEXTS: [usize; 3] = [1, 8, 32];

/// Rows of prompts for which times are taken, and the most, up to the last.
const PROMPTS: [usize; 2] = [16, 128];

/// Positions of all rows together for which times are taken.
const LONG: usize = 1024;

/// Runs of which the fastest counts, of the CPU and of the device, each of another layer, so that weights come
/// from memory as they will.
const RUNS: usize = 6;

/// The same for prompts.
const PROMPT_RUNS: usize = 4;

/// A device that is so many times slower with few rows of a prompt is not tried with more.
const HOPELESS: f64 = 4.0;

/// Where the attention of layers is computed.
pub(crate) struct Placed {
    /// The device, if one knows it.
    pub device: Option<OnDevice>,
    /// Why none does.
    pub why: Option<String>,
}

impl Placed {
    /// On the CPU, for a reason.
    fn on_cpu(why: impl Into<String>) -> Self {
        Self {
            device: None,
            why: Some(why.into()),
        }
    }

    /// On the CPU: there is no device.
    pub fn without() -> Self {
        Self {
            device: None,
            why: None,
        }
    }
}

/// What is at hand to try a device.
pub(crate) struct Trying<'a> {
    pub device: &'a Arc<InUse>,
    pub on: &'a Compute,
    pub config: &'a ModelConfig,
    pub weights: &'a Weights,
    pub pool: &'a Arc<KvPool>,
    pub options: &'a Options,
    pub rope: &'a mut Ropes,
    pub scratch: &'a mut Scratch,
    pub tracer: Tracer,
}

/// Seconds of the CPU and of the device, the first of which found nothing in the caches, and how far their results
/// are apart.
struct Compared {
    seconds: [f64; 2],
    apart: f32,
}

/// Why there are no times.
enum Why {
    /// The device was lost.
    Lost(String),
    /// Results are wrong, and how.
    Wrong(String),
}

/// A layer that is computed.
#[derive(Clone, Copy)]
struct Run {
    layer: usize,
    texts: usize,
    /// Of each text.
    rows: usize,
    /// Positions behind which.
    positions: usize,
    /// The device goes first.
    device_first: bool,
}

impl Trying<'_> {
    /// Decides.
    ///
    /// # Errors
    /// No room for a sequence.
    pub fn decide(mut self) -> Result<Placed, Error> {
        if let Some(why) = self.refused() {
            return Ok(Placed::on_cpu(why));
        }
        let mut on_device = match self.prepared() {
            Ok(on_device) => on_device,
            Err(why) => return Ok(Placed::on_cpu(why)),
        };
        let of = self.compared(&on_device);
        let known = match self.device.lease().known_attention(&of) {
            Ok(known) => known,
            // Refused aloud: wrong before.
            Err(e) => return Ok(refused_aloud(e.to_string())),
        };
        let known = match known {
            Some(times) if self.agrees(&on_device)? => Some(times),
            _ => None,
        };
        let times = match known {
            Some(times) => times,
            None => match self.measured(&on_device, &of)? {
                Ok(times) => times,
                Err(why) => return Ok(refused_aloud(why)),
            },
        };
        if !times.same_bits {
            return Ok(Placed::on_cpu(
                "its bits are not the processor's, and times must not decide on a text",
            ));
        }
        tracing::info!(?times, "attention of a layer");
        on_device.times = match self.options.device_attention {
            DeviceAttention::On => None,
            _ => Some(times),
        };
        on_device.done = AtomicU64::new(0);
        on_device.waited = AtomicU64::new(0);
        Ok(Placed {
            device: Some(on_device),
            why: None,
        })
    }

    /// Why it is not tried.
    fn refused(&self) -> Option<&'static str> {
        let layers = &self.weights.layers;
        let shared = |layer: &LayerWeights| layer.projections().all(|m| m.device().is_some());
        match () {
            () if self.options.device_attention == DeviceAttention::Off => {
                Some("--device-attention off")
            }
            () if !self.device.same_bits() => {
                Some("its bits are not the processor's, and times must not decide on a text")
            }
            () if !layers.iter().all(shared) => {
                Some("it does not have all projections: their format, or its memory")
            }
            () => unsupported(self.config),
        }
    }

    /// The device with kernels and buffers for all layers.
    fn prepared(&self) -> Result<OnDevice, String> {
        let (c, options) = (self.config, self.options);
        let kv = self.pool.shape();
        let shape = AttentionShape::of(c, kv);
        let rows = options.chunk.max(options.batch);
        let mut dense = self.device.dense();
        let copies = !dense.facts().unified;
        let room = shape.room(rows, [options.batch, options.context], copies);
        let memory = KvMemory(Arc::new(self.pool.memory().clone()));
        let prepared = dense.prepare_attention(&shape, &memory);
        let prepared = prepared.and_then(|()| dense.make_attention_room(&room));
        prepared.map_err(|e| e.to_string())?;
        let mut layers = Vec::with_capacity(self.weights.layers.len());
        for (number, layer) in self.weights.layers.iter().enumerate() {
            let layer = of_device(layer, c, number, kv.at(number, 0, 0));
            let layer = layer.ok_or("it does not have all projections")?;
            let shared = dense.share_attention(layer);
            layers.push(shared.map_err(|e| e.to_string())?);
        }
        Ok(OnDevice {
            device: Arc::clone(self.device),
            shape,
            layers,
            copies,
            room,
            times: None,
            tracer: self.tracer.clone(),
            done: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        })
    }

    /// What is compared.
    fn compared(&self, on_device: &OnDevice) -> OfAttention {
        let layer = &self.weights.layers[0];
        OfAttention {
            shape: on_device.shape,
            formats: [&layer.q, &layer.o].map(|m| m.dtype()),
            texts: self.options.batch,
            rows: self.prompt(),
            positions: self.options.context,
            threads: self.on.threads(),
        }
    }

    /// Most rows of a prompt of which times are taken; 1 or fewer for none.
    fn prompt(&self) -> usize {
        let most = self.options.chunk.min(self.options.context);
        most.min(PROMPTS[PROMPTS.len() - 1])
    }

    /// Whether results are the CPU's, compared once, so that the driver has run the kernels.
    fn agrees(&mut self, on_device: &OnDevice) -> Result<bool, Error> {
        for rows in [1, self.prompt().clamp(1, PROMPTS[0])] {
            let [_, positions] = self.positions(1, rows);
            let run = Run {
                layer: self.layer(0),
                texts: 1,
                rows,
                positions,
                device_first: false,
            };
            let compared = self.one(on_device, run)?;
            if compared.is_none_or(|compared| compared.apart != 0.0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Compares results and takes times, and keeps what came out; the reason if they are wrong.
    fn measured(
        &mut self,
        on_device: &OnDevice,
        of: &OfAttention,
    ) -> Result<Result<AttentionTimes, String>, Error> {
        let mut times = AttentionTimes {
            same_bits: true,
            next: Both::default(),
            prompts: Both::default(),
        };
        for texts in sizes(TEXTS, self.options.batch) {
            match self.timed(on_device, [texts, 1], &mut times)? {
                Ok(lines) => push(&mut times.next, lines),
                Err(why) => return Ok(Err(self.keep_wrong(of, why))),
            }
        }
        for rows in sizes(PROMPTS, self.prompt()).filter(|&rows| rows > 1) {
            match self.timed(on_device, [1, rows], &mut times)? {
                Ok(lines) => push(&mut times.prompts, lines),
                Err(why) => return Ok(Err(self.keep_wrong(of, why))),
            }
            let [cpu, device] = [&times.prompts.cpu, &times.prompts.device].map(|samples| {
                samples
                    .0
                    .last()
                    .map_or(0.0, |s| s.launch + s.weight * LONG as f64)
            });
            if device > HOPELESS * cpu {
                break;
            }
        }
        let found = Found::Attention(times.clone());
        self.device.lease().keep_attention(of, found);
        Ok(Ok(times))
    }

    /// Keeps how wrong results are; in words.
    fn keep_wrong(&self, of: &OfAttention, why: Why) -> String {
        match why {
            Why::Lost(why) => why,
            Why::Wrong(how) => {
                let lease = self.device.lease();
                lease.keep_attention(of, Found::Wrong(how.clone()));
                format!("it computes wrong results: {how}")
            }
        }
    }

    /// The lines through the times of CPU and device for so many texts of so many rows. `times` learns whether
    /// the bits are the same.
    fn timed(
        &mut self,
        on_device: &OnDevice,
        [texts, rows]: [usize; 2],
        times: &mut AttentionTimes,
    ) -> Result<Result<[Sample; 2], Why>, Error> {
        let positions = self.positions(texts, rows);
        let runs = if rows > 1 { PROMPT_RUNS } else { RUNS };
        let mut best = [[f64::INFINITY; 2]; 2];
        for run in 0..runs {
            for (i, positions) in positions.into_iter().enumerate() {
                let device_first = run % 2 == 1;
                let run = Run {
                    layer: self.layer(2 * run + i),
                    texts,
                    rows,
                    positions,
                    device_first,
                };
                let Some(Compared { seconds, apart }) = self.one(on_device, run)? else {
                    let lost = self.device.lost().map(ToString::to_string);
                    return Ok(Err(Why::Lost(lost.unwrap_or_default())));
                };
                let facts = self.device.dense().facts().clone();
                if let Some(how) = wrong(&facts, apart) {
                    return Ok(Err(Why::Wrong(how)));
                }
                times.same_bits &= apart == 0.0;
                let cold = usize::from(device_first);
                best[i][cold] = best[i][cold].min(seconds[cold]);
            }
        }
        // What a row sees on average.
        let seen = positions.map(|positions| positions + rows.div_ceil(2));
        Ok(Ok([0, 1].map(|who| {
            line(texts * rows, seen, best.map(|of| of[who]))
        })))
    }

    /// Few and many positions behind which so many texts have so many rows.
    fn positions(&self, texts: usize, rows: usize) -> [usize; 2] {
        let windows = self.config.window.iter().map(|&window| window as usize);
        let window = windows.max().filter(|_| !self.config.window.contains(&0));
        let most = (self.options.context - rows).min(window.unwrap_or(usize::MAX));
        let long = (LONG / texts).min(most);
        [long / 8, long]
    }

    /// The layer of a run: of those that see all positions, if there are such.
    fn layer(&self, run: usize) -> usize {
        let all = 0..self.weights.layers.len();
        let wide: Vec<usize> = all.filter(|&l| self.config.window[l] == 0).collect();
        match wide.len() {
            0 => run * self.weights.layers.len() / (2 * RUNS),
            count => wide[run * count / (2 * RUNS)],
        }
    }

    /// Computes a layer on the CPU and on the device. `None` if the device was lost.
    fn one(&mut self, on_device: &OnDevice, run: Run) -> Result<Option<Compared>, Error> {
        let Run {
            layer: number,
            texts,
            rows,
            positions,
            ..
        } = run;
        let n = texts * rows;
        let mut numbers = Numbers::new((positions + n) as u64);
        let mut sequences = Vec::with_capacity(texts);
        for text in 0..texts {
            let mut sequence = Sequence::new(self.pool.sequence(positions + rows)?);
            sequence.assume(0, positions);
            self.fill(&mut sequence, number, positions, &mut numbers);
            sequence.kv.prepare(positions, rows);
            (0..rows).for_each(|row| self.rope.fill(text * rows + row, positions + row));
            sequences.push(sequence);
        }
        let tokens = vec![0; rows];
        let spans = sequences.iter_mut().map(|sequence| Span {
            sequence,
            tokens: &tokens,
        });
        let mut spans: Vec<_> = spans.collect();
        let d = self.config.d_model as usize;
        let x: Vec<f32> = (0..n * d).map(|_| numbers.next()).collect();
        let of = Layer {
            config: self.config,
            number,
            rope: self.rope.of(number),
        };
        let layer = AttentionLayer {
            config: of.config,
            weights: &self.weights.layers[number],
            number,
            rope: of.rope,
            given: None,
            device: None,
        };
        let (on, s) = (self.on, &mut *self.scratch);
        let (mut seconds, mut found) = ([0.0; 2], [const { Vec::new() }; 2]);
        // A device with a copy of the pages gets them, as before other tokens.
        if on_device.copies && !on_device.run(of, on, &x, &mut spans, s) {
            return Ok(None);
        }
        for by_device in [run.device_first, !run.device_first] {
            let start = Instant::now();
            match by_device {
                false => layer.run(on, &x, &mut spans, s),
                true if on_device.run(of, on, &x, &mut spans, s) => layer.add_o_bias(n, s),
                true => return Ok(None),
            }
            seconds[usize::from(by_device)] = start.elapsed().as_secs_f64();
            found[usize::from(by_device)] = results(s, on_device, n);
        }
        let apart = found[0].iter().zip(&found[1]);
        let apart = apart.map(|(expected, found)| deviation(expected, found));
        Ok(Some(Compared {
            seconds,
            apart: apart.fold(0.0, f32::max),
        }))
    }

    /// Fills a layer's keys and values.
    fn fill(&self, sequence: &mut Sequence, layer: usize, positions: usize, numbers: &mut Numbers) {
        let (c, cpu) = (self.config, Cpu::detect());
        let mut vector = vec![0.0; c.head_dim as usize];
        for position in 0..positions {
            let mut page = sequence.kv.writer(position);
            for head in 0..c.kv_heads as usize {
                vector.iter_mut().for_each(|x| *x = numbers.next());
                page.store_key(cpu, layer, head, &vector);
                vector.rotate_left(1);
                page.store_value(cpu, layer, head, &vector);
            }
        }
    }
}

/// Numbers of rows of which times are taken: the sizes below `most`, and that itself up to the last of them.
fn sizes<const N: usize>(sizes: [usize; N], most: usize) -> impl Iterator<Item = usize> {
    let most = most.min(sizes[N - 1]);
    let few = sizes.into_iter().filter(move |&n| n < most);
    few.chain([most])
}

/// Adds times of CPU and device.
fn push(to: &mut Both, [cpu, device]: [Sample; 2]) {
    to.cpu.0.push(cpu);
    to.device.0.push(device);
}

/// Wrong results: told aloud, and left to the CPU.
fn refused_aloud(why: String) -> Placed {
    tracing::warn!(why, "attention stays on the CPU");
    Placed::on_cpu(why)
}

/// A layer as devices know it.
fn of_device(
    layer: &LayerWeights,
    c: &ModelConfig,
    number: usize,
    first: usize,
) -> Option<OfDevice> {
    let numbers = layer.projections().map(|m| Some(m.device()?.matrix));
    let numbers: Option<Vec<usize>> = numbers.collect();
    let quantizes: Vec<bool> = (layer.projections())
        .map(|m| m.dtype().is_grouped())
        .collect();
    let vectors = |all: &Option<[Vec<f32>; 3]>| all.as_ref().map(|all| all.concat());
    Some(OfDevice {
        matrices: numbers?.try_into().ok()?,
        quantizes: quantizes.try_into().ok()?,
        norm: layer.attn_norm.as_ref().map(row_norm),
        after: layer.ffn_norm.as_ref().map(row_norm),
        biases: vectors(&layer.qkv_bias).unwrap_or_default(),
        norms: (layer.qk_norm.as_ref()).map_or_else(Vec::new, |norms| norms.concat()),
        whole: c.qk_norm_whole,
        value_norm: layer.value_norm.is_some(),
        rotates: c.rotates(number as u32),
        sinks: layer.sinks.clone().unwrap_or_default(),
        first,
        window: c.window[number] as usize,
    })
}

fn row_norm(norm: &Norm) -> RowNorm {
    RowNorm {
        weights: norm.weight.clone(),
        biases: norm.bias.clone().unwrap_or_default(),
        eps: norm.eps,
    }
}

/// What a layer has given: O's results, keys, values.
fn results(s: &Scratch, of: &OnDevice, rows: usize) -> Vec<Vec<f32>> {
    let (d, kv) = (of.shape.d, of.shape.kv_width());
    let all = [&s.out[..rows * d], &s.k[..rows * kv], &s.v[..rows * kv]];
    all.map(<[f32]>::to_vec).into()
}

/// The line through the times at two numbers of positions.
fn line(n: usize, positions: [usize; 2], seconds: [f64; 2]) -> Sample {
    let all = seconds[1] / positions[1].max(1) as f64;
    let slope = match positions[1] > positions[0] {
        true => (seconds[1] - seconds[0]) / (positions[1] - positions[0]) as f64,
        false => 0.0,
    };
    // Where more positions are no slower, all of it is the projections.
    let weight = slope.clamp(all * 1e-3, all);
    Sample {
        n,
        launch: seconds[1] - weight * positions[1] as f64,
        weight,
    }
}
