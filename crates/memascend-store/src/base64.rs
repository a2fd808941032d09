//! Checksums as text: words in base 64.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The two digits of each twelve bits.
static PAIRS: [[u8; 2]; 4096] = {
    let mut pairs = [[0; 2]; 4096];
    let mut bits = 0;
    while bits < 4096 {
        pairs[bits] = [DIGITS[bits >> 6], DIGITS[bits & 63]];
        bits += 1;
    }
    pairs
};

/// Words in base 64, little-endian, padded to whole groups with `=`. Each commit writes a hundred
/// thousand.
pub(crate) fn encode_words(mut words: impl ExactSizeIterator<Item = u32>) -> String {
    let mut digits = Vec::with_capacity((words.len() * 4).div_ceil(3) * 4);
    let group = |digits: &mut Vec<u8>, bits: u32| {
        let [[first, second], [third, fourth]] =
            [PAIRS[(bits >> 12 & 0xfff) as usize], PAIRS[(bits & 0xfff) as usize]];
        digits.extend_from_slice(&[first, second, third, fourth]);
    };
    // Three words are four groups of three bytes.
    while words.len() >= 3 {
        let mut next = || words.next().expect("three are left");
        let (a, b, c) = (next(), next(), next());
        group(&mut digits, a.swap_bytes() >> 8);
        group(&mut digits, (a >> 24) << 16 | (b & 0xffff).swap_bytes() >> 16);
        group(&mut digits, (b >> 16).swap_bytes() >> 8 | (c & 0xff));
        group(&mut digits, c.swap_bytes() & 0xff_ffff);
    }
    let mut rest: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    let bytes = rest.len();
    rest.resize(bytes.next_multiple_of(3), 0);
    for three in rest.as_chunks::<3>().0 {
        group(&mut digits, u32::from_be_bytes([0, three[0], three[1], three[2]]));
    }
    let padding = rest.len() - bytes;
    let begin = digits.len() - padding;
    digits[begin..].fill(b'=');
    String::from_utf8(digits).expect("digits are ASCII")
}

/// So many words, if the text is exactly their base 64.
pub(crate) fn decode_words(text: &str, words: usize) -> Option<Vec<u32>> {
    const VALUES: [u8; 256] = {
        let mut values = [0xff; 256];
        let mut index = 0;
        while index < 64 {
            values[DIGITS[index] as usize] = index as u8;
            index += 1;
        }
        values
    };
    let mut bytes = Vec::with_capacity(words * 4 + 2);
    for group in text.as_bytes().as_chunks::<4>().0 {
        let mut bits = 0;
        for byte in group {
            let value = if *byte == b'=' { 0 } else { VALUES[*byte as usize] };
            if value == 0xff {
                return None;
            }
            bits = bits << 6 | u32::from(value);
        }
        bytes.extend_from_slice(&bits.to_be_bytes()[1..]);
    }
    bytes.truncate(words * 4);
    let decoded: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    (decoded.len() == words && encode_words(decoded.iter().copied()) == text).then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_64_is_exact() {
        for words in [
            vec![],
            vec![0],
            vec![1, u32::MAX],
            vec![0x0403_0201, 0x0807_0605, 0x0c0b_0a09],
            (0..50_u32).map(|n| n.wrapping_mul(0x1234_5679)).collect(),
        ] {
            let text = encode_words(words.iter().copied());
            assert_eq!(decode_words(&text, words.len()), Some(words.clone()), "{text}");
            assert_eq!(decode_words(&text, words.len() + 1), None);
        }
        assert_eq!(decode_words("AQIDBA==", 1), Some(vec![0x0403_0201]));
        assert_eq!(
            encode_words([0x0403_0201, 0x0807_0605, 0x0c0b_0a09, 0x100f_0e0d].into_iter()),
            "AQIDBAUGBwgJCgsMDQ4PEA=="
        );
        for wrong in ["AQIDBB==", "AQIDBA=A", "AQID BA=", "AQIDBA--"] {
            assert_eq!(decode_words(wrong, 1), None, "{wrong}");
        }
    }
}
