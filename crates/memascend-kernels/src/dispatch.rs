//! One body per kernel, compiled once per instruction set and chosen at run time.

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use super::format::F16c;
use super::format::{F16, Format};

/// The choice of [`Isa::choose`].
static CHOSEN: OnceLock<Isa> = OnceLock::new();

/// An instruction set that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW and VL (x86-64).
    Avx512,
    /// AVX2 (x86-64).
    Avx2,
    /// Present on every machine of the architecture: SSE2 on x86-64, NEON on aarch64.
    Baseline,
}

impl Isa {
    /// Every instruction set, the widest first.
    const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Baseline];

    /// Whether this machine can run it. The standard library caches the detection.
    #[inline]
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Baseline => true,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => false,
        }
    }

    /// The instruction sets this machine can run, the widest first; [`Isa::Baseline`] is always
    /// last.
    pub fn available() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The choice of [`choose`](Self::choose), or the widest instruction set this machine can run.
    #[inline]
    pub fn best() -> Isa {
        CHOSEN.get().copied().unwrap_or_else(Self::widest)
    }

    fn widest() -> Isa {
        Self::ALL.into_iter().find(|isa| isa.is_available()).unwrap_or(Isa::Baseline)
    }

    /// Its name in `MEMASCEND_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Baseline => "baseline",
        }
    }

    /// Makes the instruction set of that name the best one, for the whole process and once: to
    /// measure how a machine with less would do. Results are the same bits.
    ///
    /// # Errors
    /// If the name is unknown, or this machine lacks the instruction set.
    pub fn choose(name: &str) -> Result<(), String> {
        let named = |isas: &[Isa]| isas.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ");
        let Some(isa) = Self::ALL.into_iter().find(|isa| isa.name() == name) else {
            return Err(format!("unknown instruction set: use one of {}", named(&Self::ALL)));
        };
        if !isa.is_available() {
            return Err(format!("this processor lacks it: use one of {}", named(&Self::available())));
        }
        if *CHOSEN.get_or_init(|| isa) != isa {
            return Err("another instruction set was chosen already".into());
        }
        Ok(())
    }
}

