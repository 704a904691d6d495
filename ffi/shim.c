/* The shim, linked into libsbcl: functions that the host needs and the stock runtime does not export. */

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>

#ifdef __linux__
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include "sbcl_host.h"

#include "genesis/sbcl.h"
#include "genesis/unwind-block.h"
#include "runtime.h"
#include "os.h"
#include "interrupt.h"
#include "gc.h"
#include "lispregs.h"
#include "thread.h"
#include "validate.h"

/* SBCL sets these variables when it starts, from the core's :callable-exports. */
uint32_t (*sbcl_host_start)(const struct sbcl_host *host);
void (*sbcl_host_stack_lost)(uint32_t stack);

static int is_in_page(void *address, os_vm_address_t page) {
  return (char *)address >= (char *)page && (char *)address < (char *)page + os_vm_page_size;
}

/* Returns true if POSITION on the control stack is inside BOUNDARY: nearer to the end towards which the stack grows. */
static int is_inside(void *position, char *boundary) {
#ifdef LISP_FEATURE_STACK_GROWS_DOWNWARD_NOT_UPWARD
  return (char *)position < boundary;
#else
  return (char *)position >= boundary;
#endif
}

/* Abandons all code whose frames are inside BOUNDARY on the control stack, including its cleanup forms. */
static void abandon_frames(struct thread *thread, char *boundary) {
  struct unwind_block *cleanup = (struct unwind_block *)thread->current_unwind_protect_block;
  while (cleanup && is_inside(cleanup, boundary))
    cleanup = cleanup->uwp;
  thread->current_unwind_protect_block = (lispobj)cleanup;
  struct catch_block *catcher = (struct catch_block *)thread->current_catch_block;
  while (catcher && is_inside(catcher, boundary))
    catcher = catcher->previous_catch;
  thread->current_catch_block = (lispobj)catcher;
}

/* Undoes the bindings from BOUNDARY on, and abandons all code that runs within them, including its cleanup forms. SBCL's
 * unbind_to_here does not restore the words through which Lisp code reads variables (TLS_LOAD_INDIRECT). */
static void abandon_bindings(struct thread *thread, lispobj *boundary) {
  struct binding *binding = (struct binding *)get_binding_stack_pointer(thread);
  while ((lispobj *)binding > boundary) {
    binding--;
    uint32_t index = (uint32_t)binding->symbol;
    if (!index)
      continue;
    lispobj *cell = (lispobj *)((char *)thread + index);
    *cell = binding->value;
#ifdef LISP_FEATURE_TLS_LOAD_INDIRECT
    if (*cell == NO_TLS_VALUE_MARKER)
      cell[-1] = tlsindex_to_symbol_map[index / bytes_per_tls_symbol];
#endif
    binding->symbol = binding->value = 0;
  }
  set_binding_stack_pointer(thread, binding);
  struct unwind_block *cleanup = (struct unwind_block *)thread->current_unwind_protect_block;
  while (cleanup && (lispobj *)cleanup->bsp > boundary)
    cleanup = cleanup->uwp;
  thread->current_unwind_protect_block = (lispobj)cleanup;
  struct catch_block *catcher = (struct catch_block *)thread->current_catch_block;
  while (catcher && (lispobj *)catcher->bsp > boundary)
    catcher = catcher->previous_catch;
  thread->current_catch_block = (lispobj)catcher;
}

/* Abandons all code that runs in the stack space reserved for handling exhaustion of the binding stack. */
static void abandon_reserved_bindings(struct thread *thread) {
  /* The binding that faulted was counted, but has not been made. */
  set_binding_stack_pointer(thread, BINDING_STACK_HARD_GUARD_PAGE(thread));
  abandon_bindings(thread, (lispobj *)BINDING_STACK_GUARD_PAGE(thread));
}

#if defined(LISP_FEATURE_X86_64)

