//! [`Serde`]: structs and enums as property lists and keywords, by way of serde.

use std::collections::HashSet;
use std::fmt;

use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor};
use serde::ser::{self, Serialize};

use super::convert::{
    ConversionError, FromLisp, IntoLisp, MAX_DESCRIPTION, Reader, Shape, Symbol, Writer, check_stack_room, keyword,
    object_count_text, shorten, upper_case,
};
use crate::image::message::{self, Token};

/// A Rust value that serde reads from, or writes as, a Lisp object.
///
/// | Rust | Lisp |
/// |---|---|
/// | struct | a property list, `(:id 7 :items ("a" "b"))`; structures, instances, conditions and hash tables can be read as well |
/// | sequence, tuple | a list; vectors can be read as well, and a dotted list, such as a pair, as a tuple |
/// | map | a hash table; property lists can be read as well |
/// | enum variant | a keyword, `:in-stock`; for a variant with values, a list of the keyword and the values; for a variant with fields, a list of the keyword and the fields as in a property list |
/// | `None`, `()`, `false` | `nil` |
/// | number, character, string, `true` | as for [`FromLisp`] and [`IntoLisp`]; symbols can be read as strings, in lower case |
///
/// In Lisp, the name of a field or a variant has a hyphen for each underscore, and before each capital that follows a
/// lower-case letter or a digit. Case is ignored. Writing a struct fails if two of its fields have the same name in
/// Lisp, and reading a keyword fails if the keyword matches two names or aliases of variants. If a property list has a
/// key twice, the first entry counts. Reading fails if different symbols or strings become the same key of a map or the
/// same field of a struct, such as `:a-b` and `:a_b`. If other keys of a map become the same Rust key, such as 1 and 2
/// as `bool`, the last entry usually counts.
///
/// Some types are read according to the object that is found: for example enums with `#[serde(tag = …)]` or
/// `#[serde(untagged)]`, fields with `#[serde(flatten)]`, and `serde_json::Value`. These types read `nil` as a unit and
/// a property list as a list, so values of these types cannot always be read back from what was written. For `tag`,
/// `untagged` and `flatten`, serde goes through the object a second time without a check of the stack; the guide says
/// [when this can end the process](crate::guide::what_ends_the_process).
///
/// ```
/// use sbcl::Serde;
///
/// #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
/// struct Order { id: i64, line_items: Vec<String>, state: State }
///
/// #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
/// enum State { Open, SentBy(String) }
///
/// # let lisp = sbcl::Lisp::get_or_boot()?;
/// let Serde(order) = lisp.eval::<Serde<Order>>(r#"'(:id 7 :line-items ("a" "b") :state (:sent-by "post"))"#)?;
/// assert_eq!(order, Order { id: 7, line_items: vec!["a".into(), "b".into()], state: State::SentBy("post".into()) });
/// assert_eq!(lisp.call::<i64>("getf", (Serde(&order), sbcl::keyword("id")))?, 7);
/// # Ok::<(), sbcl::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Serde<T>(pub T);

impl<T: DeserializeOwned> FromLisp for Serde<T> {
    const SHAPE: Shape = Shape::DEEP;

    fn from_lisp(reader: &mut Reader<'_>) -> Result<Self, ConversionError> {
        T::deserialize(Deserializer(reader)).map(Self).map_err(|SerdeError(error)| error)
    }
}

impl<T: Serialize> IntoLisp for Serde<T> {
    fn write(&self, writer: &mut Writer<'_>) -> Result<(), ConversionError> {
        self.0.serialize(Serializer(writer)).map_err(|SerdeError(error)| error)
    }
}

/// Maximum length of a message about an object that serde cannot read, in characters. serde's messages contain the whole
/// text of a string, and then what serde expected.
const MAX_SERDE_MESSAGE: usize = 1000;

/// A [`ConversionError`] as serde's error type.
#[derive(Debug)]
struct SerdeError(ConversionError);

impl fmt::Display for SerdeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for SerdeError {}

impl From<ConversionError> for SerdeError {
    fn from(error: ConversionError) -> Self {
        Self(error)
    }
}

