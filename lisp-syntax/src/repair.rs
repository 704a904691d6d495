//! A search for the edits that balance a text and agree best with its indentation.
//!
//! A state is the stack of open parentheses, and the construct within which the next line begins. Each line leads from
//! one state to another, at a cost for each disagreement between its indentation and the stack. An edit costs
//! [`EDIT_COST`], more than any single disagreement. So a repair seldom has more edits than it takes to balance the text,
//! and the edits are placed where the lines after them align. Of equal states only the cheapest is kept. The number of
//! states stays small, because a closed form leaves no trace in the stack.

use std::collections::HashMap;
use std::ops::Range;

use super::lexer::{Line, Mode, Token, TokenKind, is_blank, lex};
use super::{StopCondition, lex_lines};

/// Cost of an edit.
const EDIT_COST: u32 = 24;
/// Cost of each parenthesis after the first that an edit inserts.
const EXTRA_PAREN_COST: u32 = 5;
/// Cost of a line whose first form begins in the column of the innermost open parenthesis, or left of it.
const OUTSIDE_COST: u32 = 10;
/// Cost of a list at the left margin, within an open form. Such a list is probably a top-level form.
const AT_MARGIN_COST: u32 = 16;
/// Cost of a line that is indented too deeply.
const TOO_DEEP_COST: u32 = 5;
/// Cost of a line that is not aligned with any expected column.
const UNALIGNED_COST: u32 = 2;
/// Cost of an improbable feature, such as a line that begins within a symbol between vertical bars, or a quote in an
/// unusual position.
const UNLIKELY_COST: u32 = 6;
/// Cost of a list at the left margin, within a string, if the list is not within a string in the unedited text. With
/// [`EDIT_COST`], this is more than the cost of two edits: one edit must not hide a form in a string to balance a text with two
/// faults.
const FORM_IN_STRING_COST: u32 = 30;
/// Maximum difference between the cost of a state and that of the cheapest state. A state that costs more is dropped.
const MAX_COST_ABOVE_BEST: u32 = 90;
/// Maximum number of edits of a repair.
const MAX_EDITS: u8 = 4;
/// Maximum number of states kept after a line.
const MAX_STATES: usize = 150;
/// Maximum number of parentheses inserted by one edit.
const MAX_CLOSING: usize = 16;
/// Maximum number of positions in a line at which an insertion of one kind is tried.
const MAX_POSITIONS: usize = 24;
/// Number of parentheses of a line, counted from its end, whose removal is tried.
const MAX_REMOVED_PARENTHESES: usize = 200;
/// Number of steps after which the search is abandoned. A step applies one variant of a line to one state.
const MAX_STEPS: usize = 600_000;
/// Maximum number of lines of a text for which edits are searched.
const MAX_LINES: usize = 5_000;
/// Maximum length in bytes of the lines of a text for which edits are searched.
const MAX_LINE_LENGTH: usize = 4_000;

/// A change of one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Edit {
    /// Line, from 0.
    pub(super) line: usize,
    /// Position in the line, in bytes.
    pub(super) at: usize,
    /// Number of bytes removed at the position.
    pub(super) removed: usize,
    /// Text inserted at the position.
    pub(super) inserted: String,
}

/// An open parenthesis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct OpenParen {
    line: u32,
    column: u32,
    /// Column of the form's second element, if that element is on the same line as the parenthesis.
    argument: Option<u32>,
    /// Column of the last element that begins a line.
    child: Option<u32>,
}

/// Stacks of open parentheses that share their common parts. A node is a parenthesis and the index of the node below it.
struct Stacks {
    nodes: Vec<(OpenParen, usize)>,
    known: HashMap<(OpenParen, usize), usize>,
}

/// Index of the empty stack, whose node stands for the file.
const EMPTY_STACK: usize = 0;

impl Stacks {
    fn new() -> Self {
        let paren = OpenParen { line: 0, column: 0, argument: None, child: None };
        Self { nodes: vec![(paren, EMPTY_STACK)], known: HashMap::new() }
    }

    fn push(&mut self, below: usize, paren: OpenParen) -> usize {
        let nodes = &mut self.nodes;
        *self.known.entry((paren, below)).or_insert_with(|| {
            nodes.push((paren, below));
            nodes.len() - 1
        })
    }
}

#[derive(Debug, Clone, Copy)]
struct State {
    cost: u32,
    edits: u8,
    /// Index of the state's last edit in [`Search::edits_made`]; `usize::MAX` if the state has no edits.
    history: usize,
}

