/* Embeds the core (SBCL_CORE_FILE) and the shared library (SBCL_LIBRARY_FILE) in the program as data. A file whose
 * macro is not defined is left out.
 *
 * SBCL's runtime looks for its core in a section named lisp.core of the running program's file and maps it from there,
 * so the section starts and ends at a multiple of the page size of SBCL's heap. The library's symbols delimit exactly the
 * file's contents.
 */

/* The page size of SBCL's heap, as a power of 2: 32 KiB on x86-64, 64 KiB on aarch64. Mach-O allows at most 32 KiB. */
#if defined(__aarch64__) && !defined(__APPLE__)
#define CORE_ALIGNMENT 16
#else
#define CORE_ALIGNMENT 15
#endif

#if defined(__APPLE__)
#define SYMBOL(name) _##name
#define LOCAL(name) .private_extern _##name
#define CORE_SECTION .section __DATA,__lisp_core
#define LIBRARY_SECTION .section __DATA,__lisp_library
#define POINTER_SECTION .section __DATA,__const
#else
#define SYMBOL(name) name
#define LOCAL(name) .hidden name
#define CORE_SECTION .section lisp.core,"a",@progbits
#define LIBRARY_SECTION .section .rodata.sbcl_library,"a",@progbits
#define POINTER_SECTION .section .data.rel.ro.sbcl_core,"aw",@progbits
#endif

#if defined(SBCL_CORE_FILE)
        CORE_SECTION
        .p2align CORE_ALIGNMENT
        .globl SYMBOL(sbcl_embedded_core_start)
        LOCAL(sbcl_embedded_core_start)
SYMBOL(sbcl_embedded_core_start):
        .incbin SBCL_CORE_FILE
        .p2align CORE_ALIGNMENT
#endif

#if defined(SBCL_LIBRARY_FILE)
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

        /* Address of the core, which may be in another object of the program; 0 if there is no core. */
        POINTER_SECTION
        .p2align 3
        .globl SYMBOL(sbcl_embedded_core)
        LOCAL(sbcl_embedded_core)
SYMBOL(sbcl_embedded_core):
#if defined(__APPLE__) && !defined(SBCL_CORE_FILE)
        .quad 0
#else
#if !defined(SBCL_CORE_FILE)
        .weak SYMBOL(sbcl_embedded_core_start)
        LOCAL(sbcl_embedded_core_start)
#endif
        .quad SYMBOL(sbcl_embedded_core_start)
#endif
#endif

#if !defined(__APPLE__)
        /* Without this note the linker would make the program's stack executable. */
        .section .note.GNU-stack,"",@progbits
#endif