/* Returns the oldest of the bindings of *ALIEN-STACK-POINTER* after which the alien stack extends below BOUNDARY. */
static lispobj *find_alien_stack_binding(struct thread *thread, char *boundary) {
  struct binding *binding = (struct binding *)get_binding_stack_pointer(thread);
  char *pointer = (char *)thread->alien_stack_pointer;
  while (pointer < boundary && binding > (struct binding *)thread->binding_stack_start) {
    binding--;
    if (binding->symbol == offsetof(struct thread, alien_stack_pointer))
      pointer = (char *)binding->value;
  }
  return (lispobj *)binding;
}

int32_t sbcl_host_catch_stack_loss(void *address, void *context) {
  struct thread *thread = get_sb_vm_thread();
  uword_t stack_pointer = *os_context_register_addr(context, reg_RSP) & ~(uword_t)15;
  uint32_t stack;
  if (gc_active_p || !sbcl_host_stack_lost)
    return 0;
  /* Abandon all code that runs in the stack space reserved for handling exhaustion. */
  if (is_in_page(address, CONTROL_STACK_HARD_GUARD_PAGE(thread))) {
    stack = SBCL_STACK_CONTROL;
    stack_pointer = (uword_t)CONTROL_STACK_RETURN_GUARD_PAGE(thread);
    abandon_frames(thread, (char *)stack_pointer);
  } else if (!gc_managed_heap_space_p(os_context_pc(context))) {
    return 0;
  } else if (is_in_page(address, BINDING_STACK_HARD_GUARD_PAGE(thread))) {
    stack = SBCL_STACK_BINDING;
    abandon_reserved_bindings(thread);
  } else if (is_in_page(address, ALIEN_STACK_HARD_GUARD_PAGE(thread))) {
    stack = SBCL_STACK_ALIEN;
    abandon_bindings(thread, find_alien_stack_binding(thread, (char *)ALIEN_STACK_RETURN_GUARD_PAGE(thread)));
  } else {
    return 0;
  }
  /* Continue as if sbcl_host_stack_lost had been called at the end of the stack that remains. */
  *os_context_register_addr(context, reg_RSP) = stack_pointer - 8;
  *os_context_register_addr(context, reg_RDI) = stack;
  set_os_context_pc(context, (uword_t)sbcl_host_stack_lost);
  return 1;
}

#elif defined(LISP_FEATURE_ARM64)

/* C code runs on the alien stack. When that stack is exhausted, there is no room for this function either, and the kernel
 * ends the process. */
int32_t sbcl_host_catch_stack_loss(void *address, void *context) {
  struct thread *thread = get_sb_vm_thread();
  lispobj *frame = (lispobj *)*os_context_register_addr(context, reg_CFP);
  /* Lisp code may use two words beyond its stack pointer. */
  lispobj *stack_pointer = (lispobj *)*os_context_register_addr(context, reg_CSP) + 2;
  uint32_t stack;
  if (gc_active_p || !sbcl_host_stack_lost || !gc_managed_heap_space_p(os_context_pc(context)))
    return 0;
  /* Abandon all code that runs in the stack space reserved for handling exhaustion. */
  if (is_in_page(address, CONTROL_STACK_HARD_GUARD_PAGE(thread))) {
    stack = SBCL_STACK_CONTROL;
    stack_pointer = (lispobj *)CONTROL_STACK_GUARD_PAGE(thread);
    abandon_frames(thread, (char *)stack_pointer);
    /* Find the innermost frame that remains. A frame begins with the caller's frame pointer and the return address. */
    while (frame > stack_pointer - 2)
      frame = (lispobj *)frame[0];
  } else if (is_in_page(address, BINDING_STACK_HARD_GUARD_PAGE(thread))) {
    stack = SBCL_STACK_BINDING;
    abandon_reserved_bindings(thread);
  } else {
    return 0;
  }
  /* Continue as if Lisp code in that frame had called sbcl_host_stack_lost. */
  thread->control_frame_pointer = frame;
  thread->control_stack_pointer = stack_pointer;
  *os_context_register_addr(context, reg_NL0) = stack;
  set_os_context_pc(context, (uword_t)sbcl_host_stack_lost);
  return 1;
}

