//! Properties of reports: their maximum length, the parts that they always keep, and that no text can forge a marker.

use std::sync::Arc;

use proptest::prelude::*;
use sbcl::outcome::{Clipped, FrameRecord, Local, LocalValue, Outcome, RestartRecord, Slot, Warning};
use sbcl::report::{self, EvaluationPart, FrameRange, Page};
use sbcl::{ErrorRecord, Limits};

/// Generates text of up to `pieces` pieces, with many that look like the markers of a report.
fn text(pieces: usize) -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("[ERROR]".to_owned()),
        Just("[stdout\\\\]".to_owned()),
        Just("\n=> 1\n".to_owned()),
        Just("\n[Debugger]\n".to_owned()),
        Just("[... 5 characters omitted]".to_owned()),
        Just("\n".to_owned()),
        Just("ü𝄞\u{0}\u{301}".to_owned()),
        "[ -~]{1,60}",
        ("[a-z𝄞]", 1_usize..3_000).prop_map(|(character, count)| character.repeat(count)),
    ];
    prop::collection::vec(piece, 0..=pieces).prop_map(|pieces| pieces.concat())
}

fn limited(pieces: usize, characters: usize) -> impl Strategy<Value = String> {
    text(pieces).prop_map(move |text| text.chars().take(characters).collect())
}

fn clipped(pieces: usize, characters: usize) -> impl Strategy<Value = Clipped> {
    (limited(pieces, characters), prop_oneof![Just(0_u64), 1_u64..5_000_000])
        .prop_map(|(text, omitted)| Clipped { text, omitted })
}

prop_compose! {
    fn frame()(call in limited(3, 300), source in prop::option::of("[a-z/]{1,80}"),
               locals in prop::collection::vec(("[A-Z]{1,150}", limited(2, 300)), 0..6)) -> FrameRecord {
        FrameRecord {
            number: 0,
            call: call.replace('\n', "\\n"),
            source,
            code: None,
            machinery: None,
            locals: locals
                .into_iter()
                .map(|(name, value)| Local { name, value: LocalValue::Value(value.replace('\n', "\\n")) })
                .collect(),
        }
    }
}

prop_compose! {
    fn record()(kind in "[A-Z-]{1,150}", message in clipped(12, 10_000),
                frames in prop::collection::vec(frame(), 0..40), more in 0_u64..1_000_000,
                restarts in prop::collection::vec(("[A-Z-]{1,150}", limited(2, 300)), 0..100),
                slots in prop::collection::vec(("[A-Z-]{1,150}", limited(2, 300)), 0..100),
                evaluation in 0_u64..1_000_000_000) -> ErrorRecord {
        let frames: Vec<_> =
            frames.into_iter().zip(0..).map(|(frame, number)| FrameRecord { number, ..frame }).collect();
        ErrorRecord {
            id: 7,
            kind,
            message,
            time: jiff::Timestamp::UNIX_EPOCH,
            form: None,
            slots: slots.into_iter().map(|(name, value)| Slot { name, value }).collect(),
            slots_omitted: 0,
            restarts: (1..)
                .zip(restarts)
                .map(|(number, (name, description))| RestartRecord { number, name, description })
                .collect(),
            total_frames: frames.len() as u64 + more,
            frames,
            evaluation,
        }
    }
}

