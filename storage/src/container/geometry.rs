//! How the bundle of one neuron is laid out: a Gate part, an Up/Down part, and padding.
//!
//! ```text
//!  0            gate_len       gate_span                     gate_span+rest_len      stride
//!  | Gate payload | zeros (split) | Up payload ‖ Down payload          | zeros          |
//! ```
//!
//! PowerInfer-2 §4.4 loads a bundle in two phases: the Gate part first, Up and Down only if the
//! neuron fires. Direct I/O reads whole sectors, so the geometry depends on sector boundaries:
//!
//! * *split*: the Gate part is padded to whole sectors, so each phase reads only its own part;
//! * *unsplit*: the parts touch. Phase one reads [`BundleGeometry::gate_read`] bytes, the sectors
//!   the Gate part touches, and phase two the remaining ones; together still one stride.
//!
//! Scales of quantised rows are *inline*, after their rows, or *resident*, in a separate section
//! that is held in RAM. Example, 4096 elements in 4 bits: 2048 bytes of quants and 256 of scales
//! per row. An inline bundle has 6912 bytes: 8192 with 4096-byte sectors, 7168 with 512-byte ones.
//! A resident one has 6144: 8192 in two parts of one page each, or 6144 with 512-byte sectors.

use super::layout_error::LayoutError;
use super::limits::{MAX_SCALES_PER_NEURON, MAX_STRIDE, SECTORS};

/// Where the scales of quantised rows are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// In the bundle, after their rows.
    Inline,
    /// In the SCALES section, for RAM.
    Resident,
}

/// Preference for [`BundleGeometry::choose`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Prefer {
    /// Whichever keeps the stride small.
    #[default]
    Auto,
    /// Scales in the bundle.
    Inline,
    /// Scales in RAM.
    Resident,
}

/// Sizes in bytes of one bundle; the same for every neuron of the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BundleGeometry {
    /// Unit of direct I/O: 512, 1024, 2048 or 4096.
    pub sector: u32,
    /// Placement of the scales.
    pub placement: Placement,
    /// Payload of the Gate part.
    pub gate_len: u32,
    /// Payload of the Up and Down part.
    pub rest_len: u32,
    /// Bytes reserved for the Gate part: `gate_len`, or that rounded up to a sector when split.
    pub gate_span: u32,
    /// Distance between neurons: a multiple of the sector.
    pub stride: u32,
    /// Bytes of one neuron in the SCALES section; 0 when inline.
    pub scales_per_neuron: u32,
}

impl BundleGeometry {
    /// Chooses placement and split for rows of the given sizes in bytes (`rest` = Up and Down
    /// together).
    ///
    /// Scales go inline unless resident ones reduce the padded stride by at least 10 %, with their
    /// RAM added to the stride: that RAM could hold bundles instead. The Gate part is split off if
    /// its padding adds at most 12.5 % to the stride, because then the two phases of PowerInfer-2
    /// §4.4 read disjoint sectors.
    ///
    /// # Errors
    /// If a size is zero or the bundle exceeds the limits of the format.
    pub fn choose(
        gate_quants: u32,
        gate_scales: u32,
        rest_quants: u32,
        rest_scales: u32,
        sector: u32,
        prefer: Prefer,
    ) -> Result<Self, LayoutError> {
        let add = |a: u32, b: u32| {
            a.checked_add(b)
                .ok_or(LayoutError::Overflow { what: "bundle" })
        };
        let scales = add(gate_scales, rest_scales)?;
        let (gate, rest) = (
            add(gate_quants, gate_scales)?,
            add(rest_quants, rest_scales)?,
        );
        let inline = || Self::padded(gate, rest, sector, Placement::Inline, 0);
        let resident = || {
            Self::padded(
                gate_quants,
                rest_quants,
                sector,
                Placement::Resident,
                scales,
            )
        };
        match prefer {
            // Without scales nothing can be resident.
            _ if scales == 0 => inline(),
            Prefer::Inline => inline(),
            Prefer::Resident => resident(),
            Prefer::Auto => {
                let (i, r) = (inline()?, resident()?);
                let cost = u64::from(r.stride) + u64::from(r.scales_per_neuron);
                let saves = 10 * cost <= 9 * u64::from(i.stride);
                Ok(if saves { r } else { i })
            }
        }
    }

