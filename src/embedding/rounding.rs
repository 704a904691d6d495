//! Division of integers of any size, rounded to the nearest `f64`.

/// Number of quotient bits that are computed: the 53 bits of an `f64`, and more than enough bits to round correctly.
const QUOTIENT_BITS: i64 = 66;
/// The binary exponent of the smallest positive `f64`.
const MIN_EXPONENT: i64 = -1074;
/// The binary exponent of the smallest power of two that is too large for an `f64`.
const MAX_EXPONENT: i64 = f64::MAX_EXP as i64;

/// Divides two integers, given in two's complement with the lowest word first. Rounds the quotient to the nearest
/// `f64`, ties to even.
///
/// The divisor must not be 0.
pub(super) fn quotient(dividend: &[u64], divisor: &[u64]) -> f64 {
    let (negative, mut dividend) = sign_and_magnitude(dividend);
    let (other, mut divisor) = sign_and_magnitude(divisor);
    let sign = if negative == other { 1.0 } else { -1.0 };
    let shift = bit_length(&dividend) - bit_length(&divisor);
    // The quotient lies between 2^(shift - 1) and 2^(shift + 1). Shifting the operands for a quotient that is certainly
    // beyond the range of `f64` could take much time and memory.
    if shift > MAX_EXPONENT {
        return sign * f64::INFINITY;
    }
    if shift < MIN_EXPONENT - 1 {
        return sign * 0.0;
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
    sign * round_to_float(quotient, is_exact, shift - QUOTIENT_BITS + 1)
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
    let mut carry = negative;
    let absolute = words.iter().map(|&word| {
        let (value, over) = (if negative { !word } else { word }).overflowing_add(u64::from(carry));
        carry = over;
        value
    });
    (negative, absolute.collect())
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
                let found = quotient(&dividend, divisor);
                assert_eq!(found.to_bits(), (float * expected).to_bits(), "{dividend:?} / {divisor:?} is {found:e}");
            }
        }
    }

    #[test]
    fn quotient_far_beyond_the_range_takes_little_time() {
        fn time<R>(work: impl Fn() -> R) -> Duration {
            let times = (0..3).map(|_| {
                let start = Instant::now();
                std::hint::black_box(work());
                start.elapsed()
            });
            times.min().unwrap_or_default()
        }
        let (one, huge) = (scaled(1, 0), scaled(1, if cfg!(miri) { 1 << 12 } else { 1 << 24 }));
        let copy = time(|| sign_and_magnitude(&huge));
        for (dividend, divisor) in [(&huge, &one), (&one, &huge)] {
            let quotient = time(|| quotient(dividend, divisor));
            assert!(cfg!(miri) || quotient < 20 * copy, "{quotient:?} {copy:?}");
        }
    }
}
