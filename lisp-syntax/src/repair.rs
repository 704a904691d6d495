//! Finds the edits that make text balanced and fit its indentation best: a search over lines.
//!
//! A state is the stack of open parentheses, and what the line begins within. Each line takes it to the next one and
//! costs what its indentation disagrees with the stack. An edit costs [`EDIT`], more than most disagreements: so there
//! are as few as it takes to balance the text, and they are where the lines after them fall into place. States that are
//! equal are merged into the cheaper one, which keeps their number small: a closed form leaves nothing behind.

use std::collections::HashMap;
use std::ops::Range;

use super::Stop;
use super::lexer::{Item, Kind, Line, Mode, is_blank, lex};

/// What an edit costs.
const EDIT: u32 = 24;
/// What each further parenthesis of the same edit costs.
const FURTHER: u32 = 5;
/// What a line costs whose first form begins at or left of the parenthesis that it is in.
const OUTSIDE: u32 = 10;
/// The same at the left margin, where a top-level form is meant to begin.
const AT_MARGIN: u32 = 16;
/// What a line costs that is deeper than it should be.
const TOO_DEEP: u32 = 5;
/// What a line costs whose place is another one.
const UNALIGNED: u32 = 2;
/// What a line costs that goes on with a symbol between bars, and a quote that stands where none does.
const UNLIKELY: u32 = 6;
/// How much worse than the best a state may be.
const HOPELESS: u32 = 90;
/// Edits at most.
const MOST_EDITS: u8 = 4;
/// States kept after a line.
const MOST_STATES: usize = 150;
/// Parentheses that are put in at once, at most.
const MOST_CLOSING: usize = 16;
/// Places in a line where something is put in.
const MOST_PLACES: usize = 24;
/// Parentheses of a line, the last ones, each of which may be the one to leave out.
const MOST_LEFT_OUT: usize = 200;
/// How many states are taken over lines before the search is given up.
const MOST_STEPS: usize = 600_000;
/// Lines and characters of a line that are searched.
const MOST_LINES: usize = 5_000;
const LONGEST_LINE: usize = 4_000;

/// What was done to a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Edit {
    /// The line, from 0, and the byte in it.
    pub(super) line: usize,
    pub(super) at: usize,
    /// Bytes that are removed there.
    pub(super) removed: usize,
    /// What comes in their place.
    pub(super) inserted: String,
}

/// An open parenthesis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Frame {
    line: u32,
    column: u32,
    /// Column of the second element, if it is in the same line.
    argument: Option<u32>,
    /// Column of the last element that begins a line.
    child: Option<u32>,
}

/// Stacks, shared: each is a frame on another one.
struct Stacks {
    nodes: Vec<(Frame, usize)>,
    known: HashMap<(Frame, usize), usize>,
}

/// The empty one, whose frame is the file.
const BOTTOM: usize = 0;

impl Stacks {
    fn new() -> Self {
        let frame = Frame { line: 0, column: 0, argument: None, child: None };
        Self { nodes: vec![(frame, BOTTOM)], known: HashMap::new() }
    }

    fn on(&mut self, below: usize, frame: Frame) -> usize {
        let nodes = &mut self.nodes;
        *self.known.entry((frame, below)).or_insert_with(|| {
            nodes.push((frame, below));
            nodes.len() - 1
        })
    }
}

#[derive(Debug, Clone, Copy)]
struct State {
    cost: u32,
    edits: u8,
    /// Its last edit, in the search's list; `usize::MAX` for none.
    history: usize,
}

/// What a line does to whatever stack it meets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Effect {
    /// Column and kind of the first form of a line that begins in code.
    first: Option<(u32, FirstKind)>,
    closed: usize,
    opened: Vec<(u32, Option<u32>)>,
    end: Mode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum FirstKind {
    List,
    /// Something that stands anywhere.
    Anywhere,
    Other,
}

/// A way to take a line.
struct Variant {
    effect: Effect,
    cost: u32,
    edit: Option<Edit>,
}