#else
#error "ffi/shim.c has no code for this kind of processor."
#endif

int32_t sbcl_host_is_lisp_thread(void) { return get_sb_vm_thread() != 0; }

/* Whoever stops the threads holds this lock until they may continue (gc_stop_the_world). */
int32_t sbcl_host_may_be_stopping(void) {
  if (pthread_mutex_trylock(&all_threads_lock) != 0)
    return 1;
  pthread_mutex_unlock(&all_threads_lock);
  return 0;
}

static const char *runtime_path;

void sbcl_host_set_runtime_path(const char *path) { runtime_path = path; }

/* Linked with --wrap. Returns the file in whose ELF section SBCL looks for a core. The host sets this file; it need not be
 * /proc/self/exe, because the host may be a shared object in another program, or use another core. */
char *__wrap_os_get_runtime_executable_path(void) { return runtime_path ? strdup(runtime_path) : 0; }

static int32_t (*take_action)(int32_t signal, const void *action);

void sbcl_host_give_actions(int32_t (*take)(int32_t signal, const void *action)) { take_action = take; }

#ifdef __linux__

int __real_sigaction(int signal, const struct sigaction *action, struct sigaction *before);

/* Linked with --wrap: SBCL, which installs its signal handlers with sigaction(2), calls this function instead. The host's
 * function take_action decides whether an action is installed. */
int __wrap_sigaction(int signal, const struct sigaction *action, struct sigaction *before) {
  if (before && __real_sigaction(signal, 0, before) != 0)
    return -1;
  if (!action || (take_action && take_action(signal, action)))
    return 0;
  return __real_sigaction(signal, action, 0);
}

#endif

/* A child of fork(3) has one thread. SBCL's locks are taken before the fork, so that in the child no lock is held forever by a
 * thread that is missing there. Even a thread that is ending, and that no other thread waits for any more, may hold one of
 * the allocator's locks to return unused memory. */

extern pthread_mutex_t code_allocator_lock;

/* Blocks all signals and returns the previous mask. */
static sigset_t block_signals(void) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  return before;
}

/* Takes the locks in SBCL's order (alloc.c). Signals must be blocked, because a thread that holds such a lock must not be
 * stopped for a collection. */
static void take_allocator(void) {
  pthread_mutex_lock(&code_allocator_lock);
  acquire_gc_page_table_lock();
}

static void release_allocator(void) {
  release_gc_page_table_lock();
  pthread_mutex_unlock(&code_allocator_lock);
}

static sigset_t signals_before_fork;

/* Called before fork(3), which then waits for the locks of malloc(3). A thread that was stopped for a collection may hold one
 * of those locks, so no thread may be stopped from here on: whoever stops the threads holds all_threads_lock until they may
 * continue. This thread can itself be stopped while it waits, but no interruption may unwind it. */
static void begin_fork(void) {
  sigset_t before;
  block_deferrable_signals(&before);
  pthread_mutex_lock(&all_threads_lock);
  block_signals();
  take_allocator();
  /* Store the mask while the locks are held, so that another forking thread cannot overwrite it. */
  signals_before_fork = before;
}

/* Called after fork(3), in both processes. */
static void end_fork(void) {
  sigset_t before = signals_before_fork;
  release_allocator();
  pthread_mutex_unlock(&all_threads_lock);
  pthread_sigmask(SIG_SETMASK, &before, 0);
}

int32_t sbcl_host_guard_forks(void) { return pthread_atfork(begin_fork, end_fork, end_fork); }

/* Returns the bytes of the heap's pages that contain objects. SBCL's bytes_allocated counts the objects alone, but an object
 * that is larger than a page leaves a part of its last page empty, up to almost half of its pages. Pages that a thread has
 * reserved do not count while they are empty. Called on any thread, also during a collection. */
