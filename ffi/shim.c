/* Linked into libsbcl: what the host needs and the stock runtime does not export. */

#include <string.h>

#include "sbcl_host.h"

#include "genesis/sbcl.h"
#include "runtime.h"
#include "thread.h"

/* Set by SBCL while it starts, from the core's :callable-exports. */
uint32_t (*sbcl_host_start)(const struct sbcl_host *host);

int32_t sbcl_host_is_lisp_thread(void) { return get_sb_vm_thread() != 0; }

static const char *runtime_path;

void sbcl_host_set_runtime_path(const char *path) { runtime_path = path; }

/* Linked with --wrap: where SBCL looks for a core in an ELF section. The host knows better than /proc/self/exe, for it
 * may be a shared object in some other program, or may have been told of another core. */
char *__wrap_os_get_runtime_executable_path(void) { return runtime_path ? strdup(runtime_path) : 0; }
