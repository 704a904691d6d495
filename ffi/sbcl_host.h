/* The contract between the Rust host and the Lisp side.
 *
 * Lisp threads pull jobs from the host and push events back; the host never calls into Lisp for an evaluation. The text
 * of jobs, events and messages is UTF-32 in native byte order, as in SBCL's character strings.
 *
 * src/image/bindings.rs is generated from this file (cargo feature `bindgen`); lisp/core/contract.lisp reads it when the
 * core is built. After a change, generate the bindings again and increment SBCL_HOST_CONTRACT.
 */
#ifndef SBCL_HOST_H
#define SBCL_HOST_H

#include <stddef.h>
#include <stdint.h>

/* Version of this contract. A core with another version is refused at boot. */
#define SBCL_HOST_CONTRACT 22u

/* Lanes: the kinds of Lisp threads. The threads of a lane pull the jobs of that lane. */
enum sbcl_lane {
  SBCL_LANE_EVALUATION = 0, /* runs the user's code, in as many threads as the host requests */
  SBCL_LANE_INSPECTION = 1, /* answers read-only questions; may run the user's print methods and macro functions */
  SBCL_LANE_CONTROL = 2,    /* interrupts threads of other lanes, and starts threads; never runs the user's code */
  SBCL_LANE_SIGNALS = 3     /* one thread, which pulls once to identify itself and gets no job: the host forwards
                               SBCL's signals to this thread */
};

enum sbcl_job_kind {
  SBCL_JOB_EVALUATE = 1,    /* text: code; name: package or empty; operation: the operation to run with the code, or empty
                               to evaluate the code; flags: SBCL_EVALUATE_… */
  SBCL_JOB_RESET = 2,       /* end the user's threads, remove the session's definitions and reset its variables */
  SBCL_JOB_DEFINITIONS = 3, /* list the session's definitions; flags: the sbcl_item to list, or 0 for all; argument:
                               maximum number of definitions; name: the package to list, or empty for all */
  SBCL_JOB_DESCRIBE = 4,    /* text: symbol; name: package or empty; flags: SBCL_DESCRIBE_SOURCE or 0 */
  SBCL_JOB_INTERRUPT = 5,   /* argument: the job to interrupt, or 0 for none; flags: an sbcl_interrupt.
                               SBCL_INTERRUPT_HEAP also ends the user's threads */
  /* Operations on a held evaluation. Only the thread that holds the evaluation gets these jobs. */
  SBCL_JOB_INVOKE_RESTART = 6,    /* argument: the restart's number, from 1, or 0 to use the name; name: the restart's
                                     name; text: expressions whose values are the restart's arguments */
  SBCL_JOB_FRAME_LOCALS = 7,      /* argument: number of the first frame; flags: number of frames */
  SBCL_JOB_EVAL_IN_FRAME = 8,     /* argument: frame number; text: code */
  SBCL_JOB_RETURN_FROM_FRAME = 9, /* argument: frame number; text: code whose values the frame returns */
  SBCL_JOB_RESTART_FRAME = 10,    /* argument: number of the frame whose function is called again */
  SBCL_JOB_RELEASE = 11,          /* unwind the held evaluation */
  /* operation: the query's name and arguments */
  SBCL_JOB_QUERY = 12,
  SBCL_JOB_START_THREAD = 13, /* flags: a lane. Start an evaluation thread, or start a thread that takes over the inspection
                                 lane: the lane's present thread ends after its job. If the new thread cannot be started,
                                 report SBCL_EVENT_THREAD_REFUSED; the present thread continues to serve the lane */
  SBCL_JOB_ABANDON = 14, /* argument: a job that does not react to interruptions, whose thread is withdrawn from its lane;
                            flags: the lane. SBCL_LANE_INSPECTION gets a new thread, unless another thread has taken it
                            over; if none can be started, the job is refused (SBCL_EVENT_REFUSED) */
  SBCL_JOB_LOOK = 15     /* find the lock that an abandoned thread holds; answered by SBCL_EVENT_BLOCKED of job 0 */
};

/* Flags of SBCL_JOB_EVALUATE. */
#define SBCL_EVALUATE_TIMING 1u
#define SBCL_EVALUATE_HOLD 2u          /* hold the evaluation in the debugger if it fails */
#define SBCL_EVALUATE_RECORD_ERRORS 4u /* report errors that the code handles, too */
#define SBCL_EVALUATE_DETACHED 8u /* bind copies of *package* and the REPL's variables; their values become the session's
                                     if the final SBCL_EVENT_FOREGROUND is answered with 1 */
#define SBCL_EVALUATE_BACKGROUND 16u /* start in the background: the thread does not become the main thread */

