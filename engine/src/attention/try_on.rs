//! Whether a device computes the attention of layers: what it knows, whether its results have the CPU's bits, and how
//! fast it is beside the CPU, with this model's weights.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use emberflow_kernels::{Compute, Cpu};
use emberflow_models::config::ModelConfig;
use emberflow_storage::clock::Moment;
use emberflow_storage::trace::Tracer;

use super::AttentionLayer;
use super::on_device::{Layer, OnDevice, Times};
use crate::device::attend::{AttentionShape, MOST_ROWS, unsupported};
use crate::device::check::{deviation, wrong};
use crate::device::numbers::Numbers;
use crate::device::products::{Sample, Samples};
use crate::device::{
    AttentionLayer as OfDevice, AttentionTimes, Found, InUse, KvMemory, OfAttention,
};
use crate::error::Error;
use crate::kv::KvPool;
use crate::options::{DeviceAttention, Options};
use crate::rope::Ropes;
use crate::scratch::Scratch;
use crate::sequence::{Sequence, Span};
use crate::weights::{LayerWeights, Weights};

/// Numbers of rows for which times are taken, and the most.
const ROWS: [usize; 2] = [1, 8];

/// Positions of all rows together for which times are taken.
const LONG: usize = 1024;

/// Runs of which the fastest counts, of the CPU and of the device, each of another layer, so that weights come
/// from memory as they will.
const RUNS: usize = 6;

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

/// A layer that is computed.
#[derive(Clone, Copy)]
struct Run {
    layer: usize,
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
        tracing::info!(cpu = ?times.cpu, device = ?times.device, "attention of a layer");
        let times = Times {
            cpu: times.cpu,
            device: times.device,
        };
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
        let facts = self.device.dense().facts().clone();
        let layers = &self.weights.layers;
        let shared = |layer: &LayerWeights| layer.projections().all(|m| m.device().is_some());
        match () {
            () if self.options.device_attention == DeviceAttention::Off => {
                Some("--device-attention off")
            }
            () if !facts.unified => {
                Some("it has a memory of its own, and keys and values are in the machine's")
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
        let room = shape.room(options.batch, options.context);
        let mut dense = self.device.dense();
        let memory = KvMemory(Arc::new(self.pool.memory().clone()));
        let prepared = dense.prepare_attention(&shape, &room, &memory);
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
            rows: room.rows,
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
            rows: on_device.rows,
            positions: self.options.context,
            threads: self.on.threads(),
        }
    }

    /// Numbers of rows of which times are taken.
    fn rows(most: usize) -> impl Iterator<Item = usize> {
        let few = ROWS.into_iter().filter(move |&n| n < most);
        few.chain([most.min(MOST_ROWS)])
    }

    /// Whether results are the CPU's, compared once, so that the driver has run the kernels.
    fn agrees(&mut self, on_device: &OnDevice) -> Result<bool, Error> {
        let [_, positions] = self.positions(1);
        let run = Run {
            layer: self.layer(0),
            rows: 1,
            positions,
            device_first: false,
        };
        let compared = self.one(on_device, run)?;
        Ok(compared.is_some_and(|compared| compared.apart == 0.0))
    }

    /// Compares results and takes times, and keeps what came out; the reason if they are wrong.
    fn measured(
        &mut self,
        on_device: &OnDevice,
        of: &OfAttention,
    ) -> Result<Result<AttentionTimes, String>, Error> {
        let mut times = AttentionTimes {
            same_bits: true,
            cpu: Samples::default(),
            device: Samples::default(),
        };
        for n in Self::rows(on_device.rows) {
            let positions = self.positions(n);
            let mut best = [[f64::INFINITY; 2]; 2];
            for run in 0..RUNS {
                for (i, positions) in positions.into_iter().enumerate() {
                    let device_first = run % 2 == 1;
                    let run = Run {
                        layer: self.layer(2 * run + i),
                        rows: n,
                        positions,
                        device_first,
                    };
                    let compared = self.one(on_device, run)?;
                    let Some(Compared { seconds, apart }) = compared else {
                        let lost = self.device.lost().map(ToString::to_string);
                        return Ok(Err(lost.unwrap_or_default()));
                    };
                    let facts = self.device.dense().facts().clone();
                    if let Some(how) = wrong(&facts, apart) {
                        let lease = self.device.lease();
                        lease.keep_attention(of, Found::Wrong(how.clone()));
                        return Ok(Err(format!("it computes wrong results: {how}")));
                    }
                    times.same_bits &= apart == 0.0;
                    let cold = usize::from(device_first);
                    best[i][cold] = best[i][cold].min(seconds[cold]);
                }
            }
            let both = [&mut times.cpu, &mut times.device];
            for (i, samples) in both.into_iter().enumerate() {
                samples.0.push(line(n, positions, best.map(|of| of[i])));
            }
        }
        let found = Found::Attention(times.clone());
        self.device.lease().keep_attention(of, found);
        Ok(Ok(times))
    }

    /// Few and many positions for so many rows.
    fn positions(&self, rows: usize) -> [usize; 2] {
        let windows = self.config.window.iter().map(|&window| window as usize);
        let window = windows.max().filter(|_| !self.config.window.contains(&0));
        let most = (self.options.context - 1).min(window.unwrap_or(usize::MAX));
        let long = (LONG / rows).min(most);
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
            rows: n,
            positions,
            ..
        } = run;
        let mut numbers = Numbers::new((positions + n) as u64);
        let mut sequences = Vec::with_capacity(n);
        for row in 0..n {
            let mut sequence = Sequence::new(self.pool.sequence(positions + 1)?);
            sequence.assume(0, positions);
            self.fill(&mut sequence, number, positions, &mut numbers);
            sequence.kv.prepare(positions, 1);
            self.rope.fill(row, positions);
            sequences.push(sequence);
        }
        let mut spans: Vec<_> = sequences
            .iter_mut()
            .map(|sequence| Span {
                sequence,
                tokens: &[0],
            })
            .collect();
        let d = self.config.d_model as usize;
        let x = &mut self.scratch.normed[..n * d];
        x.iter_mut().for_each(|x| *x = numbers.next());
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
        for by_device in [run.device_first, !run.device_first] {
            let start = Moment::now();
            match by_device {
                false => layer.run(on, &mut spans, n, s),
                true if on_device.run(of, on, &mut spans, s) => layer.add_o_bias(n, s),
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
    let vectors = |all: &Option<[Vec<f32>; 3]>| all.as_ref().map(|all| all.concat());
    Some(OfDevice {
        matrices: numbers?.try_into().ok()?,
        quantizes: layer.o.dtype().is_grouped(),
        biases: vectors(&layer.qkv_bias).unwrap_or_default(),
        norms: (layer.qk_norm.as_ref()).map_or_else(Vec::new, |norms| norms.concat()),
        value_norm: layer.value_norm.is_some(),
        rotates: c.rotates(number as u32),
        sinks: layer.sinks.clone().unwrap_or_default(),
        first,
        window: c.window[number] as usize,
    })
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
