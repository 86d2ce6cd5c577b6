//! Router of a mixture of experts: the experts that each row visits, and their weights.
//!
//! Scores become weights in f32 in a fixed order. Ties go to the lower expert number.

use emberflow_kernels::{Compute, math};
use emberflow_models::config::{ExpertGroups, Mixture, ModelConfig, Scoring};

use crate::ffn::{BankWork, Bias, Choice, FfnBiases, Rows};
use crate::input::Input;
use crate::matrix::Matrix;
use crate::norm::{Norm, sigmoid, softplus};

/// The router of a layer's experts.
#[derive(Debug)]
pub struct Router {
    /// Scores of the experts, `[experts × d_model]`.
    pub scores: Matrix,
    /// Biases of these scores, `[experts]`.
    pub bias: Option<Vec<f32>>,
    /// Added to the scores for choosing experts, `[experts]`.
    pub choice_bias: Option<Vec<f32>>,
    /// The experts of each token, `[vocab × chosen]`, if they do not follow from the scores.
    pub by_token: Option<Matrix>,
    /// Gate of the shared expert, `[d_model]`; `None` if it has no gate or does not exist.
    pub shared: Option<Vec<f32>>,
    /// Norm of the router's input, if that is the residual stream and not the input of the experts.
    pub norm: Option<Norm>,
    /// Factors of the experts' weights, `[experts]`.
    pub factors: Option<Vec<f32>>,
}

/// The routes of the rows of a layer.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    /// Experts per layer; experts per row (`chosen`).
    experts: usize,
    chosen: usize,
    /// Weights scale the experts' input, not their output.
    scales_input: bool,
    /// The rows' tokens, in a model with layers whose experts follow from the token.
    tokens: Vec<u32>,
    /// Scores, then probabilities, `[rows × experts]`.
    scores: Vec<f32>,
    /// Values by which a row's experts are chosen, if not the scores.
    by: Vec<f32>,
    /// By row, the chosen experts.
    choices: Vec<Choice>,
    /// Start of each expert's routes in `rows` and `weights`, plus the end.
    first: Vec<u32>,
    /// Rows by expert, ascending; their weights.
    rows: Vec<u32>,
    weights: Vec<f32>,
    /// Weight of the shared expert by row; empty without one.
    shared: Vec<f32>,
}

impl Routes {
    /// Buffers for up to `rows` rows.
    pub fn new(c: &ModelConfig, rows: usize) -> Self {
        let Some(mixture) = &c.mixture else {
            return Self::default();
        };
        let (experts, chosen) = (c.experts as usize, mixture.chosen as usize);
        Self {
            experts,
            chosen,
            scales_input: mixture.scales_input,
            tokens: Vec::with_capacity(token_rows(mixture, rows)),
            scores: vec![0.0; rows * experts],
            by: vec![0.0; by_len(mixture, experts)],
            choices: vec![Choice::default(); rows * chosen],
            first: vec![0; experts + 1],
            rows: vec![0; rows * chosen],
            weights: vec![0.0; rows * chosen],
            shared: Vec::with_capacity(rows),
        }
    }

