//! Vector operations for the float kernels: 32 f32 lanes, one quantisation group wide, and the
//! single registers they consist of.

use crate::{dtype::E2M1_DOUBLED, q4k};

/// 32 f32 lanes, held in as many registers as the instruction set needs.
///
/// Two values make up the 64 lanes of the reduction rule. All methods are inlined into
/// a function that enables the instruction set. Pointers need no alignment.
pub(crate) trait Lanes: Copy {
    /// One register of the instruction set.
    type Register: Register;

    /// All lanes zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn zero() -> Self;

    /// All lanes `value`.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn splat(value: f32) -> Self;

    /// 32 f32 values: reads 128 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 128 bytes.
    unsafe fn load_f32(from: *const u8) -> Self;

    /// 32 f16 values: reads 64 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 64 bytes.
    unsafe fn load_f16(from: *const u8) -> Self;

    /// 32 bf16 values: reads 64 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 64 bytes.
    unsafe fn load_bf16(from: *const u8) -> Self;

    /// 32 signed bytes times `scale`: reads 32 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 32 bytes.
    unsafe fn load_q8(from: *const u8, scale: f32) -> Self;

    /// 32 nibbles minus 8, times `scale`: reads 16 bytes; low nibbles come first.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 16 bytes.
    unsafe fn load_q4(from: *const u8, scale: f32) -> Self;

    /// Whether [`load_four_q4`](Lanes::load_four_q4) is faster than four times
    /// [`load_q4`](Lanes::load_q4). Where it is not, the methods of four groups are not used.
    const FOUR: bool = false;

    /// The weights of four groups as [`load_q4`](Lanes::load_q4) has them, in an order of their own:
    /// reads 64 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 64 bytes.
    #[inline(always)]
    unsafe fn load_four_q4(from: *const u8) -> [Self; 4] {
        // SAFETY: the caller guarantees 64 readable bytes.
        unsafe {
            [
                Self::load_q4(from, 1.0),
                Self::load_q4(from.add(16), 1.0),
                Self::load_q4(from.add(32), 1.0),
                Self::load_q4(from.add(48), 1.0),
            ]
        }
    }

    /// Four of 16 factors, from `first` on, one for each group: for the lanes of every result of
    /// [`load_four_q4`](Lanes::load_four_q4).
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    #[inline(always)]
    unsafe fn of_four(factors: &[f32; 16], first: usize) -> [Self; 4] {
        // SAFETY: passed on from the caller.
        unsafe {
            [
                Self::splat(factors[first]),
                Self::splat(factors[first + 1]),
                Self::splat(factors[first + 2]),
                Self::splat(factors[first + 3]),
            ]
        }
    }

    /// Values in the order of [`load_four_q4`](Lanes::load_four_q4) by group and lane.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    #[inline(always)]
    unsafe fn in_order(values: [Self; 4]) -> [Self; 4] {
        values
    }

    /// 32 floats of four bits (e2m1), doubled, times `scale`: reads 16 bytes; low nibbles come first.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 16 bytes.
    #[inline(always)]
    unsafe fn load_mxfp4(from: *const u8, scale: f32) -> Self {
        let mut quants = [0i8; 32];
        // SAFETY: the caller guarantees 16 readable bytes; `quants` is 32 bytes long.
        unsafe {
            let bytes = from.cast::<[u8; 16]>().read_unaligned();
            for (j, byte) in bytes.into_iter().enumerate() {
                quants[j] = E2M1_DOUBLED[usize::from(byte & 15)];
                quants[16 + j] = E2M1_DOUBLED[usize::from(byte >> 4)];
            }
            Self::load_q8(quants.as_ptr().cast(), scale)
        }
    }

    /// 32 nibbles times `scale`, less `min`, rounded once: reads 16 bytes; low nibbles come first.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 16 bytes.
    #[inline(always)]
    unsafe fn load_q4k(from: *const u8, scale: f32, min: f32) -> Self {
        let mut quants = [0i8; 32];
        // SAFETY: the caller guarantees 16 readable bytes; `quants` is 32 bytes long.
        unsafe {
            let bytes = from.cast::<[u8; 16]>().read_unaligned();
            for (j, byte) in bytes.into_iter().enumerate() {
                quants[j] = (byte & 15) as i8;
                quants[16 + j] = (byte >> 4) as i8;
            }
            let quants = Self::load_q8(quants.as_ptr().cast(), 1.0);
            quants.mul_add(Self::splat(scale), Self::splat(-min))
        }
    }

    /// The scales and the minimums of two whole super-blocks of q4k: reads 32 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `scales` is valid for reads of 32 bytes.
    #[inline(always)]
    unsafe fn super_blocks(scales: *const u8) -> [[f32; 16]; 2] {
        // SAFETY: the caller guarantees 32 readable bytes.
        let bytes = unsafe { scales.cast::<[u8; 32]>().read_unaligned() };
        let (scales, mins) = q4k::factors(&bytes, 16, 0, 16);
        [scales, mins]
    }

