//! Division of integers of any size, rounded to the nearest `f64`.

/// Number of quotient bits that are computed: the 53 bits of an `f64`, and more than enough bits to round correctly.
const QUOTIENT_BITS: i64 = 66;
/// Number of words of the shorter operand that are divided first. The float hardly ever depends on the other words.
const LEADING_WORDS: usize = 4;
/// The binary exponent of the smallest positive `f64`.
const MIN_EXPONENT: i64 = -1074;
/// The binary exponent of the smallest power of two that is too large for an `f64`.
const MAX_EXPONENT: i64 = f64::MAX_EXP as i64;

/// Divides two integers, given in two's complement with the lowest word first. Rounds the quotient to the nearest
/// `f64`, ties to even.
///
/// The divisor must not be 0.
pub(super) fn quotient(dividend: &[u64], divisor: &[u64]) -> f64 {
    let (negative, dividend) = sign_and_magnitude(dividend);
    let (other, divisor) = sign_and_magnitude(divisor);
    let sign = if negative == other { 1.0 } else { -1.0 };
    let omitted = dividend.len().min(divisor.len()).saturating_sub(LEADING_WORDS);
    if omitted > 0 {
        // The quotient lies between two quotients of leading words. If both are rounded to one float, so is the quotient.
        let (dividend, divisor) = (&dividend[omitted..], &divisor[omitted..]);
        let least = quotient_of_magnitudes(dividend.to_vec(), successor(divisor));
        if least == quotient_of_magnitudes(successor(dividend), divisor.to_vec()) {
            return sign * least;
        }
    }
    sign * quotient_of_magnitudes(dividend, divisor)
}

/// Divides two natural numbers, given with the lowest word first, and rounds the quotient as [`quotient`] does.
fn quotient_of_magnitudes(mut dividend: Vec<u64>, mut divisor: Vec<u64>) -> f64 {
    let shift = bit_length(&dividend) - bit_length(&divisor);
    // The quotient lies between 2^(shift - 1) and 2^(shift + 1). Shifting the operands for a quotient that is certainly
    // beyond the range of `f64` could take much time and memory.
    if shift > MAX_EXPONENT {
        return f64::INFINITY;
    }
    if shift < MIN_EXPONENT - 1 {
        return 0.0;
    }
    shift_left(if shift < 0 { &mut dividend } else { &mut divisor }, shift.unsigned_abs());
    // The operands get an extra word, because each step doubles the remainder.
    let size = dividend.len().max(divisor.len()) + 1;
    dividend.resize(size, 0);
    divisor.resize(size, 0);
    let mut quotient = 0_u128;
    for _ in 0..QUOTIENT_BITS {
        quotient <<= 1;
        if !dividend.iter().rev().lt(divisor.iter().rev()) {
            subtract(&mut dividend, &divisor);
            quotient |= 1;
        }
        shift_left(&mut dividend, 1);
        dividend.truncate(size);
    }
    let is_exact = dividend.iter().all(|&word| word == 0);
    round_to_float(quotient, is_exact, shift - QUOTIENT_BITS + 1)
}

/// Returns the float that is nearest to a number, ties to even. If `is_exact` is true, the number is `quotient` ×
/// 2^`exponent`; otherwise the number is larger than this product, by less than 2^`exponent`.
fn round_to_float(quotient: u128, is_exact: bool, exponent: i64) -> f64 {
    let length = i64::from(u128::BITS - quotient.leading_zeros());
    // Subnormal floats have fewer mantissa bits.
    let cut =
        (length - i64::from(f64::MANTISSA_DIGITS)).max(MIN_EXPONENT - exponent).clamp(1, i64::from(u128::BITS) - 1);
    let (kept, lost) = (quotient >> cut, quotient & ((1 << cut) - 1));
    let half = 1 << (cut - 1);
    let up = lost > half || lost == half && (!is_exact || kept & 1 == 1);
    let mut float = (kept + u128::from(up)) as f64;
    // Scaling by powers of two is exact unless the result overflows.
    let mut power = exponent + cut;
    while power != 0 {
        let step = power.clamp(-1000, 1000);
        float *= 2_f64.powi(step as i32);
        power -= step;
        if float == 0.0 || float.is_infinite() {
            break;
        }
    }
    float
}

/// Splits an integer in two's complement into its sign, true for negative, and its absolute value.
fn sign_and_magnitude(words: &[u64]) -> (bool, Vec<u64>) {
    let negative = words.last().is_some_and(|&high| high.cast_signed() < 0);
    (negative, add_bit(words.iter().map(|&word| if negative { !word } else { word }), negative))
}

/// Returns the natural number in `words` plus 1.
fn successor(words: &[u64]) -> Vec<u64> {
    add_bit(words.iter().copied().chain([0]), true)
}

/// Adds `bit` to a natural number. A carry out of the last word is lost.
fn add_bit(words: impl Iterator<Item = u64>, bit: bool) -> Vec<u64> {
    let mut carry = bit;
    let sum = words.map(|word| {
        let (value, over) = word.overflowing_add(u64::from(carry));
        carry = over;
        value
    });
    sum.collect()
}

fn bit_length(words: &[u64]) -> i64 {
    let Some(last) = words.iter().rposition(|&word| word != 0) else { return 0 };
    (last as i64 + 1) * 64 - i64::from(words[last].leading_zeros())
}

