/* The contract between the Rust host and the Lisp side.
 *
 * Lisp threads pull jobs from the host and push events back; the host never calls into Lisp for an evaluation. All
 * text crosses as UTF-32 in native byte order, the way SBCL holds strings, so that neither side encodes anything.
 *
 * src/image/bindings.rs is generated from this file (cargo feature `bindgen`); lisp/core/contract.lisp reads it when
 * the core is built. Whoever changes it makes the bindings anew and counts up SBCL_HOST_CONTRACT.
 */
#ifndef SBCL_HOST_H
#define SBCL_HOST_H

#include <stddef.h>
#include <stdint.h>

/* Version of this contract: a core that speaks another is refused at boot. */
#define SBCL_HOST_CONTRACT 17u

/* The Lisp threads, each of which pulls its own kind of job. */
enum sbcl_lane {
  SBCL_LANE_EVALUATION = 0, /* runs the user's code, in as many threads as the host asks for */
  SBCL_LANE_INSPECTION = 1, /* read-only questions; may run the user's print methods */
  SBCL_LANE_CONTROL = 2,    /* interrupts; never runs the user's code */
  SBCL_LANE_SIGNALS = 3     /* pulls once, to be known: the host forwards SBCL's signals to it; gets no job */
};

enum sbcl_job_kind {
  SBCL_JOB_EVALUATE = 1,    /* text: code; name: package or empty; operation: who evaluates it, empty for plainly */
  SBCL_JOB_RESET = 2,       /* remove what the session defined */
  SBCL_JOB_DEFINITIONS = 3, /* list what the session defined; flags: only what is this sbcl_item, 0 for all; argument: at
                               most this many; name: only in this package, or empty */
  SBCL_JOB_DESCRIBE = 4,    /* text: symbol; name: package or empty; flags */
  SBCL_JOB_INTERRUPT = 5,   /* argument: the job to interrupt; flags: an sbcl_interrupt */
  /* For an evaluation that is held where it failed: only the thread that holds it gets these. */
  SBCL_JOB_INVOKE_RESTART = 6,    /* argument: number from 1, or 0; name: name; text: expressions for its arguments */
  SBCL_JOB_FRAME_LOCALS = 7,      /* argument: number of the first frame; flags: how many frames */
  SBCL_JOB_EVAL_IN_FRAME = 8,     /* argument: frame number; text: code */
  SBCL_JOB_RETURN_FROM_FRAME = 9, /* argument: frame number; text: code */
  SBCL_JOB_RESTART_FRAME = 10,    /* argument: frame number */
  SBCL_JOB_RELEASE = 11,          /* unwind */
  /* operation: what is asked, by name */
  SBCL_JOB_QUERY = 12,
  SBCL_JOB_START_THREAD = 13, /* start a thread that evaluates, or report SBCL_EVENT_THREAD_REFUSED */
  SBCL_JOB_ABANDON = 14, /* argument: a job that does not react to being interrupted: its thread serves no lane any more;
                            flags: its lane. SBCL_LANE_INSPECTION gets another thread in its place; the job is refused
                            (SBCL_EVENT_REFUSED) when that cannot be started */
  SBCL_JOB_LOOK = 15     /* answered by SBCL_EVENT_BLOCKED of job 0 */
};

/* Flags of SBCL_JOB_EVALUATE. */
#define SBCL_EVALUATE_TIMING 1u
#define SBCL_EVALUATE_HOLD 2u          /* when it fails, hold it there */
#define SBCL_EVALUATE_RECORD_ERRORS 4u /* tell of the errors that the code handles, too */
#define SBCL_EVALUATE_DETACHED 8u /* under copies of *package* and the REPL's variables, which are the session's if
                                     SBCL_EVENT_FOREGROUND says so in the end */
#define SBCL_EVALUATE_BACKGROUND 16u /* in the background from its beginning: its thread does not become the main one */

/* Flags of SBCL_JOB_DESCRIBE. */
#define SBCL_DESCRIBE_SOURCE 1u /* with the text of definitions */

/* Why a job is interrupted. */
enum sbcl_interrupt {
  SBCL_INTERRUPT_TIMEOUT = 1,
  SBCL_INTERRUPT_CANCEL = 2,
  SBCL_INTERRUPT_HEAP = 3 /* the heap is nearly used up */
};