prop_compose! {
    fn outcome()(notices in prop::collection::vec(limited(3, 2_000), 0..8), background in clipped(6, 20_000),
                 stdout in clipped(20, 30_000), stderr in clipped(20, 30_000),
                 warnings in prop::collection::vec(("[A-Z-]{1,150}", clipped(4, 10_000)), 0..40),
                 values in prop::collection::vec(clipped(6, 10_000), 0..12), error in prop::option::of(record()),
                 kept in any::<bool>(), held in any::<bool>(), evaluation in 1_u64..1_000_000_000) -> Outcome {
        Outcome {
            evaluation,
            kept,
            notices,
            background,
            turns: [&stdout, &stderr].map(|stream| u32::try_from(stream.text.chars().count()).unwrap()).to_vec(),
            stdout,
            stderr,
            printed_before: 0,
            warnings: warnings.into_iter().map(|(kind, message)| Warning {
                kind, message, file: None, line: None, column: None, form: None,
            }).collect(),
            warnings_omitted: 0,
            held: held && error.is_some(),
            in_background: false,
            result: error.map_or(Ok(values), |error| Err(Arc::new(error))),
            timing: None,
            defined: Vec::new(),
            records: Vec::new(),
            errors: Vec::new(),
        }
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Returns the lines that are section markers.
fn sections(text: &str) -> Vec<&str> {
    let is_marker = |line: &&str| {
        ["[notice]", "[background]", "[stdout]", "[stderr]", "[warnings]", "[Backtrace]", "[Debugger]"].contains(line)
    };
    text.lines().filter(is_marker).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn fitted_report_stays_within_max_and_keeps_message_and_ten_frames(outcome in outcome(), max in 6_000_usize..12_000) {
        let fitted = report::fitted(&outcome, max);
        let text = report::evaluation(&fitted);
        prop_assert!(length(&text) <= max, "{} of {max}:\n{text}", length(&text));
        prop_assert_eq!(&text, &report::evaluation(&report::fitted(&outcome, max)));
        if let Err(error) = &outcome.result {
            let message: String = error.message.text.chars().take(2_000).collect();
            let message = report::escape_output(message.strip_suffix('\n').unwrap_or(&message));
            prop_assert!(text.contains(&error.kind));
            // The last characters may begin a marker, which is escaped in the complete message only.
            let shown: String = message.chars().take(1_980).collect();
            prop_assert!(text.contains(&shown), "{text}");
            let frames = text.split("[Backtrace]\n").nth(1).unwrap_or_default();
            for frame in error.frames.iter().take(10) {
                let begin: String = frame.call.chars().take(200).collect();
                prop_assert!(frames.contains(&format!("{}: {}", frame.number, report::escape_markers(&begin)
                    .chars().take(200).collect::<String>())), "{} is missing:\n{text}", frame.number);
            }
        }
        if outcome.is_error() {
            // Only values may contain lines that look like markers.
            let mut seen = sections(&text);
            let all = seen.len();
            seen.dedup();
            prop_assert_eq!(seen.len(), all);
            prop_assert_eq!(text.matches("[ERROR]").count(), 1);
        }
    }

    #[test]
    fn short_report_is_not_changed_by_fitted(stdout in limited(2, 1_000), value in limited(2, 1_000)) {
        let outcome = Outcome {
            evaluation: 1,
            kept: true,
            notices: Vec::new(),
            background: Clipped::default(),
            turns: vec![u32::try_from(length(&stdout)).unwrap()],
            stdout: Clipped::from(stdout),
            stderr: Clipped::default(),
            printed_before: 0,
            warnings: Vec::new(),
            warnings_omitted: 0,
            result: Ok(vec![Clipped::from(value)]),
            timing: None,
            held: false,
            in_background: false,
            defined: Vec::new(),
            records: Vec::new(),
            errors: Vec::new(),
        };
        prop_assert_eq!(report::evaluation(&report::fitted(&outcome, 9_500)), report::evaluation(&outcome));
    }

    #[test]
    fn fitted_error_description_stays_within_max(error in record(), max in 6_000_usize..12_000) {
        let text = report::last_error(Some(&report::fitted_error(&error, max)));
        // Indentation adds two characters to each line of the message.
        let indented = 2 * error.message.text.chars().take(2_000).filter(|character| *character == '\n').count();
        prop_assert!(length(&text) <= max + indented, "{} of {max}", length(&text));
        let title = format!("Error: {}", error.kind);
        prop_assert!(text.starts_with(&title), "{text}");
    }

    /// Each page of a backtrace stays within `max`, and all pages together have every frame.
    #[test]
    fn backtrace_pages_stay_within_max_and_cover_all_frames(error in record(), max in 6_000_usize..12_000, locals in any::<bool>()) {
        let (mut from, total) = (0, error.frames.len() as u64);
        while from < total {
            let range = FrameRange { from, max_frames: 1_000, locals };
            let text = report::frames(Some(&error), &range, max);
            prop_assert!(length(&text) <= max, "{} of {max}", length(&text));
            let first = format!("\n  {from}: ");
            prop_assert!(text.contains(&first), "{text}");
            from = match text.split("pass `from` ").nth(1) {
                Some(rest) => rest.split(' ').next().unwrap().parse().unwrap(),
                None => total,
            };
        }
    }

    /// Each page of an evaluation's output stays within `max`, and all pages together are the output as printed.
    #[test]
    fn output_pages_stay_within_max_and_cover_all_output(printed in text(20), max in 6_000_usize..8_000, characters in 1_000_u64..20_000) {
        let (mut from, mut all) = (0, String::new());
        let total = length(&printed) as u64;
        while from < total {
            let page = Page::new(3, EvaluationPart::Output, &printed, 0, from, characters).fitted(max);
            let text = report::evaluation_page(&page);
            prop_assert!(length(&text) <= max, "{} of {max}", length(&text));
            prop_assert!(!page.text.is_empty());
            from += length(&page.text) as u64;
            prop_assert_eq!(text.contains(&format!("\"from\": {from}}} shows ")), from < total);
            all += &page.text;
        }
        prop_assert_eq!(all, printed);
    }
}

#[test]
fn omission_marker_of_one_character_is_in_the_singular() {
    assert_eq!(report::omission_marker(1), "[... 1 character omitted]");
    let page = report::evaluation_page(&Page::new(3, EvaluationPart::Output, "ab", 0, 0, 1));
    let marker = "[... 1 character omitted; check-evaluation {\"id\": 3, \"part\": \"output\", \"from\": 1} shows it]";
    assert!(page.ends_with(marker), "{page}");
}

#[test]
fn backtrace_of_one_frame_is_in_the_singular() {
    let call = "(F)".to_owned();
    let frame = FrameRecord { number: 0, call, source: None, code: None, machinery: None, locals: Vec::new() };
    let error = ErrorRecord {
        id: 1,
        kind: "SIMPLE-ERROR".to_owned(),
        message: Clipped::from("x".to_owned()),
        time: jiff::Timestamp::UNIX_EPOCH,
        form: None,
        slots: Vec::new(),
        slots_omitted: 0,
        restarts: Vec::new(),
        total_frames: 1,
        frames: vec![frame],
        evaluation: 1,
    };
    assert_eq!(report::backtrace(Some(&error), 20), "Backtrace for SIMPLE-ERROR (1 of 1 frame):\n  0: (F)");
}

/// The number in the marker is the position of the missing text in the output, with stdout and stderr in printing order.
#[test]
fn omission_marker_gives_the_from_position_of_the_missing_output() {
    let (mut stdout, mut stderr, mut turns) = (String::new(), String::new(), Vec::new());
    for line in 0..4_000 {
        stdout += &format!("out {line:04}\n");
        stderr += &format!("err {line:04}\n");
        turns.extend([9, 9]);
    }
    let outcome = Outcome {
        evaluation: 12,
        kept: true,
        notices: Vec::new(),
        background: Clipped::default(),
        stdout: Clipped::from(stdout),
        stderr: Clipped::from(stderr),
        turns,
        printed_before: 100,
        warnings: Vec::new(),
        warnings_omitted: 0,
        result: Ok(Vec::new()),
        timing: None,
        held: false,
        in_background: false,
        defined: Vec::new(),
        records: Vec::new(),
        errors: Vec::new(),
    };
    let max = usize::try_from(Limits::default().max_answer()).unwrap();
    let text = report::evaluation(&report::fitted(&outcome, max));
    assert!(length(&text) <= max && length(&text) > max - 1_000, "{}", length(&text));
    let printed = outcome.printed();
    for (section, stream) in text.split("[stderr]").zip(["out", "err"]) {
        let (head, tail) = section.split_once("[... ").expect("a marker");
        let last = head.trim_end().lines().last().expect("a line");
        let next: usize = last[4..].parse::<usize>().unwrap() + 1;
        let from: usize = tail.split("\"from\": ").nth(1).unwrap().split('}').next().unwrap().parse().unwrap();
        let rest: String = printed.chars().skip(from - 100).take(9).collect();
        assert_eq!(rest, format!("{stream} {next:04}\n"), "{section}");
        assert!(
            tail.starts_with(|digit: char| digit.is_ascii_digit()) && tail.contains("check-evaluation {\"id\": 12, ")
        );
    }
}
