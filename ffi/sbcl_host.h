/* The contract between the Rust host and the Lisp side.
 *
 * Lisp threads pull jobs from the host and push events back; the host never calls into Lisp for an evaluation. All
 * text crosses as UTF-32 in native byte order, as SBCL holds strings, so that neither side encodes anything.
 *
 * src/image/bindings.rs is generated from this file (cargo feature `bindgen`); lisp/core/contract.lisp reads it when the
 * core is built. After a change, generate the bindings again and increment SBCL_HOST_CONTRACT.
 */
#ifndef SBCL_HOST_H
#define SBCL_HOST_H

#include <stddef.h>
#include <stdint.h>

/* Version of this contract. A core with another version is refused at boot. */
#define SBCL_HOST_CONTRACT 17u

/* Lanes: the kinds of Lisp threads. The threads of each lane pull the jobs of that lane. */
enum sbcl_lane {
  SBCL_LANE_EVALUATION = 0, /* runs the user's code, in as many threads as the host requests */
  SBCL_LANE_INSPECTION = 1, /* answers read-only questions; may run the user's print methods */
  SBCL_LANE_CONTROL = 2,    /* interrupts the others; never runs the user's code */
  SBCL_LANE_SIGNALS = 3     /* pulls once, to identify itself, and gets no job; the host forwards SBCL's signals to it */
};

enum sbcl_job_kind {
  SBCL_JOB_EVALUATE = 1,    /* text: code; name: package or empty; operation: the evaluator, empty for the default one */
  SBCL_JOB_RESET = 2,       /* remove the session's definitions */
  SBCL_JOB_DEFINITIONS = 3, /* list the session's definitions; flags: only this sbcl_item, 0 for all; argument: maximum
                               number; name: only in this package, or empty */
  SBCL_JOB_DESCRIBE = 4,    /* text: symbol; name: package or empty; flags */
  SBCL_JOB_INTERRUPT = 5,   /* argument: the job to interrupt; flags: an sbcl_interrupt */
  /* Operations on a held evaluation. Only the thread that holds it gets them. */
  SBCL_JOB_INVOKE_RESTART = 6,    /* argument: number from 1, or 0; name: name if 0; text: expressions for arguments */
  SBCL_JOB_FRAME_LOCALS = 7,      /* argument: number of the first frame; flags: how many frames */
  SBCL_JOB_EVAL_IN_FRAME = 8,     /* argument: frame number; text: code */
  SBCL_JOB_RETURN_FROM_FRAME = 9, /* argument: frame number; text: code */
  SBCL_JOB_RESTART_FRAME = 10,    /* argument: frame number */
  SBCL_JOB_RELEASE = 11,          /* unwind the evaluation */
  /* operation: the query, by name */
  SBCL_JOB_QUERY = 12,
  SBCL_JOB_START_THREAD = 13, /* start an evaluation thread, or report SBCL_EVENT_THREAD_REFUSED */
  SBCL_JOB_ABANDON = 14, /* argument: a job that does not react to interruption, whose thread is withdrawn from its lane;
                            flags: the lane. SBCL_LANE_INSPECTION gets a new thread; if none can be started, the job is
                            refused (SBCL_EVENT_REFUSED) */
  SBCL_JOB_LOOK = 15     /* find the lock that an abandoned thread holds; answered by SBCL_EVENT_BLOCKED of job 0 */
};

/* Flags of SBCL_JOB_EVALUATE. */
#define SBCL_EVALUATE_TIMING 1u
#define SBCL_EVALUATE_HOLD 2u          /* hold the evaluation in the debugger if it fails */
#define SBCL_EVALUATE_RECORD_ERRORS 4u /* report errors that the code handles, too */
#define SBCL_EVALUATE_DETACHED 8u /* bind copies of *package* and the REPL's variables, which become the session's if
                                     the final SBCL_EVENT_FOREGROUND is answered with 1 */
#define SBCL_EVALUATE_BACKGROUND 16u /* start in the background: the thread does not become the main one */

