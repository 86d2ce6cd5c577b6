//! Memory as tensors, without a copy where it has a graph's shape.

use std::fmt::Debug;
use std::ops::Range;

use ort::value::{PrimitiveTensorElementType, TensorRef, ValueRef};

use crate::error::Error;
use crate::graph::{Form, Key, Numbers, Weights};

/// Memory as a tensor.
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

/// `height` rows as they are stored.
fn stored_rows<'a>(form: &Form, height: usize, rows: &'a [u8]) -> Result<ValueRef<'a>, Error> {
    let shape = [height, form.row_bytes];
    match form.weights {
        Weights::Bytes => tensor(shape, bytemuck::cast_slice::<u8, i8>(rows)),
        Weights::Nibbles(_) => tensor(shape, rows),
    }
}

/// The same as graphs of such numbers read them: of floats, nibbles are [unpacked](Form::unpack).
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

/// Some of all rows as a graph reads them: where they are, or in `buffer`, padded or unpacked.
pub(super) fn rows_of_run<'a>(
    key: Key,
    all: &'a [u8],
    some: &Range<usize>,
    buffer: &'a mut Vec<u8>,
) -> Result<ValueRef<'a>, Error> {
    let (form, height, len) = (&key.form, key.tile.height, key.form.row_bytes);
    let rows = match form.is_unpacked(key.numbers) {
        false => padded(all, some, height, len, buffer),
        true => {
            buffer.resize(height * form.float_row_bytes(), 0);
            form.unpack(&all[some.start * len..some.end * len], buffer);
            buffer
        }
    };
    rows_as_read(form, key.numbers, height, rows)
}

/// The items `some` of `all`, of `len` values each, as `count` items: where they are, or padded with zeros in `buffer`.
pub(super) fn padded<'a, T: Copy + Default>(
    all: &'a [T],
    some: &Range<usize>,
    count: usize,
    len: usize,
    buffer: &'a mut Vec<T>,
) -> &'a [T] {
    let items = &all[some.start * len..some.end * len];
    if some.len() == count {
        return items;
    }
    buffer.clear();
    buffer.extend_from_slice(items);
    buffer.resize(count * len, T::default());
    buffer
}
