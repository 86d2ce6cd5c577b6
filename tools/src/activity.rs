//! Activation and routing statistics stored in a container.

use emberflow_models::config::{Bank, ModelConfig};
use emberflow_predictor::stats::{ActivationStats, StatsError};
use emberflow_storage::container::Container;

use crate::Failure;

/// Reads the activation statistics of a container of the model `c`; `None` if it has none.
///
/// # Errors
/// Damaged statistics, or statistics whose shape does not match the model.
pub fn activity(
    container: &Container,
    c: &ModelConfig,
) -> Result<Option<ActivationStats>, Failure> {
    let stats = container.read_stats()?;
    if stats.is_empty() {
        return Ok(None);
    }
    let stats = parse(&stats, c).map_err(Failure::stats(container.path()))?;
    Ok(Some(stats))
}

/// Parses activation statistics of the model `c`.
///
/// # Errors
/// Damaged statistics, or statistics whose shape does not match the model.
pub fn parse(bytes: &[u8], c: &ModelConfig) -> Result<ActivationStats, StatsError> {
    let layers = c.ffn_layers().count();
    match c.mixture {
        None => {
            let neurons: Vec<usize> = c.banks().map(|bank| bank.neurons as usize).collect();
            ActivationStats::parse(bytes, &neurons, 1)
        }
        Some(_) => ActivationStats::parse_routing(bytes, layers, c.experts as usize),
    }
}

/// Visit counts of the experts.
pub struct RouteCounts {
    /// Tokens counted.
    pub tokens: u64,
    /// Visits per layer with an FFN and expert; zeros for dense layers.
    pub visits: Vec<Vec<u64>>,
}

/// Reads the routing statistics of a container of the model `c`; `None` if it has none.
///
/// # Errors
/// As [`activity`].
pub fn visits(container: &Container, c: &ModelConfig) -> Result<Option<RouteCounts>, Failure> {
    let stats = activity(container, c)?;
    let routing = stats.and_then(|s| Some((s.tokens, s.profile?.routing?)));
    Ok(routing.map(|(tokens, routing)| {
        let all = routing.layers.into_iter().map(|layer| layer.visits);
        let each = |mut visits: Vec<u64>| {
            visits.resize(c.experts as usize, 0);
            visits
        };
        RouteCounts {
            tokens,
            visits: all.map(each).collect(),
        }
    }))
}

/// Original neuron numbers per bank, read from the statistics of a container whose neurons were reordered. Empty if
/// the container has the original order.
///
/// # Errors
/// As [`activity`].
pub fn original_ids(container: &Container, c: &ModelConfig) -> Result<Vec<Vec<u32>>, Failure> {
    let Some(stats) = activity(container, c)? else {
        return Ok(Vec::new());
    };
    if let Some(routing) = stats.routing() {
        let original = |bank: Bank| {
            let layer = routing.layers.get(bank.place as usize)?;
            let expert = layer.neurons.get(bank.expert as usize)?;
            Some(expert.original.clone())
        };
        return Ok(c.banks().map(|b| original(b).unwrap_or_default()).collect());
    }
    let experts = stats.layers.into_iter().flat_map(|l| l.experts);
    Ok(experts.map(|e| e.original).collect())
}
