//! Checks every byte of a container.

use super::error::{Error, Result};
use super::format::{BankEntry, SUPERBLOCK_LEN, Section, Superblock, TensorEntry};
use super::layout::{BankPlace, Extent};
use super::limits::MAX_PROBLEMS;
use super::prove::superblock_error;
use super::reader::Container;
use super::stripes::StripeSums;
use xxhash_rust::xxh3::Xxh3;

/// One problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Offset from the container's first byte.
    pub offset: u64,
    /// The damaged part and its damage, without the file's name.
    pub what: String,
}

/// Result of [`Container::verify`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerifyReport {
    /// Bytes read and checked.
    pub bytes: u64,
    /// Dense tensors checked.
    pub tensors: u64,
    /// Bundles checked.
    pub bundles: u64,
    /// Bytes of alignment gaps, checked to be zero.
    pub gap_bytes: u64,
    /// The first problems in file order.
    pub problems: Vec<Problem>,
    /// Number of problems, listed or not.
    pub problem_count: u64,
}

impl VerifyReport {
    /// Whether there are no problems.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.problem_count == 0
    }
}

impl Container {
    /// Reads the whole container and checks every byte: superblock, sections, tensors, scales,
    /// bundles, and zeros in the gaps. Calls `progress` with (bytes done, total bytes). Continues
    /// after a problem, even a failed read.
    ///
    /// # Errors
    /// If the file cannot even be inspected.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<VerifyReport> {
        let facts = self.file().metadata().map_err(|source| Error::File {
            path: self.path().to_path_buf(),
            what: "inspect it",
            source,
        })?;
        let mut pass = Pass {
            container: self,
            progress,
            report: VerifyReport::default(),
            at: 0,
            buf: Vec::new(),
        };
        // Bytes appended or cut off since the container was opened. Inside another file, bytes may
        // follow.
        let (end, len) = (self.base() + self.file_len(), facts.len());
        if len < end || (len > end && self.base() == 0) {
            let path = self.path().to_path_buf();
            let (expected, found) = (end, len);
            pass.problem(
                self.file_len(),
                &if len < end {
                    Error::Truncated {
                        path,
                        expected,
                        found,
                    }
                } else {
                    Error::Trailing {
                        path,
                        expected,
                        found,
                    }
                },
            );
        }
        pass.superblock();
        for section in Section::ALL {
            pass.section(section);
        }
        pass.gap(self.file_len());
        pass.report.problems.sort_by_key(|p| p.offset);
        Ok(pass.report)
    }
}

/// One pass over the file, front to back.
struct Pass<'a> {
    container: &'a Container,
    progress: &'a mut dyn FnMut(u64, u64),
    report: VerifyReport,
    /// Everything before this offset is checked.
    at: u64,
    buf: Vec<u8>,
}

