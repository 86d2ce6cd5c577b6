//! Our own formats: containers, statistics, predictors, traces.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use emberflow_benches::trace::{self, Reader};
use emberflow_engine::{Budget, Engine, Logits, Model, Options};
use emberflow_kernels::{DType, Narrow};
use emberflow_models::chat::{Conversation, Message};
use emberflow_predictor::section::{Directory, Kind, NewBank, Training, encode};
use emberflow_predictor::stats::routing::{ExpertMisses, RoutedLayer, Routing};
use emberflow_predictor::stats::{
    ActivationStats, BankProfile, ExpertStats, FORMAT, FORMAT_V2, LayerStats, Misses, Profile,
    Sample, Sampled,
};
use emberflow_predictor::{LowRankSpec, Quality, Reads};
use emberflow_storage::container::{
    BankSpec, BundleGeometry, Container, Prefer, Spec, TensorSpec, Writer,
};
use xxhash_rust::xxh3::xxh3_64;

use super::{Form, Target};
use crate::{fixtures, packed};

fn target(seeds: Vec<Vec<u8>>, form: Form, run: fn(&[u8]) -> bool) -> Target {
    let run = Box::new(run);
    Target { seeds, form, run }
}

pub(super) fn container() -> Target {
    let form = Form {
        seal: seal_container,
        ..Form::BINARY
    };
    target(containers(), form, use_container)
}

pub(super) fn model() -> Target {
    let form = Form {
        json: |bytes| {
            let (from, len) = u64_at(bytes, 56).zip(u64_at(bytes, 64))?;
            Some(from as usize..from.checked_add(len)? as usize)
        },
        seal: seal_container,
        ..Form::BINARY
    };
    target(models(), form, use_model)
}

pub(super) fn stats() -> Target {
    let form = Form {
        seal: seal_stats,
        ..Form::BINARY
    };
    target(vec![profile()], form, use_stats)
}

pub(super) fn stats_json() -> Target {
    target(vec![counts()], Form::JSON, use_stats)
}

pub(super) fn predictor() -> Target {
    target(vec![section()], Form::BINARY, use_section)
}

pub(super) fn trace() -> Target {
    let form = Form {
        json: |bytes| {
            let len = u32::from_le_bytes(*bytes.get(8..)?.first_chunk()?);
            Some(12..12 + len as usize)
        },
        seal: seal_trace,
        ..Form::BINARY
    };
    target(vec![tokens()], form, use_trace)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn put64(bytes: &mut [u8], at: usize, value: u64) {
    if let Some(to) = bytes.get_mut(at..at + 8) {
        to.copy_from_slice(&value.to_le_bytes());
    }
}

/// A scratch file for all runs: creating one for each would take longer than the reader.
fn scratch(bytes: &[u8]) -> File {
    thread_local! {
        static FILE: RefCell<File> = RefCell::new(tempfile::tempfile().expect("scratch file"));
    }
    FILE.with_borrow(|file| {
        file.set_len(0).expect("scratch file");
        file.write_all_at(bytes, 0).expect("scratch file");
        file.try_clone().expect("scratch file")
    })
}

/// Two containers: some of everything, and no optional part.
fn containers() -> Vec<Vec<u8>> {
    let tensor = |name: &str, dims: &[u64], len| TensorSpec {
        name: name.into(),
        dtype: 3,
        dims: dims.to_vec(),
        len,
    };
    let bank = |layer, expert, neurons| BankSpec {
        layer,
        expert,
        neurons,
        flags: 0,
    };
    let geometry = |prefer| BundleGeometry::choose(100, 13, 200, 26, 512, prefer);
    let bare = Spec {
        geometry: geometry(Prefer::Inline).expect("a geometry"),
        bundle_dtype: 1,
        meta: Vec::new(),
        stats: Vec::new(),
        predictor_len: 0,
        tensors: Vec::new(),
        banks: vec![bank(3, 2, 2)],
        source: String::new(),
    };
    let full = Spec {
        geometry: geometry(Prefer::Resident).expect("a geometry"),
        meta: br#"{"name":"test"}"#.to_vec(),
        stats: b"counts".to_vec(),
        predictor_len: 333,
        tensors: vec![tensor("embed", &[10, 7], 280), tensor("norm", &[7], 28)],
        banks: vec![bank(0, 0, 3), bank(1, 0, 2), bank(1, 1, 1)],
        source: "checkpoint a".into(),
        ..bare.clone()
    };
    vec![write_container(&full), write_container(&bare)]
}

fn write_container(spec: &Spec) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.ember");
    let write = || {
        let mut writer = Writer::create(&path, spec.clone())?;
        if spec.predictor_len > 0 {
            writer.write_predictor(&vec![5; spec.predictor_len as usize])?;
        }
        for (i, tensor) in spec.tensors.iter().enumerate() {
            let mut sink = writer.begin_tensor(i)?;
            sink.append(&vec![6; tensor.len as usize])?;
            sink.finish()?;
        }
        let g = &spec.geometry;
        let part = |len: u32| vec![7; len as usize];
        for (i, bank) in spec.banks.iter().enumerate() {
            let mut sink = writer.begin_bank(i)?;
            for _ in 0..bank.neurons {
                sink.append_neuron(
                    &part(g.gate_len),
                    &part(g.rest_len),
                    &part(g.scales_per_neuron),
                )?;
            }
            sink.finish()?;
        }
        writer.finish()
    };
    write().expect("a container");
    std::fs::read(&path).expect("a container")
}