size_t sbcl_host_heap_use(void) {
  size_t pages = 0;
  for (page_index_t page = 0; page < next_free_page; page++)
    pages += page_words_used(page) != 0;
  return pages * GENCGC_PAGE_BYTES;
}

#ifdef __linux__

bool __real_maybe_gc(os_context_t *context);

/* Linked with --wrap. Collects garbage in the handler of the signal with which allocating code requests a collection.
 * Where interrupts are disabled but may be enabled (ALLOW-WITH-INTERRUPTS), SBCL's function unblocks signals for POST-GC
 * and leaves interrupts disabled. SBCL then defers a signal that arrives, or that arrived during the collection, and ends
 * the process with "pending handler changed in gc". To prevent this, interrupts are enabled here, so that the signal is
 * handled at once. */
bool __wrap_maybe_gc(os_context_t *context) {
  struct thread *thread = get_sb_vm_thread();
  if (read_TLS(INTERRUPTS_ENABLED, thread) != NIL || read_TLS(ALLOW_WITH_INTERRUPTS, thread) == NIL)
    return __real_maybe_gc(context);
  bind_variable(INTERRUPTS_ENABLED, LISP_T, thread);
  bool collected = __real_maybe_gc(context);
  unbind(thread);
  return collected;
}

#ifdef LISP_FEATURE_ARM64

/* Makes the unused part of this thread's control stack zero. SBCL's functions overwrite this part. But a stack is
 * large, and writing makes the whole stack resident, in each thread that stops for a collection. So the kernel takes back
 * the pages here, and provides pages of zeros when the stack grows again. */
static void clear_unused_stack(void) {
  struct thread *thread = get_sb_vm_thread();
  char *unused = (char *)thread->control_stack_pointer;
  char *end = (char *)(thread->state_word.control_stack_guard_page_protected ? CONTROL_STACK_GUARD_PAGE(thread)
                                                                             : CONTROL_STACK_HARD_GUARD_PAGE(thread));
  char *page = (char *)(((uword_t)unused + os_vm_page_size - 1) & ~(uword_t)(os_vm_page_size - 1));
  memset(unused, 0, page - unused);
  if (page < end)
    madvise(page, end - page, MADV_DONTNEED);
}

/* Linked with --wrap. Called in the handler of the signal that stops this thread for a collection. */
void __wrap_scrub_control_stack(void) { clear_unused_stack(); }

/* Linked with --wrap. Called in the thread that has collected garbage. */
void __wrap_scrub_control_stacks(void) { clear_unused_stack(); }

#endif

/* Forking the process for a checkpoint: see lisp/core/checkpoint.lisp. This code must run with glibc 2.31, whatever version
 * it is built with. */

#define SBCL_HOST_FORK_BLOCKED (-0x10000)
/* Maximum duration of a thread's pause. */
#define SBCL_HOST_PAUSE_MILLISECONDS 3000

extern void sb_posix_after_fork(void);

/* True in a process that sbcl_host_fork has made: a copy of the host's process. */
static int is_copy;

void __real_exit(int status) __attribute__((noreturn));
void __wrap_exit(int status) __attribute__((noreturn));

/* Linked with --wrap: SBCL, which calls exit(3) when it has saved an image, calls this function instead. A copy ends at once.
 * exit(3) would run the host's exit handlers and, before these, the destructors of this thread's thread-local variables, and
 * such a destructor may wait for a lock that a missing thread holds. */
void __wrap_exit(int status) {
  if (is_copy)
    _exit(status);
  __real_exit(status);
}

/* Forks like _Fork(3) of glibc 2.34, but returns an error number, negated, on failure. fork(3) would wait for the locks of
 * malloc(3) and stdio(3), which a thread stopped in C code may hold forever, and would run the program's pthread_atfork
 * handlers. */
