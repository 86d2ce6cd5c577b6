//! Forecasts beside simulations.

use super::*;

/// Largest deviation of a forecast from the simulation.
const WITHIN: f64 = 0.4;

fn ratio(pass: Compared) -> f64 {
    pass.forecast_ms / pass.simulated_ms
}

#[test]
fn plans_take_about_as_long_as_forecast() {
    let plans = plans().unwrap();
    assert_eq!(plans.len(), 4 * SHARES.len());
    let near = |pass: Compared| (ratio(pass) - 1.0).abs() < WITHIN;
    for plan in &plans {
        for pass in [plan.decode, plan.prompt] {
            assert!(
                pass.simulated_ms >= pass.apart_ms * (1.0 - 1e-9),
                "{plan:?}"
            );
            assert!(pass.apart_ms >= pass.bound_ms * (1.0 - 1e-9), "{plan:?}");
        }
        assert!(near(plan.prompt), "{plan:?}");
        assert!(near(plan.decode), "{plan:?}");
        // Parts read nothing.
        assert_eq!(
            plan.in_parts.is_some(),
            plan.npu && plan.resident_share == 1.0,
            "{plan:?}"
        );
        if let Some(parts) = plan.in_parts {
            assert!(parts.simulated_ms >= parts.apart_ms * (1.0 - 1e-9));
            assert!(parts.apart_ms >= parts.bound_ms * (1.0 - 1e-9));
        }
    }
    // A 7B model has use for the NPU, for tokens and for prompts.
    let [without, with] = [&plans[SHARES.len() - 1], &plans[2 * SHARES.len() - 1]];
    assert!(with.npu && with.npu_clusters_of_token > 1.0, "{with:?}");
    assert!(with.streamed > 0, "{with:?}");
    let in_parts = with.in_parts.expect("in parts").simulated_ms;
    assert!(3.0 * in_parts < without.prompt.simulated_ms, "{with:?}");
    assert!(in_parts < with.prompt.simulated_ms, "{with:?}");
    more_memory_is_never_slower(&plans);
}

fn more_memory_is_never_slower(plans: &[PhonePlan]) {
    for model in plans.chunks(SHARES.len()) {
        for two in model.windows(2) {
            let row = |pass: Compared| pass.simulated_ms / pass.rows as f64;
            let slower =
                |of: fn(&PhonePlan) -> Compared| row(of(&two[1])) > 1.02 * row(of(&two[0]));
            assert!(!slower(|plan| plan.decode), "{}", text(two));
            assert!(!slower(|plan| plan.prompt), "{}", text(two));
        }
        let [first, .., last] = model else { panic!() };
        assert!(first.decode.simulated_ms > 2.0 * last.decode.simulated_ms);
    }
}

/// Drawn neurons fire as often, and as often again, as the forecast assumes.
#[test]
fn tokens_are_drawn_with_the_models_statistics() {
    let planner = bamboo().unwrap();
    let tokens = draw(&planner.firing, 20, 7);
    let (share, all) = (
        planner.firing.share(),
        planner.shape.neurons * planner.shape.layers,
    );
    let mut again = 0;
    for two in tokens.windows(2) {
        for (one, next) in two[0].iter().zip(&two[1]) {
            again += one.iter().filter(|n| next.binary_search(n).is_ok()).count();
        }
    }
    let fired = |tokens: &[Fired]| tokens.iter().flatten().map(Vec::len).sum::<usize>() as f64;
    let found = fired(&tokens) / (tokens.len() * all) as f64;
    assert!((found / share - 1.0).abs() < 0.01, "{found} {share}");
    let again = again as f64 / fired(&tokens[..tokens.len() - 1]);
    assert!((again - PERSISTENCE).abs() < 0.01, "{again}");
}

#[test]
fn a_plan_is_drawn_with_a_lane_for_each_processor() {
    let svg = drawn().unwrap().svg();
    for lane in ["token: CPU", "token: NPU", "token: flash", "chunk: CPU"] {
        assert!(svg.contains(lane), "{lane}");
    }
}