/* Flags of SBCL_JOB_DESCRIBE. */
#define SBCL_DESCRIBE_SOURCE 1u /* include the text of definitions */

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
  uint64_t evaluation;  /* number of the evaluation that the job belongs to, 0 for none; recorded for its code */
  const uint32_t *operation; /* (:NAME :ARGUMENT value …); values are strings, integers, T, NIL or lists of them */
  uint64_t operation_length; /* characters */
  uint64_t connection; /* the connection whose *package*, REPL and printer variables apply; 0: the global ones */
};

/* Events that a job reports. "begin": a new item starts, and the text is its name. "continue": the text is appended to
 * the item begun last; any number of these may follow. */
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
  SBCL_EVENT_RESTART = 9,        /* begin: restart name; number: from 1, with gaps if there are too many restarts */
  SBCL_EVENT_RESTART_TEXT = 10,  /* continue */
  SBCL_EVENT_FRAME = 11,         /* begin; number: frame number */
  SBCL_EVENT_FRAME_TEXT = 12,    /* continue */
  SBCL_EVENT_FRAME_SOURCE = 13,  /* text: path or evaluation; number: line, 0 if unknown */
  SBCL_EVENT_FRAMES = 14,        /* number: total number of frames */
  SBCL_EVENT_TIME_REAL = 15,     /* number: milliseconds */
  SBCL_EVENT_TIME_RUN = 16,      /* number: milliseconds */
  SBCL_EVENT_TIME_GC = 17,       /* number: milliseconds */
  SBCL_EVENT_BYTES_CONSED = 18,  /* number: bytes */
  SBCL_EVENT_ITEM = 19,          /* begin: label; number: an sbcl_item */
  SBCL_EVENT_ITEM_TEXT = 20,     /* continue */
  SBCL_EVENT_NOTICE = 21,        /* text: a notice from the Lisp side itself */
  SBCL_EVENT_DEFINED = 22,       /* a form of the code defined something; number: its start, in characters; text: its
                                    end, a space, the package that it was read in */
  SBCL_EVENT_FORM = 23,          /* the form that failed; number: from 1; text: its start, in characters */
  SBCL_EVENT_SLOT = 24,          /* begin: name of a slot of the condition */
  SBCL_EVENT_SLOT_TEXT = 25,     /* continue */
  SBCL_EVENT_LOCAL = 26,         /* begin: name of a variable of the frame begun last; number: 0 has a value,
                                    1 dead, 2 unavailable */
  SBCL_EVENT_LOCAL_TEXT = 27,    /* continue */
  SBCL_EVENT_HELD = 28,          /* the evaluation is held when this job has ended; number: 0 in an error of this job,
                                    1 as it was before this job */
  SBCL_EVENT_REFUSED = 29,       /* text: why an operation on a held evaluation is impossible; of job 0: why
                                    sbcl_host_start cannot start */
  SBCL_EVENT_RELEASED = 30,      /* this job unwinds the held evaluation, as SBCL_JOB_RELEASE does */
  SBCL_EVENT_HEAP = 31,          /* asked after a collection; returns 1 if the job keeps more of the heap than it may, and
                                    must be abandoned; 0 if it may continue, even if interrupted for the heap */
  SBCL_EVENT_WARNING_PLACE = 32, /* text: file of the warning begun last, empty for the evaluated code; number: column,
                                    0 if unknown */
  SBCL_EVENT_WARNING_FORM = 33,  /* text: name of the top-level form around the warning, as in (DEFUN F) */
  SBCL_EVENT_FRAME_CODE = 34,    /* text: the source line at the frame begun last */
  SBCL_EVENT_FRAME_MACHINERY = 35, /* text: the library, as in "ASDF", to whose machinery the frame begun last belongs */
  SBCL_EVENT_RECORD = 36,        /* begin: kind of a record, which an operation returns */
  SBCL_EVENT_FIELD = 37,         /* begin: name of a field of the record begun last; number: its value if no text follows */
  SBCL_EVENT_FIELD_TEXT = 38,    /* continue */
  SBCL_EVENT_UNHANDLED = 39,     /* number: index, from 0, of the error that nothing handled among the errors with
                                    SBCL_JOB_SIGNALLED; the job fails with this error */
  SBCL_EVENT_FOREGROUND = 40,    /* asked when all forms are evaluated; returns 1 if the evaluation is in the foreground,
                                    and stays there; 0 if it has gone into the background */
  SBCL_EVENT_THREAD_ENDED = 41,  /* of job 0: this evaluation thread ends */
  SBCL_EVENT_DEFINITIONS = 42,   /* without text: returns 1 if other connections must be notified of the evaluation's
                                    definitions; text: a summary of the definitions */
  SBCL_EVENT_STEP = 43,          /* text: the job's next step, as in "the test FOO"; number: milliseconds after which the
                                    job is interrupted if the step still runs. Empty: no particular step, no limit */
  SBCL_EVENT_INTERRUPTED = 44,   /* the last interruption sent to the job's thread begins to run there, or the thread does
                                    not exist; another may be sent. Of SBCL_JOB_PROGRAM, number: the call that it was
                                    to end */
  SBCL_EVENT_UNWINDING = 45,     /* the job, or the call of this number, begins to unwind because it was interrupted */
  SBCL_EVENT_BLOCKED = 46,       /* of job 0, answers SBCL_JOB_LOOK; text: the lock of SBCL's own that an abandoned thread
                                    holds while others wait for it, as in "the lock \"PCL global mutex\"";
                                    empty: none */
  SBCL_EVENT_THREAD_REFUSED = 47 /* of job 0, answers SBCL_JOB_START_THREAD; text: why no thread could be started */
};