/// The effect of a line on any stack of open parentheses.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct LineEffect {
    /// Column and kind of the first form, for a line that begins in code.
    first: Option<(u32, FirstKind)>,
    closed: usize,
    opened: Vec<(u32, Option<u32>)>,
    end: Mode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum FirstKind {
    List,
    /// A closing parenthesis or a feature conditional, which may stand in any column.
    Anywhere,
    Other,
}

/// A variant of a line: the unchanged line, or the line with one edit.
struct LineVariant {
    effect: LineEffect,
    cost: u32,
    edit: Option<Edit>,
}

/// Returns the edits that balance the lines, in order. Returns `None` if the text is too long, if no edits are found within
/// the limits, if a symbol's vertical bar is not closed, or if `stop` ended the search.
pub(super) fn find_edits(lines: &[&str], stop: StopCondition<'_>) -> Option<Vec<Edit>> {
    let region = unbalanced_region(lines, stop);
    let edits = match search(&lines[region.clone()], stop) {
        Some(mut edits) => {
            for edit in &mut edits {
                edit.line += region.start;
            }
            edits
        }
        None if region.len() < lines.len() => search(lines, stop)?,
        None => return None,
    };
    // A surplus `|#` or one misplaced quote can leave a vertical bar open. Any other open bar has no repair: nothing shows
    // where its symbol should end, and two new quotes, for instance, would only hide the bar in a string. A line that begins
    // within bars is not edited, because the bar that ends the symbol may belong to a string, which the edit would change.
    let lexed = lex_lines(lines);
    let ends_in_bars = |line: usize| lexed.get(line).is_some_and(|line| line.end == Mode::Bars);
    if edits.iter().any(|edit| edit.line > 0 && ends_in_bars(edit.line - 1)) {
        return None;
    }
    let removed = |edit: &Edit| &lines[edit.line][edit.at..edit.at + edit.removed];
    let marks = edits.iter().filter(|edit| edit.inserted == "\"" || matches!(removed(edit), "\"" | "|#")).count();
    (!ends_in_bars(lines.len().wrapping_sub(1)) || marks == 1).then_some(edits)
}

/// Leaves out the top-level forms at the beginning and at the end of the text that are balanced on their own, and returns
/// the range of the lines between them.
fn unbalanced_region(lines: &[&str], stop: StopCondition<'_>) -> Range<usize> {
    let starts: Vec<usize> = (0..lines.len()).filter(|&number| lines[number].starts_with('(')).collect();
    let mut walk = Search::new(lines, 0, stop);
    let mut begin = 0;
    while let Some(end) = walk.balanced_form_end(begin, lines.len()) {
        if end == lines.len() {
            break;
        }
        begin = end;
    }
    let mut end = lines.len();
    for &start in starts.iter().rev().take_while(|&&start| start > begin) {
        if walk.balanced_form_end(start, end) != Some(end) {
            break;
        }
        end = start;
    }
    begin..end
}

fn search(lines: &[&str], stop: StopCondition<'_>) -> Option<Vec<Edit>> {
    if lines.len() > MAX_LINES || lines.iter().any(|line| line.len() > MAX_LINE_LENGTH) {
        return None;
    }
    let mut best: Option<(u32, Vec<Edit>)> = None;
    for max_edits in 1..=MAX_EDITS {
        // Stop when `max_edits` edits alone would cost at least as much as the best repair so far.
        if best.as_ref().is_some_and(|(cost, _)| *cost <= EDIT_COST * u32::from(max_edits)) {
            break;
        }
        let found = Search::new(lines, max_edits, stop).run();
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
    // A search that was stopped may have missed a cheaper repair.
    if stop() {
        return None;
    }
    best.map(|(_, edits)| edits)
}

struct Search<'a> {
    lines: &'a [&'a str],
    /// Maximum number of edits that lead to a state.
    max_edits: u8,
    stacks: Stacks,
    edits_made: Vec<(Edit, usize)>,
    steps: usize,
    stop: StopCondition<'a>,
}

