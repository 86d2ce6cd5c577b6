//! Sinks that a packer streams the bytes of one unit into.

use xxhash_rust::xxh3::Xxh3;

use super::error::{Error, Result};
use super::journal::Sums;
use super::layout::Extent;
use super::limits::WRITE_BUFFER;
use super::stripes::StripeSums;
use super::unit::Unit;
use super::writer::{Writer, set_checksums, set_stripe};

impl Writer {
    /// Starts dense tensor `index`; the sink takes its bytes in pieces of any size.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn begin_tensor(&mut self, index: usize) -> Result<ByteSink<'_>> {
        self.begin(Unit::Tensor(index))
    }

    /// Starts the predictor section.
    ///
    /// # Errors
    /// Currently none.
    pub fn begin_predictor(&mut self) -> Result<ByteSink<'_>> {
        self.begin(Unit::Predictor)
    }

    fn begin(&mut self, unit: Unit) -> Result<ByteSink<'_>> {
        let (place, _) = self.places(unit)?;
        if let Some(done) = self.slot(unit) {
            *done = None;
        }
        Ok(ByteSink::new(self, unit, place))
    }

    /// Starts bank `index`; the sink takes its neurons in packed order.
    ///
    /// # Errors
    /// When there is no such bank.
    pub fn begin_bank(&mut self, index: usize) -> Result<BankSink<'_>> {
        let unit = Unit::Bank(index);
        let (data, scales) = self.places(unit)?;
        let row = self.bank_row(unit);
        if let Some(done) = self.slot(unit) {
            *done = None;
        }
        Ok(BankSink::new(self, index, row, data, scales))
    }

    /// Writes dense tensor `index` at once.
    ///
    /// # Errors
    /// As [`ByteSink::append`] and [`ByteSink::finish`].
    pub fn write_tensor(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        let mut sink = self.begin_tensor(index)?;
        sink.append(bytes)?;
        sink.finish()
    }

    /// Writes the predictor section at once.
    ///
    /// # Errors
    /// As [`ByteSink::append`] and [`ByteSink::finish`].
    pub fn write_predictor(&mut self, bytes: &[u8]) -> Result<()> {
        let mut sink = self.begin_predictor()?;
        sink.append(bytes)?;
        sink.finish()
    }
}

/// Takes the bytes of one tensor or of the predictor. Dropped unfinished, nothing is recorded.
pub struct ByteSink<'a> {
    writer: &'a mut Writer,
    unit: Unit,
    stream: Stream,
    /// Of a tensor.
    stripes: Option<StripeSums>,
    /// Byte of the checksum table at which those of stripes begin.
    first_stripe: usize,
}

impl<'a> ByteSink<'a> {
    pub(super) fn new(writer: &'a mut Writer, unit: Unit, place: Extent) -> Self {
        Self {
            stripes: writer.stripe_sums(unit),
            first_stripe: writer.first_stripe(),
            writer,
            unit,
            stream: Stream::new(place),
        }
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// If they exceed the specified length or the system refuses.
    pub fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        let total = self.stream.end().saturating_add(bytes.len() as u64);
        if total > self.stream.place.end() {
            return Err(self.length(total));
        }
        if let Some(stripes) = &mut self.stripes {
            let (table, first) = (&mut self.writer.checksums, self.first_stripe);
            stripes.update(bytes, |index, sum| set_stripe(table, first, index, sum));
        }
        while !bytes.is_empty() {
            let (head, rest) = bytes.split_at(bytes.len().min(WRITE_BUFFER));
            self.stream.buf.extend_from_slice(head);
            self.stream.flush_if_full(self.writer)?;
            bytes = rest;
        }
        Ok(())
    }

    /// Completes the unit.
    ///
    /// # Errors
    /// If bytes are missing or the system refuses.
    pub fn finish(mut self) -> Result<()> {
        if self.stream.end() != self.stream.place.end() {
            return Err(self.length(self.stream.end()));
        }
        self.stream.flush(self.writer)?;
        let sums = Sums {
            data: self.stream.hash.digest(),
            scales: 0,
        };
        self.writer.complete(self.unit, sums, self.stream.place.len)
    }

    fn length(&self, end: u64) -> Error {
        Error::Length {
            path: self.writer.target.clone(),
            what: match self.unit {
                Unit::Tensor(i) => {
                    let name = self
                        .writer
                        .spec
                        .tensors
                        .get(i)
                        .map_or("", |t| t.name.as_str());
                    format!("tensor {name}")
                }
                other => other.to_string(),
            },
            expected: self.stream.place.len,
            found: end.saturating_sub(self.stream.place.offset),
        }
    }
}

