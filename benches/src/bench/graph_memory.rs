//! Memory of the graphs that an NPU's provider holds for a model: shared by all layers, as the engine's are, beside a set
//! of them for each layer (llm.npu, §3.2, shares graphs among chunks).
//!
//! The engine's graphs take weights as inputs, so that a graph serves all matrices whose rows have one form. Here the same
//! graphs are opened again for each layer.

use std::time::Instant;

use emberflow_npu::{Error, Form, Npu, Provider, Summed, Weights};
use emberflow_storage::{mem, trim_heap};

/// Graphs of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Graphs {
    /// How many.
    pub count: u64,
    /// Bytes by which resident memory grew, after each graph has run.
    pub bytes: u64,
    /// Seconds to open and to run them.
    pub seconds: f64,
}

/// Both ways.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GraphMemory {
    /// One set for all layers.
    pub shared: Graphs,
    /// A set for each layer, the first of which is the shared one.
    pub of_layers: Graphs,
}

impl GraphMemory {
    /// Share of the memory of sets of layers that one set saves.
    pub fn saved(&self) -> f64 {
        1.0 - self.shared.bytes as f64 / self.of_layers.bytes.max(1) as f64
    }
}

/// Rows of so many elements in bytes with one scale.
pub fn form(elements: usize) -> Form {
    let groups = elements.div_ceil(32);
    Form {
        weights: Weights::Bytes,
        summed: Summed::ByRow(0),
        groups,
        row_bytes: 32 * groups + 2,
    }
}

/// Resident bytes without what the allocator can give back.
fn resident() -> u64 {
    trim_heap();
    mem::rss().unwrap_or(0)
}

/// One set of graphs, and a set for each of `layers` layers.
///
/// # Errors
/// There is no library, or the provider does not take a graph.
pub fn measure(provider: Provider, forms: &[Form], layers: usize) -> Result<GraphMemory, Error> {
    let set = |forms: &[Form]| -> Result<Npu, Error> {
        let mut npu = Npu::open(provider)?;
        forms.iter().try_for_each(|&form| npu.prepare(form))?;
        Ok(npu)
    };
    // What the library allocates once is not a graph's.
    drop(set(&[form(64)])?);
    let (before, start) = (resident(), Instant::now());
    let grown = |sets: &[Npu]| Graphs {
        count: sets.iter().map(Npu::compiled).sum(),
        bytes: resident().saturating_sub(before),
        seconds: start.elapsed().as_secs_f64(),
    };
    let mut sets = vec![set(forms)?];
    let shared = grown(&sets);
    for _ in 1..layers {
        sets.push(set(forms)?);
    }
    Ok(GraphMemory {
        shared,
        of_layers: grown(&sets),
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Set in the process that measures.
    const ALONE: &str = "EMBERFLOW_MEASURES_ALONE";

    /// A set for each layer takes many times as much. In a process of its own, as other tests allocate too. Skipped without
    /// the library, unless `EMBERFLOW_NEEDS_ONNXRUNTIME` is set.
    #[test]
    fn layers_share_their_graphs() {
        if std::env::var_os(ALONE).is_some() {
            return alone();
        }
        let mut process = Command::new(std::env::current_exe().unwrap());
        let name = concat!(module_path!(), "::layers_share_their_graphs");
        let (_, name) = name.split_once("::").unwrap();
        process
            .args(["--exact", name, "--nocapture"])
            .env(ALONE, "1");
        let output = process.output().unwrap();
        let [out, told] = [&output.stdout, &output.stderr].map(|all| String::from_utf8_lossy(all));
        assert!(output.status.success(), "{told}{out}");
        assert!(out.contains("1 passed"), "{out}");
    }

    fn alone() {
        const LAYERS: usize = 8;
        let needed = std::env::var_os("EMBERFLOW_NEEDS_ONNXRUNTIME").is_some();
        let found = match measure(Provider::Cpu, &[form(320), form(960)], LAYERS) {
            Ok(found) => found,
            Err(e) => {
                assert!(!needed, "{e}");
                return;
            }
        };
        assert_eq!(found.of_layers.count, LAYERS as u64 * found.shared.count);
        assert!(
            found.shared.count >= 8 && found.shared.bytes > 0,
            "{found:?}"
        );
        // llm.npu: 75 %.
        assert!(found.saved() > 0.5, "{found:?}");
    }
}
