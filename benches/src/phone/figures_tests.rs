//! The deviations of simulated figures from published ones do not change.

use super::figures::published;
use super::llm_npu::Orders;
use super::npumoe::Variants;
use super::{CHUNKS, simulate_all, values};

#[test]
fn figures_are_within_a_quarter_or_say_why_not() {
    let figures = simulate_all().figures;
    assert_eq!(
        figures.len(),
        published(),
        "every published figure is simulated"
    );
    let values = values(&Orders::of(CHUNKS), &Variants::run());
    assert_eq!(
        values.len(),
        published(),
        "every simulated value is published"
    );
    for figure in &figures {
        assert!(
            figure.ratio.is_finite() && !figure.rests_on.is_empty(),
            "{figure:?}"
        );
        assert_eq!(figure.within, figure.differs.is_empty(), "{figure:?}");
    }
    let within = figures.iter().filter(|figure| figure.within).count();
    assert!(within >= 30, "{within} of {}", figures.len());
}