    fn padded(
        gate_len: u32,
        rest_len: u32,
        sector: u32,
        placement: Placement,
        scales_per_neuron: u32,
    ) -> Result<Self, LayoutError> {
        check_sector(sector)?;
        let whole = round_up(
            gate_len
                .checked_add(rest_len)
                .ok_or(LayoutError::Overflow { what: "bundle" })?,
            sector,
        )?;
        let padded_gate = round_up(gate_len, sector)?;
        let split = padded_gate
            .checked_add(round_up(rest_len, sector)?)
            .ok_or(LayoutError::Overflow { what: "bundle" })?;
        let splits = 8 * u64::from(split) <= 9 * u64::from(whole);
        let geometry = Self {
            sector,
            placement,
            gate_len,
            rest_len,
            gate_span: if splits { padded_gate } else { gate_len },
            stride: if splits { split } else { whole },
            scales_per_neuron,
        };
        geometry.check()?;
        Ok(geometry)
    }

    /// Checks that the fields are consistent and within the limits.
    ///
    /// # Errors
    /// Names the first invalid field.
    pub fn check(&self) -> Result<(), LayoutError> {
        check_sector(self.sector)?;
        let bad = |field, found: u32, expected: String| {
            Err(LayoutError::Geometry {
                field,
                found: found.into(),
                expected,
            })
        };
        if self.gate_len == 0 || self.gate_len > MAX_STRIDE {
            return bad("gate_len", self.gate_len, format!("1 to {MAX_STRIDE}"));
        }
        if self.rest_len == 0 || self.rest_len > MAX_STRIDE {
            return bad("rest_len", self.rest_len, format!("1 to {MAX_STRIDE}"));
        }
        let padded_gate = round_up(self.gate_len, self.sector)?;
        if self.gate_span != self.gate_len && self.gate_span != padded_gate {
            let expected = format!("{} or {padded_gate}", self.gate_len);
            return bad("gate_span", self.gate_span, expected);
        }
        // Both terms are at most about MAX_STRIDE, so the sum fits.
        let stride = round_up(self.gate_span + self.rest_len, self.sector)?;
        if self.stride != stride {
            return bad("stride", self.stride, stride.to_string());
        }
        if self.stride > MAX_STRIDE {
            return bad("stride", self.stride, format!("at most {MAX_STRIDE}"));
        }
        let scales = self.scales_per_neuron;
        match self.placement {
            Placement::Inline if scales != 0 => bad("scales_per_neuron", scales, "0".into()),
            Placement::Resident if scales == 0 || scales > MAX_SCALES_PER_NEURON => bad(
                "scales_per_neuron",
                scales,
                format!("1 to {MAX_SCALES_PER_NEURON}"),
            ),
            _ => Ok(()),
        }
    }

    /// Whether scales are in the bundle.
    #[must_use]
    pub fn inline_scales(&self) -> bool {
        self.placement == Placement::Inline
    }

    /// Whether the Gate part fills whole sectors, so that the two phases read disjoint ones.
    #[must_use]
    pub fn is_split(&self) -> bool {
        self.gate_span.is_multiple_of(self.sector)
    }

    /// Bytes phase one reads from the start of the bundle: the sectors the Gate part touches.
    #[must_use]
    pub fn gate_read(&self) -> u32 {
        self.gate_span.next_multiple_of(self.sector)
    }

    /// Offset in the bundle of the sectors with the Up/Down part, for a read without the Gate part.
    /// The read ends at the stride.
    #[must_use]
    pub fn rest_read(&self) -> u32 {
        self.gate_span - self.gate_span % self.sector
    }

    /// Payload of one bundle, without padding.
    #[must_use]
    pub fn payload(&self) -> u32 {
        self.gate_len + self.rest_len
    }
}

fn check_sector(sector: u32) -> Result<(), LayoutError> {
    if SECTORS.contains(&sector) {
        return Ok(());
    }
    Err(LayoutError::Geometry {
        field: "sector",
        found: sector.into(),
        expected: "512, 1024, 2048 or 4096".into(),
    })
}

