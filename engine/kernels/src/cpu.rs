//! Selection of the instruction set.

/// Passes the feature list of one instruction set to another macro. The lists are written only
/// here: detection and `#[target_feature]` both expand from it and cannot diverge.
#[cfg(target_arch = "x86_64")]
macro_rules! with_features {
    (avx2, $then:ident $(, $($rest:tt)*)?) => {
        $then! { ["avx2" "fma" "f16c"] $($($rest)*)? }
    };
    (avx512, $then:ident $(, $($rest:tt)*)?) => {
        $then! {
            ["avx512f" "avx512bw" "avx512vl" "avx512dq" "avx2" "fma" "f16c"] $($($rest)*)?
        }
    };
    (avx2_vnni, $then:ident $(, $($rest:tt)*)?) => {
        $then! { ["avxvnni" "avx2" "fma" "f16c"] $($($rest)*)? }
    };
    (avx512_vnni, $then:ident $(, $($rest:tt)*)?) => {
        $then! {
            ["avx512vnni" "avx512f" "avx512bw" "avx512vl" "avx512dq" "avx2" "fma" "f16c"]
            $($($rest)*)?
        }
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! with_features {
    (neon, $then:ident $(, $($rest:tt)*)?) => {
        $then! { ["neon"] $($($rest)*)? }
    };
    (neon_dotprod, $then:ident $(, $($rest:tt)*)?) => {
        $then! { ["neon" "dotprod"] $($($rest)*)? }
    };
    (neon_i8mm, $then:ident $(, $($rest:tt)*)?) => {
        $then! { ["neon" "dotprod" "i8mm"] $($($rest)*)? }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use with_features;

#[cfg(target_arch = "x86_64")]
macro_rules! detected {
    ([$($feature:tt)+]) => { true $(&& std::arch::is_x86_feature_detected!($feature))+ };
}
#[cfg(target_arch = "aarch64")]
macro_rules! detected {
    ([$($feature:tt)+]) => { true $(&& std::arch::is_aarch64_feature_detected!($feature))+ };
}

/// Environment variable that overrides the choice of [`Cpu::detect`].
const OVERRIDE: &str = "EMBERFLOW_ISA";

/// An instruction set with kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust without vector intrinsics.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// [`Isa::Avx2`] with AVX-VNNI byte dot products.
    Avx2Vnni,
    /// x86-64 with AVX-512 F, BW, VL and DQ, and all of [`Isa::Avx2`].
    Avx512,
    /// [`Isa::Avx512`] with AVX512-VNNI byte dot products.
    Avx512Vnni,
    /// 64-bit Arm with Advanced SIMD.
    Neon,
    /// [`Isa::Neon`] with byte dot products.
    NeonDotprod,
    /// [`Isa::NeonDotprod`] with byte matrix products.
    NeonI8mm,
}

impl Isa {
    /// Every instruction set, best last.
    pub const ALL: [Isa; 8] = [
        Isa::Scalar,
        Isa::Neon,
        Isa::NeonDotprod,
        Isa::NeonI8mm,
        Isa::Avx2,
        Isa::Avx2Vnni,
        Isa::Avx512,
        Isa::Avx512Vnni,
    ];

    /// The name used in `EMBERFLOW_ISA` and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx2Vnni => "avx2-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Neon => "neon",
            Isa::NeonDotprod => "neon-dotprod",
            Isa::NeonI8mm => "neon-i8mm",
        }
    }

    fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => with_features!(avx2, detected),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2Vnni => with_features!(avx2_vnni, detected),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => with_features!(avx512, detected),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => with_features!(avx512_vnni, detected),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => with_features!(neon, detected),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => with_features!(neon_dotprod, detected),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => with_features!(neon_i8mm, detected),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
}

/// Proof that this machine has an instruction set, and the receiver of all kernels. Created once at
/// start and copied. It says too with which scales activations are quantised, as all matrices of a
/// layer read the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    // Private: only constructors that check the machine create a value.
    isa: Isa,
    per_token: bool,
    pruned: bool,
}