int32_t sbcl_host_fork(void) {
  sigset_t before = block_signals();
  take_allocator();
  /* The order of the arguments after the first depends on the processor, so all of them are 0. */
  long process = syscall(SYS_clone, SIGCHLD, 0L, 0L, 0L, 0L);
  int error = errno;
  release_allocator();
  pthread_sigmask(SIG_SETMASK, &before, 0);
  if (process < 0)
    return -error;
  if (process == 0) {
    is_copy = 1;
    sb_posix_after_fork();
  }
  return (int32_t)process;
}

/* Returns true if the last signal interrupted Lisp code in THREAD. The program counter decides, because on x86-64 SBCL's own
 * test counts C code that Lisp has called as Lisp. */
static int is_in_lisp(struct thread *thread) {
  sword_t signals = fixnum_value(read_TLS(FREE_INTERRUPT_CONTEXT_INDEX, thread));
  if (signals <= 0)
    return 0;
  os_context_t *context = nth_interrupt_context(signals - 1, thread);
#ifdef LISP_FEATURE_ARM64
  /* SBCL saves no context of C code. The last saved context is that of the last signal if SBCL has made the frame of the
   * interruption just beyond the stack of this context (build_fake_control_stack_frames). */
  if (thread->control_frame_pointer != (lispobj *)*os_context_register_addr(context, reg_CSP) + 2)
    return 0;
#endif
  return gc_managed_heap_space_p(os_context_pc(context));
}

/* The number of pauses that have begun plus the number of pauses that have ended: odd while a pause is active. */
static uint32_t pause_counter;

/* Begins a pause and returns its number, which is odd and so never 0. */
uint32_t sbcl_host_begin_pause(void) { return __atomic_or_fetch(&pause_counter, 1, __ATOMIC_SEQ_CST); }

void sbcl_host_end_pause(void) { __atomic_add_fetch(&pause_counter, 1, __ATOMIC_SEQ_CST); }

/* Called by an interruption of this thread. If the thread was in Lisp code, waits until the pause with this number ends, but
 * no longer than SBCL_HOST_PAUSE_MILLISECONDS, and returns 1. Returns 0 at once if the thread was in C code, which may hold
 * a lock, or in without-gcing, because the thread that stops the world waits for the end of without-gcing. */
int32_t sbcl_host_pause(uint32_t number) {
  struct thread *thread = get_sb_vm_thread();
#ifndef LISP_FEATURE_ARM64 /* On arm64, pausable-p of lisp/core/machine.lisp has found that the thread was in Lisp. */
  if (!is_in_lisp(thread))
    return 0;
#endif
  if (read_TLS(GC_INHIBIT, thread) != NIL)
    return 0;
  for (int left = SBCL_HOST_PAUSE_MILLISECONDS; left > 0 && __atomic_load_n(&pause_counter, __ATOMIC_RELAXED) == number; left--)
    nanosleep(&(struct timespec){0, 1000000}, 0);
  return 1;
}

/* Forks this process while the world is stopped. The child lacks the other threads, so they are cut off at their current
 * positions, and nothing is forked if a thread must not be cut off there. Such a thread is in Lisp code with interrupts
 * disabled: the code may be changing data that the collector or another thread needs. With WAIT_FOR_C, a thread in C code
 * that Lisp has called with interrupts enabled must not be cut off either: it may hold a lock of malloc. Returns the result
 * of sbcl_host_fork, or SBCL_HOST_FORK_BLOCKED if there is a thread that must not be cut off. In the latter case THREADS, an
 * array of COUNT words, receives two lists of Lisp thread objects, each followed by a 0: first the threads that must not be
 * cut off, then all threads in Lisp code and those in C code that must not be cut off. */