/* Flags of SBCL_JOB_DESCRIBE. */
#define SBCL_DESCRIBE_SOURCE 1u /* include the text of definitions */

/* Audiences of a connection's messages. */
enum sbcl_audience {
  SBCL_AUDIENCE_AGENT = 0,          /* an agent, which calls tools */
  SBCL_AUDIENCE_SHELL = 1,          /* a person at a shell; the image ends with the evaluation */
  SBCL_AUDIENCE_ATTACHED_SHELL = 2, /* a person at a shell; the image outlives the person's command */
  SBCL_AUDIENCE_REPL = 3            /* a person at the prompt of the REPL */
};

/* Reasons for interrupting a job. */
enum sbcl_interrupt {
  SBCL_INTERRUPT_TIMEOUT = 1,
  SBCL_INTERRUPT_CANCEL = 2,
  SBCL_INTERRUPT_HEAP = 3 /* the heap is nearly full */
};

/* A job. Its texts belong to the host and stay valid until the job's SBCL_EVENT_DONE. */
struct sbcl_job {
  uint64_t id;
  uint32_t kind;
  uint32_t flags;
  uint64_t argument;
  const uint32_t *text;
  uint64_t text_length; /* characters */
  const uint32_t *name;
  uint64_t name_length; /* characters */
  uint64_t evaluation;  /* number of the evaluation that the job belongs to, or 0; recorded in compiled code */
  const uint32_t *operation; /* a list (:NAME :ARGUMENT value …) as text; values are strings, integers, T, NIL, lists of
                                strings, or lists of lists of this form */
  uint64_t operation_length; /* characters */
  uint64_t connection; /* the connection whose values of *package* and of the REPL, printer and reader variables
                          apply; 0: the global values */
  uint32_t audience;   /* an sbcl_audience: the audience of the connection's messages */
};

/* Events that a job reports. "begin": a new item starts, and the text is the item's name. "continue": the text is
 * appended to the item begun last; any number of such events may follow. */