/// Returns the edits that balance the lines, in order; `None` where there are too many, none are found, or `stop` ended
/// the search.
pub(super) fn edits(lines: &[&str], stop: Stop<'_>) -> Option<Vec<Edit>> {
    let region = damaged(lines, stop);
    let found = search(&lines[region.clone()], stop);
    let mut edits = match found {
        Some(edits) => edits,
        None if region.len() < lines.len() => return search(lines, stop),
        None => return None,
    };
    for edit in &mut edits {
        edit.line += region.start;
    }
    Some(edits)
}

/// The lines between the top-level forms at the beginning and at the end that are balanced, each on its own.
fn damaged(lines: &[&str], stop: Stop<'_>) -> Range<usize> {
    let starts: Vec<usize> = (0..lines.len()).filter(|&number| lines[number].starts_with('(')).collect();
    let mut walk = Search::new(lines, 0, stop);
    let mut begin = 0;
    while let Some(end) = walk.clean_form(begin, lines.len()) {
        if end == lines.len() {
            break;
        }
        begin = end;
    }
    let mut end = lines.len();
    for &start in starts.iter().rev().take_while(|&&start| start > begin) {
        if walk.clean_form(start, end) != Some(end) {
            break;
        }
        end = start;
    }
    begin..end
}

fn search(lines: &[&str], stop: Stop<'_>) -> Option<Vec<Edit>> {
    if lines.len() > MOST_LINES || lines.iter().any(|line| line.len() > LONGEST_LINE) {
        return None;
    }
    let mut best: Option<(u32, Vec<Edit>)> = None;
    for allowed in 1..=MOST_EDITS {
        // So many edits alone cost more than what is found.
        if best.as_ref().is_some_and(|(cost, _)| *cost <= EDIT * u32::from(allowed)) {
            break;
        }
        let found = Search::new(lines, allowed, stop).run();
        let better = match (&best, &found) {
            (Some((least, _)), Some((cost, _))) => cost < least,
            (None, found) => found.is_some(),
            (Some(_), None) => false,
        };
        match (better, best.is_some()) {
            (true, _) => best = found,
            (false, true) => break,
            (false, false) => {}
        }
    }
    // A cheaper repair may be among those that were not looked at.
    if stop() {
        return None;
    }
    best.map(|(_, edits)| edits)
}

struct Search<'a> {
    lines: &'a [&'a str],
    /// Edits that a state may have.
    allowed: u8,
    stacks: Stacks,
    made: Vec<(Edit, usize)>,
    steps: usize,
    stop: Stop<'a>,
}

