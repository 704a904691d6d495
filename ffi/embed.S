/* The core and the shared library as data of the program.
 *
 * SBCL's runtime looks for its core in a section named lisp.core of the running program's file and maps it from there,
 * so the section starts and ends at a multiple of 32 KiB, the runtime's largest unit. The symbols' ends are the files'.
 */

#if defined(__APPLE__)
#define SYMBOL(name) _##name
#define LOCAL(name) .private_extern _##name
#define CORE_SECTION .section __DATA,__lisp_core
#define LIBRARY_SECTION .section __DATA,__lisp_library
#else
#define SYMBOL(name) name
#define LOCAL(name) .hidden name
#define CORE_SECTION .section lisp.core,"a",@progbits
#define LIBRARY_SECTION .section .rodata.sbcl_library,"a",@progbits
#endif

        CORE_SECTION
        .p2align 15
        .globl SYMBOL(sbcl_embedded_core_start)
        LOCAL(sbcl_embedded_core_start)
SYMBOL(sbcl_embedded_core_start):
        .incbin SBCL_CORE_FILE
        .globl SYMBOL(sbcl_embedded_core_end)
        LOCAL(sbcl_embedded_core_end)
SYMBOL(sbcl_embedded_core_end):
        .p2align 15

        LIBRARY_SECTION
        .p2align 4
        .globl SYMBOL(sbcl_embedded_library_start)
        LOCAL(sbcl_embedded_library_start)
SYMBOL(sbcl_embedded_library_start):
        .incbin SBCL_LIBRARY_FILE
        .globl SYMBOL(sbcl_embedded_library_end)
        LOCAL(sbcl_embedded_library_end)
SYMBOL(sbcl_embedded_library_end):
        .byte 0

#if !defined(__APPLE__)
        /* Without this mark the linker would make the program's stack executable. */
        .section .note.GNU-stack,"",@progbits
#endif