fn round_up(value: u32, to: u32) -> Result<u32, LayoutError> {
    value
        .checked_next_multiple_of(to)
        .ok_or(LayoutError::Overflow { what: "bundle" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(sizes: [u32; 4], sector: u32, prefer: Prefer) -> BundleGeometry {
        BundleGeometry::choose(sizes[0], sizes[1], sizes[2], sizes[3], sector, prefer).unwrap()
    }

    /// 4096 elements in 4 bits: the example in the module documentation.
    #[test]
    fn four_bit_rows_of_4096() {
        let q4 = [2048, 256, 4096, 512];
        let g = choose(q4, 4096, Prefer::Auto);
        // Resident scales save nothing on 4096-byte sectors; splitting would add half.
        assert_eq!(
            (g.placement, g.gate_span, g.stride),
            (Placement::Inline, 2304, 8192)
        );
        assert_eq!(
            (g.is_split(), g.gate_read(), g.rest_read()),
            (false, 4096, 0)
        );

        let g = choose(q4, 4096, Prefer::Resident);
        assert_eq!(
            (g.placement, g.gate_span, g.stride),
            (Placement::Resident, 4096, 8192)
        );
        assert_eq!(
            (g.scales_per_neuron, g.is_split(), g.rest_read()),
            (768, true, 4096)
        );

        let g = choose(q4, 512, Prefer::Inline);
        assert_eq!((g.gate_span, g.stride, g.is_split()), (2560, 7168, true));
        // 6144 on flash and 768 in RAM against 7168: too little gain for the RAM.
        assert_eq!(choose(q4, 512, Prefer::Auto), g);
        let g = choose(q4, 512, Prefer::Resident);
        assert_eq!((g.gate_span, g.stride), (2048, 6144));
        // A bundle that just misses a sector: 1056 -> 1536 inline, 1024 and 32 resident.
        let g = choose([352, 0, 672, 32], 512, Prefer::Auto);
        assert_eq!((g.placement, g.stride), (Placement::Resident, 1024));
    }

    #[test]
    fn half_floats_have_no_scales_to_keep() {
        let g = choose([8192, 0, 16384, 0], 4096, Prefer::Resident);
        assert_eq!((g.placement, g.scales_per_neuron), (Placement::Inline, 0));
        assert_eq!((g.gate_span, g.stride, g.is_split()), (8192, 24576, true));
    }

    #[test]
    fn split_is_taken_up_to_an_eighth() {
        // 512-byte sectors: gate 3585 -> 4096, rest 512: 4608 split against 4608 whole.
        assert!(choose([3585, 0, 512, 0], 512, Prefer::Auto).is_split());
        // gate 1 -> 512, rest 4096: 4608 against 4608 whole: free.
        assert!(choose([1, 0, 4096, 0], 512, Prefer::Auto).is_split());
        // gate 256, rest 4352 -> 512 + 4608 = 5120 against 4608: 11 % more, taken.
        assert_eq!(choose([256, 0, 4352, 0], 512, Prefer::Auto).stride, 5120);
        // gate 256, rest 3328 -> 512 + 3584 = 4096 against 3584: 14 % more, refused.
        let g = choose([256, 0, 3328, 0], 512, Prefer::Auto);
        assert_eq!((g.stride, g.gate_span, g.is_split()), (3584, 256, false));
    }

    #[test]
    fn nonsense_is_refused() {
        let e = BundleGeometry::choose(0, 0, 1, 0, 512, Prefer::Auto).unwrap_err();
        assert!(e.to_string().contains("gate_len"), "{e}");
        let e = BundleGeometry::choose(1, 0, 0, 0, 512, Prefer::Auto).unwrap_err();
        assert!(e.to_string().contains("rest_len"), "{e}");
        let e = BundleGeometry::choose(1, 0, 1, 0, 513, Prefer::Auto).unwrap_err();
        assert!(e.to_string().contains("sector"), "{e}");
        assert!(BundleGeometry::choose(u32::MAX, 1, 1, 0, 512, Prefer::Auto).is_err());
        assert!(BundleGeometry::choose(u32::MAX - 1, 0, 1, 0, 512, Prefer::Auto).is_err());
        assert!(BundleGeometry::choose(MAX_STRIDE, 0, 1, 0, 512, Prefer::Auto).is_err());
    }
}
