//! A test container of random neurons, and stores over it.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use emberflow_kernels::{Cpu, DType, Row, quantize_row};
use emberflow_models::config::ModelConfig;
use emberflow_storage::budget::Ledger;
use emberflow_storage::container::{
    BankSpec, BundleGeometry, Container, Prefer, ROW_CHECKSUM, Spec, TensorSpec, Unit, Writer,
    append_row,
};
use emberflow_storage::io::{FileSource, IoChoice};
use emberflow_storage::trace::Tracer;
use fastrand::Rng;

use crate::ablation::Ablation;
use crate::bundle::NeuronFormat;
use crate::error::Error;
use crate::memory::MemoryPlan;
use crate::options::{Lab, Options};
use crate::store::{Cover, Known, Layout, Naming, NeuronStore, ReadCosts, StoreSetup};

/// Names and configurations of the fixtures' models.
pub(crate) fn fixtures() -> Vec<(String, ModelConfig)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/models");
    let models = std::fs::read_dir(folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let opened = emberflow_models::open(&path).unwrap();
        (path.display().to_string(), opened.config().clone())
    });
    models.collect()
}

/// A container with seeded contents.
pub(crate) struct World {
    _dir: tempfile::TempDir,
    path: PathBuf,
    pub format: NeuronFormat,
    banks: Vec<BankSpec>,
    seed: u64,
}

/// Configuration of a store over a [`World`].
#[derive(Debug, Clone)]
pub(crate) struct StoreOptions {
    pub naming: Naming,
    pub gates_first: bool,
    pub ablation: Ablation,
    pub io: IoChoice,
    pub buffers: u32,
    pub costs: ReadCosts,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            naming: Naming::Predictor,
            gates_first: false,
            ablation: Ablation::Full,
            io: IoChoice::Pread,
            buffers: 3,
            costs: ReadCosts {
                cluster: 40.0,
                gate: 1.0,
                rest: 1.5,
                bundle: 2.0,
                fire_share: 0.2,
            },
        }
    }
}

/// `n` seeded numbers within ±1.
pub(crate) fn floats(seed: u64, n: usize) -> Vec<f32> {
    let mut random = Rng::with_seed(seed);
    (0..n).map(|_| 2.0 * random.f32() - 1.0).collect()
}

/// True with probability `share`.
pub(crate) fn chance(random: &mut Rng, share: f64) -> bool {
    random.f64() < share
}

/// Rows of the tensor `table` of every [`World`].
pub(crate) const TABLE_ROWS: u32 = 300;

/// One of them.
pub(crate) fn table_row(row: u32) -> Vec<u8> {
    floats(u64::from(row), 5)
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect()
}

impl World {
    /// Banks (layer, expert, neurons) of vectors with `d` elements.
    pub fn new(banks: &[(u32, u32, u32)], d: usize, dtype: DType, seed: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let format = NeuronFormat {
            dtype,
            d,
            inline_scales: true,
            ungated: false,
        };
        let geometry = BundleGeometry::choose(
            format.gate_len() as u32,
            0,
            format.rest_len() as u32,
            0,
            512,
            Prefer::Inline,
        )
        .unwrap();
        let banks: Vec<BankSpec> = banks
            .iter()
            .map(|&(layer, expert, neurons)| BankSpec {
                layer,
                expert,
                neurons,
                flags: 0,
            })
            .collect();
        let path = dir.path().join("world.ember");
        let spec = Spec {
            geometry,
            bundle_dtype: dtype.code(),
            meta: b"{}".to_vec(),
            stats: Vec::new(),
            predictor_len: 0,
            tensors: vec![TensorSpec {
                name: "table".into(),
                dtype: DType::F32.code(),
                dims: vec![TABLE_ROWS.into(), 5],
                len: u64::from(TABLE_ROWS) * (20 + ROW_CHECKSUM) as u64,
            }],
            banks: banks.clone(),
            source: String::new(),
        };
        let world = Self {
            _dir: dir,
            format,
            banks,
            seed,
            path: path.clone(),
        };
        let mut writer = Writer::create(&path, spec).unwrap();
        let mut table = Vec::new();
        (0..TABLE_ROWS).for_each(|row| append_row(&mut table, &table_row(row)));
        writer.write_tensor(0, &table).unwrap();
        for bank in 0..world.banks.len() {
            assert!(!writer.is_done(Unit::Bank(bank)));
            let mut sink = writer.begin_bank(bank).unwrap();
            for neuron in 0..world.banks[bank].neurons {
                let [gate, up, down] = world.vectors(bank as u32, neuron);
                sink.append_neuron(&gate, &[up, down].concat(), &[])
                    .unwrap();
            }
            sink.finish().unwrap();
        }
        writer.finish().unwrap();
        world
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.banks.last().map_or(0, |b| b.layer as usize + 1)
    }