enum sbcl_event {
  SBCL_EVENT_DONE = 0,           /* the job has ended; number: 0 success, 1 failure; returns 1 if the thread was
                                    abandoned and must end */
  SBCL_EVENT_STDOUT = 1,         /* continue */
  SBCL_EVENT_STDERR = 2,         /* continue */
  SBCL_EVENT_WARNING = 3,        /* begin: condition type; number: line of the code, 0 if unknown */
  SBCL_EVENT_WARNING_TEXT = 4,   /* continue; number: 1 to replace the text so far */
  SBCL_EVENT_VALUE = 5,          /* begin; number: 1 to replace the value begun last */
  SBCL_EVENT_VALUE_TEXT = 6,     /* continue */
  SBCL_EVENT_ERROR = 7,          /* begin: condition type; number: 1 if the previous error was still being described */
  SBCL_EVENT_ERROR_TEXT = 8,     /* continue; number: 1 to replace the text so far */
  SBCL_EVENT_RESTART = 9,        /* begin: restart name; number: the restart's number, from 1; if there are too many
                                    restarts, some are not reported, and their numbers are skipped */
  SBCL_EVENT_RESTART_TEXT = 10,  /* continue */
  SBCL_EVENT_FRAME = 11,         /* begin; number: frame number */
  SBCL_EVENT_FRAME_TEXT = 12,    /* continue */
  SBCL_EVENT_FRAME_SOURCE = 13,  /* text: the file or the evaluation that the code of the frame begun last comes from;
                                    number: line, 0 if unknown */
  SBCL_EVENT_FRAMES = 14,        /* number: total number of frames */
  SBCL_EVENT_TIME_REAL = 15,     /* number: milliseconds */
  SBCL_EVENT_TIME_RUN = 16,      /* number: milliseconds */
  SBCL_EVENT_TIME_GC = 17,       /* number: milliseconds */
  SBCL_EVENT_BYTES_CONSED = 18,  /* number: bytes */
  SBCL_EVENT_ITEM = 19,          /* begin: label; number: an sbcl_item */
  SBCL_EVENT_ITEM_TEXT = 20,     /* continue */
  SBCL_EVENT_NOTICE = 21,        /* text: a notice from the Lisp side itself */
  SBCL_EVENT_DEFINED = 22,       /* a form of the code defined something; number: the form's start, in characters; text:
                                    the form's end, a newline, the lines of CHANGES-TEXT (lisp/core/changes.lisp), a
                                    newline, @ and the package in which the form was read */
  SBCL_EVENT_FORM = 23,          /* the form that failed; number: the form's number, from 1; text: the form's start, in
                                    characters */
  SBCL_EVENT_SLOT = 24,          /* begin: name of a slot of the condition */
  SBCL_EVENT_SLOT_TEXT = 25,     /* continue */
  SBCL_EVENT_LOCAL = 26,         /* begin: name of a variable of the frame begun last; number: 0 if the variable has a
                                    value, 1 if it is dead, 2 if its value is unavailable */
  SBCL_EVENT_LOCAL_TEXT = 27,    /* continue */
  SBCL_EVENT_HELD = 28,          /* the evaluation is held when this job has ended; number: 0 if it stopped during this
                                    job, 1 if it was held before this job and still is */
  SBCL_EVENT_REFUSED = 29,       /* text: why the job's request cannot be fulfilled; of job 0: why Lisp could not start */
  SBCL_EVENT_RELEASED = 30,      /* this job unwinds the held evaluation, as SBCL_JOB_RELEASE does */
  SBCL_EVENT_HEAP = 31,          /* asked after a garbage collection; returns 1 if the job keeps more of the heap than it
                                    may and must end; 0 if the job may continue, even if it was interrupted
                                    because the heap is nearly full */
  SBCL_EVENT_WARNING_PLACE = 32, /* text: file of the warning begun last, empty for the evaluated code; number: column,
                                    0 if unknown */
  SBCL_EVENT_WARNING_FORM = 33,  /* text: name of the top-level form that contains the code of the warning begun last,
                                    as in (DEFUN F) */
  SBCL_EVENT_FRAME_CODE = 34,    /* text: the source line at the frame begun last */
  SBCL_EVENT_FRAME_MACHINERY = 35, /* text: the part of SBCL or of a library to which the frame begun last belongs, as in
                                      "ASDF" or "the reader" */
  SBCL_EVENT_RECORD = 36,        /* begin: kind of a record with which the Lisp side answers a query or an operation */
  SBCL_EVENT_FIELD = 37,         /* begin: name of a field of the record begun last; number: its value if no text follows */
  SBCL_EVENT_FIELD_TEXT = 38,    /* continue */
  SBCL_EVENT_UNHANDLED = 39,     /* the job fails with an error that was not handled; number: the index of this error,
                                    from 0, among the errors that the job reported with SBCL_JOB_SIGNALLED */
  SBCL_EVENT_FOREGROUND = 40,    /* asked when all forms have been evaluated; returns 1 if the evaluation is in the
                                    foreground and stays there; 0 if it has moved to the background */
  SBCL_EVENT_THREAD_ENDED = 41,  /* of job 0: this evaluation thread ends */
  SBCL_EVENT_DEFINITIONS = 42,   /* without text: returns 1 if other connections must be notified of the evaluation's
                                    definitions; text: a summary of the definitions */
  SBCL_EVENT_STEP = 43,          /* text: the job's next step, as in "the test FOO", or empty for no particular step;
                                    number: milliseconds after which the job is interrupted if the step still runs; no
                                    limit if the text is empty */
  SBCL_EVENT_INTERRUPTED = 44,   /* the last interruption sent to the job's thread begins to run there, or the thread does
                                    not exist, so that the next interruption may be sent. If the job is
                                    SBCL_JOB_PROGRAM, number: the call that the interruption was to end */
  SBCL_EVENT_UNWINDING = 45,     /* the job begins to unwind because it was interrupted. If the job is SBCL_JOB_PROGRAM,
                                    number: the call that begins to unwind */
  SBCL_EVENT_BLOCKED = 46,       /* of job 0, answers SBCL_JOB_LOOK; text: the lock of SBCL's own that an abandoned thread
                                    holds while other threads wait for it, as in "the lock \"PCL global mutex\"", or
                                    empty if there is no such lock */
  SBCL_EVENT_THREAD_REFUSED = 47 /* of job 0, answers SBCL_JOB_START_THREAD; number: the lane; text: why no thread could be
                                    started */
};

/* Added to the job number in events that describe an error at the time when it is signalled. The code may still handle
 * such an error. Job numbers are lower than this flag, which is a fixnum in Lisp. */
#define SBCL_JOB_SIGNALLED (1ull << 61)

/* Kinds of SBCL_EVENT_ITEM. */
enum sbcl_item {
  SBCL_ITEM_FUNCTION = 1,
  SBCL_ITEM_VARIABLE = 2,
  SBCL_ITEM_MACRO = 3,
  SBCL_ITEM_CLASS = 4,
  SBCL_ITEM_PACKAGE = 5,
  SBCL_ITEM_SYSTEM = 6,
  SBCL_ITEM_ROLE = 7,      /* a role of a described symbol */
  SBCL_ITEM_DETAIL = 8,    /* a labelled detail of the preceding role */
  SBCL_ITEM_NOT_FOUND = 9, /* nothing was found; the item has no label, and its text is a sentence */
  SBCL_ITEM_MORE = 10      /* label: number of further definitions */
};

