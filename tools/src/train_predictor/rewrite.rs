//! A container with another PREDICTOR section: everything else is copied and checked.

use std::os::unix::fs::FileExt;
use std::path::Path;

use emberflow_storage::container::{BankSpec, Container, Spec, TensorSpec, Unit, Writer};
use xxhash_rust::xxh3::xxh3_64;

use crate::Failure;

/// Writes `output`, which appears when it is whole.
pub fn with_predictors(
    container: &Container,
    output: &Path,
    section: &[u8],
) -> Result<(), Failure> {
    let g = *container.geometry();
    let spec = Spec {
        geometry: g,
        bundle_dtype: container.bundle_dtype(),
        meta: container.meta().to_vec(),
        stats: container.read_stats()?,
        predictor_len: section.len() as u64,
        tensors: container
            .tensors()
            .iter()
            .map(|t| TensorSpec {
                name: t.name.clone(),
                dtype: t.dtype,
                dims: t.dims.clone(),
                len: t.len,
            })
            .collect(),
        banks: container
            .banks()
            .iter()
            .map(|b| BankSpec {
                layer: b.layer,
                expert: b.expert,
                neurons: b.neurons,
                flags: b.flags,
            })
            .collect(),
        source: format!(
            "predictors {:016x} {:016x}",
            xxh3_64(container.meta()),
            xxh3_64(section)
        ),
    };
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
    }
    let (span, per_neuron) = (g.gate_span as usize, g.scales_per_neuron as usize);
    let mut bundle = vec![0; g.stride as usize];
    for (i, bank) in container.banks().iter().enumerate() {
        if writer.is_done(Unit::Bank(i)) {
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
        }
        sink.finish()?;
    }
    writer.finish()?;
    Ok(())
}