    /// Banks of a layer.
    pub fn banks_of(&self, layer: usize) -> Vec<u32> {
        (0..)
            .zip(&self.banks)
            .filter(|(_, bank)| bank.layer as usize == layer)
            .map(|(number, _)| number)
            .collect()
    }

    pub fn neurons(&self, bank: u32) -> usize {
        self.banks[bank as usize].neurons as usize
    }

    /// The stored Gate, Up and Down of a neuron.
    pub fn vectors(&self, bank: u32, neuron: u32) -> [Vec<u8>; 3] {
        let seed = self.seed ^ u64::from(bank) << 40 ^ u64::from(neuron) << 8;
        let (dtype, d) = (self.format.dtype, self.format.d);
        [0, 1, 2].map(|kind| {
            let mut bytes = vec![0; dtype.row_bytes(d)];
            let (quants, scales) = bytes.split_at_mut(dtype.quants_bytes(d));
            quantize_row(dtype, &floats(seed + kind, d), quants, scales).unwrap();
            bytes
        })
    }

    /// The same, dequantized.
    pub fn floats(&self, bank: u32, neuron: u32) -> [Vec<f32>; 3] {
        let (dtype, d) = (self.format.dtype, self.format.d);
        self.vectors(bank, neuron).map(|bytes| {
            let mut floats = vec![0.0; d];
            Cpu::detect().dequantize(Row::inline(dtype, d, &bytes), &mut floats);
            floats
        })
    }

    /// A plan with `hot_clusters` clusters and `slots` slots.
    pub fn plan(&self, gates_resident: bool, hot_clusters: u64, slots: u64) -> MemoryPlan {
        let gate_banks = if gates_resident {
            self.banks.len() as u64
        } else {
            0
        };
        self.plan_partly(gate_banks, hot_clusters, slots)
    }

    /// The same with resident Gate rows in the first `gate_banks` banks.
    pub fn plan_partly(&self, gate_banks: u64, hot_clusters: u64, slots: u64) -> MemoryPlan {
        MemoryPlan {
            ledger: Ledger::new(1 << 30),
            gate_banks,
            banks: self.banks.len() as u64,
            hot_clusters,
            slots,
            // As many as the store has.
            stream_buffers: u32::MAX,
            tile_slots: 0,
            tiles: 0,
            streamed: 0,
            tables: [false; 3],
        }
    }

    /// The banks as byte ranges, and the file to read them from.
    pub fn layout(&self) -> Result<(Layout, FileSource), Error> {
        let container = Container::open(&self.path)?;
        Layout::new(container, self.format, 0..self.layers() as u32)
    }

    /// The bytes of a whole cluster as read into a stream buffer.
    pub fn cluster_bytes(&self, layout: &Layout, bank: u32, cluster: u32) -> Vec<u8> {
        let Cover { offset, len } = layout.cover_cluster(bank, cluster);
        let mut bytes = vec![0; len as usize];
        let (file, base) = (layout.container.file(), layout.container.base());
        file.read_exact_at(&mut bytes, base + offset).unwrap();
        bytes
    }

    /// A store that starts with `plan`; one cluster of each bank is hot.
    pub fn store(&self, plan: &MemoryPlan, setup: &StoreOptions) -> Result<NeuronStore, Error> {
        let (layout, source) = self.layout()?;
        let options = Options {
            lab: Lab {
                io: setup.io,
                ablation: setup.ablation,
                ..Lab::default()
            },
            ..Options::default()
        };
        let mut store = NeuronStore::open(StoreSetup {
            hot_wanted: vec![1; layout.banks()],
            layout,
            source,
            memory: plan,
            naming: setup.naming,
            buffers: setup.buffers,
            known: &Known::default(),
            costs: setup.costs,
            gates_first: setup.gates_first,
            always: Vec::new(),
            policy: setup.ablation.policy(),
            options: &options,
            tracer: Tracer::default(),
        })?;
        let outside = store.outside.clone();
        store.warm(plan, outside, &mut |_, _| Ok(()))?;
        Ok(store)
    }
}