    /// Bytes allocated by [`Routes::new`] and for a layer's units.
    pub fn bytes_for(c: &ModelConfig, rows: usize) -> usize {
        let Some(mixture) = &c.mixture else {
            return 0;
        };
        let (experts, chosen) = (c.experts as usize, mixture.chosen as usize);
        let choice = size_of::<Choice>() + size_of::<u32>() + size_of::<f32>();
        4 * (rows * (experts + 1) + by_len(mixture, experts) + token_rows(mixture, rows))
            + rows * chosen * choice
            + (experts + 1) * (size_of::<u32>() + size_of::<BankWork<'_>>())
    }

    /// Records the tokens of a pass, for layers whose experts follow from the token.
    pub fn set_tokens(&mut self, tokens: impl Iterator<Item = u32>) {
        self.tokens.clear();
        if self.tokens.capacity() > 0 {
            self.tokens.extend(tokens);
        }
    }

    /// The token of the first row; 0 if none is recorded.
    pub fn first_token(&self) -> u32 {
        self.tokens.first().copied().unwrap_or(0)
    }

    /// The experts of row `row`, ascending, if they follow from its token.
    pub fn of_token(&mut self, on: &Compute, router: &Router, row: usize) -> Option<&[Choice]> {
        let table = router.by_token.as_ref()?;
        let choices = &mut self.choices[row * self.chosen..][..self.chosen];
        from_table(on, table, self.tokens[row], &mut self.by, choices);
        choices.sort_unstable_by_key(|choice| choice.expert);
        Some(choices)
    }

    /// Chooses the experts of `n` rows, if they follow from their tokens; [`Routes::choose`] adds the weights. Returns whether
    /// they do.
    pub fn choose_by_token(&mut self, on: &Compute, router: &Router, n: usize) -> bool {
        let known = (0..n).all(|row| self.of_token(on, router, row).is_some());
        if known {
            self.sort(n);
        }
        known
    }

    /// Chooses the experts of every row of `input`.
    pub fn choose(
        &mut self,
        on: &Compute,
        router: &Router,
        mixture: &Mixture,
        input: Input<'_>,
        scratch: &mut [Vec<f32>],
    ) {
        let (n, experts, chosen) = (input.tokens(), self.experts, self.chosen);
        (router.scores).matmul(on, input, scratch, &mut self.scores);
        let rows = self.scores.chunks_exact_mut(experts);
        let choices = self.choices.chunks_exact_mut(chosen);
        for (row, (scores, choices)) in rows.zip(choices).take(n).enumerate() {
            for (score, bias) in scores.iter_mut().zip(router.bias.iter().flatten()) {
                *score += bias;
            }
            match (mixture.scoring, &router.by_token) {
                (scoring, Some(table)) => {
                    from_table(on, table, self.tokens[row], &mut self.by, choices);
                    to_shares(scores, scoring);
                    for choice in &mut *choices {
                        choice.weight = scores[choice.expert as usize];
                    }
                    // `from_table` sorts them by number, which decides between equal weights
                    choices.sort_unstable_by(|a, b| {
                        (b.weight.total_cmp(&a.weight)).then(a.expert.cmp(&b.expert))
                    });
                }
                _ if mixture.chooses_apart() => {
                    let bias = router.choice_bias.as_deref();
                    choose_by(scores, &mut self.by, bias, mixture, choices);
                }
                (Scoring::Softmax, _) => {
                    softmax(scores);
                    pick(scores, choices);
                }
                (Scoring::SqrtSoftplus, _) => {
                    to_shares(scores, mixture.scoring);
                    pick(scores, choices);
                }
                (Scoring::Sigmoid, _) => pick(scores, choices),
                (Scoring::SparseMixer, _) => mix(scores, choices, mixture.jitter),
            }
            weigh(choices, mixture);
            if let Some(factors) = &router.factors {
                let scaled = choices.iter_mut();
                scaled.for_each(|choice| choice.weight *= factors[choice.expert as usize]);
            }
        }
        self.sort(n);
        self.shared.clear();
        if let Some(gate) = &router.shared {
            let rows = input.x.chunks_exact(input.n());
            (self.shared).extend(rows.map(|x| sigmoid(on.cpu.dot_f32(gate, x))));
        } else if mixture.shared_bank() > 0 {
            self.shared.resize(n, 1.0);
        }
    }

    /// The choices of [`Routes::choose`] for `n` rows, row by row, largest weight first.
    pub fn choices(&self, n: usize) -> &[Choice] {
        &self.choices[..n * self.chosen]
    }

    /// Groups the choices of `n` rows by expert.
    fn sort(&mut self, n: usize) {
        let choices = &self.choices[..n * self.chosen];
        self.first.fill(0);
        for choice in choices {
            self.first[choice.expert as usize + 1] += 1;
        }
        for expert in 0..self.experts {
            self.first[expert + 1] += self.first[expert];
        }
        // After this loop `first[e]` is the end of expert e's routes, which is the start of e + 1.
        for (row, choices) in (0..).zip(choices.chunks_exact(self.chosen)) {
            for choice in choices {
                let next = &mut self.first[choice.expert as usize];
                self.rows[*next as usize] = row;
                self.weights[*next as usize] = choice.weight;
                *next += 1;
            }
        }
        self.first.copy_within(0..self.experts, 1);
        self.first[0] = 0;
    }

    /// Experts visited by at least one row, ascending.
    pub fn visited(&self) -> impl Iterator<Item = u32> + Clone + '_ {
        let experts = (0..).zip(self.first.windows(2));
        (experts.filter(|(_, ends)| ends[0] < ends[1])).map(|(expert, _)| expert)
    }