/* One job. Its texts belong to the host and stay valid until the job's SBCL_EVENT_DONE. */
struct sbcl_job {
  uint64_t id;
  uint32_t kind;
  uint32_t flags;
  uint64_t argument;
  const uint32_t *text;
  uint64_t text_length; /* characters */
  const uint32_t *name;
  uint64_t name_length; /* characters */
  uint64_t evaluation;  /* number of the evaluation it belongs to, 0 for none: what is evaluated remembers it */
  const uint32_t *operation; /* as (:NAME :ARGUMENT value …), values being strings, integers, T, NIL or lists of them */
  uint64_t operation_length; /* characters */
  uint64_t connection; /* whose *package*, REPL and printer variables it has; 0: the global ones */
};

/* What a job reports. Kinds that "begin" something carry its name as text; those that "continue" append to what was
 * begun last and may come any number of times. */
enum sbcl_event {
  SBCL_EVENT_DONE = 0,           /* the job is over; number: 0 success, 1 failure; returns 1 when its thread is to
                                    end: it was abandoned */
  SBCL_EVENT_STDOUT = 1,         /* continue */
  SBCL_EVENT_STDERR = 2,         /* continue */
  SBCL_EVENT_WARNING = 3,        /* begin: condition type; number: line of the code, 0 if unknown */
  SBCL_EVENT_WARNING_TEXT = 4,   /* continue; number: 1 to begin the text again */
  SBCL_EVENT_VALUE = 5,          /* begin; number: 1 in place of the one begun last */
  SBCL_EVENT_VALUE_TEXT = 6,     /* continue */
  SBCL_EVENT_ERROR = 7,          /* begin: condition type; number: 1 if the error before was still being described */
  SBCL_EVENT_ERROR_TEXT = 8,     /* continue; number: 1 to begin the text again */
  SBCL_EVENT_RESTART = 9,        /* begin: restart name; number: from 1, and of many some are left out */
  SBCL_EVENT_RESTART_TEXT = 10,  /* continue */
  SBCL_EVENT_FRAME = 11,         /* begin; number: frame number */
  SBCL_EVENT_FRAME_TEXT = 12,    /* continue */
  SBCL_EVENT_FRAME_SOURCE = 13,  /* text: path or evaluation; number: line, 0 if unknown */
  SBCL_EVENT_FRAMES = 14,        /* number: how many frames there were */
  SBCL_EVENT_TIME_REAL = 15,     /* number: milliseconds */
  SBCL_EVENT_TIME_RUN = 16,      /* number: milliseconds */
  SBCL_EVENT_TIME_GC = 17,       /* number: milliseconds */
  SBCL_EVENT_BYTES_CONSED = 18,  /* number: bytes */
  SBCL_EVENT_ITEM = 19,          /* begin: label; number: an sbcl_item */
  SBCL_EVENT_ITEM_TEXT = 20,     /* continue */
  SBCL_EVENT_NOTICE = 21,        /* text: something the Lisp side has to say of itself */
  SBCL_EVENT_DEFINED = 22,       /* a form of the code defined something; number: where it begins, in characters;
                                    text: where it ends, a space, the package it was read in */
  SBCL_EVENT_FORM = 23,          /* which form failed; number: from 1; text: where it begins, in characters */
  SBCL_EVENT_SLOT = 24,          /* begin: name of a slot of the condition */
  SBCL_EVENT_SLOT_TEXT = 25,     /* continue */
  SBCL_EVENT_LOCAL = 26,         /* begin: name of a variable of the frame begun last; number: 0 has a value,
                                    1 dead, 2 unavailable */
  SBCL_EVENT_LOCAL_TEXT = 27,    /* continue */
  SBCL_EVENT_HELD = 28,          /* when this job is over, the evaluation is held; number: 0 by an error of this job's,
                                    1 as it was before it */
  SBCL_EVENT_REFUSED = 29,       /* text: why what was asked of a held evaluation cannot be done; of job 0: why
                                    sbcl_host_start cannot start */
  SBCL_EVENT_RELEASED = 30,      /* this job unwinds the held evaluation, as SBCL_JOB_RELEASE does */
  SBCL_EVENT_HEAP = 31,          /* asked after a collection: 1 if more is kept than the job may keep, which is to be
                                    abandoned then; 0 if it may go on, even if it was interrupted for the heap */
  SBCL_EVENT_WARNING_PLACE = 32, /* text: the file that the warning begun last is of, empty for the code; number: the
                                    column, 0 if unknown */
  SBCL_EVENT_WARNING_FORM = 33,  /* text: what the form around it is called, as in (DEFUN F) */
  SBCL_EVENT_FRAME_CODE = 34,    /* text: the line of source at the frame begun last */
  SBCL_EVENT_FRAME_MACHINERY = 35, /* text: whose machinery that frame belongs to, as in "ASDF" */
  SBCL_EVENT_RECORD = 36,        /* begin: kind of a record, which an operation answers with */
  SBCL_EVENT_FIELD = 37,         /* begin: name of a field of the record begun last; number: its value, if no text is */
  SBCL_EVENT_FIELD_TEXT = 38,    /* continue */
  SBCL_EVENT_UNHANDLED = 39,     /* number: which error of those with SBCL_JOB_SIGNALLED, from 0, nothing handled: the
                                    job fails with it */
  SBCL_EVENT_FOREGROUND = 40,    /* asked when all of it is evaluated: 1 if the evaluation is in the foreground, and
                                    stays there; 0 if it has gone into the background */
  SBCL_EVENT_THREAD_ENDED = 41,  /* of job 0: this thread, which evaluates, ends */
  SBCL_EVENT_DEFINITIONS = 42,   /* asked without a text: 1 if other connections are to be told what the evaluation
                                    defined; text: that, in words */
  SBCL_EVENT_STEP = 43,          /* text: what the job does from here on, as in "the test FOO"; number: milliseconds after
                                    which the job is interrupted if it still does that. Empty: nothing in particular, for
                                    as long as it likes */
  SBCL_EVENT_INTERRUPTED = 44,   /* the interruption that was last sent to the job's thread begins to run there, or there
                                    is no such thread: another one may be sent. Of SBCL_JOB_PROGRAM, number: which call
                                    it was to end */
  SBCL_EVENT_UNWINDING = 45,     /* the job, or the call of that number, begins to unwind because it was interrupted */
  SBCL_EVENT_BLOCKED = 46,       /* of job 0, the answer to SBCL_JOB_LOOK; text: which lock of SBCL's own an abandoned
                                    thread holds while others wait for it, as in "the lock \"PCL global mutex\"";
                                    empty: none */
  SBCL_EVENT_THREAD_REFUSED = 47 /* of job 0, in answer to SBCL_JOB_START_THREAD; text: why no thread could be started */
};

