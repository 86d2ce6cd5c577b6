//! Sizes of the matrices around experts of another width.

use emberflow_models::config::ModelConfig;

/// Rows and columns of the matrices of layer `layer`; zeros without any.
pub(crate) fn matrices_apart(c: &ModelConfig, layer: u32) -> [[usize; 2]; 4] {
    match c.mixture_of(layer) {
        Some(_) => sizes(c),
        None => [[0; 2]; 4],
    }
}

/// Widths of the buffers of a layer: the experts' input, their sums, and the shared expert's products. Zeros without such
/// experts.
pub(crate) fn widths(c: &ModelConfig) -> [usize; 3] {
    let [input, _, before, _] = sizes(c);
    [input[0], input[0], before[0]]
}

/// Columns of the widest matrix; 0 without such experts.
pub(crate) fn widest(c: &ModelConfig) -> usize {
    let cols = sizes(c).map(|[_, cols]| cols);
    cols.into_iter().fold(0, usize::max)
}

/// Rows and columns of In, of Out, of the shared expert's matrices before and after its activation.
fn sizes(c: &ModelConfig) -> [[usize; 2]; 4] {
    let Some(mixture) = c.mixture.as_ref().filter(|mixture| mixture.width > 0) else {
        return [[0; 2]; 4];
    };
    let [d, width, shared] = [c.d_model, mixture.width, mixture.shared].map(|n| n as usize);
    let before = (2 - usize::from(c.ffn_kind.ungated)) * shared;
    [[width, d], [d, width], [before, d], [d, shared]]
}
