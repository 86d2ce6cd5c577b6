//! Tensors over host memory, copied only if a graph's shape requires it.

use std::fmt::Debug;
use std::ops::Range;

use ort::value::{PrimitiveTensorElementType, TensorRef, ValueRef};

use crate::error::Error;
use crate::graph::{Form, Key, Numbers, Weights};

/// A tensor over host memory.
pub(super) fn tensor<'a, T, const N: usize>(
    shape: [usize; N],
    values: &'a [T],
) -> Result<ValueRef<'a>, Error>
where
    T: PrimitiveTensorElementType + Debug + Clone + 'static,
{
    let tensor = TensorRef::from_array_view((shape, values)).map_err(Error::of)?;
    Ok(tensor.into_dyn())
}

/// Stored rows as a tensor.
fn stored_rows<'a>(form: &Form, height: usize, rows: &'a [u8]) -> Result<ValueRef<'a>, Error> {
    let shape = [height, form.row_bytes];
    match form.weights {
        Weights::Bytes => tensor(shape, bytemuck::cast_slice::<u8, i8>(rows)),
        Weights::Nibbles(_) => tensor(shape, rows),
    }
}

/// Rows as a tensor for graphs of the given numbers; for floats nibbles have been [unpacked](Form::unpack).
pub(super) fn rows_as_read<'a>(
    form: &Form,
    numbers: Numbers,
    height: usize,
    rows: &'a [u8],
) -> Result<ValueRef<'a>, Error> {
    match form.is_unpacked(numbers) {
        false => stored_rows(form, height, rows),
        true => {
            let shape = [height, form.float_row_bytes()];
            tensor(shape, bytemuck::cast_slice::<u8, i8>(rows))
        }
    }
}

/// A range of stored rows as the input of a graph: in place, or padded or unpacked in `buffer`.
pub(super) fn rows_of_run<'a>(
    key: Key,
    stored: &'a [u8],
    range: &Range<usize>,
    buffer: &'a mut Vec<u8>,
) -> Result<ValueRef<'a>, Error> {
    let (form, height, len) = (&key.form, key.tile.height, key.form.row_bytes);
    let rows = match form.is_unpacked(key.numbers) {
        false => padded(stored, range, height, len, buffer),
        true => {
            buffer.resize(height * form.float_row_bytes(), 0);
            form.unpack(&stored[range.start * len..range.end * len], buffer);
            buffer
        }
    };
    rows_as_read(form, key.numbers, height, rows)
}

/// A range of items of `len` values each, as `count` items: in place, or padded with zeros in `buffer`.
pub(super) fn padded<'a, T: Copy + Default>(
    values: &'a [T],
    range: &Range<usize>,
    count: usize,
    len: usize,
    buffer: &'a mut Vec<T>,
) -> &'a [T] {
    let items = &values[range.start * len..range.end * len];
    if range.len() == count {
        return items;
    }
    buffer.clear();
    buffer.extend_from_slice(items);
    buffer.resize(count * len, T::default());
    buffer
}
