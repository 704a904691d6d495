;;;; The records by which Lisp answers queries and operations, for both languages: PUSH-RECORD compiles no other names, and
;;;; the build makes a Rust structure of each (src/outcome/records.rs). A record is its kind, the structure's name, what it
;;;; tells, and its fields: each its name, its type, what it is, and what it is called in structured results, if it is called
;;;; something else there. `?`: it may be missing; a number is one from 0; a flag is 1 for true.

(system System "What is about one of several systems whose tests are run begins."
 (name text "The system, as it was asked for.")
 (printed number "The characters that the evaluation had printed by then."))

(run RunCounts "The counts of a run of tests."
 (system text? "The system, where there are several.")
 (passed number "All their checks held.")
 (failed number "A check did not hold, or the test took too long.")
 (errors number "An error ended the test.")
 (skipped number "It was not run, or checked nothing for a reason that it gave.")
 (milliseconds number "How long all of them took."))

(test TestResult "A test. What is told of its checks comes after it."
 (system text? "The system, where there are several.")
 (name text "The name of the test.")
 (framework text "The library that it is written with; `ASDF` for a test operation of none that is known.")
 (status test-status "What it came to.")
 (milliseconds number "How long it took.")
 (checks number? "How many checks held, where that is known.")
 (message text? "What its framework says of it.")
 (error number? "The error that ended it: its place among those of the outcome, from 0.")
 (file text? "Where it is defined.")
 (line number? "The line there, from 1.")
 (code text? "The text of that line."))

(check Check "A check that did not hold, of the test before it."
 (form text? "The form that was checked.")
 (expected text? "The value that it was to have.")
 (actual text? "The value that it had.")
 (message text? "What was said of it.")
 (file text? "Where it is.")
 (line number? "The line there, from 1."))

(more-checks MoreChecks "How many more checks of the test before it did not hold."
 (count number "The number."))

(suspects Suspects "The suspects of a test follow."
 (system text? "The system, where there are several.")
 (name text "The name of the test.")
 (printed text? "What a test operation printed of the failure that they are for.")
 (more number "How many more reports of that operation are like it."))

(suspect Suspect "A function that may be at fault."
 (name text "The name of the function.")
 (file text? "Where it is defined.")
 (line number "The line there, from 1.")
 (passing number "How many passing tests ran what makes the difference.")
 (macros text? "The macros that it expands, with commas between."))

(line SuspectLine "A line of the suspect before it."
 (line number "The line in the file, from 1.")
 (code text "The text of the line.")
 (passing number? "How many passing tests ran it, where these are more than of other lines."))

(no-suspects NoSuspects "Suspects were looked for, and there are none."
 (system text? "The system, where there are several."))

(differs Difference "A test passes in one of two images alone."
 (system text? "The system, where there are several.")
 (name text "The name of the test.")
 (passes passing-image "The image in which it passes."))

(directory Directory "A directory in which another image finds systems."
 (system text? "The system, where there are several.")
 (name text "The path of the directory."))

(load SystemToLoad "A system that another image loads to find the tests."
 (system text? "The system that is tested, where there are several.")
 (name text "The name of the system to load."))

(loading Loading "A load has begun."
 (name text "The name of the system or file."))

(progress LoadProgress "How far a load is."
 (message text "A sentence."))

(loaded Loaded "What was loaded."
 (name text "The name of the system or file.")
 (files number "How many files were loaded.")
 (compiled number "How many of them were compiled.")
 (present number? "How many files it has, when none had to be loaded.")
 (definition text? "The file with the definition of the system, where that was looked for.")
 (systems text? "The other systems that were loaded, with commas between.")
 (milliseconds number "How long it took."))

(read ReadUpTo "How much of the code was read."
 (end number "The number of the first character that was not."))

(trace Trace "What was traced."
 (functions number "How many functions were traced.")
 (calls number "How many calls there were.")
 (recorded number "How many of them were recorded.")
 (omitted number "How many of them were not.")
 (stopped flag "A thread was started, and local functions were traced no further."))

(call TracedCall "A call of a traced function."
 (thread text? "The thread that made it, other than the one that evaluates.")
 (depth number "How many recorded calls it is in.")
 (text text "The call, printed.")
 (end call-end "How it ended.")
 (result text "The values or the error, printed.")
 (nanoseconds number? "How long it took.")
 (deeper number? "How many deeper calls in it were not recorded."))

(profile ProfileSummary "What a profiler has seen."
 (mode text "What it counted: `cpu`, `alloc` or `time`.")
 (samples number "How many samples it has taken.")
 (threads number "How many threads these are of.")
 (milliseconds number "How long it ran.")
 (functions number "How many functions it has seen."))

(function ProfiledFunction "A function that a profiler has seen."
 (name text "The name of the function.")
 (place text? "Where it is defined.")
 (own number "The samples in which it ran itself." "self")
 (total number "The samples in which it, or what it called, ran."))

(stack Stack "Calls in each other that a profiler has seen."
 (count number "The number of samples.")
 (frames text "The names of the functions, outermost first, with semicolons between."))

(symbol FoundSymbol "A symbol or a package that a search found."
 (name text "As one would type it.")
 (kind text "What it means.")
 (lambda-list text? "The lambda list; of a package, what it exports.")
 (documentation text? "The first line of its documentation.")
 (exported flag "Its package exports it."))

(nothing Nothing "A search found nothing."
 (text text "Sentences that say so, with near names."))

(relation Relation "The relation of what a search found to a name."
 (name text "The name of the relation."))

(reference Reference "What stands in a relation to a name."
 (name text "What it is in.")
 (place text "The file and the line, or that they are not known." "where")
 (code text? "The text of that line.")
 (how text? "How it refers to the name."))

(note Note "What is to be said of what was found."
 (text text "A sentence."))

(more More "How many more there are than were asked for."
 (count number "The number."))

(omitted Omitted "How many more there are than are kept."
 (count number "The number."))

(step ExpansionStep "A step of an expansion."
 (operator text "The operator of the form that was expanded." "macro")
 (result text "The operator of what that became.")
 (count number "How many times in succession."))

(expansion ExpansionPiece "A piece of an expansion."
 (text text "Its text."))

(error ExpansionError "A macro function, or the reader, failed."
 (class text "The class name of the condition." "type")
 (message text "Its report.")
 (during text "What was being done." "while"))

(saving Saving "The image is being saved by another process."
 (process number? "The number of that process.")
 (stopped number "How long the session stood still, in microseconds.")
 (timers number "How many timers are not in it."))

(thread SavedThread "A thread that is not in what is saved."
 (name text "The name of the thread."))

(image Image "The image."
 (name text? "The name of the checkpoint that it was booted from.")
 (package text "The package of the session."))

(definitions DefinitionCount "How much of a kind the session has defined."
 (count number "The number.")
 (kind text "The kind, in the singular."))

(package Package "A package."
 (name text "A name of it."))