fn shift_left(words: &mut Vec<u64>, count: u64) {
    let (whole, part) = ((count / 64) as usize, count % 64);
    if part > 0 {
        let mut carry = 0;
        for word in words.iter_mut() {
            (*word, carry) = (*word << part | carry, *word >> (64 - part));
        }
        words.push(carry);
    }
    words.splice(0..0, std::iter::repeat_n(0, whole));
}

fn subtract(words: &mut [u64], others: &[u64]) {
    let mut borrow = false;
    for (word, &other) in words.iter_mut().zip(others) {
        let (value, first) = word.overflowing_sub(other);
        let (value, second) = value.overflowing_sub(u64::from(borrow));
        (*word, borrow) = (value, first || second);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Returns the words of `factor` × 2^`exponent`.
    fn scaled(factor: i64, exponent: u64) -> Vec<u64> {
        let mut words = vec![factor.unsigned_abs()];
        shift_left(&mut words, exponent);
        words.push(0);
        if factor < 0 {
            let zero = vec![0; words.len()];
            let magnitude = std::mem::replace(&mut words, zero);
            subtract(&mut words, &magnitude);
        }
        words
    }

    #[test]
    fn quotients_at_the_limits_of_the_range_are_rounded_correctly() {
        let (one, three) = (scaled(1, 0), scaled(3, 0));
        let below_2_54: i64 = (1 << 54) - 1;
        for sign in [1_i64, -1] {
            let float = sign as f64;
            for (dividend, divisor, expected) in [
                (scaled(sign, 1023), &one, 2_f64.powi(1023)),
                (scaled(sign, 1024), &one, f64::INFINITY),
                (scaled(sign, 1025), &one, f64::INFINITY),
                (scaled(sign, 5000), &one, f64::INFINITY),
                // Halfway between the largest float and 2^1024.
                (scaled(sign * below_2_54, 970), &one, f64::INFINITY),
                (scaled(sign * (below_2_54 - 1), 970), &one, f64::MAX),
                (scaled(sign, 1025), &three, 2_f64.powi(1023) / 1.5 * 2.0),
                (scaled(sign, 1026), &three, f64::INFINITY),
                (scaled(sign, 0), &scaled(1, 1074), 5e-324),
                (scaled(sign, 0), &scaled(3, 1073), 5e-324),
                // Halfway between 0 and the smallest float, and a bit more.
                (scaled(sign, 0), &scaled(1, 1075), 0.0),
                (scaled(sign * 0x1001, 0), &scaled(1, 1087), 5e-324),
                (scaled(sign, 0), &scaled(1, 1076), 0.0),
                (scaled(sign * 7, 0), &scaled(3, 1076), 5e-324),
                (scaled(sign * 4, 0), &scaled(3, 1076), 0.0),
                (scaled(sign, 0), &scaled(1, 5000), 0.0),
            ] {
                let multiple = |words: &[u64]| [&[0; 30][..], words].concat();
                let expected = float * expected;
                for found in [quotient(&dividend, divisor), quotient(&multiple(&dividend), &multiple(divisor))] {
                    assert_eq!(found.to_bits(), expected.to_bits(), "{dividend:?} / {divisor:?} is {found:e}");
                }
            }
        }
    }

    #[test]
    fn words_beyond_the_leading_words_count() {
        // Halfway between two floats, of which the lower one is even.
        let tie: i64 = (1 << 53) + 1;
        let below = (tie - 1) as f64;
        let (mut above_tie, mut divisor) = (scaled(tie, 1000), scaled(1, 1000));
        assert_eq!(quotient(&above_tie, &divisor), below);
        above_tie[0] |= 1;
        assert_eq!(quotient(&above_tie, &divisor), below + 2.0);
        divisor[0] |= 1;
        assert_eq!(quotient(&scaled(tie, 1000), &divisor), below);
    }

    #[test]
    fn leading_words_give_the_float_of_all_words() {
        // A linear congruential generator with Knuth's constants.
        let mut random = 1_u64;
        let mut words = |count: usize| {
            let mut words: Vec<u64> = (0..count)
                .map(|_| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    random
                })
                .collect();
            words.push(0);
            words
        };
        for (more, other) in (0..12).flat_map(|more| (0..12).map(move |other| (more, other))) {
            let (dividend, divisor) = (words(1 + more), words(1 + other));
            let expected = quotient_of_magnitudes(dividend.clone(), divisor.clone());
            assert_eq!(quotient(&dividend, &divisor).to_bits(), expected.to_bits(), "{dividend:?} / {divisor:?}");
        }
    }

    #[test]
    fn quotient_of_huge_integers_takes_little_time() {
        fn time<R>(work: impl Fn() -> R) -> Duration {
            let times = (0..3).map(|_| {
                let start = Instant::now();
                std::hint::black_box(work());
                start.elapsed()
            });
            times.min().unwrap_or_default()
        }
        let exponent = if cfg!(miri) { 1 << 12 } else { 1 << 24 };
        let (one, huge, multiple) = (scaled(1, 0), scaled(1, exponent), scaled(3, exponent));
        let copy = time(|| sign_and_magnitude(&huge));
        for (dividend, divisor) in [(&huge, &one), (&one, &huge), (&huge, &multiple), (&multiple, &huge)] {
            let quotient = time(|| quotient(dividend, divisor));
            assert!(cfg!(miri) || quotient < 20 * copy, "{quotient:?} {copy:?}");
        }
    }
}