/* Added to the job of events: they tell of an error where it is signalled, which the code may handle, not of the one that
 * the job fails with. */
#define SBCL_JOB_SIGNALLED (1ull << 48)

/* What an SBCL_EVENT_ITEM is. */
enum sbcl_item {
  SBCL_ITEM_FUNCTION = 1,
  SBCL_ITEM_VARIABLE = 2,
  SBCL_ITEM_MACRO = 3,
  SBCL_ITEM_CLASS = 4,
  SBCL_ITEM_PACKAGE = 5,
  SBCL_ITEM_SYSTEM = 6,
  SBCL_ITEM_ROLE = 7,      /* a role of a described symbol */
  SBCL_ITEM_DETAIL = 8,    /* a labelled detail of the role before it */
  SBCL_ITEM_NOT_FOUND = 9, /* a sentence */
  SBCL_ITEM_MORE = 10      /* label: how many more definitions there are */
};

/* A message between Lisp and a program that embeds it: words, as lisp/embedding/values.lisp writes and reads them. */
struct sbcl_message {
  const uint64_t *words;
  uint64_t count; /* words */
};

/* What becomes of a call between Lisp and the program. */
enum sbcl_call_status {
  SBCL_CALL_VALUES = 0,  /* the message has its values */
  SBCL_CALL_FAILED = 1,  /* the message has the condition, or the error */
  SBCL_CALL_PANICKED = 2, /* by the program only: the message has what it panicked with */
  SBCL_CALL_UNWINDING = 3, /* something in Lisp unwinds to a frame further out: return as soon as possible */
  SBCL_CALL_MISSING = 4 /* by the program only: it has no such function any more, and has read nothing */
};

/* Functions of the program's that Lisp calls by these numbers. Those that the program defines have higher ones. */
enum sbcl_program_function {
  SBCL_PROGRAM_RUN = 0,        /* an integer: run the closure that it stands for */
  SBCL_PROGRAM_ASK = 1,        /* a condition: nil, or a list of a restart's name and arguments */
  SBCL_PROGRAM_READ_INPUT = 2, /* nothing: the next characters of its input, or nil; none when what
                                    reads is being interrupted */
  SBCL_PROGRAM_DEFINED = 3,    /* two integers: Lisp calls the function of the first number from now on, no more that of the
                                    second, if it is not 0; with interrupts off */
  SBCL_PROGRAM_FIRST = 16      /* the first that is defined */
};