    /// Units of a layer of `n` rows whose banks begin at `bank` and have these biases: the visited
    /// experts in ascending order, then the shared one.
    pub fn units<'a>(
        &'a self,
        bank: u32,
        n: usize,
        biases: Option<&'a FfnBiases>,
    ) -> Vec<BankWork<'a>> {
        let mut units = Vec::with_capacity(self.experts + 1);
        for (expert, ends) in (bank..).zip(self.first.windows(2)) {
            let routes = ends[0] as usize..ends[1] as usize;
            if routes.is_empty() {
                continue;
            }
            let factors = Some(&self.weights[routes.clone()]);
            units.push(BankWork {
                bank: expert,
                rows: if routes.len() == n {
                    Rows::All(n)
                } else {
                    Rows::Some(&self.rows[routes])
                },
                weights: factors.filter(|_| !self.scales_input),
                scales: factors.filter(|_| self.scales_input),
                bias: Bias::of(biases, (expert - bank) as usize),
                hidden: None,
            });
        }
        if !self.shared.is_empty() {
            units.push(BankWork {
                bank: bank + self.experts as u32,
                rows: Rows::All(n),
                weights: Some(&self.shared[..n]),
                scales: None,
                bias: Bias::NONE,
                hidden: None,
            });
        }
        units
    }
}

/// Softmax in place.
fn softmax(scores: &mut [f32]) {
    let most = scores.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let mut sum = 0.0;
    for score in &mut *scores {
        *score = math::exp(*score - most);
        sum += *score;
    }
    scores.iter_mut().for_each(|score| *score /= sum);
}

/// Moves the largest scores, in descending order, to `choices`; their entries become −∞.
fn pick(scores: &mut [f32], choices: &mut [Choice]) {
    for choice in choices {
        let mut best = 0;
        for (expert, score) in scores.iter().enumerate() {
            if *score > scores[best] {
                best = expert;
            }
        }
        *choice = Choice {
            expert: best as u32,
            weight: scores[best],
        };
        scores[best] = f32::NEG_INFINITY;
    }
}

/// SparseMixer (arXiv 2409.12136) at inference: the highest scores one by one. The weight of each
/// is its softmax share among the remaining scores that differ from it by at most `2 · jitter`,
/// relative to the larger magnitude. Chosen entries become −∞.
fn mix(scores: &mut [f32], choices: &mut [Choice], jitter: f32) {
    for choice in choices {
        pick(scores, std::slice::from_mut(choice));
        let best = choice.weight;
        // Entries chosen before are −∞.
        let others = scores.iter().filter(|score| score.is_finite());
        let near = others.filter(|score| {
            let distance = (best - **score) / score.abs().max(best);
            // NaN if both are 0.
            distance.is_nan() || distance <= 2.0 * jitter
        });
        let sum = near.fold(1.0, |sum, score| sum + math::exp(*score - best));
        choice.weight = 1.0 / sum;
    }
}

/// Length of [`Routes::by`].
fn by_len(mixture: &Mixture, experts: usize) -> usize {
    experts * usize::from(mixture.chooses_apart() || !mixture.by_token.is_empty())
}

/// The experts of a token in a table. `numbers` is a buffer.
fn from_table(
    on: &Compute,
    table: &Matrix,
    token: u32,
    numbers: &mut [f32],
    choices: &mut [Choice],
) {
    let numbers = &mut numbers[..choices.len()];
    on.cpu.dequantize(table.row(token as usize), numbers);
    for (choice, number) in choices.iter_mut().zip(numbers) {
        choice.expert = *number as u32;
    }
}

/// Rows with recorded tokens.
fn token_rows(mixture: &Mixture, rows: usize) -> usize {
    rows * usize::from(!mixture.by_token.is_empty())
}

/// Softmax or sigmoid of the scores.
fn to_shares(scores: &mut [f32], scoring: Scoring) {
    match scoring {
        Scoring::Sigmoid => scores.iter_mut().for_each(|score| *score = sigmoid(*score)),
        Scoring::SqrtSoftplus => {
            (scores.iter_mut()).for_each(|score| *score = softplus(*score).sqrt());
        }
        Scoring::Softmax | Scoring::SparseMixer => softmax(scores),
    }
}

