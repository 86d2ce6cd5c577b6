//! Points of a benchmark of whole runs: a share of the FFN in memory, and a variant.

use super::bound::Device;
use super::child::{Child, Decoding};
use super::facts::Facts;
use super::output::percent;
use super::rounds::{Series, in_turns};
use crate::Failure;
use crate::cli::BenchArgs;

/// One point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point<V> {
    /// Share of the FFN in memory.
    pub share: f64,
    /// What else varies.
    pub variant: V,
}

/// All variants at every share, share by share.
pub fn each<V: Copy>(shares: &[f64], variants: &[V]) -> Vec<Point<V>> {
    let at = |&share: &f64| {
        let variants = variants.iter();
        variants.map(move |&variant| Point { share, variant })
    };
    shares.iter().flat_map(at).collect()
}

/// Names of the points in progress messages.
pub fn names<V: Copy>(points: &[Point<V>], name: impl Fn(V) -> String) -> Vec<String> {
    let one = |p: &Point<V>| format!("{} at {}", name(p.variant), percent(p.share));
    points.iter().map(one).collect()
}

/// Everything needed to run a benchmark on one device.
pub struct Setup {
    /// Machine and file.
    pub facts: Facts,
    /// The device that the runs read from.
    pub device: Device,
    /// Starts the runs.
    pub child: Child,
}

impl Setup {
    /// For the model of `bench`, read through the engine `io`.
    ///
    /// # Errors
    /// A model or a device that cannot be opened.
    pub fn new(bench: &BenchArgs, io: &str) -> Result<Self, Failure> {
        Ok(Self {
            facts: Facts::of(&bench.model)?,
            device: Device::open(&bench.model, io, bench.quick)?,
            child: Child::new(bench)?,
        })
    }

    /// Runs `decoding` at the share of every point, interleaved; `more` gives the additional arguments of a variant.
    ///
    /// # Errors
    /// The first failure of a run.
    pub fn decode<V: Copy>(
        &mut self,
        decoding: &Decoding<'_>,
        rounds: u32,
        points: &[Point<V>],
        name: impl Fn(V) -> String,
        more: impl Fn(V) -> [String; 2],
    ) -> Result<Vec<Series>, Failure> {
        let (device, child) = (&mut self.device, &self.child);
        let names = names(points, name);
        in_turns(&names, rounds, &mut || device.measure(), &mut |i, _| {
            let Point { share, variant } = points[i];
            let [option, value] = more(variant);
            let run = Decoding { share, ..*decoding };
            child.run(&run.with(&[&option, &value]), None)
        })
    }
}
