/* Linked into libsbcl: what the host needs and the stock runtime does not export. */

#include <string.h>

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

/* Set by SBCL while it starts, from the core's :callable-exports. */
uint32_t (*sbcl_host_start)(const struct sbcl_host *host);
void (*sbcl_host_stack_lost)(void);

int32_t sbcl_host_catch_stack_loss(void *address, void *context) {
#ifdef LISP_FEATURE_X86_64
  struct thread *thread = get_sb_vm_thread();
  char *end = (char *)CONTROL_STACK_HARD_GUARD_PAGE(thread), *room = (char *)CONTROL_STACK_RETURN_GUARD_PAGE(thread);
  if ((char *)address < end || (char *)address >= end + os_vm_page_size || gc_active_p || !sbcl_host_stack_lost)
    return 0;
  /* Everything in the page of room that handlers have is given up, cleanup forms included. */
  struct unwind_block *cleanup = (struct unwind_block *)thread->current_unwind_protect_block;
  while (cleanup && (char *)cleanup < room)
    cleanup = cleanup->uwp;
  thread->current_unwind_protect_block = (lispobj)cleanup;
  struct catch_block *catcher = (struct catch_block *)thread->current_catch_block;
  while (catcher && (char *)catcher < room)
    catcher = catcher->previous_catch;
  thread->current_catch_block = (lispobj)catcher;
  /* As if it had been called there. */
  *os_context_register_addr(context, reg_RSP) = (uword_t)room - 8;
  set_os_context_pc(context, (uword_t)sbcl_host_stack_lost);
  return 1;
#else
  (void)address, (void)context;
  return 0;
#endif
}

int32_t sbcl_host_is_lisp_thread(void) { return get_sb_vm_thread() != 0; }

static const char *runtime_path;

void sbcl_host_set_runtime_path(const char *path) { runtime_path = path; }

/* Linked with --wrap: where SBCL looks for a core in an ELF section. The host knows better than /proc/self/exe, for it
 * may be a shared object in some other program, or may have been told of another core. */
char *__wrap_os_get_runtime_executable_path(void) { return runtime_path ? strdup(runtime_path) : 0; }
