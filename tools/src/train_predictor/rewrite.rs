//! Copies a container, checking everything, with a new PREDICTOR section.

use std::os::unix::fs::FileExt;
use std::path::Path;

use emberflow_storage::container::{Container, Spec, Unit, Writer};
use xxhash_rust::xxh3::xxh3_64;

use crate::{Failure, progress};

/// Writes `output` atomically.
pub fn with_predictors(
    container: &Container,
    output: &Path,
    section: &[u8],
) -> Result<(), Failure> {
    let g = *container.geometry();
    let source = format!(
        "predictors {:016x} {:016x}",
        xxh3_64(container.meta()),
        xxh3_64(section)
    );
    let spec = Spec {
        stats: container.read_stats()?,
        predictor_len: section.len() as u64,
        ..container.spec(source)
    };
    let bar = progress::bytes("copying the model", container.file_len());
    let mut writer = Writer::create(output, spec)?;
    if !writer.is_done(Unit::Predictor) {
        writer.write_predictor(section)?;
    }
    let mut bytes = Vec::new();
    for (i, tensor) in container.tensors().iter().enumerate() {
        if !writer.is_done(Unit::Tensor(i)) {
            bytes.resize(tensor.len as usize, 0);
            container.read_tensor(tensor, &mut bytes)?;
            let mut sink = writer.begin_tensor(i)?;
            sink.append(&bytes)?;
            sink.finish()?;
        }
        bar.inc(tensor.len);
    }
    let (span, per_neuron) = (g.gate_span as usize, g.scales_per_neuron as usize);
    let mut bundle = vec![0; g.stride as usize];
    for (i, bank) in container.banks().iter().enumerate() {
        if writer.is_done(Unit::Bank(i)) {
            bar.inc(bank.len);
            continue;
        }
        let mut scales = vec![0; bank.neurons as usize * per_neuron];
        if per_neuron > 0 {
            container.read_scales(i, &mut scales)?;
        }
        let mut sink = writer.begin_bank(i)?;
        for n in 0..bank.neurons {
            let at = container.base() + container.neuron_offset(i, n);
            let read = container.file().read_exact_at(&mut bundle, at);
            read.map_err(Failure::file(container.path()))?;
            container.check_bundle(i, n, &bundle)?;
            let gate = &bundle[..g.gate_len as usize];
            let rest = &bundle[span..span + g.rest_len as usize];
            let scales = &scales[n as usize * per_neuron..][..per_neuron];
            sink.append_neuron(gate, rest, scales)?;
            bar.inc(g.stride.into());
        }
        sink.finish()?;
    }
    writer.finish()?;
    bar.finish_and_clear();
    Ok(())
}
