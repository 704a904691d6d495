//! Conversions of integers of any size, to and from the types of `num-bigint`.

use num_bigint::{BigInt, BigUint, Sign};

use super::convert::{ConversionError, FromLisp, IntoLisp, Reader, Shape, Writer};
use crate::image::message::Token;

/// This implementation requires the feature `num-bigint`.
impl FromLisp for BigInt {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        match reader.token() {
            Token::Integer(value) => Ok(value.into()),
            Token::Bignum(words) => {
                let octets: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                Ok(Self::from_signed_bytes_le(&octets))
            }
            token => Err(reader.unexpected("an integer", token)),
        }
    }
}

/// This implementation requires the feature `num-bigint`.
impl IntoLisp for BigInt {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        if let Ok(value) = i64::try_from(self) {
            writer.0.integer(value);
            return Ok(());
        }
        let mut octets = self.to_signed_bytes_le();
        let sign = if self.sign() == Sign::Minus { 0xff } else { 0 };
        octets.resize(octets.len().next_multiple_of(8), sign);
        let words: Vec<u64> = octets.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        writer.0.bignum(&words);
        Ok(())
    }
}

/// This implementation requires the feature `num-bigint`.
impl FromLisp for BigUint {
    const SHAPE: Shape = Shape::ATOM;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        let value = BigInt::from_lisp(reader)?;
        let (small, bits) = (i64::try_from(&value).ok(), value.bits());
        value.try_into().map_err(|_| {
            // Computing the decimal digits of a large integer would take too long.
            let found = small.map_or_else(|| format!("a negative integer of {bits} bits"), |small| small.to_string());
            ConversionError::new("a non-negative integer", found)
        })
    }
}

/// This implementation requires the feature `num-bigint`.
impl IntoLisp for BigUint {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        BigInt::from(self.clone()).write(writer)
    }
}
