//! Round trips of random values through Lisp.

use std::collections::BTreeMap;

use proptest::prelude::*;
use sbcl::{FromLisp, IntoLisp, Value};

#[cfg(feature = "num-bigint")]
proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bigint_and_biguint_survive_a_round_trip_through_lisp(octets in any::<Vec<u8>>(), zeros in 0_usize..40) {
        use num_bigint::{BigInt, BigUint};
        let lisp = super::lisp();
        let signed = BigInt::from_signed_bytes_le(&octets) << (8 * zeros);
        let unsigned = BigUint::from_bytes_be(&octets);
        prop_assert_eq!(&lisp.call::<BigInt>("identity", (&signed,)).unwrap(), &signed);
        prop_assert_eq!(&lisp.call::<BigUint>("identity", (&unsigned,)).unwrap(), &unsigned);
        // Lisp sees the same number.
        prop_assert_eq!(lisp.call::<String>("princ-to-string", (&signed,)).unwrap(), signed.to_string());
        prop_assert_eq!(&lisp.call::<BigInt>("-", (&signed,)).unwrap(), &-&signed);
        prop_assert_eq!(lisp.call::<BigUint>("1-", (&signed,)).is_ok(), signed > BigInt::ZERO);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_rust_values_survive_a_round_trip_through_lisp(
        text in any::<String>(),
        numbers in any::<Vec<i128>>(),
        octets in any::<Vec<u8>>(),
        nested in prop::collection::vec(any::<(u64, Option<char>, Vec<String>)>(), 0..5),
        float in any::<f64>().prop_filter("NaN is not itself", |float| !float.is_nan()),
        map in any::<BTreeMap<String, (bool, i8)>>(),
    ) {
        let lisp = super::lisp();
        prop_assert_eq!(&lisp.call::<String>("identity", (&text,)).unwrap(), &text);
        prop_assert_eq!(&lisp.call::<Vec<i128>>("identity", (&numbers,)).unwrap(), &numbers);
        prop_assert_eq!(&lisp.call::<Vec<u8>>("identity", (&octets,)).unwrap(), &octets);
        prop_assert_eq!(&lisp.call::<Vec<(u64, Option<char>, Vec<String>)>>("identity", (&nested,)).unwrap(), &nested);
        prop_assert_eq!(lisp.call::<f64>("identity", (float,)).unwrap(), float);
        prop_assert_eq!(&lisp.call::<BTreeMap<String, (bool, i8)>>("identity", (&map,)).unwrap(), &map);
        // The same round trip through handles.
        prop_assert_eq!(&lisp.value(&nested).unwrap().to::<Vec<(u64, Option<char>, Vec<String>)>>().unwrap(), &nested);
    }
    #[test]
    fn handles_at_different_depths_stand_for_the_same_object(
        lists in prop::collection::vec(prop::collection::vec(any::<String>(), 0..4), 0..4),
    ) {
        macro_rules! check_pairs {
            ([$($one:ty),*] $others:tt) => {$(check_pairs!($one, $others);)*};
            ($one:ty, [$($other:ty),*]) => {$(check_pair::<$one, $other>(&lists);)*};
        }
        check_pairs!(
            [Value, Vec<Value>, Vec<Vec<Value>>, Vec<Option<Vec<Value>>>, Vec<Vec<String>>]
            [Value, Vec<Value>, Vec<Vec<Value>>, Vec<Vec<String>>]
        );
    }

    #[test]
    fn tables_and_association_lists_are_read_with_handles_at_any_depth(
        map in prop::collection::btree_map(any::<String>(), prop::collection::vec(any::<String>(), 0..4), 0..6),
    ) {
        let lisp = super::lisp();
        let pairs: Vec<(&String, &Vec<String>)> = map.iter().collect();
        for object in [lisp.value(&map).unwrap(), lisp.value(&pairs).unwrap()] {
            let handles: BTreeMap<String, Value> = object.to().unwrap();
            let lists: BTreeMap<String, Vec<Value>> = object.to().unwrap();
            // With types that need fewer or more levels.
            let (_, with_handle): (Value, BTreeMap<String, Value>) = lisp.call("values", (1, &object)).unwrap();
            let (_, with_list): (Vec<Value>, BTreeMap<String, Value>) = lisp.call("values", ([1], &object)).unwrap();
            let (_, with_map): (BTreeMap<String, Vec<Value>>, BTreeMap<String, Value>) =
                lisp.call("values", (&object, &object)).unwrap();
            for handles in [handles, with_handle, with_list, with_map] {
                let read: BTreeMap<String, Vec<String>> =
                    handles.iter().map(|(key, value)| (key.clone(), value.to().unwrap())).collect();
                prop_assert_eq!(&read, &map);
            }
            let read: BTreeMap<String, Vec<String>> = lists
                .iter()
                .map(|(key, values)| (key.clone(), values.iter().map(|value| value.to().unwrap()).collect()))
                .collect();
            prop_assert_eq!(&read, &map);
        }
    }
}

/// Reads `lists` as an `A` and as a `B`, as two values and as two elements of a list.
fn check_pair<A, B>(lists: &[Vec<String>])
where
    A: FromLisp + IntoLisp + Send + Sync,
    B: FromLisp + IntoLisp + Send + Sync,
{
    let lisp = super::lisp();
    let values: (A, B) = lisp.call("values", (lists, lists)).unwrap();
    let elements: Vec<(A, B)> = lisp.call("list", ((lists, lists),)).unwrap();
    for (one, other) in std::iter::once(values).chain(elements) {
        assert!(lisp.call::<bool>("equal", (&one, lists)).unwrap());
        assert!(lisp.call::<bool>("equal", (&other, lists)).unwrap());
    }
}