/* Handles of functions in Lisp: *PROGRAM-ENTRIES* in lisp/embedding/embedding.lisp. */
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

/* The job that threads of the program's print and warn into. */
#define SBCL_JOB_PROGRAM (1ull << 62)

/* Of a program that embeds the image: valid as long as the process. Both functions of the host are called as those of
 * struct sbcl_host are; here they may call Lisp back. */
struct sbcl_library {
  uint32_t threads;  /* how many Lisp threads work for the program, besides the one that interrupts them */
  uint32_t reserved;
  /* Uses this Lisp thread, number 0 to interrupt others, until it is to end: 0; or something unwinds: 1. */
  int32_t (*serve)(uint32_t thread);
  /* Calls a function of the program's, with a message of COUNT words: an sbcl_call_status. ANSWER's count is, on the way
   * in, how many of this thread's answers Lisp is still reading: those stay, and this one stays until the next call of
   * this thread that does not count it. */
  int32_t (*call)(uint64_t function, const uint64_t *words, uint64_t count, struct sbcl_message *answer);
  /* Set by Lisp before it calls any: calls a Lisp function by its handle, with the objects in a message of COUNT words, on
   * a Lisp thread that has called the program. An sbcl_call_status; the answer stays until the next call of either kind in this thread. */
  int32_t (*gate)(uint64_t function, uint64_t shape, const uint64_t *words, uint64_t count, struct sbcl_message *answer);
};

/* The host's side, passed to sbcl_host_start and valid as long as the process. Each function may be called from any
 * Lisp thread with interrupts disabled, and returns without unwinding. Float traps may be enabled: on x86-64 the host
 * masks them for itself, elsewhere its caller does. */
struct sbcl_host {
  uint32_t contract;          /* SBCL_HOST_CONTRACT */
  uint32_t size;              /* sizeof(struct sbcl_host) */
  uint64_t seed;              /* for *random-state* */
  uint64_t user_init;         /* 1: load the user's init file */
  /* Waits for the lane's next job and fills it in: 1; 0 when the lane is to end. JOB's id is, on the way in, the job
   * that this thread did last when it holds an evaluation, else 0. */
  int32_t (*next_job)(uint32_t lane, struct sbcl_job *job);
  /* Takes an event of a job (0: of none in particular). Returns 1 when the host keeps no more of the text begun
   * last, so that printing it may stop; else 0. */
  int32_t (*event)(uint64_t job, uint32_t kind, int64_t number, const uint32_t *text, uint64_t length);
  /* A directory for what a user without a home directory, or without one to write to, would have there. It need not
   * exist; the host removes it at the end. */
  const uint32_t *scratch;
  uint64_t scratch_length; /* characters; 0 for none */
  struct sbcl_library *library; /* null when the host is no program that embeds the image */
};

/* Exported by the core (save-lisp-and-die :callable-exports): starts the Lisp threads. Returns the core's
 * SBCL_HOST_CONTRACT; when that differs from host->contract, nothing was started. 0: it could not, and has pushed an
 * SBCL_EVENT_REFUSED that says why. */
extern uint32_t (*sbcl_host_start)(const struct sbcl_host *host);

/* Exported by the core as well: unwinds the evaluation, or the thread, whose control stack is used up. Does not
 * return. */
extern void (*sbcl_host_stack_lost)(void);

/* Of the shim, for the handler of SIGSEGV: when ADDRESS is in the last page of the calling Lisp thread's control stack,
 * which it reaches when what handles an exhausted stack exhausts it again, gives up what handles it, has the thread go
 * on in sbcl_host_stack_lost, and returns 1. Else 0. */
int32_t sbcl_host_catch_stack_loss(void *address, void *context);

/* Of the shim: 1 when the calling thread is known to SBCL. Async-signal-safe. */
int32_t sbcl_host_is_lisp_thread(void);

/* Of the shim: from here on, before initialize_lisp, TAKE gets each struct sigaction that SBCL would set. When it returns
 * 0, that is set. On Linux; elsewhere TAKE is never called. */
void sbcl_host_give_actions(int32_t (*take)(int32_t signal, const void *action));

/* Of the shim: the file in which SBCL looks for a core, before initialize_lisp. PATH must stay valid. */
void sbcl_host_set_runtime_path(const char *path);

/* Of the shim: from here on a process that fork(3) makes can allocate, whatever other threads do at that time. Once a
 * process. Returns 0 or an error number. */
int32_t sbcl_host_guard_forks(void);

#endif
