//! Conversions between Lisp and Rust values, and their errors.

use super::*;
use sbcl::FromLisp;
use std::fmt::Debug;

#[test]
fn lisp_values_are_converted_to_the_requested_rust_type() {
    let lisp = lisp();
    assert_eq!(lisp.eval::<(i64, i64)>("(floor 17 5)").unwrap(), (3, 2));
    assert_eq!(lisp.eval::<i64>("(floor 17 5)").unwrap(), 3);
    assert_eq!(lisp.eval::<Vec<String>>(r#"(list "ada" "grace")"#).unwrap(), ["ada", "grace"]);
    assert_eq!(lisp.eval::<Vec<Vec<u8>>>("'((1 2) #(3))").unwrap(), [vec![1, 2], vec![3]]);
    assert_eq!(lisp.eval::<Option<f64>>("nil").unwrap(), None);
    assert_eq!(lisp.eval::<Option<f64>>("1/4").unwrap(), Some(0.25));
    assert_eq!(lisp.eval::<(String, char)>(r#"(values "größe λ😀" #\λ)"#).unwrap(), ("größe λ😀".to_owned(), 'λ'));
    assert_eq!(lisp.eval::<(bool, bool)>("(values nil 7)").unwrap(), (false, true));
    assert_eq!(lisp.eval::<Vec<(String, i64)>>(r#"'(("a" . 1) ("b" 2))"#).unwrap(), [("a".into(), 1), ("b".into(), 2)]);
    assert_eq!(lisp.eval::<Symbol>("'car").unwrap(), Symbol::new("COMMON-LISP", "CAR"));
    assert_eq!(lisp.eval::<Symbol>(":rate").unwrap(), keyword("rate"));
    assert_eq!(lisp.eval::<Ratio>("(/ 6 -4)").unwrap(), Ratio { numerator: -3, denominator: 2 });
    for (code, numerator) in [("(expt 2 62)", 1 << 62), ("(expt 2 63)", 1 << 63), ("(- (expt 2 127))", i128::MIN)] {
        assert_eq!(lisp.eval::<Ratio>(code).unwrap(), Ratio { numerator, denominator: 1 });
    }
    assert!(lisp.eval::<Ratio>("(expt 2 127)").is_err());
    assert_eq!(lisp.eval::<Complex>("#c(1 2.5d0)").unwrap(), Complex { re: 1.0, im: 2.5 });
    assert_eq!(lisp.eval::<u128>("(1- (expt 2 128))").unwrap(), u128::MAX);
    assert_eq!(lisp.eval::<i128>("(- (expt 2 127))").unwrap(), i128::MIN);
    assert_eq!(lisp.eval::<u64>("(1- (expt 2 64))").unwrap(), u64::MAX);
    assert_eq!(
        lisp.eval::<Vec<f64>>("(make-array 2 :element-type 'double-float :initial-element 1d0)").unwrap(),
        [1.0; 2]
    );
    assert_eq!(lisp.eval::<[i64; 2]>("#(1 2)").unwrap(), [1, 2]);
    let map: HashMap<String, i64> =
        lisp.eval(r#"(let ((h (make-hash-table :test 'equal))) (setf (gethash "x" h) 1) h)"#).unwrap();
    assert_eq!(map, HashMap::from([("x".to_owned(), 1)]));
    lisp.eval::<()>("(values)").unwrap();
    assert_eq!(lisp.eval::<Option<i64>>("(values)").unwrap(), None);
}

#[test]
fn rust_values_survive_a_round_trip_through_lisp() {
    let lisp = lisp();
    macro_rules! same {
        ($($value:expr),* $(,)?) => {$({
            let value = $value;
            assert_eq!(lisp.call("identity", (&value,)).ok(), Some(value));
        })*};
    }
    same!(i64::MIN, u64::MAX, i128::MIN, i128::MAX, u128::MAX, -1_i8, 1.5_f32, f64::MIN_POSITIVE, 'ß', true, false);
    same!(String::new(), "odd".to_owned(), "größe 😀".to_owned(), "nul\0".to_owned(), "x".repeat(5000));
    same!(vec![1_i64, 2, 3], Vec::<i64>::new(), vec![1_u8, 2, 3], (0..=255).collect::<Vec<u8>>());
    same!(Some(3_i32), None::<i32>, vec![(1_i64, "a".to_owned(), 'c')], vec![vec!["deep".to_owned()]]);
    same!(BTreeMap::from([("a".to_owned(), vec![1_i64]), ("b".to_owned(), vec![])]), keyword("k"), [1.5_f64, 2.5]);
    same!(Ratio { numerator: 1, denominator: 3 }, Complex { re: 1.0, im: -1.0 });
    assert!(
        lisp.call::<bool>("typep", (vec![1_u8], lisp.eval::<Value>("'(vector (unsigned-byte 8))").unwrap())).unwrap()
    );
}

#[test]
fn error_names_the_expected_type_the_found_value_and_the_position() {
    let lisp = lisp();
    let text = |error: Error| error.to_string();
    assert_eq!(
        text(lisp.eval::<i64>(r#""abc""#).unwrap_err()),
        r#"expected an integer from -9223372036854775808 to 9223372036854775807, but found the string "abc""#
    );
    assert_eq!(
        text(lisp.eval::<Vec<(String, u8)>>(r#"'(("a" 1) ("b" 256))"#).unwrap_err()),
        "expected an integer from 0 to 255, but found 256 (in element 1, element 1)"
    );
    assert_eq!(text(lisp.eval::<String>("'(1 2)").unwrap_err()), "expected a string, but found (1 2)");
    assert_eq!(text(lisp.eval::<(i64, i64)>("1").unwrap_err()), "expected 2 values, but found one value");
    assert_eq!(
        text(lisp.eval::<String>("(string (code-char #xd800))").unwrap_err()),
        "expected text, but found a string with the surrogate code point 0xd800"
    );
    assert!(text(lisp.eval::<i64>("(make-hash-table)").unwrap_err()).contains("#<HASH-TABLE"));
    for (code, found) in [("2.5d0", "2.5d0"), ("1d300", "1d300"), ("-1.5d-9", "-1.5d-9"), ("1f0", "1.0")] {
        assert_eq!(text(lisp.eval::<String>(code).unwrap_err()), format!("expected a string, but found {found}"));
        assert_eq!(format!("{:?}", lisp.eval::<Value>(code).unwrap()), format!("Value({found})"));
    }
    let error = text(lisp.eval::<sbcl::Serde<String>>("1d300").unwrap_err());
    assert!(error.ends_with("floating point `1e300`, expected a string"), "{error}");
    // Conversion of a circular object ends with an error.
    assert!(lisp.eval::<Vec<i64>>("(let ((l (list 1))) (setf (cdr l) l))").is_err());
    assert_eq!(lisp.eval::<i64>("(+ 1 2)").unwrap(), 3);
}

/// The result of reading an object that `outer` containers hold: the object or the error, as text.
fn reading<T: Debug>(result: Result<T, Error>, outer: usize) -> String {
    match result {
        Ok(object) => format!("{object:?}"),
        Err(Error::Conversion(error)) => {
            // A collection changes the address with which a hash table is printed.
            let found = error.found.split(" {").next();
            format!("expected {}, but found {found:?} in {:?}", error.expected, &error.place[outer..])
        }
        Err(error) => error.to_string(),
    }
}

/// Asserts that the object is read as the same `T`, or fails with the same error, as a `Value`, an element, a slot and an
/// argument, and if `is_value` is true, also as the value of a call.
fn assert_read_alike<T: FromLisp + Debug + Send + 'static>(value: &Value, code: &str, is_value: bool) {
    let lisp = lisp();
    let argument = lisp.enter(|cx| cx.local_function(|object: T| format!("{object:?}"))?.call::<String>((value,)));
    assert_eq!(argument.ok(), value.to::<T>().ok().map(|object| format!("{object:?}")), "{code}");
    let read = reading(value.to::<T>(), 0);
    assert_eq!(reading(lisp.call::<[T; 1]>("list", (value,)).map(|[object]| object), 1), read, "{code}");
    let structure: Value = lisp.call("make-read-alike", (keyword("object"), value)).unwrap();
    assert_eq!(reading(structure.slot::<T>("object"), 0), read, "{code}");
    if is_value {
        assert_eq!(reading(lisp.call::<T>("identity", (value,)), 0), read, "{code}");
    }
}

/// A number, or the type of any other object.
#[derive(Debug)]
#[allow(dead_code)]
struct Kept(Result<i64, String>);

impl FromLisp for Kept {
    const SHAPE: sbcl::Shape = Result::<i64, Value>::SHAPE;

    fn from_lisp(reader: &mut sbcl::Reader<'_>) -> Result<Self, sbcl::ConversionError> {
        Ok(Self(reader.read::<Result<i64, Value>>()?.map_err(|value| value.type_of().unwrap())))
    }
}

#[test]
fn object_is_read_alike_as_a_value_an_element_a_slot_and_an_argument() {
    let lisp = lisp();
    lisp.load_str("(defstruct read-alike object)").unwrap();
    let objects = [
        "nil",
        "t",
        "7",
        "-1",
        "300",
        "(expt 2 70)",
        "(- (expt 2 127))",
        "1/2",
        "1.5",
        "2.5d0",
        "#c(1 2d0)",
        "#\\a",
        "(code-char #xd800)",
        "\"text\"",
        "(string (code-char #xd800))",
        "'car",
        ":key",
        "(make-symbol \"LONE\")",
        "#'car",
        "'(1)",
        "'(1 2)",
        "'(1 . 2)",
        "'(1 2 . 3)",
        "'(1 2 3)",
        "'(1 x)",
        "'((1 2) (3 4))",
        "'((\"a\" . 1) (\"b\" 2))",
        "'(:a 1 :b 2)",
        "(vector 1 2)",
        "(coerce '(1 2) '(vector (unsigned-byte 8)))",
        "(coerce '(1d0 2d0) '(vector double-float))",
        "(let ((h (make-hash-table :test 'equal))) (setf (gethash \"x\" h) 1) h)",
        "'#1=(1 . #1#)",
    ];
    let objects = objects.map(|code| (code, lisp.eval::<Value>(code).unwrap()));
    macro_rules! check {
        ($is_value:literal: $($type:ty),* $(,)?) => {$(
            for (code, value) in &objects {
                assert_read_alike::<$type>(value, code, $is_value);
            }
        )*};
    }
    type Map = HashMap<String, i64, std::hash::BuildHasherDefault<std::hash::DefaultHasher>>;
    check!(true: i8, i64, u8, u64, i128, u128, f32, f64, bool, char, String, (), Symbol, Ratio, Complex, Kept);
    check!(true: Option<i64>, Option<(i64, i64)>, Vec<i64>, Vec<u8>, Vec<f64>, Vec<(i64, i64)>, [i64; 2], Vec<Kept>);
    check!(true: Map, BTreeMap<String, i64>, BTreeMap<i64, Option<i64>>, sbcl::Serde<i64>, sbcl::Serde<(i64, i64)>);
    check!(true: sbcl::Serde<Vec<f64>>, sbcl::Serde<BTreeMap<String, i64>>, sbcl::Serde<Option<String>>);
    // The value of a call is not read as a tuple: the call's values are.
    check!(false: (i64,), (i64, i64), (i64, Option<i64>), (f64, f64), (i64, i64, i64));
    check!(false: (Vec<i64>, Vec<i64>), (Kept, Kept));
    let list: Value = lisp.eval("'(1 2)").unwrap();
    assert_eq!(list.to::<(i64, i64)>().unwrap(), (1, 2));
    assert_eq!(lisp.call::<(i64, i64)>("values-list", (&list,)).unwrap(), (1, 2));
}

#[test]
fn conversion_error_cuts_off_the_text_of_the_found_object() {
    #[derive(Debug, serde::Deserialize)]
    enum Unit {
        Gb,
    }
    let lisp = lisp();
    let name = "(make-string 100000 :initial-element #\\X)";
    let keyword = format!("(intern {name} :keyword)");
    for (error, limit) in [
        (lisp.eval::<i64>(name).unwrap_err(), 200),
        (lisp.eval::<i64>(&format!("(make-symbol {name})")).unwrap_err(), 200),
        (lisp.eval::<i64>(&keyword).unwrap_err(), 200),
        (lisp.eval::<Function>("(make-array 100000)").unwrap_err(), 200),
        (lisp.eval::<sbcl::Serde<Vec<i64>>>(name).unwrap_err(), 1_200),
        (lisp.eval::<sbcl::Serde<Unit>>(&keyword).unwrap_err(), 1_200),
    ] {
        assert!(matches!(error, Error::Conversion(_)), "{error:?}");
        let text = error.to_string();
        assert!(text.contains('…') && text.chars().count() < limit, "{}: {text}", text.len());
    }
    assert!(matches!(lisp.eval::<sbcl::Serde<Unit>>(":gb").unwrap().0, Unit::Gb));
}

#[test]
fn bool_and_unit_are_read_without_a_copy_of_the_object() {
    let lisp = lisp();
    // A message has no room for so many characters.
    let huge: Value = lisp.eval("(make-string (expt 2 28) :element-type 'base-char)").unwrap();
    assert!(huge.to::<String>().unwrap_err().to_string().contains("too large to be converted"));
    assert!(huge.to::<bool>().unwrap());
    assert_eq!(huge.to::<Option<()>>().unwrap(), Some(()));
    lisp.call::<()>("identity", (&huge,)).unwrap();
    assert_eq!(lisp.call::<Vec<bool>>("list", (&huge, false, 0)).unwrap(), [true, false, true]);
    assert_eq!(lisp.call::<(bool, bool)>("values", (false, &huge)).unwrap(), (false, true));
    let read: (bool, Value) = lisp.call("values", (&huge, &huge)).unwrap();
    assert!(read.0 && read.1.eql(&huge).unwrap());
    lisp.define("host:is-true", "Whether OBJECT is true.", |object: bool| object).unwrap();
    assert!(lisp.call::<bool>("host:is-true", (&huge,)).unwrap());
}

#[test]
fn failed_conversion_keeps_no_objects_alive() {
    let lisp = lisp();
    lisp.define("host:count-lists", "How many lists.", |lists: Vec<Vec<Value>>| lists.len()).unwrap();
    let object = "(list (loop repeat 1000 collect (list :unwritten)) (let ((l (list 1))) (setf (cdr l) l)))";
    for _ in 0..3 {
        let errors = [
            lisp.eval::<Vec<Vec<Value>>>(object).map(drop).unwrap_err(),
            lisp.eval::<()>(&format!("(host:count-lists {object})")).unwrap_err(),
        ];
        for error in errors {
            assert!(error.to_string().contains("too large to be converted, or contains itself"), "{error}");
        }
    }
    let kept: i64 = lisp
        .eval("(count :unwritten sbcl-host/embedding::**handle-table** :key (lambda (x) (if (consp x) (car x))))")
        .unwrap();
    assert_eq!(kept, 0);
}

#[test]
fn doubly_circular_list_is_too_large_to_convert() {
    let twice = "(let ((l (list 1 2))) (setf (first l) l (second l) l))";
    let error = lisp().eval::<sbcl::Serde<Vec<i64>>>(twice).map(drop).unwrap_err();
    assert!(error.to_string().contains("too large to be converted, or contains itself"), "{error}");
    assert_eq!(lisp().eval::<i64>("(+ 1 2)").unwrap(), 3);
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Order {
    id: i64,
    line_items: Vec<String>,
    state: State,
    note: Option<String>,
    by_name: BTreeMap<String, f64>,
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
enum State {
    InStock,
    SentBy(String),
    Moved { from: i64, to_place: i64 },
    Pair(i64, bool),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
struct Id(u32);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
enum Place {
    InStock,
    Shelf(u8),
}

#[test]
fn serde_map_keys_of_any_type_are_read_back() {
    fn same<K: Debug + Ord + Send + Sync + serde::Serialize + serde::de::DeserializeOwned>(key: K) {
        let map = BTreeMap::from([(key, 1)]);
        let back = lisp().call::<sbcl::Serde<BTreeMap<K, i32>>>("identity", (sbcl::Serde(&map),));
        assert_eq!(back.unwrap_or_else(|error| panic!("{map:?}: {error}")).0, map);
    }
    macro_rules! same {
        ($($key:expr),*) => {$(same($key);)*};
    }
    same!(Id(7), true, false, Some(1_u8), None::<u8>, (1_u8, 2_u8), 'x', vec![1_u8], "A_b-C".to_owned());
    same!(u128::MAX, i128::MIN, u64::MAX, Place::InStock, Place::Shelf(3), Some(Place::InStock));
}

#[test]
fn serde_structs_and_enums_map_to_property_lists_and_keywords() {
    use sbcl::Serde;
    let lisp = lisp();
    for state in
        [State::InStock, State::SentBy("post".into()), State::Moved { from: 1, to_place: 2 }, State::Pair(3, true)]
    {
        let order = Order {
            id: 7,
            line_items: vec!["a".into(), "b".into()],
            state,
            note: None,
            by_name: BTreeMap::from([("x".to_owned(), 1.5)]),
        };
        assert_eq!(lisp.call::<Serde<Order>>("identity", (Serde(&order),)).unwrap().0, order);
    }
    let printed = lisp.value(Serde(State::Moved { from: 1, to_place: 2 })).unwrap().to_string();
    assert_eq!(printed, "(:MOVED :FROM 1 :TO-PLACE 2)");
    lisp.load_str(
        "(defstruct order id line-items state note by-name)
         (defclass parcel () ((from :initarg :from) (to-place :initarg :to-place)))",
    )
    .unwrap();
    let order: Serde<Order> =
        lisp.eval("(make-order :id 1 :line-items #(\"x\") :state :in-stock :note \"n\" :by-name '(:a 1/2))").unwrap();
    assert_eq!((order.0.id, order.0.note.as_deref(), order.0.by_name["a"]), (1, Some("n"), 0.5));
    #[derive(serde::Deserialize)]
    struct Parcel {
        from: i64,
        to_place: i64,
    }
    let parcel: Serde<Parcel> = lisp.eval("(make-instance 'parcel :from 1 :to-place 2)").unwrap();
    assert_eq!((parcel.0.from, parcel.0.to_place), (1, 2));
    let missing = lisp.eval::<Serde<Order>>("'(:id 1)").unwrap_err().to_string();
    assert!(missing.contains("missing field"), "{missing}");
    assert!(lisp.eval::<Serde<Order>>("7").is_err());
}

/// A list of such lists.
#[derive(serde::Deserialize)]
struct Tree(Vec<Tree>);

impl FromLisp for Tree {
    const SHAPE: sbcl::Shape = sbcl::Shape::DEEP;

    fn from_lisp(reader: &mut sbcl::Reader<'_>) -> Result<Self, sbcl::ConversionError> {
        Vec::from_lisp(reader).map(Self)
    }
}

type Read = fn(&Value) -> Result<usize, Error>;

#[test]
fn failed_conversion_of_a_large_object_takes_no_longer_when_the_object_is_nested_deeply() {
    let reads: [Read; 2] = [
        |object| object.to::<Tree>().map(|tree| tree.0.len()),
        |object| object.to::<sbcl::Serde<Tree>>().map(|tree| tree.0.0.len()),
    ];
    for read in reads {
        let [shallow, deep] = [10, 200].map(|depth| {
            let code = format!(
                "(let ((object (make-list 100000 :initial-element 1)))
                   (loop repeat {depth} do (setf object (list nil object nil)))
                   object)"
            );
            let object: Value = lisp().eval(&code).unwrap();
            let times = (0..3).map(|_| {
                let start = Instant::now();
                assert!(matches!(read(&object), Err(Error::Conversion(_))));
                start.elapsed()
            });
            times.min().unwrap()
        });
        assert!(deep < 5 * shallow, "{shallow:?} {deep:?}");
    }
}

#[test]
fn inexact_integers_and_ratios_are_converted_to_the_nearest_f64() {
    let lisp = lisp();
    let numbers: Vec<Value> = lisp
        .eval(
            "(let ((*random-state* (sb-ext:seed-random-state 1)))
               (flet ((any (bits) (- (random (ash 1 bits)) (ash 1 (1- bits)))))
                 (append (list (/ (expt 10 400) (1+ (expt 10 399))) (1- (ash 1 1024)) (/ (1+ (ash 1 54)) 3))
                         (loop repeat 50 collect (any 200))
                         (loop repeat 50 collect (/ (any 80) (1+ (random (ash 1 80)))))
                         (loop repeat 50 collect (/ (any 62) (1+ (random (ash 1 62)))))
                         ;; Some of these are subnormal, or become 0.
                         (loop repeat 200
                               collect (/ (any (+ 2 (random 1000))) (1+ (random (ash 1 (+ 2 (random 1200))))))))))",
        )
        .unwrap();
    for number in &numbers[2..] {
        let nearest: f64 = lisp.call("coerce", (number, Symbol::new("COMMON-LISP", "DOUBLE-FLOAT"))).unwrap();
        assert_eq!(number.to::<f64>().unwrap().to_bits(), nearest.to_bits(), "{number}");
    }
    assert_eq!(numbers[0].to::<f64>().unwrap(), 10.0);
    // Subnormal numbers have fewer bits.
    for (code, nearest) in [("(expt 2 -1074)", 5e-324), ("(/ 3 (ash 1 1076))", 5e-324), ("(expt 10 -320)", 1e-320)] {
        assert_eq!(lisp.eval::<f64>(code).unwrap(), nearest, "{code}");
        assert_eq!(lisp.eval::<f64>(&format!("(- {code})")).unwrap(), -nearest, "{code}");
    }
    assert_eq!(lisp.eval::<f64>("(expt 10 -400)").unwrap(), 0.0);
    assert_eq!(lisp.eval::<f64>("(expt 2 1023)").unwrap(), 2_f64.powi(1023));
    for beyond in [&numbers[1], &lisp.eval("(expt 10 400)").unwrap()] {
        assert!(matches!(beyond.to::<f64>(), Err(Error::Conversion(_))), "{beyond}");
    }
    assert_eq!(lisp.eval::<Complex>("1/2").unwrap(), Complex { re: 0.5, im: 0.0 });
    assert_eq!(lisp.eval::<Complex>("(expt 10 30)").unwrap(), Complex { re: 1e30, im: 0.0 });
}

#[test]
fn surrogates_fail_string_conversion_and_are_replaced_when_displayed() {
    let lisp = lisp();
    let surrogate = "(string (code-char #xd800))";
    let character: Value = lisp.eval("(code-char #xd800)").unwrap();
    assert_eq!(lisp.call::<i64>("char-code", (&character,)).unwrap(), 0xd800);
    for failed in [
        lisp.eval::<String>(surrogate).map(drop),
        lisp.eval::<sbcl::Serde<String>>(surrogate).map(drop),
        lisp.eval::<Symbol>(&format!("(make-symbol {surrogate})")).map(drop),
    ] {
        assert!(matches!(failed, Err(Error::Conversion(_))), "{failed:?}");
    }
    assert_eq!(lisp.eval::<Value>(surrogate).unwrap().to_string(), "\"\u{fffd}\"");
    let condition = condition(lisp.eval::<()>(&format!("(error \"bad ~a\" {surrogate})")).unwrap_err());
    assert_eq!(condition.message(), "bad \u{fffd}");
}

#[test]
fn keyword_upcases_names_as_the_lisp_reader_does() {
    for name in ["rate", "straße", "élan", "ǰ", "ς"] {
        assert_eq!(lisp().eval::<Symbol>(&format!(":{name}")).unwrap(), keyword(name));
    }
}

#[test]
fn pair_with_a_nil_cdr_converts_to_none_or_false() {
    let pairs = "'((\"a\" . 1) (\"b\" . nil))";
    let map: BTreeMap<String, Option<i64>> = lisp().eval(pairs).unwrap();
    assert_eq!(map, BTreeMap::from([("a".to_owned(), Some(1)), ("b".to_owned(), None)]));
    assert_eq!(lisp().eval::<Vec<(String, bool)>>(pairs).unwrap(), [("a".to_owned(), true), ("b".to_owned(), false)]);
    assert!(matches!(lisp().eval::<Vec<(i64, i64)>>("'((1))"), Err(Error::Conversion(_))));
}

#[test]
fn circular_list_is_an_error_for_len_get_and_to() {
    let lisp = lisp();
    for code in ["(let ((l (list :a 1 :b))) (setf (cdddr l) l))", "(let ((l (list (cons 1 2)))) (setf (cdr l) l))"] {
        let list: Value = lisp.eval(code).unwrap();
        assert!(condition(list.len().unwrap_err()).is("type-error"), "{code}");
        assert!(list.get::<Value>(keyword("other")).is_err(), "{code}");
        assert!(list.to::<Vec<Value>>().is_err(), "{code}");
    }
    assert!(condition(lisp.value(5).unwrap().len().unwrap_err()).is("type-error"));
}

#[test]
fn vector_displaced_to_a_vector_that_became_shorter_is_an_error_that_says_so() {
    let code = "(let* ((whole (make-array 10 :adjustable t :initial-element 1))
                       (part (make-array 5 :displaced-to whole :displaced-index-offset 5)))
                  (adjust-array whole 2)
                  part)";
    let error = lisp().eval::<Vec<i64>>(code).unwrap_err().to_string();
    assert!(error.contains("displaced to a vector that became shorter"), "{error}");
}

#[test]
fn index_beyond_a_list_is_none_or_for_a_dotted_list_a_type_error() {
    let lisp = lisp();
    let (proper, dotted): (Value, Value) = lisp.eval("(values (list 1 2) (list* 1 2 3))").unwrap();
    assert_eq!((proper.get::<i64>(1).unwrap(), dotted.get::<i64>(1).unwrap()), (Some(2), Some(2)));
    for index in [2, 9_999, 10_000, 10_001, u64::from(u32::MAX), 1 << 62, u64::MAX] {
        assert_eq!(proper.get::<i64>(index).unwrap(), None, "{index}");
        assert!(condition(dotted.get::<i64>(index).unwrap_err()).is("type-error"), "{index}");
    }
}

#[test]
fn value_is_printed_in_full_up_to_the_character_limit() {
    let numbers: Vec<i64> = (0..100).collect();
    let text = format!("({})", numbers.iter().map(i64::to_string).collect::<Vec<_>>().join(" "));
    assert_eq!(lisp().value(&numbers).unwrap().to_string(), text);
    let nested: Value = lisp().eval("(let ((x nil)) (dotimes (i 50 x) (setf x (list x))))").unwrap();
    assert_eq!(nested.to_string(), format!("{}NIL{}", "(".repeat(50), ")".repeat(50)));
    let circular: Value = lisp().eval("(let ((x (list 1))) (setf (car x) x))").unwrap();
    assert_eq!(circular.print(30).unwrap(), format!("{}…", "(".repeat(30)));
}

#[test]
fn huge_integer_is_printed_in_full_or_as_its_size() {
    let huge: Value = lisp().eval("(ash 1 4000000)").unwrap();
    assert_eq!(huge.print(10).unwrap(), "#<positive integer of 4000001 bits>");
    let large: Value = lisp().eval("(- (ash 1 120000))").unwrap();
    assert_eq!(large.to_string(), "#<negative integer of 120000 bits>");
    let text = large.print(40_000).unwrap();
    assert!(text.len() == 36_125 && text.starts_with("-39763") && !text.ends_with('…'), "{text}");
}

#[test]
fn types_that_need_handles_at_different_depths_are_read_together() {
    let lisp = lisp();
    let texts = |values: &[Value]| values.iter().map(Value::to_string).collect::<Vec<_>>();
    let (one, list) = lisp.eval::<(Value, Vec<Value>)>("(values 'a (list 1 '(2)))").unwrap();
    assert_eq!((one.to_string(), texts(&list)), ("A".to_owned(), vec!["1".to_owned(), "(2)".to_owned()]));
    let (list, one) = lisp.eval::<(Vec<Value>, Value)>("(values (list 1 '(2)) 'a)").unwrap();
    assert_eq!((one.to_string(), texts(&list)), ("A".to_owned(), vec!["1".to_owned(), "(2)".to_owned()]));
    let (list, add) = lisp.eval::<(Vec<Value>, Function)>("(values (list 'x) '+)").unwrap();
    assert_eq!((texts(&list), add.call::<i64>((1, 2)).unwrap()), (vec!["X".to_owned()], 3));
    let (flat, nested) = lisp.eval::<(Vec<Value>, Vec<Vec<Value>>)>("(values '((x) y) '((x) #(y)))").unwrap();
    assert_eq!((texts(&flat), nested.concat().len()), (vec!["(X)".to_owned(), "Y".to_owned()], 2));
    let pairs = lisp.eval::<Vec<(Value, Vec<Value>)>>("'((a (x (y))))").unwrap();
    assert_eq!(texts(&pairs[0].1), ["X", "(Y)"]);
    let failed = lisp.eval::<(Value, Vec<Value>)>("(values 'a (make-hash-table))").unwrap_err();
    assert!(failed.to_string().contains("expected a list or a vector"), "{failed}");
}

#[test]
fn hash_table_is_read_with_handles_as_values() {
    let lisp = lisp();
    for value in ["b", "\"b\"", "(1 (2))", "1/2", "100000000000000000000", "#(1)"] {
        let table = format!("(let ((h (make-hash-table :test 'equal))) (setf (gethash \"a\" h) '{value}) h)");
        let handles: HashMap<String, Value> = lisp.eval(&table).unwrap();
        assert!(handles["a"].to_string().eq_ignore_ascii_case(value), "{value}");
        let kept: BTreeMap<String, Result<i64, Value>> = lisp.eval(&table).unwrap();
        assert!(kept["a"].as_ref().unwrap_err().equalp(&handles["a"]).unwrap(), "{value}");
    }
    let lists: HashMap<String, Vec<Value>> =
        lisp.eval("(let ((h (make-hash-table :test 'equal))) (setf (gethash \"a\" h) '(b (c))) h)").unwrap();
    assert_eq!(lists["a"].iter().map(Value::to_string).collect::<Vec<_>>(), ["B", "(C)"]);
    let functions: HashMap<Symbol, Function> =
        lisp.eval("(let ((h (make-hash-table))) (setf (gethash :add h) '+) h)").unwrap();
    assert_eq!(functions[&keyword("add")].call::<i64>((1, 2)).unwrap(), 3);
}

#[test]
fn tuples_and_arrays_are_read_from_specialised_vectors() {
    let lisp = lisp();
    let doubles = "(list (coerce '(1d0 2d0) '(vector double-float)))";
    assert_eq!(lisp.eval::<Vec<(f64, f64)>>(doubles).unwrap(), [(1.0, 2.0)]);
    assert_eq!(lisp.eval::<Vec<[f64; 2]>>(doubles).unwrap(), [[1.0, 2.0]]);
    assert_eq!(lisp.eval::<sbcl::Serde<Vec<(f64, f64)>>>(doubles).unwrap().0, [(1.0, 2.0)]);
    let octets = "(list (coerce '(1 2 255) '(vector (unsigned-byte 8))))";
    assert_eq!(lisp.eval::<Vec<(u8, i64, f64)>>(octets).unwrap(), [(1, 2, 255.0)]);
    assert_eq!(lisp.eval::<Vec<[u8; 3]>>(octets).unwrap(), [[1, 2, 255]]);
    assert_eq!(lisp.eval::<sbcl::Serde<Vec<(u8, i64, u8)>>>(octets).unwrap().0, [(1, 2, 255)]);
    assert_eq!(lisp.eval::<sbcl::Serde<Vec<[u8; 3]>>>(octets).unwrap().0, [[1, 2, 255]]);
    let text = |error: Error| error.to_string();
    assert_eq!(
        text(lisp.eval::<Vec<(u8, u8)>>(octets).unwrap_err()),
        "expected a sequence of 2 objects, but found a vector of 3 octets (in element 0)"
    );
    assert_eq!(
        text(lisp.eval::<Vec<(u8, u8, i8)>>(octets).unwrap_err()),
        "expected an integer from -128 to 127, but found 255 (in element 0, element 2)"
    );
}

#[test]
fn serde_reads_numbers_of_a_specialised_vector_as_it_reads_those_of_a_list() {
    #[derive(Debug, serde::Deserialize)]
    #[allow(dead_code)]
    struct Newtype<T>(T);
    #[derive(Debug, serde::Deserialize)]
    #[serde(untagged)]
    #[allow(dead_code)]
    enum Number {
        Integer(i64),
        Float(f64),
    }
    let lisp = lisp();
    macro_rules! check {
        ($($type:ty),* $(,)?) => {$(
            for (kind, numbers) in [
                ("double-float", "0.1d0 1d300 1d-300"),
                ("double-float", "1d0"),
                ("(unsigned-byte 8)", "0 1 255"),
                ("(unsigned-byte 8)", "7"),
            ] {
                let read = |result: &str| {
                    let value = lisp.eval::<sbcl::Serde<$type>>(&format!("(coerce '({numbers}) '{result})"));
                    value.map(|value| format!("{:?}", value.0)).map_err(|error| error.to_string())
                };
                let vector = read(&format!("(vector {kind})"));
                assert_eq!(vector, read("list"), "{} of {kind} {numbers}", stringify!($type));
                assert_eq!(vector, read("simple-vector"), "{} of {kind} {numbers}", stringify!($type));
            }
        )*};
    }
    check!(Vec<f64>, Vec<f32>, Vec<u8>, Vec<i8>, Vec<u64>, Vec<i64>, Vec<i128>, Vec<u128>, Vec<bool>, Vec<()>);
    check!(Vec<char>, Vec<String>, Vec<Vec<u8>>, Vec<(u8, u8)>, Vec<Option<u8>>, Vec<Option<f64>>, Vec<Option<f32>>);
    check!(Vec<Newtype<u8>>, Vec<Newtype<f64>>, Vec<Option<Newtype<f32>>>, Vec<Number>, Vec<serde_json::Value>);
    check!(std::collections::BTreeSet<u8>, (f64, f32), (u8, Option<u8>, f64), [f32; 1], [f64; 2], Newtype<Vec<f32>>);

    let read = |code: &str| lisp.eval::<sbcl::Serde<Vec<f32>>>(code).map(|floats| floats.0);
    assert!(matches!(read("(coerce '(1d300) '(vector double-float))"), Err(Error::Conversion(_))));
    assert_eq!(read("(coerce '(1 255) '(vector (unsigned-byte 8)))").unwrap(), [1.0, 255.0]);
}

/// A value of type `T`, or `None` when the conversion fails.
#[derive(Debug, PartialEq)]
struct Lenient<T>(Option<T>);

impl<T: sbcl::FromLisp> sbcl::FromLisp for Lenient<T> {
    const SHAPE: sbcl::Shape = T::SHAPE;

    fn from_lisp(reader: &mut sbcl::Reader<'_>) -> Result<Self, sbcl::ConversionError> {
        Ok(Self(reader.read().ok()))
    }
}

impl<'de, T: serde::Deserialize<'de>> serde::Deserialize<'de> for Lenient<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(T::deserialize(deserializer).ok()))
    }
}

#[test]
fn failed_read_of_an_object_does_not_shift_the_next_object() {
    let lisp = lisp();
    type Odd = Lenient<(i64, String, i64)>;
    let (odd, next) = lisp.eval::<(Odd, i64)>("(values '(1 2 99) 7)").unwrap();
    assert_eq!((odd, next), (Lenient(None), 7));
    let lists = lisp.eval::<Vec<Lenient<Vec<i64>>>>("'((1 a 3) (4 5))").unwrap();
    assert_eq!(lists, [Lenient(None), Lenient(Some(vec![4, 5]))]);
    lisp.define("host:lenient", "The second.", |odd: Odd, next: i64| assert_eq!((odd, next), (Lenient(None), 5)))
        .unwrap();
    lisp.eval::<()>("(host:lenient (list 1 2 3) 5)").unwrap();
    // Handles inside the skipped object are released exactly once.
    let odd = lisp.eval::<(Lenient<(Value, String, Value)>, Value)>("(values (list #'car 2 #'cdr) #'list)").unwrap();
    assert!(odd.0.0.is_none());
    assert_eq!(lisp.call::<Vec<i64>>("funcall", (&odd.1, 1, 2)).unwrap(), [1, 2]);

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Fields {
        a: i64,
        b: Lenient<(i64, i64)>,
        c: i64,
    }
    let fields = lisp.eval::<sbcl::Serde<Fields>>("'(:a 1 :b (1 x :c 77) :c 5)").unwrap();
    assert_eq!(fields.0, Fields { a: 1, b: Lenient(None), c: 5 });
    let lists = lisp.eval::<sbcl::Serde<Vec<Lenient<Vec<i64>>>>>("'((1 x 3) (4 5))").unwrap();
    assert_eq!(lists.0, [Lenient(None), Lenient(Some(vec![4, 5]))]);
}

/// A type that reads nothing.
#[derive(Debug, PartialEq)]
struct Unread;

impl sbcl::FromLisp for Unread {
    const SHAPE: sbcl::Shape = sbcl::Shape::ATOM;

    fn from_lisp(_: &mut sbcl::Reader<'_>) -> Result<Self, sbcl::ConversionError> {
        Ok(Self)
    }
}

impl<'de> serde::Deserialize<'de> for Unread {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Ok(Self)
    }
}

#[test]
fn type_that_reads_nothing_does_not_shift_the_next_object() {
    let lisp = lisp();
    assert_eq!(lisp.eval::<(Unread, i64)>("(values 7 8)").unwrap(), (Unread, 8));
    // Handles that nothing reads are released once.
    let lists: Vec<(Unread, i64)> = lisp.eval("(list (list #'car 8) (list (list 9) 10))").unwrap();
    assert_eq!(lists, [(Unread, 8), (Unread, 10)]);
    assert_eq!(lisp.eval::<sbcl::Serde<(Unread, i64)>>("'((7 7) 8)").unwrap().0, (Unread, 8));
    assert_eq!(lisp.eval::<sbcl::Serde<Vec<Unread>>>("'(7 8)").unwrap().0, [Unread, Unread]);
    lisp.define("host:unread", "The second.", |unread: Unread, next: i64| assert_eq!((unread, next), (Unread, 5)))
        .unwrap();
    lisp.eval::<()>("(host:unread (list 1 2 3) 5)").unwrap();
}

#[test]
fn first_entry_of_an_alist_or_a_property_list_shadows_later_entries() {
    let lisp = lisp();
    let alist: Value = lisp.eval(r#"(acons "a" 2 '(("a" . 1) ("b" . 3)))"#).unwrap();
    assert_eq!(alist.get::<i64>("a").unwrap(), Some(2));
    let entries = [("a".to_owned(), 2), ("b".to_owned(), 3)];
    assert_eq!(alist.to::<HashMap<String, i64>>().unwrap(), HashMap::from(entries.clone()));
    assert_eq!(alist.to::<BTreeMap<String, i64>>().unwrap(), BTreeMap::from(entries.clone()));

    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Pair {
        a: i64,
        b: i64,
    }
    let plist: Value = lisp.eval("(list* :a 2 (list :a '(1) :b 3))").unwrap();
    assert_eq!(plist.get::<i64>(keyword("a")).unwrap(), Some(2));
    // An integer is an index, never a key, however large it is.
    for code in ["'(1 2 3)", "'((9223372036854775807 . 1))"] {
        assert_eq!(lisp.eval::<Value>(code).unwrap().get::<i64>(i64::MAX).unwrap(), None, "{code}");
    }
    assert_eq!(plist.to::<sbcl::Serde<Pair>>().unwrap().0, Pair { a: 2, b: 3 });
    assert_eq!(plist.to::<sbcl::Serde<HashMap<String, i64>>>().unwrap().0, HashMap::from(entries));
    let numbers = lisp.eval::<sbcl::Serde<BTreeMap<i64, String>>>(r#"'(1 "a" 2 "b" 1 "c")"#).unwrap();
    assert_eq!(numbers.0, BTreeMap::from([(1, "a".to_owned()), (2, "b".to_owned())]));
}

#[test]
fn hash_table_keys_that_become_equal_are_a_conversion_error() {
    let lisp = lisp();
    let strings: Value = lisp
        .eval(
            r#"(let ((table (make-hash-table :test 'eq)))
                 (setf (gethash (copy-seq "a") table) 1 (gethash (copy-seq "a") table) 2)
                 table)"#,
        )
        .unwrap();
    let numbers: Value =
        lisp.eval("(let ((table (make-hash-table))) (setf (gethash 1 table) 1 (gethash 2 table) 2) table)").unwrap();
    let expected = "expected a hash table whose keys become different Rust keys, but found a key that becomes the same \
                    Rust key as an earlier key (in the key of entry 1)";
    for result in [
        strings.to::<HashMap<String, i64>>().map(drop),
        strings.to::<BTreeMap<String, i64>>().map(drop),
        numbers.to::<BTreeMap<bool, i64>>().map(drop),
    ] {
        assert_eq!(result.unwrap_err().to_string(), expected);
    }
    assert_eq!(numbers.to::<BTreeMap<i64, i64>>().unwrap(), BTreeMap::from([(1, 1), (2, 2)]));
}

#[test]
fn serde_map_keys_that_become_the_same_text_are_a_conversion_error() {
    #[derive(Debug, serde::Deserialize)]
    #[allow(dead_code)]
    struct Fields {
        a_b: i64,
    }
    let lisp = lisp();
    let table = "(let ((table (make-hash-table)))
                   (setf (gethash \"a_b\" table) 1 (gethash :a-b table) 2)
                   table)";
    for code in ["'(:a-b 1 :a_b 2)", "'(:a-b 1 a-b 2)", "'(\"a_b\" 1 :a-b 2)", "'(:a-b 1 \"a_b\" 2)", table] {
        let error = lisp.eval::<sbcl::Serde<HashMap<String, i64>>>(code).unwrap_err().to_string();
        let expected = "expected a map whose keys become different Rust keys, but found two keys that become \"a_b\"";
        assert_eq!(error, expected, "{code}");
        let error = lisp.eval::<sbcl::Serde<Fields>>(code).unwrap_err().to_string();
        assert!(error.contains("duplicate field `a_b`"), "{code}: {error}");
    }
    // The map that is refused does not shift the next object.
    let maps = lisp.eval::<sbcl::Serde<Vec<Lenient<HashMap<String, i64>>>>>("'((:a-b 1 :a_b 2) (:a-b 3))").unwrap().0;
    assert_eq!(maps, [Lenient(None), Lenient(Some(HashMap::from([("a_b".to_owned(), 3)])))]);
}

#[test]
fn serde_refuses_objects_that_the_rust_type_has_no_room_for() {
    #[derive(Debug, serde::Deserialize)]
    #[allow(dead_code)]
    enum Shape {
        Open,
        Circle(i64),
        Box(i64, i64),
    }
    #[derive(Debug, serde::Deserialize)]
    #[allow(dead_code)]
    struct Pair {
        a: i64,
    }
    let lisp = lisp();
    let refused = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Conversion(_))), "{result:?}");
    let error = lisp.eval::<sbcl::Serde<(i64, i64)>>("'(1 2 3)").unwrap_err().to_string();
    assert!(error.contains("expected a sequence of 2 objects, but found a sequence of 3 objects"), "{error}");
    refused(lisp.eval::<sbcl::Serde<[i64; 2]>>("'(1 2 3)").map(drop));
    for kind in ["(unsigned-byte 8)", "double-float"] {
        let code = format!("(map '(vector {kind}) (lambda (x) (coerce x '{kind})) '(1 2 3))");
        refused(lisp.eval::<sbcl::Serde<(f64, f64)>>(&code).map(drop));
    }
    for (code, error) in [
        ("'(:open 1)", "expected the variant :open without a value, but found the variant :open with one value"),
        ("'(:circle 1 2)", "expected the variant :circle with one value, but found the variant :circle with 2 values"),
        ("'(:box 1 2 3)", "expected a sequence of 2 objects, but found a sequence of 3 objects"),
    ] {
        assert_eq!(lisp.eval::<sbcl::Serde<Shape>>(code).unwrap_err().to_string(), error);
    }
    // The last key has no value.
    refused(lisp.eval::<sbcl::Serde<Pair>>("'(:a 1 :b)").map(drop));
    refused(lisp.eval::<sbcl::Serde<HashMap<String, i64>>>("'(:a 1 :b)").map(drop));
    // The objects that are refused do not shift the next object.
    let lists = lisp.eval::<sbcl::Serde<Vec<Lenient<(i64, i64)>>>>("'((1 2 3) (4 5))").unwrap().0;
    assert_eq!(lists, [Lenient(None), Lenient(Some((4, 5)))]);
}

/// The size hint of a sequence.
struct SizeHint(Option<usize>);

impl<'de> serde::Deserialize<'de> for SizeHint {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = SizeHint;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a sequence")
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut elements: A) -> Result<SizeHint, A::Error> {
                let hint = elements.size_hint();
                while elements.next_element::<serde::de::IgnoredAny>()?.is_some() {}
                Ok(SizeHint(hint))
            }
        }

        deserializer.deserialize_seq(Visitor)
    }
}

#[test]
fn serde_size_hint_of_a_long_list_or_vector_is_limited() {
    for (length, hint) in [(0, 0), (100, 100), (100_000, 1024)] {
        for code in [
            format!("(make-list {length} :initial-element 7)"),
            format!("(make-array {length} :element-type 'double-float :initial-element 7d0)"),
            format!("(make-array {length} :element-type '(unsigned-byte 8) :initial-element 7)"),
        ] {
            assert_eq!(lisp().eval::<sbcl::Serde<SizeHint>>(&code).unwrap().0.0, Some(hint), "{code}");
        }
    }
}

#[test]
fn serde_map_keys_of_a_recursive_type_are_a_conversion_error() {
    #[derive(Debug, PartialEq, Eq, Hash, serde::Deserialize)]
    struct Path(Option<Box<Path>>);
    let error = lisp().eval::<sbcl::Serde<HashMap<Path, i64>>>("'(:a 1)").map(drop).unwrap_err();
    assert!(matches!(error, Error::Conversion(_)), "{error}");
}

#[test]
fn serde_names_that_differ_only_in_case_are_refused() {
    let lisp = lisp();
    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    enum Unit {
        Gb,
        GB,
        Kib(i64),
    }
    for code in [":gb", "'(:gb)", "'(1 :gb)"] {
        let error = match code {
            "'(1 :gb)" => lisp.eval::<sbcl::Serde<HashMap<i64, Unit>>>(code).map(drop),
            _ => lisp.eval::<sbcl::Serde<Unit>>(code).map(drop),
        };
        let text = error.unwrap_err().to_string();
        assert!(text.contains("the keyword :gb, which names Gb and GB"), "{code}: {text}");
    }
    assert_eq!(lisp.eval::<sbcl::Serde<Unit>>("'(:kib 7)").unwrap().0, Unit::Kib(7));

    #[derive(serde::Serialize)]
    #[allow(non_snake_case)]
    struct Point {
        x: i64,
        X: i64,
    }
    let text = lisp.value(sbcl::Serde(Point { x: 1, X: 2 })).unwrap_err().to_string();
    assert!(text.contains("two fields named :x"), "{text}");

    // An alias of a field may differ only in case.
    #[derive(serde::Deserialize)]
    struct Order {
        #[serde(alias = "lineItems")]
        line_items: i64,
    }
    assert_eq!(lisp.eval::<sbcl::Serde<Order>>("'(:line-items 7)").unwrap().0.line_items, 7);
}

#[test]
fn serde_reads_objects_at_any_depth() {
    let lisp = lisp();
    #[derive(serde::Deserialize)]
    struct Nested(Vec<Nested>);
    for depth in [254, 255, 256, 600, 1000] {
        let code = format!("(let ((list nil)) (dotimes (i {depth} list) (setf list (list list))))");
        let nested = lisp.eval::<sbcl::Serde<Nested>>(&code).unwrap().0;
        let levels = std::iter::successors(Some(&nested), |nested| nested.0.first()).count();
        assert_eq!(levels, depth + 1);
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    enum Tree {
        Inner(Box<Tree>),
        Leaf(i64),
        Map { by_name: BTreeMap<String, Option<(f64, Slots)>> },
    }
    #[derive(Debug, PartialEq, serde::Deserialize)]
    struct Slots {
        one: Vec<i64>,
    }
    lisp.load_str("(defstruct deep-slots one)").unwrap();
    let leaves = [
        ("'(:leaf 7)", Tree::Leaf(7)),
        (
            "(list :map :by-name (list :a (list 1/2 (make-deep-slots :one (list 1 2))) :b nil))",
            Tree::Map {
                by_name: BTreeMap::from([
                    ("a".to_owned(), Some((0.5, Slots { one: vec![1, 2] }))),
                    ("b".to_owned(), None),
                ]),
            },
        ),
    ];
    // The end of the written part falls on each level of the leaf.
    for ((code, leaf), depth) in leaves.iter().flat_map(|leaf| (248..258).map(move |depth| (leaf, depth))) {
        let code = format!("(let ((tree {code})) (dotimes (i {depth} tree) (setf tree (list :inner tree))))");
        let mut tree = lisp.eval::<sbcl::Serde<Tree>>(&code).unwrap().0;
        while let Tree::Inner(inner) = tree {
            tree = *inner;
        }
        assert_eq!(&tree, leaf, "{depth}");
    }
}

#[test]
fn surrogates_are_refused_by_serde() {
    let lisp = lisp();
    for code in [
        "(code-char #xd800)",
        "(string (code-char #xd800))",
        "(intern (string (code-char #xd800)) :keyword)",
        "(make-symbol (string (code-char #xd800)))",
        "(list (code-char #xdfff))",
    ] {
        let error = lisp.eval::<sbcl::Serde<serde_json::Value>>(code).unwrap_err();
        assert!(error.to_string().contains("surrogate") || error.to_string().contains("d800"), "{code}: {error}");
    }
}
