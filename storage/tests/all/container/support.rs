//! Small containers with known content.

use std::fs;
use std::path::{Path, PathBuf};

use emberflow_storage::container::{
    BankSpec, BundleGeometry, Container, Options, Prefer, Spec, TensorSpec, Unit, Writer,
};
use emberflow_storage::{Error, Result};
use fastrand::Rng;

/// `len` random bytes.
fn bytes(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rng.fill(&mut bytes);
    bytes
}

/// A specification, and data that follow from it and a seed.
#[derive(Clone, Debug)]
pub struct Model {
    pub spec: Spec,
    pub seed: u64,
}

impl Model {
    pub fn tensor(&self, index: usize) -> Vec<u8> {
        bytes(
            &mut Rng::with_seed(self.seed ^ (1 << 40) ^ index as u64),
            self.spec.tensors[index].len as usize,
        )
    }

    pub fn predictor(&self) -> Vec<u8> {
        bytes(
            &mut Rng::with_seed(self.seed ^ (1 << 41)),
            self.spec.predictor_len as usize,
        )
    }

    /// (gate, rest, scales) of a neuron.
    pub fn neuron(&self, bank: usize, neuron: u32) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let g = &self.spec.geometry;
        let seed = self.seed ^ ((bank as u64) << 44) ^ (u64::from(neuron) << 4);
        let mut rng = Rng::with_seed(seed);
        (
            bytes(&mut rng, g.gate_len as usize),
            bytes(&mut rng, g.rest_len as usize),
            bytes(&mut rng, g.scales_per_neuron as usize),
        )
    }

    /// All units in file order, the absent predictor left out.
    pub fn units(&self) -> Vec<Unit> {
        let predictor = (self.spec.predictor_len > 0).then_some(Unit::Predictor);
        let tensors = (0..self.spec.tensors.len()).map(Unit::Tensor);
        let banks = (0..self.spec.banks.len()).map(Unit::Bank);
        predictor.into_iter().chain(tensors).chain(banks).collect()
    }

    pub fn write_unit(&self, writer: &mut Writer, unit: Unit) -> Result<()> {
        match unit {
            Unit::Predictor => writer.write_predictor(&self.predictor()),
            Unit::Tensor(i) => {
                let mut sink = writer.begin_tensor(i)?;
                // pieces of a size that is no divisor
                for piece in self.tensor(i).chunks(97) {
                    sink.append(piece)?;
                }
                sink.finish()
            }
            Unit::Bank(i) => {
                let mut sink = writer.begin_bank(i)?;
                for n in 0..self.spec.banks[i].neurons {
                    let (gate, rest, scales) = self.neuron(i, n);
                    sink.append_neuron(&gate, &rest, &scales)?;
                }
                sink.finish()
            }
        }
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        let mut writer = Writer::create(path, self.spec.clone())?;
        for unit in self.units() {
            self.write_unit(&mut writer, unit)?;
        }
        writer.finish()
    }

    /// The whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.ember");
        self.write(&path).unwrap();
        fs::read(&path).unwrap()
    }
}

/// Journals every unit, so that each is a resume point.
pub const EACH_UNIT: Options = Options {
    checkpoint_bytes: 0,
};

pub fn tensor(name: &str, dims: &[u64], len: u64) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        dtype: 3,
        dims: dims.to_vec(),
        len,
    }
}

pub fn bank(layer: u32, expert: u32, neurons: u32) -> BankSpec {
    BankSpec {
        layer,
        expert,
        neurons,
        flags: layer ^ 5,
    }
}

/// Some of everything: resident scales, statistics, predictor, two layers, two experts.
pub fn full() -> Model {
    let geometry = BundleGeometry::choose(100, 13, 200, 26, 512, Prefer::Resident).unwrap();
    let spec = Spec {
        geometry,
        bundle_dtype: 7,
        meta: br#"{"name":"test"}"#.to_vec(),
        stats: b"counts".to_vec(),
        predictor_len: 333,
        tensors: vec![tensor("embed", &[10, 7], 280), tensor("norm", &[7], 28)],
        banks: vec![bank(0, 0, 3), bank(1, 0, 2), bank(1, 1, 1)],
        source: "checkpoint a".into(),
    };
    Model { spec, seed: 11 }
}

/// Without any optional part.
pub fn bare() -> Model {
    let geometry = BundleGeometry::choose(700, 44, 1400, 88, 512, Prefer::Inline).unwrap();
    let spec = Spec {
        geometry,
        bundle_dtype: 1,
        meta: Vec::new(),
        stats: Vec::new(),
        predictor_len: 0,
        tensors: Vec::new(),
        banks: vec![bank(3, 2, 2)],
        source: String::new(),
    };
    Model { spec, seed: 12 }
}

pub fn random(seed: u64) -> Model {
    let mut rng = Rng::with_seed(seed);
    let sector = [512, 1024, 2048, 4096][rng.usize(..4)];
    let scales = rng.u32(..2) * (1 + rng.u32(..90));
    let prefer = [Prefer::Auto, Prefer::Inline, Prefer::Resident][rng.usize(..3)];
    let (gate, rest) = (1 + rng.u32(..5000), 1 + rng.u32(..9000));
    let geometry = BundleGeometry::choose(gate, scales, rest, 2 * scales, sector, prefer).unwrap();
    let tensors = (0..rng.u64(..6))
        .map(|i| {
            let dims: Vec<u64> = (0..1 + rng.u64(..4)).map(|_| 1 + rng.u64(..9)).collect();
            tensor(&format!("layers.{i}.t"), &dims, 1 + rng.u64(..3000))
        })
        .collect();
    let mut banks = Vec::new();
    for layer in 0..rng.u32(..4) {
        for expert in 0..1 + rng.u32(..3) {
            banks.push(bank(2 * layer, 3 * expert, 1 + rng.u32(..20)));
        }
    }
    let (meta, stats) = (rng.usize(..6000), rng.u64(..2) * rng.u64(..5000));
    let spec = Spec {
        geometry,
        bundle_dtype: rng.u32(..),
        meta: bytes(&mut rng, meta),
        stats: bytes(&mut rng, stats as usize),
        predictor_len: rng.u64(..2) * rng.u64(..9000),
        tensors,
        banks,
        source: "seeded".into(),
    };
    Model { spec, seed }
}

/// A folder with one container in it.
pub struct Packed {
    pub path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Packed {
    pub fn new(bytes: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.ember");
        fs::write(&path, bytes).unwrap();
        Self { path, _dir: dir }
    }
}

/// Opens bytes as a container.
pub fn open(bytes: &[u8]) -> Result<Container, Error> {
    let packed = Packed::new(bytes);
    Container::open(&packed.path)
}

/// Reads everything a caller can read, with checks.
pub fn read_all(container: &Container) -> Result<(), Error> {
    for tensor in container.tensors() {
        container.read_tensor(tensor, &mut vec![0; tensor.len as usize])?;
    }
    let scales = container.geometry().scales_per_neuron as usize;
    for (i, bank) in container.banks().iter().enumerate() {
        container.read_scales(i, &mut vec![0; bank.neurons as usize * scales])?;
    }
    container.read_stats()?;
    container.read_predictor()?;
    Ok(())
}