/* Added to the job number of events that describe an error where it is signalled, which the code may still handle. */
#define SBCL_JOB_SIGNALLED (1ull << 48)

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
  SBCL_ITEM_NOT_FOUND = 9, /* a sentence */
  SBCL_ITEM_MORE = 10      /* label: number of further definitions */
};

/* A message between Lisp and an embedding program: words in the encoding of lisp/embedding/values.lisp. */
struct sbcl_message {
  const uint64_t *words;
  uint64_t count; /* words */
};

/* Outcomes of a call between Lisp and the program. */
enum sbcl_call_status {
  SBCL_CALL_VALUES = 0,  /* the message has the values */
  SBCL_CALL_FAILED = 1,  /* the message has the condition or the error */
  SBCL_CALL_PANICKED = 2, /* from the program only: the message has the panic's text */
  SBCL_CALL_UNWINDING = 3, /* a non-local exit in Lisp passes the caller, which must return as soon as possible */
  SBCL_CALL_MISSING = 4 /* from the program only: it no longer has this function, and has read nothing */
};

/* Numbers of host functions that every program has. Functions that the program defines have higher numbers. */
enum sbcl_program_function {
  SBCL_PROGRAM_RUN = 0,        /* takes an integer: runs the closure with this number */
  SBCL_PROGRAM_ASK = 1,        /* takes a condition: returns nil, or a list of a restart's name and arguments */
  SBCL_PROGRAM_READ_INPUT = 2, /* takes nothing: returns the next characters of the input, or nil; no characters if
                                    the reading code is being interrupted */
  SBCL_PROGRAM_DEFINED = 3,    /* takes two integers: from now on Lisp calls the function of the first number, and no
                                    longer that of the second, if it is not 0; called with interrupts off */
  SBCL_PROGRAM_FIRST = 16      /* the first number of a function that the program defines */
};

/* Handles of Lisp functions: *PROGRAM-ENTRIES* in lisp/embedding/embedding.lisp. */
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

/* The job to which the program's threads report output and warnings. */
#define SBCL_JOB_PROGRAM (1ull << 62)

/* The interface of an embedding program, valid for the life of the process. Lisp calls SERVE and CALL under the rules of
 * struct sbcl_host, except that they may call Lisp back. */