/// Repairs the checksums of tables and sections, and that of the superblock. Numbers are those of
/// the DATA LAYOUT diagram, so that the reader does not check itself.
fn seal_container(bytes: &mut [u8]) {
    if bytes.len() < 4096 {
        return;
    }
    for section in [0, 1, 2, 3, 5, 6] {
        let at = 56 + 24 * section;
        let range = u64_at(bytes, at).zip(u64_at(bytes, at + 8));
        let range = range.and_then(|(from, len)| Some(from..from.checked_add(len)?));
        let part = range.and_then(|r| bytes.get(r.start as usize..r.end as usize));
        if let Some(hash) = part.map(xxh3_64) {
            put64(bytes, at + 16, hash);
        }
    }
    let hash = xxh3_64(&bytes[..4088]);
    put64(bytes, 4088, hash);
}

fn use_container(bytes: &[u8]) -> bool {
    let len = bytes.len() as u64;
    let Ok(container) = Container::open_at(scratch(bytes), Path::new("fuzz"), 0, len) else {
        return false;
    };
    let report = container.verify(&mut |_, _| {}).expect("the file is there");
    let read = read_container(&container);
    assert!(
        read.is_ok() || !report.is_clean(),
        "verify missed what reading finds"
    );
    let stride = container.geometry().stride as usize;
    for (b, bank) in container.banks().iter().enumerate() {
        let last = container.neuron_offset(b, bank.neurons - 1);
        assert!(last + stride as u64 <= container.file_len());
        let _ = container.check_bundle(b, 0, &vec![0; stride]);
    }
    if report.is_clean() {
        let mut sealed = bytes.to_vec();
        seal_container(&mut sealed);
        assert!(sealed == bytes, "damage went unnoticed");
    }
    true
}

fn read_container(container: &Container) -> emberflow_storage::Result<()> {
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

/// A packed model: its sections are meaningful to the engine.
fn models() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().expect("a folder");
    let model = |name: &str, quant| {
        let path = packed(&fixtures().join("models").join(name), dir.path(), quant);
        let opened = Model::load(&path).expect("a model");
        next_tokens(opened).expect("two tokens");
        std::fs::read(path).expect("a container")
    };
    vec![
        model("relu", DType::Q4),
        model("qwen2", DType::Q4k),
        model("opt", DType::Q4),
        model("relu", DType::Q4c),
        model("qwen2", DType::Q8c),
    ]
}

fn use_model(bytes: &[u8]) -> bool {
    let len = bytes.len() as u64;
    let opened = Container::open_at(scratch(bytes), Path::new("fuzz"), 0, len);
    let Some(model) = opened.ok().and_then(|c| Model::open(c).ok()) else {
        return false;
    };
    let text = model.text();
    if let Ok(tokens) = text.encode(" Ab 1é😀<s>") {
        let _ = text.tokenizer().decode(&tokens, true);
    }
    if let Ok(Some(template)) = text.chat_template() {
        let _ = template.render(&Conversation {
            messages: vec![Message::new("user", "a")],
            add_generation_prompt: true,
            ..Conversation::default()
        });
    }
    drop(next_tokens(model));
    true
}

