//! What a layer's mixer needs, declared once by the mixer. Loading, the buffers of a pass, the ledger and the planner
//! read the same declaration.

use std::ops::Index;

use emberflow_kernels::Activations;
use emberflow_models::names::Role;

use super::blockwise::ScoreSizes;
use crate::error::Error;
use crate::loader::Loader;
use crate::matrix::Matrix;

/// The declaration of a layer's mixer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Needs {
    /// The matrices that it multiplies, in the order in which a lane gets them.
    pub matrices: Vec<MatrixSpec>,
    /// Floats of all its buffers, by row of a pass (see [`buffers`]).
    pub row_floats: usize,
    /// Floats of recurrent state.
    pub state_floats: usize,
    /// Floats by row that its recurrence reads, if the state can be extended by some rows of a pass again; otherwise 0.
    pub input_floats: usize,
    /// Sizes of its attention over pages, if any.
    pub scores: Option<ScoreSizes>,
}

impl Needs {
    /// Most results by row of matrices that a lane multiplies at once: of all with the mixer's input, or of another one.
    pub fn lane_results(&self) -> usize {
        let shared = self.matrices.iter().filter(|spec| spec.shared);
        let (mut inputs, mut other) = (0, 0);
        for spec in shared {
            match spec.place {
                Place::Input => inputs += spec.rows,
                Place::Between | Place::Output => other = spec.rows.max(other),
            }
        }
        inputs.max(other)
    }
}

/// A matrix of a mixer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixSpec {
    pub role: Role,
    pub rows: usize,
    pub cols: usize,
    place: Place,
    /// Blocks of rows, each with its own input; `None` if all rows have the same.
    blocks: Option<usize>,
    /// Whether a lane may multiply it.
    shared: bool,
}

/// What a matrix multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The mixer's input.
    Input,
    /// Values between input and output.
    Between,
    /// The mixed values.
    Output,
}

impl MatrixSpec {
    /// Multiplies the mixer's input.
    pub fn input(role: Role, rows: usize, cols: usize) -> Self {
        Self {
            role,
            rows,
            cols,
            place: Place::Input,
            blocks: None,
            shared: true,
        }
    }

    /// Multiplies values between input and output.
    pub fn between(role: Role, rows: usize, cols: usize) -> Self {
        let place = Place::Between;
        Self {
            place,
            ..Self::input(role, rows, cols)
        }
    }

    /// Multiplies the mixed values.
    pub fn output(role: Role, rows: usize, cols: usize) -> Self {
        let place = Place::Output;
        Self {
            place,
            ..Self::input(role, rows, cols)
        }
    }

    /// The same for a mixer inside another one, whose output matrix is not the layer's.
    pub fn inner(self) -> Self {
        let place = match self.place {
            Place::Output => Place::Between,
            place => place,
        };
        Self { place, ..self }
    }

    /// The same, never multiplied by a lane.
    pub fn on_cpu(self) -> Self {
        Self {
            shared: false,
            ..self
        }
    }

    /// The same in `blocks` blocks of rows, each with its own input; no lane multiplies them.
    pub fn in_blocks(self, blocks: usize) -> Self {
        Self {
            blocks: Some(blocks),
            ..self.on_cpu()
        }
    }

    /// Whether its blocks of rows have their own inputs.
    pub fn is_in_blocks(&self) -> bool {
        self.blocks.is_some()
    }

    /// Whether it multiplies the mixer's input.
    pub fn is_input(&self) -> bool {
        self.place == Place::Input
    }

    /// Whether it multiplies the mixed values.
    pub fn is_output(&self) -> bool {
        self.place == Place::Output
    }

    /// Whether a lane may multiply it.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Elements of its input, by row of a pass.
    pub fn input_width(&self) -> usize {
        match self.blocks {
            None | Some(1) => self.cols,
            Some(blocks) => blocks * Activations::padded(self.cols),
        }
    }
}

/// Declares the buffers of a mixer: for each, its name and its floats by row of a pass. The first one holds the input of the
/// last projection at the end of a pass.
macro_rules! buffers {
    ($sizes:ident: $shape:ty { $($(#[$doc:meta])* $name:ident: $width:expr,)* }) => {
        /// The buffers of a pass.
        struct Buffers<'a> {
            $($(#[$doc])* $name: &'a mut [f32],)*
        }

        /// Floats of each buffer, by row.
        fn widths($sizes: $shape) -> [usize; [$(stringify!($name)),*].len()] {
            [$($width),*]
        }

        impl<'a> Buffers<'a> {
            /// The buffers of `rows` rows.
            fn split($sizes: $shape, rows: usize, block: &'a mut crate::scratch::RowBuffers) -> Self {
                let [$($name),*] = block.split(rows, widths($sizes));
                Self { $($name),* }
            }
        }
    };
}
pub(super) use buffers;

/// The matrices of a mixer, as it declared them.
#[derive(Debug, Default)]
pub(crate) struct Matrices(Vec<(MatrixSpec, Matrix)>);

impl Matrices {
    /// Loads and verifies the matrices of layer `layer`.
    pub fn load(from: &Loader<'_>, layer: u32, specs: &[MatrixSpec]) -> Result<Self, Error> {
        let load = |spec: &MatrixSpec| {
            let matrix = from.matrix(spec.role, layer, spec.rows, spec.cols)?;
            Ok((*spec, matrix))
        };
        specs.iter().map(load).collect::<Result<_, _>>().map(Self)
    }

    /// The matrix of a role, if the layer has it.
    pub fn get(&self, role: Role) -> Option<&Matrix> {
        let mut matrices = self.0.iter();
        matrices.find_map(|(spec, matrix)| (spec.role == role).then_some(matrix))
    }

    /// The output matrix, if any.
    pub fn output(&self) -> Option<&Matrix> {
        let mut matrices = self.0.iter();
        matrices.find_map(|(spec, matrix)| spec.is_output().then_some(matrix))
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Matrix> + Clone {
        self.0.iter().map(|(_, matrix)| matrix)
    }

    /// Those that a lane may multiply, of the mixer's input or of other values.
    pub fn shared(&self, inputs: bool) -> impl Iterator<Item = &Matrix> + Clone {
        let shared =
            (self.0.iter()).filter(move |(spec, _)| spec.shared && spec.is_input() == inputs);
        shared.map(|(_, matrix)| matrix)
    }

    /// All that a lane may multiply.
    pub fn shared_mut(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let shared = self.0.iter_mut().filter(|(spec, _)| spec.shared);
        shared.map(|(_, matrix)| matrix)
    }
}

impl Index<Role> for Matrices {
    type Output = Matrix;

    /// The matrix of a role that the mixer declares in every layer.
    fn index(&self, role: Role) -> &Matrix {
        match self.get(role) {
            Some(matrix) => matrix,
            None => unreachable!("{role:?} is not declared"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A single block of rows is multiplied as several are.
    #[test]
    fn one_block_is_in_blocks_too() {
        let spec = MatrixSpec::between(Role::O, 8, 4);
        assert!(!spec.is_in_blocks());
        assert!(
            [1, 3]
                .iter()
                .all(|&blocks| spec.in_blocks(blocks).is_in_blocks())
        );
    }
}