/// Experts chosen by their shares (softmax or sigmoids) plus `bias`, from the best groups; their
/// weights are the shares without `bias`. `by` holds as many numbers as `scores`.
fn choose_by(
    scores: &mut [f32],
    by: &mut [f32],
    bias: Option<&[f32]>,
    mixture: &Mixture,
    choices: &mut [Choice],
) {
    to_shares(scores, mixture.scoring);
    by.copy_from_slice(scores);
    for (by, bias) in by.iter_mut().zip(bias.into_iter().flatten()) {
        *by += bias;
    }
    if let Some(groups) = mixture.groups {
        keep_groups(by, groups);
    }
    pick(by, choices);
    for choice in choices {
        choice.weight = scores[choice.expert as usize];
    }
}

/// Excludes the experts of all but the best groups from `by`; of equal groups the lower one is
/// better.
fn keep_groups(by: &mut [f32], groups: ExpertGroups) {
    let (count, size) = (groups.count as usize, by.len() / groups.count as usize);
    let value = |group: &[f32]| {
        let two = group.iter().fold([f32::NEG_INFINITY; 2], |[a, b], &x| {
            if x > a { [x, a] } else { [a, b.max(x)] }
        });
        if groups.by_best {
            two[0]
        } else {
            two[0] + two[1]
        }
    };
    // each iteration excludes the worst remaining group
    for _ in groups.chosen..groups.count {
        let mut worst: Option<(usize, f32)> = None;
        for group in 0..count {
            let value = value(&by[group * size..][..size]);
            let out = value == f32::NEG_INFINITY;
            if !out && worst.is_none_or(|(_, least)| value <= least) {
                worst = Some((group, value));
            }
        }
        if let Some((group, _)) = worst {
            by[group * size..][..size].fill(f32::NEG_INFINITY);
        }
    }
}

