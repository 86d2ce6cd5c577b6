//! The activation statistics that a container holds.

use emberflow_models::config::ModelConfig;
use emberflow_predictor::stats::ActivationStats;
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
    let [layers, experts, neurons] = [c.layers, c.experts, c.ffn].map(|n| n as usize);
    let stats = ActivationStats::parse(&stats, layers, experts, neurons)
        .map_err(Failure::stats(container.path()))?;
    Ok(Some(stats))
}

/// Original ids of the neurons by bank, where the container has them in another order; the packer
/// keeps them in the statistics. Empty: the original order.
///
/// # Errors
/// As [`activity`].
pub fn original_ids(container: &Container, c: &ModelConfig) -> Result<Vec<Vec<u32>>, Failure> {
    let layers = activity(container, c)?.map_or(Vec::new(), |stats| stats.layers);
    let experts = layers.into_iter().flat_map(|l| l.experts);
    Ok(experts.map(|e| e.original).collect())
}