    /// 16 f16 scales as f32: reads 32 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of 32 bytes.
    unsafe fn load_scales(from: *const u8) -> [f32; 16];

    /// Writes 32 f32 values, 128 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `to` is valid for writes of 128 bytes.
    unsafe fn store_f32(self, to: *mut u8);

    /// Writes 32 values rounded to nearest even f16, 64 bytes.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `to` is valid for writes of 64 bytes.
    unsafe fn store_f16(self, to: *mut u8);

    /// `self * b + c`, rounded once.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;

    /// Folds 64 lanes (`low` holds 0..32, `high` 32..64) by the fixed binary tree.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn reduce(low: Self, high: Self) -> f32;
}

/// One register of f32 lanes, for tiles with many accumulators. Pointers need no alignment.
/// [`WIDTH`](Register::WIDTH) divides 16.
pub(crate) trait Register: Copy {
    /// Number of lanes.
    const WIDTH: usize;

    /// All lanes zero.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn zero() -> Self;

    /// All lanes `value`.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn splat(value: f32) -> Self;

    /// Reads `WIDTH` values.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `from` is valid for reads of `WIDTH`
    /// values.
    unsafe fn load(from: *const f32) -> Self;

    /// Writes `WIDTH` values.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`, and `to` is valid for writes of `WIDTH`
    /// values.
    unsafe fn store(self, to: *mut f32);

    /// `self * b + c`, rounded once.
    ///
    /// # Safety
    /// The CPU has the instruction set of `Self`.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
}

/// The methods of [`Lanes`] that are the same for every kind of register: of `$lanes`, an array of
/// registers, whose places are listed.
macro_rules! by_registers {
    ($lanes:ident, $($k:literal)*) => {
        /// # Safety
        /// As for the method of [`Lanes`].
        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: passed on from the caller.
            $lanes([$({ let _: [(); $k]; unsafe { <Self::Register as Register>::zero() } }),*])
        }

        /// # Safety
        /// As for the method of [`Lanes`].
        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: passed on from the caller.
            let register = unsafe { <Self::Register as Register>::splat(value) };
            $lanes([$({ let _: [(); $k]; register }),*])
        }

        /// # Safety
        /// As for the method of [`Lanes`].
        #[inline(always)]
        unsafe fn load_f32(from: *const u8) -> Self {
            const WIDTH: usize = <<$lanes as Lanes>::Register as Register>::WIDTH;
            let from = from.cast::<f32>();
            // SAFETY: the registers are 128 bytes, which the caller guarantees to be readable.
            $lanes([$(unsafe { Register::load(from.wrapping_add($k * WIDTH)) }),*])
        }

        /// # Safety
        /// As for the method of [`Lanes`].
        #[inline(always)]
        unsafe fn store_f32(self, to: *mut u8) {
            const WIDTH: usize = <<$lanes as Lanes>::Register as Register>::WIDTH;
            let to = to.cast::<f32>();
            // SAFETY: the registers are 128 bytes, which the caller guarantees to be writable.
            $(unsafe { Register::store(self.0[$k], to.wrapping_add($k * WIDTH)) };)*
        }

        /// # Safety
        /// As for the method of [`Lanes`].
        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: passed on from the caller.
            $lanes([$(unsafe { Register::mul_add(self.0[$k], b.0[$k], c.0[$k]) }),*])
        }
    };
}
pub(super) use by_registers;

/// Implements [`Register`] by the intrinsics of an instruction set.
macro_rules! register {
    (
        $register:ty, $width:literal, $splat:ident, $load:ident, $store:ident,
        |$a:ident, $b:ident, $c:ident| $mul_add:expr
    ) => {
        impl Register for $register {
            const WIDTH: usize = $width;

            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: the caller guarantees the instruction set.
                unsafe { $splat(0.0) }
            }

            #[inline(always)]
            unsafe fn splat(value: f32) -> Self {
                // SAFETY: the caller guarantees the instruction set.
                unsafe { $splat(value) }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self {
                // SAFETY: the caller guarantees the instruction set and the values.
                unsafe { $load(from) }
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut f32) {
                // SAFETY: the caller guarantees the instruction set and room for the values.
                unsafe { $store(to, self) }
            }

            #[inline(always)]
            unsafe fn mul_add(self, b: Self, c: Self) -> Self {
                let ($a, $b, $c) = (self, b, c);
                // SAFETY: the caller guarantees the instruction set.
                unsafe { $mul_add }
            }
        }
    };
}
pub(super) use register;