impl<'a> Search<'a> {
    fn new(lines: &'a [&'a str], allowed: u8, stop: Stop<'a>) -> Self {
        Self { lines, allowed, stacks: Stacks::new(), made: Vec::new(), steps: 0, stop }
    }

    /// Where the next top-level form at the margin begins, or else `end`, when the lines from `begin` up to there are
    /// balanced. That the indentation is odd says nothing against them.
    fn clean_form(&mut self, begin: usize, end: usize) -> Option<usize> {
        let (mut mode, mut stack) = (Mode::Code, BOTTOM);
        for number in begin..end {
            let text = self.lines[number];
            if number > begin && mode == Mode::Code && stack == BOTTOM && text.starts_with('(') {
                return Some(number);
            }
            let line = lex(text, mode);
            let (reached, cost) = self.apply(&effect(mode, &line), number, stack)?;
            // Forms at the margin that are within another one: where that ends is not certain.
            if cost >= AT_MARGIN {
                return None;
            }
            (mode, stack) = (line.end, reached);
        }
        (mode == Mode::Code && stack == BOTTOM).then_some(end)
    }

    fn run(mut self) -> Option<(u32, Vec<Edit>)> {
        let start = State { cost: 0, edits: 0, history: usize::MAX };
        let mut states = HashMap::from([((Mode::Code, BOTTOM), start)]);
        for number in 0..self.lines.len() {
            states = self.step(number, states);
            if self.steps > MOST_STEPS || (self.stop)() {
                return None;
            }
        }
        let state = states.get(&(Mode::Code, BOTTOM))?;
        let mut edits = Vec::new();
        let mut history = state.history;
        while let Some((edit, before)) = self.made.get(history) {
            edits.push(edit.clone());
            history = *before;
        }
        edits.reverse();
        (!edits.is_empty()).then_some((state.cost, edits))
    }

    /// Takes all states over a line.
    fn step(&mut self, number: usize, states: HashMap<(Mode, usize), State>) -> HashMap<(Mode, usize), State> {
        let mut variants: HashMap<(Mode, bool), Vec<Variant>> = HashMap::new();
        let mut next: HashMap<(Mode, usize), State> = HashMap::new();
        // In a fixed order: the same text gets the same answer.
        let mut sorted: Vec<_> = states.into_iter().collect();
        sorted.sort_by_key(|((mode, stack), state)| (state.cost, *stack, mode_order(*mode)));
        let least = sorted.first().map_or(0, |(_, state)| state.cost);
        sorted.truncate(MOST_STATES);
        for ((mode, stack), state) in sorted {
            if state.cost > least + HOPELESS {
                continue;
            }
            if (self.stop)() {
                break;
            }
            let edited = state.edits < self.allowed;
            let (lines, stop) = (self.lines, self.stop);
            let ways = variants.entry((mode, edited)).or_insert_with(|| variants_of(lines, number, mode, edited, stop));
            self.steps += ways.len();
            for variant in ways {
                let Some((reached, cost)) = self.apply(&variant.effect, number, stack) else { continue };
                let cost = state.cost + cost + variant.cost;
                let place = next.entry((variant.effect.end, reached));
                let known = match &place {
                    std::collections::hash_map::Entry::Occupied(place) => Some(place.get().cost),
                    std::collections::hash_map::Entry::Vacant(_) => None,
                };
                if known.is_some_and(|known| known <= cost) {
                    continue;
                }
                let (edits, history) = match &variant.edit {
                    None => (state.edits, state.history),
                    Some(edit) => {
                        self.made.push((edit.clone(), state.history));
                        (state.edits + 1, self.made.len() - 1)
                    }
                };
                place.insert_entry(State { cost, edits, history });
            }
        }
        next
    }

    /// Takes a stack over a line: where that leads and what it costs; `None` when more is closed than is open.
    fn apply(&mut self, effect: &Effect, number: usize, mut stack: usize) -> Option<(usize, u32)> {
        let mut cost = 0;
        if let Some((column, kind)) = effect.first
            && kind != FirstKind::Anywhere
        {
            let (mut frame, below) = self.stacks.nodes[stack];
            cost = disagreement(&frame, stack == BOTTOM, column, kind);
            if stack != BOTTOM && frame.child != Some(column) {
                frame.child = Some(column);
                stack = self.stacks.on(below, frame);
            }
        }
        let hanging = matches!(effect.first, Some((_, FirstKind::Anywhere)));
        for _ in 0..effect.closed {
            if stack == BOTTOM {
                return None;
            }
            let (frame, below) = self.stacks.nodes[stack];
            // What has its parts at its own margin is closed on a line of its own.
            if !hanging && frame.child.is_some_and(|child| child <= frame.column) {
                cost += UNLIKELY;
            }
            stack = below;
        }
        for &(column, argument) in &effect.opened {
            let line = u32::try_from(number).unwrap_or(u32::MAX);
            stack = self.stacks.on(stack, Frame { line, column, argument, child: None });
        }
        Some((stack, cost))
    }
}

fn mode_order(mode: Mode) -> u16 {
    match mode {
        Mode::Code => 0,
        Mode::String => 1,
        Mode::Bars => 2,
        Mode::Comment(depth) => 3 + u16::from(depth),
    }
}