/* A message between Lisp and an embedding program: words in the encoding of lisp/embedding/values.lisp. */
struct sbcl_message {
  const uint64_t *words;
  uint64_t count; /* words */
};

/* Outcomes of a call between Lisp and the program. */
enum sbcl_call_status {
  SBCL_CALL_VALUES = 0,  /* the message contains the values */
  SBCL_CALL_FAILED = 1,  /* the message contains the condition or the error */
  SBCL_CALL_PANICKED = 2, /* from the program only: the message contains the function's name and the panic's text */
  SBCL_CALL_UNWINDING = 3, /* a non-local exit in Lisp unwinds past the caller, which must return as soon as possible */
  SBCL_CALL_MISSING = 4 /* from the program only: the program no longer has this function, and did not read the message */
};

/* Numbers of host functions that every program has. Functions that the program defines have higher numbers. */
enum sbcl_program_function {
  SBCL_PROGRAM_RUN = 0,        /* takes an integer: runs the closure with this number */
  SBCL_PROGRAM_ASK = 1,        /* takes a condition and its report: returns nil, or a list of a restart's name and the
                                  restart's arguments */
  SBCL_PROGRAM_READ_INPUT = 2, /* takes a boolean, true to wait for input: returns the next characters of the input, nil at
                                  the end of the input, or an empty string if no input has arrived and the call does not
                                  wait or is being interrupted */
  SBCL_PROGRAM_DEFINED = 3,    /* takes the number of a new function, and any number of numbers of functions that Lisp will
                                  not call from then on: the function that the new function replaces, and functions that a
                                  collection has found unreachable; called with interrupts off */
  SBCL_PROGRAM_FIRST = 16      /* the first number of a function that the program defines */
};

/* Handles of the Lisp functions in *PROGRAM-ENTRIES* of lisp/embedding/embedding.lisp. */
enum sbcl_entry {
  SBCL_ENTRY_RUN_UNDER_CONDITIONS = 1,
  SBCL_ENTRY_EVALUATE_TEXT,
  SBCL_ENTRY_LOAD_TEXT,
  SBCL_ENTRY_LOAD_FILE,
  SBCL_ENTRY_FIND_FUNCTION,
  SBCL_ENTRY_RELEASE,
  SBCL_ENTRY_INTERRUPT,
  SBCL_ENTRY_DEFINE_FUNCTION,
  SBCL_ENTRY_PRINT,
  SBCL_ENTRY_TYPE_OF,
  SBCL_ENTRY_SAME,
  SBCL_ENTRY_OCTET_COUNT,
  SBCL_ENTRY_COPY_OCTETS,
  SBCL_ENTRY_SIZE,
  SBCL_ENTRY_SLOT,
  SBCL_ENTRY_SLOTS,
  SBCL_ENTRY_ELEMENT,
  SBCL_ENTRY_OBJECTS,
  SBCL_ENTRY_SYMBOL,
  SBCL_ENTRY_START_THREAD,
  SBCL_ENTRY_LOCAL_FUNCTION,
  SBCL_ENTRY_BORROW_OCTETS,
  SBCL_ENTRY_SAVE,
  SBCL_ENTRY_CALLEE,
  SBCL_ENTRY_CURRENT_THREAD
};

/* The job number under which the program's threads report output and warnings. */
#define SBCL_JOB_PROGRAM (1ull << 62)

/* The interface of an embedding program, valid for the life of the process. SERVE and CALL follow the rules for the
 * functions of struct sbcl_host, except that they may call Lisp. */
struct sbcl_library {
  uint32_t threads;  /* number of Lisp threads that work for the program, without the thread that interrupts them */
  uint32_t reserved;
  /* Lets the program use the calling Lisp thread, whose number is THREAD; thread 0 interrupts the other threads. Returns 0
   * when the thread must end, 1 when a non-local exit is pending. */
  int32_t (*serve)(uint32_t thread);
  /* Calls a host function with a message of COUNT words, and returns an sbcl_call_status. On entry ANSWER's count is the
   * number of earlier answers on this thread that Lisp is still reading, and those answers stay valid. The new answer stays
   * valid until the next call on this thread whose count does not include it. */
  int32_t (*call)(uint64_t function, const uint64_t *words, uint64_t count, struct sbcl_message *answer);
  /* Set by Lisp before its first call. Calls a Lisp function by its handle, with the objects in a message of COUNT words,
   * on a Lisp thread that has called the program. SHAPE says to which depth the answer contains the values themselves
   * rather than handles (Shape in src/embedding/convert.rs). Returns an sbcl_call_status; the answer stays valid until the
   * next call in either direction on this thread. */
  int32_t (*gate)(uint64_t function, uint64_t shape, const uint64_t *words, uint64_t count, struct sbcl_message *answer);
};

