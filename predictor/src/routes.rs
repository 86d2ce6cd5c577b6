//! Collects routing statistics from a running model with experts.

use crate::stats::routing::{ExpertMisses, RoutedLayer, Routing};
use crate::stats::{ActivationStats, BATCHES, FORMAT_V2, Misses, Profile, Sample};

/// Marks a layer without routes.
const NONE: u16 = u16::MAX;

/// What is profiled: model, text and sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedSubject {
    /// Model and checkpoint, as [`Profile::model`].
    pub model: String,
    /// Hash of the text.
    pub text: u64,
    /// Experts by layer; 0 for a dense FFN.
    pub experts: Vec<u32>,
    /// Experts per token and layer.
    pub chosen: usize,
    /// Most tokens per window.
    pub window: usize,
    /// Most tokens whose routes are stored.
    pub stored: usize,
}

/// Statistics being collected.
#[derive(Debug)]
pub struct RouteRecorder {
    subject: RoutedSubject,
    routing: Routing,
    tokens: u64,
    pairs: u64,
    /// The current window, `[positions × layers × chosen]`, experts ascending.
    now: Vec<u16>,
    trace: RouteTrace,
}

/// Routes of the first tokens of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteTrace {
    layers: usize,
    chosen: usize,
    /// `[tokens × layers × chosen]`.
    routes: Vec<u16>,
    /// Visits of each layer's experts over all tokens.
    visits: Vec<Vec<u64>>,
}

impl RouteTrace {
    /// Number of stored tokens.
    pub fn tokens(&self) -> usize {
        self.routes.len() / (self.layers * self.chosen).max(1)
    }

    /// Experts that a token visits in a layer, ascending; none in a dense layer.
    pub fn experts(&self, token: usize, layer: usize) -> impl Iterator<Item = u32> {
        let first = (token * self.layers + layer) * self.chosen;
        let routes = self.routes.get(first..first + self.chosen).unwrap_or(&[]);
        let routed = routes.iter().filter(|&&expert| expert != NONE);
        routed.map(|&expert| u32::from(expert))
    }

    /// Visits of each expert, by layer.
    pub fn visits(&self) -> &[Vec<u64>] {
        &self.visits
    }
}

impl RouteRecorder {
    /// An empty recorder.
    pub fn new(subject: RoutedSubject) -> Self {
        let layers = subject
            .experts
            .iter()
            .map(|&n| RoutedLayer::new(n as usize));
        let row = subject.experts.len() * subject.chosen;
        Self {
            routing: Routing {
                experts: subject.experts.iter().copied().max().unwrap_or(0),
                chosen: subject.chosen as u32,
                layers: layers.collect(),
                misses: ExpertMisses::default(),
            },
            tokens: 0,
            pairs: 0,
            now: vec![NONE; row * subject.window],
            trace: RouteTrace {
                layers: subject.experts.len(),
                chosen: subject.chosen,
                routes: Vec::with_capacity(row * subject.stored),
                visits: Vec::new(),
            },
            subject,
        }
    }

    /// Bytes of a recorder.
    pub fn bytes_for(subject: &RoutedSubject) -> u64 {
        let row = 2 * subject.experts.len() * subject.chosen;
        let lists =
            |&n: &u32| 8 * (2 * n as usize + n as usize * (n as usize).saturating_sub(1) / 2);
        let counted: usize = subject.experts.iter().map(lists).sum();
        (row * (subject.window + subject.stored) + counted) as u64
    }

    /// Tokens counted.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Records the routes of a layer for the tokens of the window from `at` on. `experts` has
    /// [`RoutedSubject::chosen`] entries per token; the first `skip` tokens are not counted.
    pub fn see(
        &mut self,
        layer: usize,
        at: usize,
        skip: usize,
        experts: impl Iterator<Item = u32>,
    ) {
        let (layers, chosen) = (self.subject.experts.len(), self.subject.chosen);
        let mut experts = experts.skip(skip * chosen).peekable();
        let mut position = at;
        while experts.peek().is_some() && position < self.subject.window && layer < layers {
            let first = (position * layers + layer) * chosen;
            let routes = &mut self.now[first..first + chosen];
            for (route, expert) in routes.iter_mut().zip(&mut experts) {
                *route = u16::try_from(expert).unwrap_or(NONE);
            }
            routes.sort_unstable();
            position += 1;
        }
    }

    /// Ends a window of `tokens` tokens.
    pub fn end_window(&mut self, tokens: usize) {
        let (layers, chosen) = (self.subject.experts.len(), self.subject.chosen);
        let (row, tokens) = (layers * chosen, tokens.min(self.subject.window));
        self.tokens += tokens as u64;
        self.pairs += tokens.saturating_sub(1) as u64;
        for position in 0..tokens {
            for (number, layer) in self.routing.layers.iter_mut().enumerate() {
                let first = position * row + number * chosen;
                let now = &self.now[first..first + chosen];
                let before = match position {
                    0 => &[],
                    _ => &self.now[first - row..first - row + chosen],
                };
                count(layer, before, now);
            }
        }
        let left = self.subject.stored - self.trace.tokens().min(self.subject.stored);
        let part = &self.now[..tokens.min(left) * row];
        self.trace.routes.extend_from_slice(part);
        self.now.fill(NONE);
    }