impl de::Error for SerdeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        let message = shorten(&message.to_string(), MAX_SERDE_MESSAGE);
        Self(ConversionError::new("a value that serde can read", format!("a value that serde cannot read: {message}")))
    }

    fn invalid_type(unexpected: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        de::Error::custom(format_args!("invalid type: {}, expected {expected}", unexpected_text(unexpected)))
    }

    fn invalid_value(unexpected: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        de::Error::custom(format_args!("invalid value: {}, expected {expected}", unexpected_text(unexpected)))
    }
}

/// Returns serde's description of a value. serde would print 1e300 with 301 digits.
fn unexpected_text(unexpected: de::Unexpected<'_>) -> String {
    match unexpected {
        de::Unexpected::Float(value) => format!("floating point `{value:?}`"),
        other => other.to_string(),
    }
}

impl ser::Error for SerdeError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(ConversionError::new("a value that can be serialized", format!("a value that cannot: {message}")))
    }
}

/// Converts a Rust name to Lisp's spelling: `line_items` becomes `line-items`, and `LineItems` becomes `Line-Items`.
/// Callers ignore the case of the result, or convert the result to upper case.
fn lisp_name(name: &str) -> String {
    let mut lisp = String::with_capacity(name.len() + 4);
    let mut after_lower = false;
    for character in name.chars() {
        if character.is_uppercase() && after_lower {
            lisp.push('-');
        }
        after_lower = character.is_lowercase() || character.is_ascii_digit();
        lisp.push(if character == '_' { '-' } else { character });
    }
    lisp
}

/// Returns the elements of `names` whose Lisp spelling is `lisp`. Case is ignored.
fn matching_names(lisp: &str, names: &'static [&'static str]) -> impl Iterator<Item = &'static str> {
    names.iter().copied().filter(move |name| lisp_name(name).chars().map(upper_case).eq(lisp.chars().map(upper_case)))
}

/// Returns the first element of `names` whose Lisp spelling is `lisp`; case is ignored. If there is no such element,
/// returns `lisp` in Rust's spelling: in lower case, with underscores.
fn rust_name(lisp: &str, names: &'static [&'static str]) -> String {
    let name = matching_names(lisp, names).next();
    name.map_or_else(|| lisp.to_lowercase().replace('-', "_"), str::to_owned)
}

/// Returns the first element of `variants` whose Lisp spelling is `lisp`, or else `lisp` in Rust's spelling, as
/// [`rust_name`] does. Returns an error if two variants have this Lisp spelling.
fn variant_name(lisp: &str, variants: &'static [&'static str]) -> Result<String, ConversionError> {
    let mut names = matching_names(lisp, variants);
    if let (Some(one), Some(other)) = (names.next(), names.next()) {
        let found = format!("the keyword :{}, which names {one} and {other}", lisp.to_lowercase());
        return Err(ConversionError::new("a keyword that names one variant", found));
    }
    Ok(rust_name(lisp, variants))
}

/// Describes a sequence of `count` objects.
fn sequence_text(count: usize) -> String {
    format!("a sequence of {}", object_count_text(count))
}

/// Describes the variant with the Lisp name `name` and `count` values.
fn variant_text(name: &str, count: usize) -> String {
    let name = shorten(name, MAX_DESCRIPTION);
    match count {
        0 => format!("the variant :{name} without a value"),
        1 => format!("the variant :{name} with one value"),
        count => format!("the variant :{name} with {count} values"),
    }
}

struct Deserializer<'r, 'm>(&'r mut Reader<'m>);