/* The host's interface, passed to sbcl_host_start and valid for the life of the process. Each function may be called from
 * any Lisp thread with interrupts disabled, and returns without unwinding. Float traps may be enabled: the host masks them
 * itself. On x86-64, at least 8 KiB of the control stack besides its protected pages are free. */
struct sbcl_host {
  uint32_t contract;          /* SBCL_HOST_CONTRACT */
  uint32_t size;              /* sizeof(struct sbcl_host) */
  uint64_t seed;              /* for *random-state* */
  uint64_t user_init;         /* 1: load the user's init file */
  /* Waits for the lane's next job, fills in JOB and returns 1; returns 0 when the thread must end. On entry JOB's id is
   * the number of this thread's last job if that job's evaluation is held, else 0. */
  int32_t (*next_job)(uint32_t lane, struct sbcl_job *job);
  /* Receives an event of JOB, which is 0 for an event of no particular job. Returns the result that the event's comment in
   * enum sbcl_event states. For events whose comment states no result, returns 1 if the host keeps no more of the text begun
   * last, so that the text need not be printed to its end; else 0. */
  int32_t (*event)(uint64_t job, uint32_t kind, int64_t number, const uint32_t *text, uint64_t length);
  /* A directory for temporary files, which also replaces a home directory that is unknown, and a cache directory that
   * is not writable. The directory need not exist; the host removes it at the end of the process. */
  const uint32_t *scratch;
  uint64_t scratch_length; /* characters; 0 if there is no such directory */
  struct sbcl_library *library; /* null if no program embeds the image */
};

/* Exported by the core (save-lisp-and-die :callable-exports): starts the Lisp threads and returns the core's
 * SBCL_HOST_CONTRACT. If that version differs from host->contract, nothing was started. Returns 0 if Lisp could not start;
 * in this case an earlier SBCL_EVENT_REFUSED of job 0 contains the reason. */
extern uint32_t (*sbcl_host_start)(const struct sbcl_host *host);

/* The stacks of a Lisp thread. */
enum sbcl_stack {
  SBCL_STACK_CONTROL = 1,
  SBCL_STACK_BINDING,
  SBCL_STACK_ALIEN
};

/* Also exported by the core. Called on a Lisp thread whose STACK, an sbcl_stack, is exhausted: unwinds the thread's
 * evaluation, or the thread itself if it runs none. Does not return. */
extern void (*sbcl_host_stack_lost)(uint32_t stack);

/* In the shim, for the handler of SIGSEGV. ADDRESS is the address of the fault, and CONTEXT the handler's ucontext_t. If
 * ADDRESS is in the last page of a stack of the calling Lisp thread, the Lisp code that handles stack exhaustion has
 * exhausted the stack again: abandons that code, makes the thread continue in sbcl_host_stack_lost, and returns 1.
 * Otherwise, and if C code wrote to the last page of a stack that it does not use itself, returns 0. On aarch64, the alien
 * stack is the stack of C code, on which the handler itself runs, so the handler is not called when this stack is
 * exhausted. */
int32_t sbcl_host_catch_stack_loss(void *address, void *context);

/* In the shim: returns 1 if SBCL knows the calling thread. Async-signal-safe. */
int32_t sbcl_host_is_lisp_thread(void);

/* In the shim: returns 1 if a thread may be stopping the other Lisp threads, as for a collection, or has stopped them.
 * Also returns 1 while a thread starts or ends. Async-signal-safe. */
int32_t sbcl_host_may_be_stopping(void);

/* In the shim, to be called before initialize_lisp: from here on TAKE receives each signal and struct sigaction that SBCL
 * would install. The action is installed only if TAKE returns 0. Linux only; elsewhere TAKE is never called. */
void sbcl_host_give_actions(int32_t (*take)(int32_t signal, const void *action));

/* In the shim, to be called before initialize_lisp: sets the file in which SBCL looks for a core. PATH must stay valid. */
void sbcl_host_set_runtime_path(const char *path);

/* In the shim: makes SBCL's allocator usable in processes that fork(3) creates from here on, whatever other threads do
 * during the fork. To be called once per process. Returns 0 or an error number. */
int32_t sbcl_host_guard_forks(void);

#endif
