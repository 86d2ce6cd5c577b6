//! The activation statistics that a container holds.

use emberflow_models::config::{Bank, ModelConfig};
use emberflow_predictor::stats::{ActivationStats, StatsError};
use emberflow_storage::container::Container;

use crate::Failure;

/// The statistics, of a container of the model `c`; `None` where it has none.
///
/// # Errors
/// Where they are damaged or of a model of other sizes.
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

/// Parses statistics of the model `c`.
///
/// # Errors
/// Where they are damaged or of a model of other sizes.
pub fn parse(bytes: &[u8], c: &ModelConfig) -> Result<ActivationStats, StatsError> {
    let [layers, experts, neurons] = [c.layers, c.experts, c.ffn].map(|n| n as usize);
    match c.mixture {
        None => ActivationStats::parse(bytes, layers, experts, neurons),
        Some(_) => ActivationStats::parse_routing(bytes, layers, experts),
    }
}

/// How a container's routing statistics say that experts are visited.
pub struct Visits {
    /// Tokens that were counted.
    pub tokens: u64,
    /// Visits of each layer's experts; zeros in a layer without.
    pub visits: Vec<Vec<u64>>,
}

/// The routing statistics of a container of the model `c`; `None` where it has none.
///
/// # Errors
/// As [`activity`].
pub fn visits(container: &Container, c: &ModelConfig) -> Result<Option<Visits>, Failure> {
    let stats = activity(container, c)?;
    let routing = stats.and_then(|s| Some((s.tokens, s.profile?.routing?)));
    Ok(routing.map(|(tokens, routing)| {
        let all = routing.layers.into_iter().map(|layer| layer.visits);
        let each = |mut visits: Vec<u64>| {
            visits.resize(c.experts as usize, 0);
            visits
        };
        Visits {
            tokens,
            visits: all.map(each).collect(),
        }
    }))
}

/// Original ids of the neurons by bank, where the container has them in another order; the packer
/// keeps them in the statistics. Empty: the original order.
///
/// # Errors
/// As [`activity`].
pub fn original_ids(container: &Container, c: &ModelConfig) -> Result<Vec<Vec<u32>>, Failure> {
    let Some(stats) = activity(container, c)? else {
        return Ok(Vec::new());
    };
    if let Some(routing) = stats.routing() {
        let original = |bank: Bank| {
            let layer = routing.layers.get(bank.layer as usize)?;
            let expert = layer.neurons.get(bank.expert as usize)?;
            Some(expert.original.clone())
        };
        return Ok(c.banks().map(|b| original(b).unwrap_or_default()).collect());
    }
    let experts = stats.layers.into_iter().flat_map(|l| l.experts);
    Ok(experts.map(|e| e.original).collect())
}
