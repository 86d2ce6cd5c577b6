//! Points of a benchmark of whole runs: a share of the FFN in memory and something that varies.

use super::bound::Device;
use super::child::{Child, Decoding};
use super::facts::Facts;
use super::output::percent;
use super::rounds::{Series, in_turns};
use crate::Failure;
use crate::cli::BenchArgs;

/// What is run at one point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point<V> {
    /// Share of the FFN in memory.
    pub share: f64,
    /// What else differs from point to point.
    pub variant: V,
}

/// Every variant at every share, share after share.
pub fn each<V: Copy>(shares: &[f64], variants: &[V]) -> Vec<Point<V>> {
    let at = |&share: &f64| {
        let variants = variants.iter();
        variants.map(move |&variant| Point { share, variant })
    };
    shares.iter().flat_map(at).collect()
}

/// What points are called where one line tells of each.
pub fn names<V: Copy>(points: &[Point<V>], name: impl Fn(V) -> String) -> Vec<String> {
    let one = |p: &Point<V>| format!("{} at {}", name(p.variant), percent(p.share));
    points.iter().map(one).collect()
}

/// What all runs of a benchmark on one device need.
pub struct Setup {
    /// Where and on what is measured.
    pub facts: Facts,
    /// The device that the runs read from.
    pub device: Device,
    /// Starts the runs.
    pub child: Child,
}

impl Setup {
    /// For the model of `bench`, read by the engine `io`.
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

    /// Runs `decoding` at the share of every point, all in turns, with what `more` gives for what
    /// else differs.
    ///
    /// # Errors
    /// That of the first run that fails.
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