/// What it costs that a line within `frame` begins at `column`.
fn disagreement(frame: &Frame, at_top: bool, column: u32, kind: FirstKind) -> u32 {
    if at_top {
        return match (column, kind) {
            (0, FirstKind::List) => 0,
            (0, _) => UNALIGNED,
            _ => OUTSIDE - 2,
        };
    }
    // A form that is known not to go by the rules costs once.
    if frame.child == Some(column) {
        return 0;
    }
    if column <= frame.column {
        return if column == 0 && kind == FirstKind::List { AT_MARGIN } else { OUTSIDE };
    }
    let inside = column - frame.column;
    if frame.argument == Some(column) || inside == 1 || inside == 2 {
        return 0;
    }
    match frame.child {
        None if inside == 4 => 0,
        None => UNALIGNED,
        Some(child) if column > child => TOO_DEEP,
        Some(_) => UNALIGNED,
    }
}

/// What is unlikely in a line as it stands, and how much so.
fn unlikelihood(text: &str, mode: Mode, line: &Line) -> u32 {
    let begins = match mode {
        Mode::Code => 0,
        Mode::String if text.starts_with('(') => UNLIKELY,
        Mode::String if text.trim_start().starts_with('(') => 2,
        Mode::String => 1,
        Mode::Bars => UNLIKELY,
        Mode::Comment(_) if text.starts_with("(def") => 2,
        Mode::Comment(_) => u32::from(text.starts_with('(')),
    };
    // A top-level form is seldom one of a list.
    let doubled = if mode == Mode::Code && text.starts_with("((") { 3 } else { 0 };
    // A quote with nothing after it, which cannot be read.
    let nothing = line.items.windows(2).any(|pair| pair[0].kind == Kind::Prefix && pair[1].kind == Kind::Close)
        || line.items.windows(3).any(|three| three[0].kind == Kind::Feature && three[2].kind == Kind::Close);
    begins
        + doubled
        + if nothing { EDIT } else { 0 }
        + UNLIKELY * line.crowded
        + if line.end == Mode::Bars { UNLIKELY } else { 0 }
}

/// What a line does.
fn effect(mode: Mode, line: &Line) -> Effect {
    let mut effect = Effect { first: None, closed: 0, opened: Vec::new(), end: line.end };
    let mut elements: Vec<u32> = Vec::new();
    // Where the form begins that prefixes stand before.
    let mut begun: Option<u32> = None;
    let element =
        |item: &Item, begun: &mut Option<u32>, elements: &mut Vec<u32>, opened: &mut Vec<(u32, Option<u32>)>| {
            let column = begun.take().unwrap_or(item.column);
            if let (Some(count), Some((_, argument))) = (elements.last_mut(), opened.last_mut()) {
                *count += 1;
                if *count == 2 {
                    *argument = Some(column);
                }
            }
        };
    for item in &line.items {
        match item.kind {
            Kind::Prefix | Kind::Feature => {
                begun.get_or_insert(item.column);
            }
            Kind::Token | Kind::Text => element(item, &mut begun, &mut elements, &mut effect.opened),
            Kind::Open => {
                element(item, &mut begun, &mut elements, &mut effect.opened);
                effect.opened.push((item.column, None));
                elements.push(0);
            }
            Kind::Close => {
                begun = None;
                elements.pop();
                if effect.opened.pop().is_none() {
                    effect.closed += 1;
                }
            }
        }
    }
    if mode == Mode::Code {
        effect.first = line.items.first().map(|first| {
            let kind = match first.kind {
                Kind::Open => FirstKind::List,
                Kind::Close | Kind::Feature => FirstKind::Anywhere,
                Kind::Prefix if line.items.iter().find(|item| item.kind != Kind::Prefix).is_some_and(is_list) => {
                    FirstKind::List
                }
                _ => FirstKind::Other,
            };
            (first.column, kind)
        });
    }
    effect
}

fn is_list(item: &Item) -> bool {
    item.kind == Kind::Open
}