    /// The stored routes.
    pub fn trace(&mut self) -> &RouteTrace {
        self.trace.visits = self
            .routing
            .layers
            .iter()
            .map(|l| l.visits.clone())
            .collect();
        &self.trace
    }

    /// The statistics, with the misses of a cache.
    pub fn stats(self, misses: ExpertMisses) -> ActivationStats {
        let mut steps = [0; BATCHES.len()];
        steps[0] = self.tokens;
        ActivationStats {
            format: FORMAT_V2.into(),
            tokens: self.tokens,
            layers: Vec::new(),
            profile: Some(Box::new(Profile {
                model: self.subject.model,
                texts: vec![self.subject.text],
                window: self.subject.window as u32,
                pairs: self.pairs,
                steps,
                banks: Vec::new(),
                sample: Sample::default(),
                misses: Misses::default(),
                routing: Some(Routing {
                    misses,
                    ..self.routing
                }),
            })),
        }
    }
}

/// Counts the experts of a token and of the token before it, both ascending.
fn count(layer: &mut RoutedLayer, before: &[u16], now: &[u16]) {
    let known = layer.visits.len();
    let routed = || (now.iter().map(|&e| usize::from(e))).filter(move |&e| e < known);
    for expert in routed() {
        layer.visits[expert] += 1;
        layer.again[expert] += u64::from(before.binary_search(&(expert as u16)).is_ok());
        for other in routed().filter(|&other| other > expert) {
            let at = layer.pair(expert, other);
            layer.together[at] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::ExpertStats;

    fn subject() -> RoutedSubject {
        RoutedSubject {
            model: "m 01".into(),
            text: 7,
            experts: vec![6, 0, 6],
            chosen: 2,
            window: 8,
            stored: 11,
        }
    }

    /// The experts of a token in the router's order.
    fn routes(window: usize, token: usize, layer: usize) -> [u32; 2] {
        let a = (window * 5 + token / 2 + layer) as u32 % 6;
        [(a + 3) % 6, a]
    }

    #[test]
    fn counts_are_those_of_a_naive_count() {
        let mut recorder = RouteRecorder::new(subject());
        let lengths = [8usize, 8, 3];
        for (window, &len) in lengths.iter().enumerate() {
            // Chunks of three; the first token is not counted.
            for from in (0..len + 1).step_by(3) {
                let tokens = 3.min(len + 1 - from);
                let skip = usize::from(from == 0);
                for layer in [0, 2] {
                    let experts =
                        (from..from + tokens).flat_map(|t| routes(window, t.max(1) - 1, layer));
                    recorder.see(layer, from + skip - 1, skip, experts);
                }
            }
            recorder.end_window(len);
        }
        let trace = recorder.trace().clone();
        assert_eq!(trace.tokens(), 11);
        assert_eq!(trace.experts(9, 1).count(), 0);
        let mut expected = routes(1, 1, 2);
        expected.sort_unstable();
        assert!(trace.experts(9, 2).eq(expected));
        let stats = recorder.stats(ExpertMisses::default());
        assert_eq!(stats.tokens, 19);
        let profile = stats.profile.as_deref().unwrap();
        assert_eq!(profile.pairs, 16);
        let routing = profile.routing.as_ref().unwrap();
        assert!(routing.layers[1].visits.is_empty());
        for layer in [0, 2] {
            let found = &routing.layers[layer];
            let has = |w: usize, t: usize, e: usize| routes(w, t, layer).contains(&(e as u32));
            let all = || (0..3).flat_map(|w| (0..lengths[w]).map(move |t| (w, t)));
            for e in 0..6 {
                let visits = all().filter(|&(w, t)| has(w, t, e)).count() as u64;
                assert_eq!(found.visits[e], visits);
                let again = all().filter(|&(w, t)| t > 0 && has(w, t, e) && has(w, t - 1, e));
                assert_eq!(found.again[e], again.count() as u64);
                for other in e + 1..6 {
                    let both = all().filter(|&(w, t)| has(w, t, e) && has(w, t, other));
                    assert_eq!(found.together[found.pair(e, other)], both.count() as u64);
                }
            }
            let reuse = found.reuse(profile.pairs, routing.chosen);
            assert!(reuse > 0.4 && reuse < 1.0, "{reuse}");
        }
        let bytes = stats.to_bytes().unwrap();
        assert_eq!(ActivationStats::read(&bytes).unwrap(), stats);
        let mut twice = stats.clone();
        assert!(twice.merge(&stats).is_err(), "the same text");
        let mut other = stats.clone();
        other.profile.as_mut().unwrap().texts = vec![8];
        twice.merge(&other).unwrap();
        let both = twice.profile.as_deref().unwrap().routing.as_ref().unwrap();
        assert_eq!(both.layers[0].visits[1], 2 * routing.layers[0].visits[1]);
        for at in (0..bytes.len()).step_by(3) {
            assert!(ActivationStats::read(&bytes[..at]).is_err());
        }
        with_neurons(stats);
    }

    /// Statistics whose first layer's neurons are counted.
    fn counted(mut stats: ActivationStats) -> ActivationStats {
        let layer = &mut routing_of(&mut stats).layers[0];
        let each = (0..).zip(&layer.visits);
        layer.neurons = each
            .map(|(expert, &visits)| ExpertStats {
                expert,
                counts: vec![visits, 0, visits / 2],
                original: Vec::new(),
            })
            .collect();
        stats
    }

    fn routing_of(stats: &mut ActivationStats) -> &mut Routing {
        let routing = stats.profile.as_mut().and_then(|p| p.routing.as_mut());
        routing.unwrap()
    }

    fn with_neurons(stats: ActivationStats) {
        let mut counted = counted(stats.clone());
        let bytes = counted.to_bytes().unwrap();
        assert_eq!(ActivationStats::read(&bytes).unwrap(), counted);
        for at in (0..bytes.len()).step_by(3) {
            let cut = ActivationStats::read(&bytes[..at]);
            assert!(cut.is_err());
        }
        let firing = routing_of(&mut counted).layers[0].firing().unwrap();
        assert!(firing[0] == 1.0 && firing[1] == 0.0 && (0.3..=0.5).contains(&firing[2]));
        assert_eq!(routing_of(&mut counted).layers[2].firing(), None);
        // Experts with even numbers in another order.
        let mut moved = counted.clone();
        routing_of(&mut moved).permute(|layer, expert| match (layer, expert % 2) {
            (0, 0) => &[2, 0, 1],
            _ => &[],
        });
        let neurons = &routing_of(&mut moved).layers[0].neurons;
        assert_eq!(
            neurons[2].counts[1],
            2 * neurons[2].counts[0] + neurons[2].counts[1] % 2
        );
        assert_eq!(
            (&neurons[2].original[..], &neurons[1].original[..]),
            (&[2, 0, 1][..], &[][..])
        );
        let bytes = moved.to_bytes().unwrap();
        assert_eq!(ActivationStats::read(&bytes).unwrap(), moved);
        // Another text, in the same or another order, with and without counts.
        let mut other = counted.clone();
        other.profile.as_mut().unwrap().texts = vec![8];
        assert!(moved.clone().merge(&other).is_err());
        let mut without = stats;
        without.profile.as_mut().unwrap().texts = vec![8];
        assert!(counted.clone().merge(&without).is_err());
        let once = routing_of(&mut counted).layers[0].neurons[0].counts[0];
        counted.merge(&other).unwrap();
        let twice = routing_of(&mut counted).layers[0].neurons[0].counts[0];
        assert_eq!(twice, 2 * once);
    }

    #[test]
    fn impossible_routes_are_refused() {
        let mut recorder = RouteRecorder::new(subject());
        for layer in [0, 2] {
            let experts = (0..8).flat_map(|t| routes(0, t, layer));
            recorder.see(layer, 0, 0, experts);
        }
        recorder.end_window(8);
        let stats = recorder.stats(ExpertMisses::default());
        let change = |f: fn(&mut Routing)| {
            let mut bad = stats.clone();
            let routing = bad.profile.as_mut().and_then(|p| p.routing.as_mut());
            f(routing.unwrap());
            bad.to_bytes().is_err()
        };
        assert!(!change(|_| ()));
        let stats = counted(stats.clone());
        let change_neurons = |f: fn(&mut Routing)| {
            let mut bad = stats.clone();
            f(routing_of(&mut bad));
            bad.to_bytes().is_err()
        };
        assert!(!change_neurons(|_| ()));
        assert!(change_neurons(|r| r.layers[0].neurons[0].counts[0] += 1));
        assert!(change_neurons(|r| r.layers[0].neurons.truncate(5)));
        assert!(change_neurons(|r| r.layers[0].neurons[3]
            .counts
            .truncate(2)));
        assert!(change_neurons(|r| r.layers[0].neurons[3].expert = 4));
        assert!(change_neurons(
            |r| r.layers[0].neurons[1].original = vec![0, 1, 1]
        ));
        assert!(change(|r| r.chosen = 0));
        assert!(change(|r| r.layers[0].visits[0] += 1));
        assert!(change(|r| r.layers[0].again[0] = 9));
        assert!(change(|r| r.layers[0].together[0] += 1));
        assert!(change(|r| r.layers[0].visits.truncate(3)));
        assert!(change(|r| r.misses.missed[3] = 1));
    }
}