/// Takes the neurons of one bank. Dropping it unfinished records nothing.
pub struct BankSink<'a> {
    writer: &'a mut Writer,
    index: usize,
    /// Row of the next neuron in the checksum table.
    row: usize,
    data: Stream,
    scales: Stream,
}

impl<'a> BankSink<'a> {
    pub(super) fn new(
        writer: &'a mut Writer,
        index: usize,
        row: usize,
        data: Extent,
        scales: Extent,
    ) -> Self {
        let (data, scales) = (Stream::new(data), Stream::new(scales));
        Self {
            writer,
            index,
            row,
            data,
            scales,
        }
    }

    /// Appends the next neuron, and pads it. `gate` has `gate_len` bytes, `rest` `rest_len`, and
    /// `scales` `scales_per_neuron` (empty when inline).
    ///
    /// # Errors
    /// If a length is wrong, the bank is full, or the system refuses.
    pub fn append_neuron(&mut self, gate: &[u8], rest: &[u8], scales: &[u8]) -> Result<()> {
        let g = self.writer.spec.geometry;
        self.check("gate part", g.gate_len, gate)?;
        self.check("up/down part", g.rest_len, rest)?;
        self.check("scales", g.scales_per_neuron, scales)?;
        if self.data.end() >= self.data.place.end() {
            return Err(self.count(1));
        }
        let buf = &mut self.data.buf;
        let start = buf.len();
        buf.extend_from_slice(gate);
        buf.resize(start + g.gate_span as usize, 0);
        buf.extend_from_slice(rest);
        buf.resize(start + g.stride as usize, 0);
        let bundle = &buf[start..];
        set_checksums(
            &mut self.writer.checksums,
            self.row,
            bundle,
            g.gate_span as usize,
        );
        self.row += 1;
        self.scales.buf.extend_from_slice(scales);
        self.data.flush_if_full(self.writer)?;
        self.scales.flush_if_full(self.writer)
    }

    /// Completes the bank.
    ///
    /// # Errors
    /// If neurons are missing or the system refuses.
    pub fn finish(mut self) -> Result<()> {
        if self.data.end() != self.data.place.end() {
            return Err(self.count(0));
        }
        self.data.flush(self.writer)?;
        self.scales.flush(self.writer)?;
        let scales = if self.scales.place.len == 0 {
            0
        } else {
            self.scales.hash.digest()
        };
        let sums = Sums {
            data: self.data.hash.digest(),
            scales,
        };
        let bytes = self.data.place.len + self.scales.place.len;
        self.writer.complete(Unit::Bank(self.index), sums, bytes)
    }

    fn check(&self, part: &str, expected: u32, bytes: &[u8]) -> Result<()> {
        if bytes.len() as u64 == u64::from(expected) {
            return Ok(());
        }
        let bank = self.writer.spec.banks.get(self.index);
        let (layer, expert) = bank.map_or((0, 0), |b| (b.layer, b.expert));
        Err(Error::Length {
            path: self.writer.target.clone(),
            what: format!("{part} of a neuron of layer {layer} expert {expert}"),
            expected: expected.into(),
            found: bytes.len() as u64,
        })
    }

    /// The bank has more (`extra`) or fewer bundles than specified.
    fn count(&self, extra: u64) -> Error {
        let bank = self.writer.spec.banks.get(self.index);
        let (layer, expert) = bank.map_or((0, 0), |b| (b.layer, b.expert));
        let stride = u64::from(self.writer.spec.geometry.stride);
        Error::Length {
            path: self.writer.target.clone(),
            what: format!("the bank of layer {layer} expert {expert}"),
            expected: self.data.place.len,
            found: self.data.end() - self.data.place.offset + extra * stride,
        }
    }
}

/// Buffers, hashes and writes one extent.
struct Stream {
    place: Extent,
    /// File offset of the buffer.
    at: u64,
    buf: Vec<u8>,
    hash: Xxh3,
}

impl Stream {
    fn new(place: Extent) -> Self {
        let size = place.len.min(2 * WRITE_BUFFER as u64) as usize;
        Self {
            place,
            at: place.offset,
            buf: Vec::with_capacity(size),
            hash: Xxh3::new(),
        }
    }

    /// Offset after the last appended byte.
    fn end(&self) -> u64 {
        self.at + self.buf.len() as u64
    }

    fn flush_if_full(&mut self, writer: &Writer) -> Result<()> {
        if self.buf.len() < WRITE_BUFFER {
            Ok(())
        } else {
            self.flush(writer)
        }
    }

    fn flush(&mut self, writer: &Writer) -> Result<()> {
        self.hash.update(&self.buf);
        writer.write(self.at, &self.buf)?;
        self.at += self.buf.len() as u64;
        self.buf.clear();
        Ok(())
    }
}