/// Passes two tokens through a model, if it opens: its weights may be any numbers.
pub(super) fn next_tokens(model: Model) -> Result<(), emberflow_engine::Error> {
    let options = Options {
        threads: 1,
        budget: Budget::Bytes(256 << 20),
        context: 4,
        ..Options::default()
    };
    let mut engine = Engine::open(model, options)?;
    let mut sequence = engine.new_sequence()?;
    for token in [1, 2] {
        engine.forward(&mut sequence, &[token], Logits::Last)?;
    }
    Ok(())
}

fn profile() -> Vec<u8> {
    let layer = |layer: u32, counts: [u64; 3]| LayerStats {
        layer,
        experts: vec![ExpertStats {
            expert: 0,
            counts: counts.to_vec(),
            original: vec![2, 0, 1],
        }],
    };
    let bank = || {
        let mut bank = BankProfile::new(3);
        [0.5, 0.5, 3.0].into_iter().for_each(|v| bank.gates.see(v));
        bank
    };
    let mut sample = Sample::new(4);
    for priority in [7, 3] {
        let bits = vec![0b101, 0b010];
        sample.insert(Sampled { priority, bits });
    }
    let mut misses = Misses::default();
    misses.needed[3] = 70;
    misses.missed[2][3] = 20;
    let stats = ActivationStats {
        format: FORMAT_V2.into(),
        tokens: 300,
        layers: vec![layer(0, [300, 200, 0]), layer(1, [1, 2, 3])],
        profile: Some(Box::new(Profile {
            model: "m 0123".into(),
            texts: vec![5, u64::MAX],
            window: 128,
            pairs: 290,
            steps: [300, 2, 2, 2, 2, 2],
            banks: vec![bank(), bank()],
            sample,
            misses,
            routing: Some(routing()),
        })),
    };
    stats.to_bytes().expect("statistics")
}

/// Activation counts of an expert's neurons, in the packer's order.
fn inside(expert: u32) -> ExpertStats {
    ExpertStats {
        expert,
        counts: vec![100, 7, 0, 3],
        original: vec![2, 3, 0, 1],
    }
}

/// A dense layer and one of three experts, of which each of 300 tokens visits two.
fn routing() -> Routing {
    Routing {
        experts: 3,
        chosen: 2,
        layers: vec![
            RoutedLayer::default(),
            RoutedLayer {
                visits: vec![300, 200, 100],
                again: vec![290, 150, 0],
                together: vec![200, 100, 0],
                neurons: (0..3).map(inside).collect(),
            },
        ],
        misses: ExpertMisses {
            needed: 600,
            missed: std::array::from_fn(|size| 600 - 40 * size as u64),
        },
    }
}

fn counts() -> Vec<u8> {
    let expert = |expert| ExpertStats {
        expert,
        counts: vec![3, 0, 7],
        original: vec![1, 0, 2],
    };
    let layer = |layer| LayerStats {
        layer,
        experts: vec![expert(0), expert(1)],
    };
    let stats = ActivationStats {
        format: FORMAT.into(),
        tokens: 7,
        layers: vec![layer(0), layer(1)],
        profile: None,
    };
    stats.to_bytes().expect("statistics")
}

fn seal_stats(bytes: &mut [u8]) {
    if bytes.len() >= 24 {
        let (len, sum) = (bytes.len() as u64, xxh3_64(&bytes[24..]));
        put64(bytes, 8, len);
        put64(bytes, 16, sum);
    }
}

fn use_stats(bytes: &[u8]) -> bool {
    let Ok(stats) = ActivationStats::read(bytes) else {
        return false;
    };
    let (neurons, [_, experts, _]) = (stats.neurons(), stats.sizes());
    ActivationStats::parse(bytes, &neurons, experts).expect("its own sizes");
    stats.active_share();
    if let Some(profile) = &stats.profile {
        for (b, bank) in profile.banks.iter().enumerate().take(4) {
            bank.gates.quantile(0.5, 1);
            profile.sampled(b, bank.contributed.len());
        }
        if let Some(routing) = &profile.routing {
            routing.misses.rate(0.3);
            for layer in routing.layers.iter().take(4) {
                layer.covering(0.9);
                layer.reuse(profile.pairs, routing.chosen);
                layer.closest(stats.tokens);
            }
        }
    }
    let again = ActivationStats::read(&stats.to_bytes().expect("what was read is written"));
    assert_eq!(again.expect("what was written is read"), stats);
    let _ = stats.clone().merge(&stats);
    true
}