impl Cpu {
    /// The best instruction set of this machine, or the one named by the environment variable
    /// `EMBERFLOW_ISA` (see [`Isa::name`]). Ignores an unknown or unavailable value;
    /// [`name`](Cpu::name) reports the choice, and [`ignored_override`](Cpu::ignored_override) the
    /// ignored value.
    pub fn detect() -> Cpu {
        Cpu::choose(std::env::var(OVERRIDE).ok().as_deref())
    }

    /// The value of `EMBERFLOW_ISA`, if it is not an instruction set of this machine.
    pub fn ignored_override() -> Option<String> {
        let wanted = std::env::var(OVERRIDE).ok()?;
        (Cpu::choose(Some(&wanted)).name() != wanted).then_some(wanted)
    }

    fn choose(wanted: Option<&str>) -> Cpu {
        let best_first = || Isa::ALL.into_iter().rev().filter_map(Cpu::with_isa);
        best_first()
            .find(|cpu| wanted == Some(cpu.name()))
            .or_else(|| best_first().next())
            .unwrap_or(token(Isa::Scalar))
    }

    /// The token for one instruction set, `None` if this machine lacks it.
    pub fn with_isa(isa: Isa) -> Option<Cpu> {
        isa.is_available().then_some(token(isa))
    }

    /// Every instruction set of this machine, best last; never empty. For tests that compare them.
    pub fn all() -> Vec<Cpu> {
        Isa::ALL.into_iter().filter_map(Cpu::with_isa).collect()
    }

    /// The instruction set.
    #[inline]
    pub fn isa(self) -> Isa {
        self.isa
    }

    /// The same, that prunes outliers of activations or not: with one scale per token the scale is then that of the
    /// largest element, and nothing exceeds it. Scales of groups stay as they are. Initially false.
    #[must_use]
    pub const fn pruning(self, pruned: bool) -> Cpu {
        Cpu { pruned, ..self }
    }

    /// See [`pruning`](Cpu::pruning).
    pub(crate) const fn prunes(self) -> bool {
        self.pruned
    }

    /// The name of the instruction set.
    pub fn name(self) -> &'static str {
        self.isa.name()
    }
}

/// A token without a check.
const fn token(isa: Isa) -> Cpu {
    Cpu {
        isa,
        per_token: false,
        pruned: false,
    }
}

/// The same, that quantises activations with one scale per token, as rows with one scale take them
/// (q8c, q4c), or else with one per group of 32. Rows of other formats take both.
#[must_use]
pub const fn with_scale_per_token(cpu: Cpu, per_token: bool) -> Cpu {
    Cpu { per_token, ..cpu }
}

/// Whether activations are quantised with one scale per token.
#[inline]
pub(crate) const fn per_token(cpu: Cpu) -> bool {
    cpu.per_token
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalar_is_always_there_and_detect_picks_an_available_one() {
        assert_eq!(Cpu::all()[0].isa(), Isa::Scalar);
        assert!(Cpu::all().contains(&Cpu::detect()));
    }

    #[test]
    fn a_wish_is_granted_or_the_best_is_taken() {
        let all = Cpu::all();
        for cpu in &all {
            assert_eq!(Cpu::choose(Some(cpu.name())), *cpu);
        }
        let best = all[all.len() - 1];
        for wish in [None, Some(""), Some("AVX2"), Some("altivec")] {
            assert_eq!(Cpu::choose(wish), best);
        }
    }

    #[test]
    fn foreign_instruction_sets_are_refused() {
        #[cfg(target_arch = "x86_64")]
        assert_eq!(Cpu::with_isa(Isa::Neon), None);
        #[cfg(target_arch = "aarch64")]
        assert_eq!(Cpu::with_isa(Isa::Avx2), None);
    }
}
