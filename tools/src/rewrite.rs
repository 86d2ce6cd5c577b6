//! Copies a container, checking everything, with other metadata or predictors.

use std::borrow::Cow;
use std::os::unix::fs::FileExt;
use std::path::Path;

use emberflow_storage::container::{Container, Spec, Unit, Writer};
use xxhash_rust::xxh3::xxh3_64;

use crate::{Failure, progress};

/// Differences from the copied container; `None` copies the original.
#[derive(Debug, Clone, Copy, Default)]
pub struct Changed<'a> {
    /// The METADATA section.
    pub meta: Option<&'a [u8]>,
    /// The PREDICTOR section.
    pub predictors: Option<&'a [u8]>,
}

/// Writes `output` atomically.
///
/// # Errors
/// A damaged container, or a file that cannot be read or written.
pub fn copy(container: &Container, output: &Path, changed: Changed<'_>) -> Result<(), Failure> {
    let g = *container.geometry();
    let section = match changed.predictors {
        Some(section) => Cow::Borrowed(section),
        None if container.predictor_len() > 0 => Cow::Owned(container.read_predictor()?),
        None => Cow::Borrowed(&[][..]),
    };
    let meta = changed.meta.unwrap_or(container.meta());
    let parts = [container.meta(), meta, &section].map(xxh3_64);
    let spec = Spec {
        stats: container.read_stats()?,
        predictor_len: section.len() as u64,
        meta: meta.to_vec(),
        ..container.spec(format!("copy {parts:016x?}"))
    };
    let bar = progress::bytes("copying the model", container.file_len());
    let mut writer = Writer::create(output, spec)?;
    if !section.is_empty() && !writer.is_done(Unit::Predictor) {
        writer.write_predictor(&section)?;
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