const LAYERS: usize = 8;
const D: usize = 70;
const NEURONS: usize = 5;

/// A layer of each kind.
fn section() -> Vec<u8> {
    let spec = LowRankSpec {
        d: D,
        neurons: NEURONS,
        rank: 3,
        fc1: DType::Q8,
        fc2: DType::F16,
        reads: Reads::Residual,
        relu: true,
    };
    let rows = |bytes: usize| vec![0x21; NEURONS * bytes];
    let low_rank = vec![
        vec![0x21; spec.fc1_bytes()],
        vec![0x21; spec.fc2_bytes()],
        rows(2),
    ];
    let signs = rows(emberflow_kernels::sign_bytes(D));
    let coarse = |narrow: Narrow| rows(narrow.row_bytes(D));
    let quality = Quality {
        pairs: 100 * NEURONS as u64,
        active: 50,
        predicted: 70,
        hit: 49,
    };
    let (two, three) = (Narrow::Two, Narrow::Three);
    let layers = [
        (Kind::None, vec![]),
        (Kind::Sign { limit: 33 }, vec![signs]),
        (Kind::LowRank(spec), low_rank),
        (Kind::Magnitude { threshold: 0.25 }, vec![]),
        (Kind::Coarse(two), vec![coarse(two), rows(2)]),
        (
            Kind::CoarseTop(two),
            vec![coarse(two), vec![0x21; 12], rows(2)],
        ),
        (Kind::Coarse(three), vec![coarse(three), rows(2)]),
        (
            Kind::CoarseTop(three),
            vec![coarse(three), vec![0x21; 12], rows(2)],
        ),
    ];
    let banks = layers.map(|(kind, parts)| NewBank {
        kind,
        quality,
        parts,
    });
    encode(
        D,
        &[NEURONS; LAYERS],
        Training {
            trained_on: 1000,
            measured_on: 100,
            target: 0.98,
        },
        &banks,
    )
}

fn use_section(bytes: &[u8]) -> bool {
    let len = bytes.len() as u64;
    let Ok(directory) = Directory::parse(bytes, len, D, &[NEURONS; LAYERS]) else {
        return false;
    };
    if directory.check(bytes).is_err() {
        return false;
    }
    assert_eq!(directory.len(), bytes.len());
    let block: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(bytes.to_vec());
    let entries: Vec<NewBank> = (0..LAYERS)
        .map(|layer| {
            let predictor = directory.predictor(layer, &block);
            let kind = directory.banks[layer].kind;
            assert_eq!(predictor.is_some(), kind.predicts());
            directory.bank(layer, bytes).expect("a checked bank")
        })
        .collect();
    let made = Training {
        trained_on: directory.trained_on,
        measured_on: directory.measured_on,
        target: directory.target,
    };
    assert!(
        encode(D, &[NEURONS; LAYERS], made, &entries) == bytes,
        "bytes that mean nothing"
    );
    true
}

fn tokens() -> Vec<u8> {
    let header = trace::Header {
        model: "m".into(),
        experts: false,
        layers: 2,
        neurons: 300,
        stride: 1024,
        rest_read: 512,
        sector: 512,
        offsets: vec![4096, 1 << 20],
        stats_tokens: 2,
        counts: vec![vec![1; 300]; 2],
    };
    let write = || {
        let mut writer = trace::Writer::new(Vec::new(), &header)?;
        writer.token(true, &[vec![0, 1, 299], vec![]])?;
        writer.token(false, &[vec![7], vec![128, 256]])?;
        writer.finish()
    };
    write().expect("a trace")
}

fn seal_trace(bytes: &mut [u8]) {
    if let Some(at) = bytes.len().checked_sub(8) {
        let sum = xxh3_64(&bytes[..at]);
        put64(bytes, at, sum);
    }
}

fn use_trace(bytes: &[u8]) -> bool {
    let Ok(mut reader) = Reader::new(bytes) else {
        return false;
    };
    let mut layers = Vec::new();
    loop {
        match reader.token(&mut layers) {
            Ok(Some(_)) => {
                for ids in &layers {
                    assert!(ids.is_sorted_by(|a, b| a < b));
                    assert!(ids.iter().all(|&id| (id as usize) < reader.header.neurons));
                }
            }
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}
