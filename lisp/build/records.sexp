;;;; The records with which Lisp answers queries and operations. Both languages use this table: PUSH-RECORD accepts only
;;;; the names in it, and the build generates a Rust structure from each entry (src/outcome/records.rs). An entry
;;;; consists of the record's kind, the name of the structure, its documentation, and the fields. A field consists of
;;;; its name, its type, its documentation and, optionally, the name that structured results use instead. `?` marks an
;;;; optional field. A number is never negative, and a flag is 1 for true.

(system System "The header of the results of one of several tested systems."
 (name text "The name of the system, as requested.")
 (printed number "The number of characters that the evaluation had printed when the system's tests began."))

(run RunCounts "The counts of a test run."
 (system text? "The system, if several are tested.")
 (passed number "The number of tests whose checks all passed.")
 (failed number "The number of tests that had a failed check or exceeded their time limit.")
 (errors number "The number of tests that an error ended.")
 (skipped number "The number of tests that did not run, checked nothing for a stated reason, or failed as expected.")
 (milliseconds number "The duration of the run."))

(test TestResult "The result of a test. Records about its checks follow."
 (system text? "The system, if several are tested.")
 (name text "The name of the test.")
 (framework text "The framework of the test; `ASDF` for a test operation of an unknown framework.")
 (status test-status "The outcome of the test.")
 (milliseconds number "The duration of the test.")
 (checks number? "The number of checks that passed, if known.")
 (message text? "A message about the test.")
 (error number? "The index in the outcome's errors, from 0, of the error that ended the test.")
 (file text? "The file that defines the test.")
 (line number? "The line of the definition, from 1.")
 (code text? "The text of the line."))

(check Check "A failed check of the preceding test."
 (form text? "The form that was checked.")
 (expected text? "The expected value.")
 (actual text? "The actual value.")
 (message text? "The message of the check.")
 (file text? "The file that contains the check.")
 (line number? "The line of the check, from 1."))

(more-checks MoreChecks "The number of further failed checks of the preceding test."
 (count number "The number of checks."))

(suspects Suspects "The header of a test's list of suspects."
 (system text? "The system, if several are tested.")
 (name text "The name of the test.")
 (printed text? "The failure report to which the suspects belong, as the test operation printed it.")
 (more number "The number of similar failure reports of that operation."))

(suspect Suspect "A function that may cause a failure."
 (name text "The name of the function.")
 (file text? "The file that defines the function.")
 (line number "The line of the definition, from 1.")
 (passing number "The number of passing tests that ran the suspected code.")
 (macros text? "The macros of the tested code that the function uses, separated by commas."))

(line SuspectLine "A line of the preceding suspect."
 (line number "The line in the file, from 1.")
 (code text "The text of the line.")
 (passing number? "The number of passing tests that ran the line, if larger than the suspect's number."))

(no-suspects NoSuspects "A search for suspects without results."
 (system text? "The system, if several are tested."))

(differs Difference "A test that passes only in the session or only in a fresh image."
 (system text? "The system, if several are tested.")
 (name text "The name of the test.")
 (passes passing-image "The image in which the test passes."))

(directory Directory "A directory in which a fresh image must look for systems."
 (system text? "The system, if several are tested.")
 (name text "The path of the directory.")
 (primary text? "The primary system that `file` defines.")
 (file text? "The path of the .asd file in which to look for the primary system."))

(load SystemToLoad "A system that a fresh image must load to find the tests."
 (system text? "The tested system, if several are tested.")
 (name text "The name of the system to load."))

(loading Loading "The start of a load."
 (name text "The name of the system or file."))

(progress LoadProgress "The progress of a load."
 (message text "The current action with its file or system, such as `loading src/a.lisp`."))

(loaded Loaded "The result of a load."
 (name text "The name of the system or file.")
 (files number "The number of loaded files.")
 (compiled number "The number of loaded files that were compiled.")
 (present number? "The number of files of the system, if none had to be loaded.")
 (definition text? "The file with the system definition, if it was searched for.")
 (systems text? "The other loaded systems, separated by commas.")
 (milliseconds number "The duration of the load."))

(read ReadUpTo "The end of the code that was read."
 (end number "The number of characters read."))

(trace Trace "The summary of a trace."
 (functions number "The number of traced functions.")
 (calls number "The number of calls.")
 (recorded number "The number of recorded calls.")
 (omitted number "The number of calls that were not recorded.")
 (stopped flag "True if tracing of local functions stopped because a thread was started."))

(call TracedCall "A call of a traced function."
 (thread text? "The thread that made the call, if not the evaluating thread.")
 (depth number "The number of recorded calls that enclose the call.")
 (text text "The call, printed.")
 (end call-end "The way in which the call ended.")
 (result text "The values or the error, printed.")
 (nanoseconds number? "The duration of the call.")
 (deeper number? "The number of deeper calls within the call that were not recorded."))

(profile ProfileSummary "The summary of a profile."
 (mode text "The profiling mode: `cpu`, `alloc` or `time`.")
 (samples number "The number of samples.")
 (threads number "The number of threads with samples.")
 (milliseconds number "The duration of profiling.")
 (functions number "The number of functions in the samples."))

(function ProfiledFunction "A function in a profile."
 (name text "The name of the function.")
 (location text? "The source location of the definition." "place")
 (own number "The number of samples in the function itself." "self")
 (total number "The number of samples in the function or in functions that it called."))

(stack Stack "A call stack in a profile."
 (count number "The number of samples with this stack.")
 (frames text "The names of the functions, outermost first, separated by semicolons."))

(symbol FoundSymbol "A symbol or package that a search found."
 (name text "The name, as a user would type it.")
 (kind text "The kinds of things that the symbol names.")
 (lambda-list text? "The lambda list; for a package, its nicknames and export count.")
 (documentation text? "The first line of the documentation.")
 (exported flag "True if the package exports the symbol."))

(nothing Nothing "A search without results."
 (text text "The message, with similar names."))

(relation Relation "The relation of the following references to a name."
 (name text "The name of the relation."))

(reference Reference "A reference to a name."
 (name text "The definition that contains the reference; or the callee, method, subclass or test that was found.")
 (location text "The source location, or a note that it is unknown." "where")
 (code text? "The text of the line.")
 (how text? "The way in which the definition refers to the name."))

(note Note "A remark about the results."
 (text text "The text of the remark."))

(more More "The number of results beyond the requested number."
 (count number "The number of results."))

(omitted Omitted "The number of further results that were not kept."
 (count number "The number of results."))

(step ExpansionStep "A step of a macro expansion."
 (operator text "The operator of the expanded form." "macro")
 (result text "The operator of the expansion.")
 (count number "The number of consecutive occurrences of the step."))

(expansion ExpansionPiece "A piece of an expansion."
 (text text "The text of the piece."))

(error ExpansionError "An error in a macro function or in the reader."
 (class text "The class name of the condition." "type")
 (message text "The report of the condition.")
 (during text "The action that the error ended." "while"))

(saving Saving "A process that is saving the image."
 (process number? "The process ID.")
 (stopped number "The time for which the session was stopped, in microseconds.")
 (timers number "The number of timers that the saved image lacks."))

(thread SavedThread "A thread that the saved image lacks."
 (name text "The name of the thread."))

(image Image "The image."
 (name text? "The name of the checkpoint from which the image was booted.")
 (package text "The package of the session."))

(definitions DefinitionCount "The number of the session's definitions of one kind."
 (count number "The number of definitions.")
 (kind text "The kind, in the singular."))

(package Package "A package."
 (name text "A name or nickname of the package."))