int32_t sbcl_host_fork_stopped(int32_t wait_for_c, lispobj *threads, uint32_t count) {
  struct thread *self = get_sb_vm_thread(), *thread;
  lispobj *last = threads + count - 1;
  for (int all = 0; all < 2; all++) {
    lispobj *first = threads;
    for_each_thread(thread) {
      if (thread == self || thread->state_word.state != STATE_STOPPED)
        continue;
      int lisp = is_in_lisp(thread), enabled = read_TLS(INTERRUPTS_ENABLED, thread) != NIL;
      if (lisp ? all || !enabled : wait_for_c && enabled) {
        if (threads < last - 1)
          *threads++ = thread->lisp_thread ? thread->lisp_thread : NIL;
      }
    }
    if (!all && threads == first)
      break;
    *threads++ = 0;
    if (all)
      return SBCL_HOST_FORK_BLOCKED;
  }
  int32_t process = sbcl_host_fork();
  if (process == 0) {
    /* The other threads do not exist in the child. The collector would find gaps in their allocation regions, so close
     * the regions. */
    for_each_thread(thread) {
      if (thread != self)
        gc_close_thread_regions(thread, 0);
    }
    all_threads = self;
    self->next = self->prev = 0;
  }
  return process;
}

extern void finalizer_thread_stop(void);

struct dl_phdr_info;
/* link.h declares this function only if _GNU_SOURCE is defined. */
extern int dl_iterate_phdr(int (*callback)(struct dl_phdr_info *object, size_t size, void *data), void *data);

static int stop_listing(struct dl_phdr_info *object, size_t size, void *data) {
  (void)object, (void)size, (void)data;
  return 1;
}

/* Takes and releases the locks of C code that a process needs to save an image. Never returns if a thread that is missing in
 * this process holds one of these locks. */
void sbcl_host_take_c_locks(void) {
  /* This function takes the lock that SBCL takes after each collection to notify the finalizer thread. It has no other effect
   * in this process, which has no such thread. */
  finalizer_thread_stop();
#ifdef __GLIBC__
  /* mallinfo takes the lock of every arena. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  (void)mallinfo();
#pragma GCC diagnostic pop
#endif
  /* This block is too large for the thread's own cache, so malloc takes the lock of an arena. */
  free(malloc(10000));
  FILE *file = fopen("/dev/null", "r");
  if (file)
    fclose(file);
  /* Closing the image's shared objects needs both locks of the loader: dlopen takes one of them, and listing the objects, as
   * the unwinder does, takes the other. */
  void *program = dlopen(0, RTLD_LAZY);
  if (program)
    dlclose(program);
  dl_iterate_phdr(stop_listing, 0);
}

/* The kernel's struct linux_dirent64. */
struct directory_entry {
  uint64_t inode;
  int64_t offset;
  unsigned short length;
  unsigned char type;
  char name[];
};

/* Closes all file descriptors from FIRST on. */
void sbcl_host_close_from(uint32_t first) {
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
  if (syscall(SYS_close_range, first, UINT_MAX, 0) == 0)
    return;
  /* The call fails before Linux 5.9, and if a system call filter refuses it. From here on, no function that may take a lock
   * is used. */
  _Alignas(struct directory_entry) char buffer[4096];
  int directory = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) {
    struct rlimit limit = {0, 0};
    getrlimit(RLIMIT_NOFILE, &limit);
    for (rlim_t number = first; number < limit.rlim_cur && number < 1 << 20; number++)
      close((int)number);
    return;
  }
  /* Closing a descriptor may make the listing skip others, so repeat until nothing is left to close. */
  for (int closed = 1; closed; lseek(directory, 0, SEEK_SET)) {
    closed = 0;
    for (long length; (length = syscall(SYS_getdents64, directory, buffer, sizeof buffer)) > 0;) {
      for (long at = 0; at < length; at += ((struct directory_entry *)(buffer + at))->length) {
        long number = strtol(((struct directory_entry *)(buffer + at))->name, 0, 10);
        if (number >= first && number != directory && close((int)number) == 0)
          closed = 1;
      }
    }
  }
  close(directory);
}

#endif
