//! Numbers of bytes as errors show them.

use std::fmt;

/// A number of bytes, shown with a binary unit and exactly: `1.5 GiB (1610612736 bytes)`.
///
/// Below one KiB the exact number stands alone.
#[derive(Clone, Copy, Debug)]
pub struct Size(pub u64);

impl From<usize> for Size {
    fn from(bytes: usize) -> Self {
        Self(bytes as u64)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        if bytes < 1024 {
            return write!(out, "{bytes} bytes");
        }
        let mut value = bytes as f64 / 1024.0;
        let mut unit = "KiB";
        for larger in ["MiB", "GiB", "TiB"] {
            if value < 1024.0 {
                break;
            }
            (value, unit) = (value / 1024.0, larger);
        }
        let digits = if unit == "TiB" { 2 } else { 1 };
        write!(out, "{value:.digits$} {unit} ({bytes} bytes)")
    }
}

#[cfg(test)]
mod tests {
    use super::Size;

    #[test]
    fn sizes_have_a_unit_and_the_exact_number() {
        for (bytes, shown) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1.0 KiB (1024 bytes)"),
            (10 << 20, "10.0 MiB (10485760 bytes)"),
            (3 << 29, "1.5 GiB (1610612736 bytes)"),
            (5 << 40, "5.00 TiB (5497558138880 bytes)"),
            (5000 << 40, "5000.00 TiB (5497558138880000 bytes)"),
        ] {
            assert_eq!(Size(bytes).to_string(), shown);
        }
    }
}