/// The ways to take a line that begins within `mode`: as it is, and `edited` in each way that makes a difference.
fn variants_of(lines: &[&str], number: usize, mode: Mode, edited: bool, stop: Stop<'_>) -> Vec<Variant> {
    let text = lines[number];
    let line = lex(text, mode);
    let mut variants = vec![Variant { effect: effect(mode, &line), cost: unlikelihood(text, mode, &line), edit: None }];
    if !edited {
        return variants;
    }
    let mut changed = String::new();
    let mut add = |at: usize, removed: usize, inserted: &str, price: u32| {
        if stop() {
            return;
        }
        changed.clear();
        changed.push_str(&text[..at]);
        changed.push_str(inserted);
        changed.push_str(&text[at + removed..]);
        let line = lex(&changed, mode);
        let cost = price + unlikelihood(&changed, mode, &line);
        let effect = effect(mode, &line);
        let edit = || Some(Edit { line: number, at, removed, inserted: inserted.to_owned() });
        match variants.iter_mut().find(|variant| variant.effect == effect) {
            Some(variant) if variant.cost <= cost => {}
            Some(variant) => (variant.cost, variant.edit) = (cost, edit()),
            None => variants.push(Variant { effect, cost, edit: edit() }),
        }
    };

    // Where the code of the line ends, and where the closing parentheses there begin.
    let end = line.items.last().map_or(0, |item| item.end);
    let closing =
        line.items.iter().rev().take_while(|item| item.kind == Kind::Close).last().map_or(end, |item| item.start);
    if line.end == Mode::Code && !line.items.is_empty() {
        let last = lines[number + 1..].iter().all(|line| line.trim().is_empty())
            || lines[number + 1..]
                .iter()
                .find(|line| !line.trim().is_empty())
                .is_some_and(|line| line.starts_with('('));
        let mut inserted = String::new();
        for count in 0..if last { MOST_CLOSING } else { 4 } {
            inserted.push(')');
            add(end, 0, &inserted, EDIT + FURTHER * u32::try_from(count).unwrap_or(0));
        }
    }
    // The last of several is the one to leave out: the others may be right.
    let parentheses = line.items.iter().rev().filter(|item| matches!(item.kind, Kind::Open | Kind::Close));
    for item in parentheses.take(MOST_LEFT_OUT) {
        add(item.start, 1, "", EDIT);
    }
    for item in line.items.iter().filter(|item| item.kind != Kind::Close).take(MOST_PLACES) {
        add(item.start, 0, "(", EDIT + 1);
    }
    // Closed within the line, where what follows stands outside.
    for item in line.items.iter().filter(|item| item.kind != Kind::Prefix).take(MOST_PLACES) {
        add(item.end, 0, ")", EDIT + 1);
    }
    // Strings have two: where one stands alone, the other is missing, if that helps as much.
    let alone = u32::from(line.quotes.len() == 1);
    for &quote in &line.quotes {
        add(quote, 1, "", EDIT + alone);
    }
    if matches!(mode, Mode::Code | Mode::String) && !text.trim().is_empty() {
        let trimmed = text.trim_end();
        let closing_of_text = trimmed.trim_end_matches(')').len();
        let content = text.len() - text.trim_start().len();
        for at in [closing_of_text, trimmed.len(), closing, end, content] {
            add(at, 0, "\"", EDIT);
        }
        for at in words(text).take(MOST_PLACES) {
            add(at, 0, "\"", EDIT + 1);
        }
    }
    for (at, mark) in text.match_indices("|#").chain(text.match_indices("#|")) {
        add(at, mark.len(), "", EDIT);
    }
    for (at, _) in text.match_indices('|') {
        add(at, 1, "", EDIT + 2);
    }
    match mode {
        Mode::Comment(_) => {
            add(0, 0, "|#", EDIT);
            add(text.trim_end().len(), 0, "|#", EDIT);
        }
        Mode::Code if line.end != Mode::Code && line.end != Mode::String => {
            add(text.trim_end().len(), 0, "|#", EDIT);
        }
        _ => {}
    }
    variants
}

/// Where words of `text` begin and end.
fn words(text: &str) -> impl Iterator<Item = usize> + '_ {
    let bytes = text.as_bytes();
    let inside = |at: Option<usize>| {
        at.and_then(|at| bytes.get(at)).is_some_and(|&byte| !is_blank(byte) && byte != b'(' && byte != b')')
    };
    (0..=bytes.len()).filter(move |&at| text.is_char_boundary(at) && inside(at.checked_sub(1)) != inside(Some(at)))
}