impl<'m> Deserializer<'_, 'm> {
    /// Calls `visit` with the next `count` objects, and then skips the objects that `visit` has not read, even if
    /// `visit` passed the [`Elements`] to `mem::forget`. It is an error if a visit succeeds but does not read all
    /// objects. For this error, `describe` returns the description of a list or vector with a given number of objects.
    fn visit_elements<R>(
        self,
        count: usize,
        names: &'static [&'static str],
        keys: Option<SeenKeys<'m>>,
        describe: impl Fn(usize) -> String,
        visit: impl for<'e> FnOnce(Elements<'e, 'm>) -> Result<R, SerdeError>,
    ) -> Result<R, SerdeError> {
        self.0.check_stack_room()?;
        let mut left = count;
        let result = visit(Elements { reader: self.0, left: &mut left, names, keys, texts: HashSet::new() });
        for _ in 0..left {
            self.0.skip();
        }
        if left > 0 && result.is_ok() {
            return Err(ConversionError::new(describe(count.saturating_sub(left)), describe(count)).into());
        }
        result
    }

    fn visit_sequence<'de, V: Visitor<'de>>(self, count: usize, visitor: V) -> Result<V::Value, SerdeError> {
        self.visit_elements(count, &[], None, sequence_text, |elements| visitor.visit_seq(elements))
    }

    /// Visits the numbers of a specialised vector, each given as a message of its own. It is an error if a visit
    /// succeeds but does not read all numbers.
    fn visit_numbers<'de, V: Visitor<'de>>(
        self,
        mut numbers: impl ExactSizeIterator<Item = [u64; 2]>,
        visitor: V,
    ) -> Result<V::Value, SerdeError> {
        self.0.check_stack_room()?;
        let count = numbers.len();
        let value = visitor.visit_seq(Numbers { reader: self.0, numbers: &mut numbers })?;
        match numbers.len() {
            0 => Ok(value),
            left => Err(ConversionError::new(sequence_text(count.saturating_sub(left)), sequence_text(count)).into()),
        }
    }

    /// Visits the entries of a hash table.
    fn visit_table<'de, V: Visitor<'de>>(
        self,
        count: usize,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, SerdeError> {
        self.visit_elements(2 * count, names, None, sequence_text, |elements| visitor.visit_map(elements))
    }

    /// Visits the entries of a property list of `count` objects.
    fn visit_property_list<'de, V: Visitor<'de>>(
        self,
        count: usize,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, SerdeError> {
        self.visit_elements(count, names, Some(SeenKeys::default()), sequence_text, |elements| {
            visitor.visit_map(elements)
        })
    }

    /// Deserializes the object that begins with `token`. A vector of octets is deserialized as a sequence of integers.
    fn deserialize_elements<'de, V: Visitor<'de>>(self, token: Token<'m>, visitor: V) -> Result<V::Value, SerdeError> {
        match token {
            Token::Octets(words, count) => {
                let octets = super::convert::unpack_octets(words, count);
                self.visit_numbers(octets.into_iter().map(message::octet_message), visitor)
            }
            token => self.deserialize_token(token, visitor),
        }
    }

    /// Deserializes the object that begins with `token`.
    fn deserialize_token<'de, V: Visitor<'de>>(self, token: Token<'m>, visitor: V) -> Result<V::Value, SerdeError> {
        match token {
            Token::Nil => visitor.visit_unit(),
            Token::True => visitor.visit_bool(true),
            Token::Integer(value) => visitor.visit_i64(value),
            Token::Bignum(&[low, 0]) => visitor.visit_u64(low),
            Token::Single(value) => visitor.visit_f32(value),
            Token::Double(value) => visitor.visit_f64(value),
            Token::Character(code) => match char::from_u32(code) {
                Some(character) => visitor.visit_char(character),
                None => Err(SerdeError(self.0.unexpected("a character that is not a surrogate", token))),
            },
            Token::String(characters) => visitor.visit_string(Reader::decode_text(characters)?),
            Token::Symbol(has_package) => {
                if has_package {
                    self.0.skip();
                }
                visitor.visit_string(self.0.name()?.to_lowercase())
            }
            Token::Keyword => visitor.visit_string(self.0.name()?.to_lowercase()),
            Token::List(count) | Token::Vector(count) => self.visit_sequence(count, visitor),
            Token::Table(count) => self.visit_table(count, &[], visitor),
            Token::Octets(words, count) => visitor.visit_byte_buf(super::convert::unpack_octets(words, count)),
            Token::Doubles(words) => self.visit_numbers(words.iter().copied().map(message::double_message), visitor),
            token => Err(SerdeError(self.0.unexpected("a value that serde can read", token))),
        }
    }
}

/// Defines methods that read scalars with [`FromLisp`], because serde's own conversions would refuse a ratio or a large
/// integer.
macro_rules! deserialize_scalars {
    ($($function:ident $visit:ident $type:ty),*) => {$(
        fn $function<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SerdeError> {
            visitor.$visit(self.0.read::<$type>()?)
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Deserializer<'_, '_> {
    type Error = SerdeError;

    deserialize_scalars! {
        deserialize_i8 visit_i8 i8, deserialize_i16 visit_i16 i16, deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64, deserialize_i128 visit_i128 i128, deserialize_u8 visit_u8 u8,
        deserialize_u16 visit_u16 u16, deserialize_u32 visit_u32 u32, deserialize_u64 visit_u64 u64,
        deserialize_u128 visit_u128 u128, deserialize_f32 visit_f32 f32, deserialize_f64 visit_f64 f64,
        deserialize_bool visit_bool bool, deserialize_char visit_char char
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SerdeError> {
        let token = self.0.token();
        self.deserialize_token(token, visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SerdeError> {
        // A recursive type can nest options in options without consuming input, so the stack is checked here.
        self.0.check_stack_room()?;
        if self.0.is_at_nil() {
            self.0.skip();
            visitor.visit_none()
        } else {
            visitor.visit_some(self)
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, SerdeError> {
        self.0.check_stack_room()?;
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SerdeError> {
        match self.0.token() {
            Token::Nil => self.visit_sequence(0, visitor),
            token => self.deserialize_elements(token, visitor),
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, SerdeError> {
        match self.0.token() {
            Token::Dotted(count) => self.visit_sequence(count + 1, visitor),
            token => self.deserialize_elements(token, visitor),
        }
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        count: usize,
        visitor: V,
    ) -> Result<V::Value, SerdeError> {
        self.deserialize_tuple(count, visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SerdeError> {
        match self.0.token() {
            Token::Nil => self.visit_property_list(0, &[], visitor),
            Token::List(count) => self.visit_property_list(count, &[], visitor),
            token => self.deserialize_token(token, visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, SerdeError> {
        match self.0.token() {
            Token::Nil => self.visit_property_list(0, fields, visitor),
            Token::List(count) => self.visit_property_list(count, fields, visitor),
            Token::Table(count) => self.visit_table(count, fields, visitor),
            // The handle may refer to a structure or an instance.
            Token::Handle(handle) => {
                let message = self.0.slots_as_list(handle)?;
                let mut reader = self.0.nested_reader(&message);
                let count = match (reader.token(), reader.token()) {
                    (Token::Values(_), Token::List(count)) => count,
                    _ => 0,
                };
                Deserializer(&mut reader).visit_property_list(count, fields, visitor)
            }
            token => Err(SerdeError(self.0.unexpected("a property list, a hash table or an instance", token))),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, SerdeError> {
        let count = match self.0.token() {
            Token::List(count) if count > 0 => count,
            Token::Keyword => {
                let name = variant_name(&self.0.name()?, variants)?;
                return visitor.visit_enum(name.into_deserializer());
            }
            token => {
                return Err(SerdeError(self.0.unexpected("a keyword, or a list that begins with a keyword", token)));
            }
        };
        let name = self.0.read::<Symbol>()?.name;
        let name = variant_name(&name, variants)?;
        let lisp = lisp_name(&name).to_lowercase();
        let describe = |values| variant_text(&lisp, values);
        self.visit_elements(count - 1, &[], None, describe, |values| {
            visitor.visit_enum(VariantDeserializer { name, values })
        })
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SerdeError> {
        self.0.skip();
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! { str string bytes byte_buf unit unit_struct identifier }
}

/// The keys of a property list that have been read: symbols, and other keys in the message's encoding. A later entry
/// with such a key does not count, as for `getf`.
type SeenKeys<'m> = (HashSet<Symbol>, HashSet<&'m [u64]>);

/// Maximum size hint of a sequence. A visitor may reserve memory for this number of elements before it reads an
/// element, however large the type of the elements is.
const MAX_SIZE_HINT: usize = 1 << 10;

/// The remaining numbers of a specialised vector. Each number is read from a message of its own, by the rules for the
/// elements of a list.
struct Numbers<'r, 'm, I> {
    reader: &'r Reader<'m>,
    numbers: I,
}

impl<'de, I: ExactSizeIterator<Item = [u64; 2]>> de::SeqAccess<'de> for Numbers<'_, '_, I> {
    type Error = SerdeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, SerdeError> {
        let Some(message) = self.numbers.next() else { return Ok(None) };
        let mut reader = self.reader.nested_reader(&message);
        seed.deserialize(Deserializer(&mut reader)).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.numbers.len().min(MAX_SIZE_HINT))
    }
}

/// The remaining objects of a list, or the remaining keys and values of a property list or a hash table.
struct Elements<'r, 'm> {
    reader: &'r mut Reader<'m>,
    /// The number of objects that have not been read.
    left: &'r mut usize,
    names: &'static [&'static str],
    /// `None` unless the objects are a property list.
    keys: Option<SeenKeys<'m>>,
    /// The texts that the keys of a map have become so far.
    texts: HashSet<String>,
}

impl Elements<'_, '_> {
    /// Records that a key of a map becomes `text`. Returns an error if an earlier key has become the same text: the map
    /// would lose one of the two entries.
    fn record_text(&mut self, text: String) -> Result<(), SerdeError> {
        let Some(text) = self.texts.replace(text) else { return Ok(()) };
        let found = format!("two keys that become {:?}", shorten(&text, MAX_DESCRIPTION));
        Err(ConversionError::new("a map whose keys become different Rust keys", found).into())
    }

    fn skip(&mut self, count: usize) {
        *self.left -= count;
        for _ in 0..count {
            self.reader.skip();
        }
    }

    /// Deserializes the next object. If the message contains a handle instead of the object, for example because the
    /// object is nested deeply, Lisp writes the object out first.
    fn deserialize_next<'de, T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, SerdeError> {
        *self.left = self.left.saturating_sub(1);
        self.reader.read_or_skip(|reader| reader.fetch(Shape::DEEP, |reader| seed.deserialize(Deserializer(reader))))
    }
}

impl<'de> de::SeqAccess<'de> for Elements<'_, '_> {
    type Error = SerdeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, SerdeError> {
        if *self.left == 0 {
            return Ok(None);
        }
        self.deserialize_next(seed).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some((*self.left).min(MAX_SIZE_HINT))
    }
}

impl<'de> de::MapAccess<'de> for Elements<'_, '_> {
    type Error = SerdeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, SerdeError> {
        while *self.left >= 2 {
            if !self.reader.is_at_name() {
                if let Some((_, keys)) = &mut self.keys
                    && !keys.insert(self.reader.peek())
                {
                    self.skip(2);
                    continue;
                }
                if self.names.is_empty()
                    && let Some(text) = self.reader.peek_text()
                {
                    self.record_text(text)?;
                }
                return self.deserialize_next(seed).map(Some);
            }
            *self.left -= 1;
            let symbol = self.reader.read::<Symbol>()?;
            if let Some((symbols, _)) = &mut self.keys
                && !symbols.insert(symbol.clone())
            {
                self.skip(1);
                continue;
            }
            // For a struct, serde itself refuses the second value of a field.
            if self.names.is_empty() {
                self.record_text(rust_name(&symbol.name, self.names))?;
            }
            return seed.deserialize(KeyDeserializer { text: symbol.name, names: self.names }).map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, SerdeError> {
        // The object after the last value belongs to the enclosing object.
        if *self.left == 0 {
            return Err(de::Error::custom("a value without a key was requested"));
        }
        self.deserialize_next(seed)
    }
}

/// A symbol or keyword that is a key in a property list or a hash table: the name of a Rust field or a map's key, in
/// Lisp's spelling.
struct KeyDeserializer {
    text: String,
    names: &'static [&'static str],
}

impl<'de> de::Deserializer<'de> for KeyDeserializer {
    type Error = SerdeError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SerdeError> {
        visitor.visit_string(rust_name(&self.text, self.names))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, SerdeError> {
        // In a key too, a recursive type can nest options without consuming input.
        check_stack_room()?;
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, SerdeError> {
        check_stack_room()?;
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, SerdeError> {
        visitor.visit_enum(variant_name(&self.text, variants)?.into_deserializer())
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// An enum variant with values, which in Lisp is a list of the variant's name and the values.
struct VariantDeserializer<'r, 'm> {
    name: String,
    values: Elements<'r, 'm>,
}

impl<'de, 'r, 'm> de::EnumAccess<'de> for VariantDeserializer<'r, 'm> {
    type Error = SerdeError;
    type Variant = Elements<'r, 'm>;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self::Variant), SerdeError> {
        let name = seed.deserialize(IntoDeserializer::<SerdeError>::into_deserializer(self.name))?;
        Ok((name, self.values))
    }
}

impl<'de> de::VariantAccess<'de> for Elements<'_, '_> {
    type Error = SerdeError;

    fn unit_variant(self) -> Result<(), SerdeError> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(mut self, seed: T) -> Result<T::Value, SerdeError> {
        let value = de::SeqAccess::next_element_seed(&mut self, seed)?;
        value.ok_or_else(|| SerdeError(ConversionError::new("a variant with a value", "a variant without a value")))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, SerdeError> {
        let count = std::mem::take(self.left);
        Deserializer(self.reader).visit_sequence(count, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, SerdeError> {
        let count = std::mem::take(self.left);
        Deserializer(self.reader).visit_property_list(count, fields, visitor)
    }
}

struct Serializer<'w, 'm>(&'w mut Writer<'m>);

/// A list or hash table whose elements serde passes one by one. The elements are collected in a separate message until
/// the container is complete.
struct CompoundSerializer<'w, 'm> {
    writer: &'w mut Writer<'m>,
    written: message::MessageWriter,
    is_table: bool,
    /// The Lisp names of a struct's fields written so far.
    fields: HashSet<String>,
    /// False if a part is missing, because an attempt to write the part failed or panicked.
    is_intact: bool,
}

impl CompoundSerializer<'_, '_> {
    fn add(&mut self, value: &(impl Serialize + ?Sized), place: impl FnOnce() -> String) -> Result<(), SerdeError> {
        // A Serialize implementation may ignore an error or a panic. If a part were missing, the later parts would be
        // in the wrong places.
        let was_intact = std::mem::replace(&mut self.is_intact, false);
        let mut writer = Writer(&mut self.written);
        Serializer(&mut writer)
            .serialize_nested(value)
            .map_err(|SerdeError(error)| SerdeError(error.with_outer_place(place)))?;
        self.is_intact = was_intact;
        Ok(())
    }

    fn add_element(&mut self, value: &(impl Serialize + ?Sized)) -> Result<(), SerdeError> {
        let index = self.written.object_count();
        self.add(value, || format!("element {index}"))
    }

    /// Adds `name` as a keyword. Returns the keyword's name.
    fn add_name(&mut self, name: &'static str) -> String {
        let Symbol { package, name } = keyword(&lisp_name(name));
        self.written.symbol(package.as_deref(), &name);
        name
    }

    fn add_field(&mut self, name: &'static str, value: &(impl Serialize + ?Sized)) -> Result<(), SerdeError> {
        let lisp = self.add_name(name);
        if let Some(lisp) = self.fields.replace(lisp) {
            self.is_intact = false;
            let found = format!("two fields named :{}", lisp.to_lowercase());
            return Err(ConversionError::new("a struct whose field names become different keywords", found).into());
        }
        self.add(value, || format!("the field {name}"))
    }

    fn finish(self) -> Result<(), SerdeError> {
        let Self { writer, written, is_table, is_intact, .. } = self;
        if !is_intact {
            return Err(ser::Error::custom("its Serialize implementation ignored that a part could not be written"));
        }
        let write = |writer: &mut Writer<'_>| {
            writer.0.append(written);
            Ok(())
        };
        if is_table { writer.table(write) } else { writer.list(write) }.map_err(SerdeError)
    }
}

impl<'w, 'm> Serializer<'w, 'm> {
    fn compound(self) -> CompoundSerializer<'w, 'm> {
        CompoundSerializer {
            writer: self.0,
            written: message::MessageWriter::new(),
            is_table: false,
            fields: HashSet::new(),
            is_intact: true,
        }
    }

    /// Serializes `value` as part of another value.
    fn serialize_nested(self, value: &(impl Serialize + ?Sized)) -> Result<(), SerdeError> {
        self.0.check_stack_room()?;
        value.serialize(self)
    }
}

macro_rules! serialize_scalars {
    ($($function:ident $type:ty),*) => {$(
        fn $function(self, value: $type) -> Result<(), SerdeError> {
            value.write(self.0).map_err(SerdeError)
        }
    )*};
}

impl<'w, 'm> ser::Serializer for Serializer<'w, 'm> {
    type Ok = ();
    type Error = SerdeError;
    type SerializeSeq = CompoundSerializer<'w, 'm>;
    type SerializeTuple = CompoundSerializer<'w, 'm>;
    type SerializeTupleStruct = CompoundSerializer<'w, 'm>;
    type SerializeTupleVariant = CompoundSerializer<'w, 'm>;
    type SerializeMap = CompoundSerializer<'w, 'm>;
    type SerializeStruct = CompoundSerializer<'w, 'm>;
    type SerializeStructVariant = CompoundSerializer<'w, 'm>;

    serialize_scalars! {
        serialize_bool bool, serialize_i8 i8, serialize_i16 i16, serialize_i32 i32, serialize_i64 i64,
        serialize_i128 i128, serialize_u8 u8, serialize_u16 u16, serialize_u32 u32, serialize_u64 u64,
        serialize_u128 u128, serialize_f32 f32, serialize_f64 f64, serialize_char char, serialize_str &str
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<(), SerdeError> {
        self.0.0.octets(value);
        Ok(())
    }

    fn serialize_none(self) -> Result<(), SerdeError> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), SerdeError> {
        self.serialize_nested(value)
    }

    fn serialize_unit(self) -> Result<(), SerdeError> {
        self.0.0.nil();
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), SerdeError> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), SerdeError> {
        keyword(&lisp_name(variant)).write(self.0).map_err(SerdeError)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<(), SerdeError> {
        self.serialize_nested(value)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), SerdeError> {
        let mut compound = self.compound();
        compound.add_name(variant);
        compound.add(value, || format!("the variant {variant}"))?;
        compound.finish()
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<CompoundSerializer<'w, 'm>, SerdeError> {
        Ok(self.compound())
    }

    fn serialize_tuple(self, _: usize) -> Result<CompoundSerializer<'w, 'm>, SerdeError> {
        Ok(self.compound())
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<CompoundSerializer<'w, 'm>, SerdeError> {
        Ok(self.compound())
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<CompoundSerializer<'w, 'm>, SerdeError> {
        let mut compound = self.compound();
        compound.add_name(variant);
        Ok(compound)
    }

    fn serialize_map(self, _: Option<usize>) -> Result<CompoundSerializer<'w, 'm>, SerdeError> {
        Ok(CompoundSerializer { is_table: true, ..self.compound() })
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<CompoundSerializer<'w, 'm>, SerdeError> {
        Ok(self.compound())
    }

    fn serialize_struct_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        count: usize,
    ) -> Result<CompoundSerializer<'w, 'm>, SerdeError> {
        self.serialize_tuple_variant(name, index, variant, count)
    }
}

macro_rules! serialize_sequences {
    ($($trait:ident $function:ident),*) => {$(
        impl ser::$trait for CompoundSerializer<'_, '_> {
            type Ok = ();
            type Error = SerdeError;

            fn $function<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), SerdeError> {
                self.add_element(value)
            }

            fn end(self) -> Result<(), SerdeError> {
                self.finish()
            }
        }
    )*};
}

serialize_sequences! {
    SerializeSeq serialize_element, SerializeTuple serialize_element, SerializeTupleStruct serialize_field,
    SerializeTupleVariant serialize_field
}

macro_rules! serialize_structs {
    ($($trait:ident),*) => {$(
        impl ser::$trait for CompoundSerializer<'_, '_> {
            type Ok = ();
            type Error = SerdeError;

            fn serialize_field<T: Serialize + ?Sized>(&mut self, name: &'static str, value: &T) -> Result<(), SerdeError> {
                self.add_field(name, value)
            }

            fn end(self) -> Result<(), SerdeError> {
                self.finish()
            }
        }
    )*};
}

serialize_structs! { SerializeStruct, SerializeStructVariant }

impl ser::SerializeMap for CompoundSerializer<'_, '_> {
    type Ok = ();
    type Error = SerdeError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), SerdeError> {
        let index = self.written.object_count() / 2;
        self.add(key, || format!("the key of entry {index}"))
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), SerdeError> {
        let index = self.written.object_count() / 2;
        self.add(value, || format!("the value of entry {index}"))
    }

    fn end(self) -> Result<(), SerdeError> {
        self.finish()
    }
}