/// Defines a kernel from its `#[inline(always)]` body: `NAME(…)` runs on the widest instruction
/// set, `WITH(isa, …)` on a chosen one. Of two bodies, which must give the same bits, the first is for AVX-512.
macro_rules! kernel {
    (
        $(#[$doc:meta])*
        pub fn $name:ident / $with:ident ($($arg:ident: $ty:ty),+ $(,)?) = $body:path;
    ) => {
        $crate::dispatch::kernel! {
            $(#[$doc])*
            pub fn $name / $with ($($arg: $ty),+) = $body, $body;
        }
    };
    (
        $(#[$doc:meta])*
        pub fn $name:ident / $with:ident ($($arg:ident: $ty:ty),+ $(,)?) = $wide:path, $body:path;
    ) => {
        $(#[$doc])*
        pub fn $name($($arg: $ty),+) {
            $with($crate::Isa::best(), $($arg),+);
        }

        #[doc = concat!("[`", stringify!($name), "`] on a chosen instruction set: the same bits.")]
        ///
        /// # Panics
        #[doc = concat!("As [`", stringify!($name), "`], and when this machine lacks `isa`.")]
        pub fn $with(isa: $crate::Isa, $($arg: $ty),+) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            fn avx512($($arg: $ty),+) {
                $wide($($arg),+);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),+) {
                $body($($arg),+);
            }

            assert!(isa.is_available(), "this machine cannot run {isa:?} kernels");
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the assertion above found every feature the function is compiled for.
                $crate::Isa::Avx512 => unsafe { avx512($($arg),+) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the assertion above found every feature the function is compiled for.
                $crate::Isa::Avx2 => unsafe { avx2($($arg),+) },
                _ => $body($($arg),+),
            }
        }
    };
}
pub(super) use kernel;

/// As `kernel!`, with bodies written for x86-64, where the processor converts fp16.
macro_rules! half_kernel {
    (
        $(#[$doc:meta])*
        pub fn $name:ident / $with:ident ($($arg:ident: $ty:ty),+ $(,)?) = $wide:path, $narrow:path, $body:path;
    ) => {
        $(#[$doc])*
        pub fn $name($($arg: $ty),+) {
            $with($crate::Isa::best(), $($arg),+);
        }

        #[doc = concat!("[`", stringify!($name), "`] on a chosen instruction set: the same bits.")]
        ///
        /// # Panics
        /// When this machine lacks `isa`.
        pub fn $with(isa: $crate::Isa, $($arg: $ty),+) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
            fn avx512($($arg: $ty),+) {
                $wide($($arg),+);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),+) {
                $narrow($($arg),+);
            }

            assert!(isa.is_available(), "this machine cannot run {isa:?} kernels");
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the assertion above and the condition found every feature the function is
                // compiled for.
                $crate::Isa::Avx512 if is_x86_feature_detected!("f16c") => unsafe { avx512($($arg),+) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the assertion above and the condition found every feature the function is
                // compiled for.
                $crate::Isa::Avx2 if is_x86_feature_detected!("f16c") => unsafe { avx2($($arg),+) },
                _ => $body($($arg),+),
            }
        }
    };
}
pub(super) use half_kernel;

/// An instruction set as a type, for the code of a [`half_kernel!`].
pub(super) trait Level {
    /// Its features may be used.
    #[cfg(target_arch = "x86_64")]
    const ISA: Isa;
    /// How fp16 is converted.
    type Half: Format<Element = u16>;
    /// Does the work in a function of its own. Where many loops are in one function, LLVM moves the
    /// constants of all in front of them, and has no registers left within.
    fn outlined<W: KernelBody>(work: W);
}

/// The body of [`Level::outlined`].
pub(super) trait KernelBody {
    /// Always inlined, so that it is compiled for the instruction set.
    fn run(self);
}

/// AVX-512 F, BW and VL, and F16C. Used by functions compiled for them alone.
#[cfg(target_arch = "x86_64")]
pub(super) struct Wide;

#[cfg(target_arch = "x86_64")]
impl Level for Wide {
    const ISA: Isa = Isa::Avx512;
    type Half = F16c;
    #[inline(always)]
    fn outlined<W: KernelBody>(work: W) {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
        fn outlined<W: KernelBody>(work: W) {
            work.run();
        }
        // SAFETY: the caller is compiled for the same.
        unsafe { outlined(work) }
    }
}

/// AVX2, FMA and F16C. Used by functions compiled for them alone.
#[cfg(target_arch = "x86_64")]
pub(super) struct Narrow;

#[cfg(target_arch = "x86_64")]
impl Level for Narrow {
    const ISA: Isa = Isa::Avx2;
    type Half = F16c;
    #[inline(always)]
    fn outlined<W: KernelBody>(work: W) {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn outlined<W: KernelBody>(work: W) {
            work.run();
        }
        // SAFETY: the caller is compiled for the same.
        unsafe { outlined(work) }
    }
}

/// The baseline of every machine.
pub(super) struct Plain;

impl Level for Plain {
    #[cfg(target_arch = "x86_64")]
    const ISA: Isa = Isa::Baseline;
    type Half = F16;
    #[inline(never)]
    fn outlined<W: KernelBody>(work: W) {
        work.run();
    }
}

#[cfg(test)]
mod tests {
    use super::Isa;

    #[test]
    fn the_best_is_the_first_available_and_baseline_is_always_there() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::best()));
        assert_eq!(available.last(), Some(&Isa::Baseline));
    }

    #[test]
    fn an_unknown_instruction_set_is_refused_by_name() {
        let reason = Isa::choose("avx1024").unwrap_err();
        assert_eq!(reason, "unknown instruction set: use one of avx512, avx2, baseline");
    }
}