struct sbcl_library {
  uint32_t threads;  /* number of Lisp threads that work for the program, besides the one that interrupts them */
  uint32_t reserved;
  /* Works on this Lisp thread; thread 0 interrupts the others. Returns 0 when the thread must end, 1 when a non-local
   * exit is pending. */
  int32_t (*serve)(uint32_t thread);
  /* Calls a host function with a message of COUNT words, and returns an sbcl_call_status. On entry ANSWER's count is the
   * number of this thread's answers that Lisp is still reading. Those stay valid, and this answer stays valid until the
   * next call on this thread whose count does not include it. */
  int32_t (*call)(uint64_t function, const uint64_t *words, uint64_t count, struct sbcl_message *answer);
  /* Set by Lisp before its first call. Calls a Lisp function by its handle, with the objects in a message of COUNT words,
   * on a Lisp thread that has called the program. SHAPE is the depth to which Lisp writes out the values (Shape in
   * src/embedding/convert.rs). Returns an sbcl_call_status; the answer stays valid until the next call in either
   * direction on this thread. */
  int32_t (*gate)(uint64_t function, uint64_t shape, const uint64_t *words, uint64_t count, struct sbcl_message *answer);
};

/* The host's interface, passed to sbcl_host_start and valid for the life of the process. Each function may be called from
 * any Lisp thread with interrupts disabled, and returns without unwinding. Float traps may be enabled: on x86-64 the host
 * masks them itself, elsewhere its caller does. */
struct sbcl_host {
  uint32_t contract;          /* SBCL_HOST_CONTRACT */
  uint32_t size;              /* sizeof(struct sbcl_host) */
  uint64_t seed;              /* for *random-state* */
  uint64_t user_init;         /* 1: load the user's init file */
  /* Waits for the lane's next job, fills in JOB and returns 1; returns 0 when the thread must end. On entry JOB's id is
   * the last job of this thread if it holds an evaluation, else 0. */
  int32_t (*next_job)(uint32_t lane, struct sbcl_job *job);
  /* Receives an event of a job (0: of none in particular). Returns 1 if the host keeps no more of the text begun last,
   * so that printing it may stop, or as the event's comment says; else 0. */
  int32_t (*event)(uint64_t job, uint32_t kind, int64_t number, const uint32_t *text, uint64_t length);
  /* A directory that replaces the home directory for a user who has no writable one. It need not exist; the host
   * removes it at the end. */
  const uint32_t *scratch;
  uint64_t scratch_length; /* characters; 0 for none */
  struct sbcl_library *library; /* null if no program embeds the image */
};

/* Exported by the core (save-lisp-and-die :callable-exports): starts the Lisp threads and returns the core's
 * SBCL_HOST_CONTRACT; if that differs from host->contract, nothing was started. Returns 0 if Lisp could not start; an
 * SBCL_EVENT_REFUSED has then given the reason. */
extern uint32_t (*sbcl_host_start)(const struct sbcl_host *host);

/* Also exported by the core: unwinds the evaluation, or the thread, whose control stack is exhausted. Does not return. */
extern void (*sbcl_host_stack_lost)(void);

/* In the shim, for the handler of SIGSEGV. If ADDRESS is in the last page of the calling Lisp thread's control stack, the
 * handlers of an exhausted stack have exhausted it again: abandons those handlers, makes the thread continue in
 * sbcl_host_stack_lost, and returns 1. Otherwise returns 0. */
int32_t sbcl_host_catch_stack_loss(void *address, void *context);

/* In the shim: returns 1 if SBCL knows the calling thread. Async-signal-safe. */
int32_t sbcl_host_is_lisp_thread(void);

/* In the shim, to be called before initialize_lisp: from here on TAKE receives each struct sigaction that SBCL would
 * install, which is installed only if TAKE returns 0. Linux only; elsewhere TAKE is never called. */
void sbcl_host_give_actions(int32_t (*take)(int32_t signal, const void *action));

/* In the shim, to be called before initialize_lisp: sets the file in which SBCL looks for a core. PATH must stay valid. */
void sbcl_host_set_runtime_path(const char *path);

/* In the shim: makes SBCL's allocator usable in processes that fork(3) creates from here on, whatever other threads do
 * during the fork. To be called once per process. Returns 0 or an error number. */
int32_t sbcl_host_guard_forks(void);

#endif