impl Pass<'_> {
    fn problem(&mut self, offset: u64, error: &Error) {
        self.report.problem_count += 1;
        if self.report.problems.len() < MAX_PROBLEMS {
            let what = error.to_string();
            // The report is about one file, so omit its name from each line.
            let prefix = format!("{}: ", self.container.path().display());
            let what = what.strip_prefix(&prefix).unwrap_or(&what).to_owned();
            self.report.problems.push(Problem { offset, what });
        }
    }

    /// Streams `extent`, after checking the gap before it. Records a failed read and returns false.
    fn stream(
        &mut self,
        extent: Extent,
        unit: u32,
        mut piece: impl FnMut(&mut Self, u64, &[u8]),
    ) -> bool {
        self.gap(extent.offset);
        self.pieces(extent, unit, &mut piece)
    }

    fn pieces(
        &mut self,
        extent: Extent,
        unit: u32,
        piece: &mut dyn FnMut(&mut Self, u64, &[u8]),
    ) -> bool {
        let source = self.container.source();
        let total = self.container.file_len();
        let mut buf = std::mem::take(&mut self.buf);
        let done = source.stream(extent, unit, &mut buf, |offset, bytes| {
            piece(self, offset, bytes);
            self.report.bytes += bytes.len() as u64;
            (self.progress)(self.report.bytes, total);
            Ok(())
        });
        self.buf = buf;
        self.at = extent.end();
        if let Err(error) = &done {
            let offset = match error {
                Error::Read { offset, .. } => *offset,
                _ => extent.offset,
            };
            self.problem(offset, error);
        }
        done.is_ok()
    }

    /// Checks that the bytes up to `end` are zero.
    fn gap(&mut self, end: u64) {
        let extent = Extent {
            offset: self.at,
            len: end.saturating_sub(self.at),
        };
        self.pieces(extent, 1, &mut |pass, offset, bytes| {
            pass.report.gap_bytes += bytes.len() as u64;
            if let Some(i) = bytes.iter().position(|&b| b != 0) {
                let (path, offset) = (pass.container.path().to_path_buf(), offset + i as u64);
                pass.problem(offset, &Error::Gap { path, offset });
            }
        });
    }

    fn superblock(&mut self) {
        let extent = Extent {
            offset: 0,
            len: SUPERBLOCK_LEN as u64,
        };
        self.stream(extent, 1, |pass, _, bytes| {
            let expected = pass.container.superblock().encode();
            if bytes == expected {
                return;
            }
            let path = pass.container.path().to_path_buf();
            let fault = <&[u8; SUPERBLOCK_LEN]>::try_from(bytes).map(Superblock::decode);
            let error = match fault {
                Ok(Err(fault)) => superblock_error(&path, fault),
                // Valid, but not the one that was opened.
                _ => Error::File {
                    path,
                    what: "verify it",
                    source: std::io::Error::other("the file changed while it was open"),
                },
            };
            pass.problem(0, &error);
        });
    }

    fn section(&mut self, section: Section) {
        let container = self.container;
        match section {
            Section::Scales => {
                for (entry, place) in container.banks().iter().zip(&container.layout().banks) {
                    self.scales(entry, place);
                }
            }
            Section::Dense => {
                for tensor in container.tensors() {
                    self.tensor(tensor);
                }
            }
            Section::Bundles => {
                for (bank, place) in container.layout().banks.iter().enumerate() {
                    self.bank(bank, place);
                }
            }
            _ => self.hashed(section),
        }
    }

    fn hash(&mut self, extent: Extent) -> Option<u64> {
        let mut hash = Xxh3::new();
        self.stream(extent, 1, |_, _, bytes| hash.update(bytes))
            .then(|| hash.digest())
    }

    fn hashed(&mut self, section: Section) {
        let entry = self.container.superblock().sections[section as usize];
        if let Some(found) = self.hash(entry.extent)
            && found != entry.xxh3
        {
            let path = self.container.path().to_path_buf();
            let (offset, expected) = (entry.extent.offset, entry.xxh3);
            let error = Error::SectionChecksum {
                path,
                section,
                offset,
                expected,
                found,
            };
            self.problem(offset, &error);
        }
    }

    fn scales(&mut self, entry: &BankEntry, place: &BankPlace) {
        if place.scales.len > 0
            && let Some(found) = self.hash(place.scales)
            && let Err(error) = self.container.compare_scales(entry, found)
        {
            self.problem(place.scales.offset, &error);
        }
    }

    fn tensor(&mut self, tensor: &TensorEntry) {
        let extent = Extent {
            offset: tensor.offset,
            len: tensor.len,
        };
        let stripes = self.container.stripes(tensor);
        let (mut sums, mut damaged) = (stripes.map(StripeSums::new), None);
        let mut hash = Xxh3::new();
        let read = self.stream(extent, 1, |pass, _, bytes| {
            hash.update(bytes);
            if let (Some(stripes), Some(sums)) = (stripes, &mut sums) {
                sums.update(bytes, |index, found| {
                    let expected = pass.container.stripe_checksum(index);
                    if damaged.is_none() && expected != Some(found) {
                        let at = tensor.offset + (index - stripes.first) * stripes.len;
                        damaged = Some((at, expected.unwrap_or(0).into(), found.into()));
                    }
                });
            }
        });
        if !read {
            return;
        }
        let found = hash.digest();
        self.report.tensors += 1;
        let whole = (found != tensor.xxh3).then_some((tensor.offset, tensor.xxh3, found));
        // A stripe says where it is; the hash of the whole finds what is beyond 32 bits.
        if let Some((offset, expected, found)) = damaged.or(whole) {
            let (path, name) = (self.container.path().to_path_buf(), tensor.name.clone());
            self.problem(
                offset,
                &Error::TensorChecksum {
                    path,
                    name,
                    offset,
                    expected,
                    found,
                },
            );
        }
    }

    fn bank(&mut self, bank: usize, place: &BankPlace) {
        let g = *self.container.geometry();
        let mut neuron = 0;
        self.stream(place.data, g.stride, |pass, offset, bytes| {
            for (i, bundle) in bytes.chunks_exact(g.stride as usize).enumerate() {
                let at = offset + i as u64 * u64::from(g.stride);
                let (gate, rest) = bundle.split_at(g.gate_span as usize);
                if let Err(error) = pass.container.check_gate(bank, neuron, gate) {
                    pass.problem(at, &error);
                }
                if let Err(error) = pass.container.check_rest(bank, neuron, rest) {
                    pass.problem(at + u64::from(g.gate_span), &error);
                }
                neuron += 1;
                pass.report.bundles += 1;
            }
        });
    }
}
