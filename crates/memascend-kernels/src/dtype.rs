//! The number formats of weights and gradients.

/// Element type of a weight and of its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
    /// float32.
    F32,
}

impl Dtype {
    /// Bytes of one weight or gradient element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}