/// Converts the scores of the chosen experts to weights; the scores of [`choose_by`] are shares.
fn weigh(choices: &mut [Choice], mixture: &Mixture) {
    if mixture.scoring == Scoring::Sigmoid && !mixture.chooses_apart() {
        (choices.iter_mut()).for_each(|choice| choice.weight = sigmoid(choice.weight));
    }
    if mixture.renormalise {
        let sum = choices.iter().fold(0.0, |sum, choice| sum + choice.weight);
        let sum = sum + mixture.epsilon;
        choices.iter_mut().for_each(|choice| choice.weight /= sum);
    }
    if mixture.scale != 1.0 {
        (choices.iter_mut()).for_each(|choice| choice.weight *= mixture.scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes(experts: usize, chosen: usize, shares: &[f32]) -> Routes {
        let n = shares.len() / experts;
        let mut routes = Routes {
            experts,
            chosen,
            choices: vec![Choice::default(); n * chosen],
            first: vec![0; experts + 1],
            rows: vec![0; n * chosen],
            weights: vec![0.0; n * chosen],
            ..Routes::default()
        };
        let mut shares = shares.to_vec();
        let rows = shares.chunks_exact_mut(experts);
        for (shares, choices) in rows.zip(routes.choices.chunks_exact_mut(chosen)) {
            pick(shares, choices);
        }
        routes.sort(n);
        routes
    }

    #[test]
    fn rows_are_grouped_by_expert() {
        let shares = [
            0.1, 0.4, 0.2, 0.3, //
            0.0, 0.6, 0.4, 0.0, //
            0.3, 0.3, 0.2, 0.2,
        ];
        let routes = routes(4, 2, &shares);
        let units = routes.units(10, 3, None);
        let found: Vec<_> = units
            .iter()
            .map(|unit| {
                let places = 0..unit.rows.len();
                let rows: Vec<u32> = places.map(|at| unit.rows.row(at) as u32).collect();
                (unit.bank, rows, unit.weights.unwrap_or_default().to_vec())
            })
            .collect();
        let expected = [
            (10, vec![2], vec![0.3]),
            (11, vec![0, 1, 2], vec![0.4, 0.6, 0.3]),
            (12, vec![1], vec![0.4]),
            (13, vec![0], vec![0.3]),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn equal_shares_go_to_the_lower_expert() {
        let mut choices = [Choice::default(); 3];
        pick(&mut [0.25; 4], &mut choices);
        assert_eq!(choices.map(|c| c.expert), [0, 1, 2]);
    }

    #[test]
    fn weights_are_made_of_the_chosen_scores() {
        let mixture = |scoring, renormalise| Mixture {
            chosen: 2,
            renormalise,
            scoring,
            ..Mixture::default()
        };
        let weights = |scoring, renormalise| {
            // Far above the point where an f32 sigmoid reaches 1.
            let mut choices = [Choice::default(); 2];
            pick(&mut [-1.0, 40.0, 0.0, 30.0], &mut choices);
            assert_eq!(choices.map(|c| c.expert), [1, 3]);
            weigh(&mut choices, &mixture(scoring, renormalise));
            choices.map(|c| c.weight)
        };
        assert_eq!(weights(Scoring::Softmax, false), [40.0, 30.0]);
        assert_eq!(weights(Scoring::Sigmoid, false), [1.0, 1.0]);
        assert_eq!(weights(Scoring::Sigmoid, true), [0.5, 0.5]);
    }

    /// `MiniMaxM2TopKRouter` and, with groups, `DeepseekV3TopkRouter` of transformers for these scores.
    #[test]
    fn biases_and_groups_choose_and_do_not_weigh() {
        let chosen = |scoring, groups| {
            let mixture = Mixture {
                chosen: 2,
                renormalise: true,
                choice_bias: true,
                scoring,
                groups,
                scale: 2.5,
                ..Mixture::default()
            };
            let mut scores = [0.5, -1.0, 2.0, -2.0, 0.0, 1.0];
            let bias = [0.0, 0.6, -0.5, 0.1, 0.3, 0.0];
            let (mut by, mut choices) = ([0.0; 6], [Choice::default(); 2]);
            choose_by(&mut scores, &mut by, Some(&bias), &mixture, &mut choices);
            weigh(&mut choices, &mixture);
            choices.map(|c| (c.expert, c.weight))
        };
        let close = |found: [(u32, f32); 2], expected: [(u32, f32); 2]| {
            for (found, expected) in found.into_iter().zip(expected) {
                assert_eq!(found.0, expected.0, "{found:?} {expected:?}");
                assert!(
                    (found.1 - expected.1).abs() < 1e-5,
                    "{found:?} {expected:?}"
                );
            }
        };
        let groups = |count, chosen| {
            Some(ExpertGroups {
                count,
                chosen,
                by_best: false,
            })
        };
        let free = [(1, 0.874_388_6), (4, 1.625_611_5)];
        close(chosen(Scoring::Sigmoid, None), free);
        // the third group is the best, the first one the next
        let grouped = [(4, 1.015_386_3), (5, 1.484_613_7)];
        close(chosen(Scoring::Sigmoid, groups(3, 1)), grouped);
        close(chosen(Scoring::Sigmoid, groups(3, 2)), free);
        let shares = [(1, 0.672_353_5), (4, 1.827_646_4)];
        close(chosen(Scoring::Softmax, None), shares);
    }

    /// Numbers of transformers' `sparsemixer` for these scores.
    #[test]
    fn sparsemixer_weighs_the_scores_near_the_best() {
        let mixed = |scores: [f32; 4], jitter| {
            let mut choices = [Choice::default(); 2];
            mix(&mut scores.clone(), &mut choices, jitter);
            choices.map(|c| (c.expert, c.weight))
        };
        let close = |found: [(u32, f32); 2], expected: [(u32, f32); 2]| {
            for (found, expected) in found.into_iter().zip(expected) {
                assert_eq!(found.0, expected.0);
                assert!(
                    (found.1 - expected.1).abs() < 1e-5,
                    "{found:?} {expected:?}"
                );
            }
        };
        let all = [1.0, 2.0, 1.99, -3.0];
        close(mixed(all, 0.01), [(1, 0.5025), (2, 1.0)]);
        let all = [-1.0, -2.0, -1.1, -4.0];
        close(mixed(all, 0.1), [(0, 0.524_979_2), (2, 1.0)]);
        close(mixed([0.0; 4], 0.01), [(0, 0.25), (1, 1.0 / 3.0)]);
        let all = [2.0, 2.0, -1.0, 1.99];
        close(mixed(all, 0.01), [(0, 0.334_442_6), (1, 0.5025)]);
    }

    #[test]
    fn shares_sum_to_one() {
        let mut scores = [100.0, 99.0, -50.0];
        softmax(&mut scores);
        assert!((scores.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!((scores[0] / scores[1] - std::f32::consts::E).abs() < 1e-4);
    }
}