impl<'a> Search<'a> {
    fn new(lines: &'a [&'a str], max_edits: u8, stop: StopCondition<'a>) -> Self {
        Self { lines, max_edits, stacks: Stacks::new(), edits_made: Vec::new(), steps: 0, stop }
    }

    /// Returns the end of the balanced lines that begin at line `begin`: the line with the next top-level list at the
    /// margin, or else `end`. Returns `None` if the lines are not balanced, or if a list within another form begins at the
    /// margin.
    fn balanced_form_end(&mut self, begin: usize, end: usize) -> Option<usize> {
        let (mut mode, mut stack) = (Mode::Code, EMPTY_STACK);
        for number in begin..end {
            let text = self.lines[number];
            if number > begin && mode == Mode::Code && stack == EMPTY_STACK && text.starts_with('(') {
                return Some(number);
            }
            let line = lex(text, mode);
            let (reached, cost) = self.apply_effect(&line_effect(mode, &line), number, stack)?;
            // A list at the margin within an open form makes it uncertain where the open form ends.
            if cost >= AT_MARGIN_COST {
                return None;
            }
            (mode, stack) = (line.end, reached);
        }
        (mode == Mode::Code && stack == EMPTY_STACK).then_some(end)
    }

    fn run(mut self) -> Option<(u32, Vec<Edit>)> {
        let start = State { cost: 0, edits: 0, history: usize::MAX };
        let mut states = HashMap::from([((Mode::Code, EMPTY_STACK), start)]);
        let mut unedited = Mode::Code;
        for number in 0..self.lines.len() {
            states = self.apply_variants(number, unedited, states);
            unedited = lex(self.lines[number], unedited).end;
            if self.steps > MAX_STEPS || (self.stop)() {
                return None;
            }
        }
        let state = states.get(&(Mode::Code, EMPTY_STACK))?;
        let mut edits = Vec::new();
        let mut history = state.history;
        while let Some((edit, before)) = self.edits_made.get(history) {
            edits.push(edit.clone());
            history = *before;
        }
        edits.reverse();
        (!edits.is_empty()).then_some((state.cost, edits))
    }

    /// Applies the variants of the line `number` to the states before the line, and returns the states after the line.
    /// `unedited` is the construct within which the line begins in the unedited text.
    fn apply_variants(
        &mut self,
        number: usize,
        unedited: Mode,
        states: HashMap<(Mode, usize), State>,
    ) -> HashMap<(Mode, usize), State> {
        let mut variants_by_start: HashMap<(Mode, bool), Vec<LineVariant>> = HashMap::new();
        let mut next: HashMap<(Mode, usize), State> = HashMap::new();
        // The states are sorted so that the same text always has the same result.
        let mut sorted: Vec<_> = states.into_iter().collect();
        sorted.sort_by_key(|((mode, stack), state)| (state.cost, *stack, mode_order(*mode)));
        let least = sorted.first().map_or(0, |(_, state)| state.cost);
        sorted.truncate(MAX_STATES);
        for ((mode, stack), state) in sorted {
            if state.cost > least + MAX_COST_ABOVE_BEST {
                continue;
            }
            if (self.stop)() {
                break;
            }
            let may_edit = state.edits < self.max_edits;
            let (lines, stop) = (self.lines, self.stop);
            let variants = variants_by_start
                .entry((mode, may_edit))
                .or_insert_with(|| line_variants(lines, number, unedited, mode, may_edit, stop));
            self.steps += variants.len();
            for variant in variants {
                let Some((reached, cost)) = self.apply_effect(&variant.effect, number, stack) else { continue };
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
                        self.edits_made.push((edit.clone(), state.history));
                        (state.edits + 1, self.edits_made.len() - 1)
                    }
                };
                place.insert_entry(State { cost, edits, history });
            }
        }
        next
    }

    /// Applies the effect of the line `number` to a stack. Returns the new stack and the cost of the line's indentation, or
    /// `None` if the line closes more parentheses than are open.
    fn apply_effect(&mut self, effect: &LineEffect, number: usize, mut stack: usize) -> Option<(usize, u32)> {
        let mut cost = 0;
        if let Some((column, kind)) = effect.first
            && kind != FirstKind::Anywhere
        {
            let (mut paren, below) = self.stacks.nodes[stack];
            cost = indentation_cost(&paren, stack == EMPTY_STACK, column, kind);
            if stack != EMPTY_STACK && paren.child != Some(column) {
                paren.child = Some(column);
                stack = self.stacks.push(below, paren);
            }
        }
        let hanging = matches!(effect.first, Some((_, FirstKind::Anywhere)));
        for _ in 0..effect.closed {
            if stack == EMPTY_STACK {
                return None;
            }
            let (paren, below) = self.stacks.nodes[stack];
            // If the elements of a form are not indented, its closing parenthesis is usually on a separate line.
            if !hanging && paren.child.is_some_and(|child| child <= paren.column) {
                cost += UNLIKELY_COST;
            }
            stack = below;
        }
        for &(column, argument) in &effect.opened {
            let line = u32::try_from(number).unwrap_or(u32::MAX);
            stack = self.stacks.push(stack, OpenParen { line, column, argument, child: None });
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

/// Returns the cost of a line that begins at `column` within the form of `paren`, or outside all forms if `at_top` is true.
fn indentation_cost(paren: &OpenParen, at_top: bool, column: u32, kind: FirstKind) -> u32 {
    if at_top {
        return match (column, kind) {
            (0, FirstKind::List) => 0,
            (0, _) => UNALIGNED_COST,
            _ => OUTSIDE_COST - 2,
        };
    }
    // A form with unusual indentation has a cost only for the first line with that indentation.
    if paren.child == Some(column) {
        return 0;
    }
    if column <= paren.column {
        return if column == 0 && kind == FirstKind::List { AT_MARGIN_COST } else { OUTSIDE_COST };
    }
    let inside = column - paren.column;
    if paren.argument == Some(column) || inside == 1 || inside == 2 {
        return 0;
    }
    match paren.child {
        None if inside == 4 => 0,
        None => UNALIGNED_COST,
        Some(child) if column > child => TOO_DEEP_COST,
        Some(_) => UNALIGNED_COST,
    }
}

/// Returns the cost of improbable features of a line. `unedited` is the construct within which the line begins in the unedited
/// text.
fn improbability_cost(text: &str, unedited: Mode, mode: Mode, line: &Line) -> u32 {
    let begins = match mode {
        Mode::Code => 0,
        Mode::String if text.starts_with('(') && unedited == Mode::Code => FORM_IN_STRING_COST,
        Mode::String if text.starts_with('(') => UNLIKELY_COST,
        Mode::String if text.trim_start().starts_with('(') => 2,
        Mode::String => 1,
        Mode::Bars => UNLIKELY_COST,
        Mode::Comment(_) if text.starts_with("(def") => 2,
        Mode::Comment(_) => u32::from(text.starts_with('(')),
    };
    // A top-level form seldom begins with two parentheses.
    let doubled = if mode == Mode::Code && text.starts_with("((") { 3 } else { 0 };
    // A prefix with nothing after it cannot be read, nor can `#+` with only a feature after it.
    let dangling_prefix = line
        .tokens
        .windows(2)
        .any(|pair| pair[0].kind == TokenKind::Prefix && pair[1].kind == TokenKind::Close)
        || line.tokens.windows(3).any(|three| three[0].kind == TokenKind::Feature && three[2].kind == TokenKind::Close);
    begins
        + doubled
        + if dangling_prefix { EDIT_COST } else { 0 }
        + UNLIKELY_COST * line.crowded_quotes
        + if line.end == Mode::Bars { UNLIKELY_COST } else { 0 }
}

/// Computes the effect of a line on the stack of open parentheses. `mode` is the construct within which the line begins.
fn line_effect(mode: Mode, line: &Line) -> LineEffect {
    let mut effect = LineEffect { first: None, closed: 0, opened: Vec::new(), end: line.end };
    let mut elements: Vec<u32> = Vec::new();
    // Column of the first prefix before the next form.
    let mut prefix_start: Option<u32> = None;
    let element = |token: &Token,
                   prefix_start: &mut Option<u32>,
                   elements: &mut Vec<u32>,
                   opened: &mut Vec<(u32, Option<u32>)>| {
        let column = prefix_start.take().unwrap_or(token.column);
        if let (Some(count), Some((_, argument))) = (elements.last_mut(), opened.last_mut()) {
            *count += 1;
            if *count == 2 {
                *argument = Some(column);
            }
        }
    };
    for token in &line.tokens {
        match token.kind {
            TokenKind::Prefix | TokenKind::Feature => {
                prefix_start.get_or_insert(token.column);
            }
            TokenKind::Atom | TokenKind::String => element(token, &mut prefix_start, &mut elements, &mut effect.opened),
            TokenKind::Open => {
                element(token, &mut prefix_start, &mut elements, &mut effect.opened);
                effect.opened.push((token.column, None));
                elements.push(0);
            }
            TokenKind::Close => {
                prefix_start = None;
                elements.pop();
                if effect.opened.pop().is_none() {
                    effect.closed += 1;
                }
            }
        }
    }
    if mode == Mode::Code {
        effect.first = line.tokens.first().map(|first| {
            let kind = match first.kind {
                TokenKind::Open => FirstKind::List,
                TokenKind::Close | TokenKind::Feature => FirstKind::Anywhere,
                TokenKind::Prefix
                    if line.tokens.iter().find(|token| token.kind != TokenKind::Prefix).is_some_and(opens_list) =>
                {
                    FirstKind::List
                }
                _ => FirstKind::Other,
            };
            (first.column, kind)
        });
    }
    effect
}

fn opens_list(token: &Token) -> bool {
    token.kind == TokenKind::Open
}

/// Returns the variants of a line that begins within `mode`: the unchanged line and, if `may_edit` is true, the line with
/// each edit that changes its effect. In the unedited text, the line begins within `unedited`.
fn line_variants(
    lines: &[&str],
    number: usize,
    unedited: Mode,
    mode: Mode,
    may_edit: bool,
    stop: StopCondition<'_>,
) -> Vec<LineVariant> {
    let text = lines[number];
    let line = lex(text, mode);
    let cost = improbability_cost(text, unedited, mode, &line);
    let mut variants = vec![LineVariant { effect: line_effect(mode, &line), cost, edit: None }];
    if !may_edit {
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
        let cost = price + improbability_cost(&changed, unedited, mode, &line);
        let effect = line_effect(mode, &line);
        let edit = || Some(Edit { line: number, at, removed, inserted: inserted.to_owned() });
        match variants.iter_mut().find(|variant| variant.effect == effect) {
            Some(variant) if variant.cost <= cost => {}
            Some(variant) => (variant.cost, variant.edit) = (cost, edit()),
            None => variants.push(LineVariant { effect, cost, edit: edit() }),
        }
    };

    // `end` is the end of the code in the line; `closing` is the start of the closing parentheses at that end.
    let end = line.tokens.last().map_or(0, |token| token.end);
    let closing = line
        .tokens
        .iter()
        .rev()
        .take_while(|token| token.kind == TokenKind::Close)
        .last()
        .map_or(end, |token| token.start);
    if line.end == Mode::Code && !line.tokens.is_empty() {
        let last = lines[number + 1..].iter().all(|line| line.trim().is_empty())
            || lines[number + 1..]
                .iter()
                .find(|line| !line.trim().is_empty())
                .is_some_and(|line| line.starts_with('('));
        let mut inserted = String::new();
        for count in 0..if last { MAX_CLOSING } else { 4 } {
            inserted.push(')');
            add(end, 0, &inserted, EDIT_COST + EXTRA_PAREN_COST * u32::try_from(count).unwrap_or(0));
        }
    }
    // The removals are tried from the end of the line, so that the last of several equal candidates is chosen.
    let parentheses = line.tokens.iter().rev().filter(|token| matches!(token.kind, TokenKind::Open | TokenKind::Close));
    for token in parentheses.take(MAX_REMOVED_PARENTHESES) {
        add(token.start, 1, "", EDIT_COST);
    }
    for token in line.tokens.iter().filter(|token| token.kind != TokenKind::Close).take(MAX_POSITIONS) {
        add(token.start, 0, "(", EDIT_COST + 1);
    }
    // A parenthesis inserted within the line leaves the rest of the line outside the form.
    for token in line.tokens.iter().filter(|token| token.kind != TokenKind::Prefix).take(MAX_POSITIONS) {
        add(token.end, 0, ")", EDIT_COST + 1);
    }
    // Quotes come in pairs. If a line has only one quote, removing it costs more than inserting the missing quote.
    let alone = u32::from(line.quotes.len() == 1);
    for &quote in &line.quotes {
        add(quote, 1, "", EDIT_COST + alone);
    }
    if matches!(mode, Mode::Code | Mode::String) && !text.trim().is_empty() {
        let trimmed = text.trim_end();
        let closing_of_text = trimmed.trim_end_matches(')').len();
        let content = text.len() - text.trim_start().len();
        for at in [closing_of_text, trimmed.len(), closing, end, content] {
            add(at, 0, "\"", EDIT_COST);
        }
        for at in word_boundaries(text).take(MAX_POSITIONS) {
            add(at, 0, "\"", EDIT_COST + 1);
        }
    }
    for (at, mark) in text.match_indices("|#").chain(text.match_indices("#|")) {
        add(at, mark.len(), "", EDIT_COST);
    }
    match mode {
        Mode::Comment(_) => {
            add(0, 0, "|#", EDIT_COST);
            add(text.trim_end().len(), 0, "|#", EDIT_COST);
        }
        Mode::Code if matches!(line.end, Mode::Comment(_)) => {
            add(text.trim_end().len(), 0, "|#", EDIT_COST);
        }
        _ => {}
    }
    variants
}

/// Returns the positions at which words of `text` begin and end.
fn word_boundaries(text: &str) -> impl Iterator<Item = usize> + '_ {
    let bytes = text.as_bytes();
    let inside = |at: Option<usize>| {
        at.and_then(|at| bytes.get(at)).is_some_and(|&byte| !is_blank(byte) && byte != b'(' && byte != b')')
    };
    (0..=bytes.len()).filter(move |&at| text.is_char_boundary(at) && inside(at.checked_sub(1)) != inside(Some(at)))
}
