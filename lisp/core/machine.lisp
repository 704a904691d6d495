;;;; The processor-specific code of the Lisp side. Each kind of processor has a section, and all sections define the
;;;; names that other files use. No other file of the Lisp side contains code for a particular processor. The host's
;;;; processor-specific code is in src/image/machine.rs, and ffi/shim.c contains the code for SBCL's C runtime.

(in-package "SBCL-HOST")

;;; The order of stores

(defmacro publish (place object)
  "Store OBJECT in PLACE, from which other threads read OBJECT without a lock, and return OBJECT. On aarch64, a plain store
could become visible to another thread before the stores that initialise OBJECT (docs/memory-ordering.md)."
  (let ((new (gensym "NEW")))
    `(let ((,new ,object))
       (sb-thread:barrier (:write))
       (setf ,place ,new))))

#-(or x86-64 arm64)
(eval-when (:compile-toplevel :load-toplevel :execute)
  (error "lisp/core/machine.lisp has no section for this kind of processor."))

(defun saved-interrupt-context ()
  "Return the interrupt context that SBCL saved last in this thread, or NIL."
  (and (plusp sb-kernel:*free-interrupt-context-index*)
       (sb-di::nth-interrupt-context (1- sb-kernel:*free-interrupt-context-index*))))

(defmacro context-word (context register)
  "Return the value of REGISTER, a register's number, in CONTEXT, an interrupt context, as an unsigned word."
  `(ldb (byte 64 0) (sb-vm:context-register ,context ,register)))

;;;; x86-64. The control stack grows downwards, and C code uses it, too. Full calls go through linkage cells. For the
;;;; collector, each word of a stack may be a reference.

#+x86-64
(progn
  ;; Stacks and frames
  (defconstant +no-boundary+ 0
    "The value of *USER-CODE-BOUNDARY* in a thread where no frame is the user's: no frame is inside this address.")

  (declaim (inline inner-frame-p))
  (defun inner-frame-p (address other)
    "Return true when the frame at ADDRESS is inside the frame at OTHER, which has called it directly or indirectly."
    (declare (type (unsigned-byte 64) address other))
    (< address other))

  (declaim (inline control-stack-room))
  (defun control-stack-room ()
    "Return the number of bytes from the stack pointer to the end of this thread's control stack."
    (- (sap-int (sb-vm::current-sp)) (sb-kernel:get-lisp-obj-address sb-vm:*control-stack-start*)))

  (declaim (inline alien-stack-room))
  (defun alien-stack-room ()
    "Return the number of bytes that are free on this thread's alien stack, which grows downwards."
    (sap- (sb-vm::current-thread-offset-sap sb-vm::thread-alien-stack-pointer-slot)
          (sb-vm::current-thread-offset-sap sb-vm::thread-alien-stack-start-slot)))

  (defconstant +c-code-on-alien-stack+ nil
    "True when C code that Lisp calls runs on the alien stack, and false when it runs on the control stack.")

  (defconstant +recycled-stacks-cleared+ nil
    "True when SBCL overwrites the whole control stack of a thread that has ended before another thread uses it.")

  (declaim (inline on-stack-p))
  (defun on-stack-p (address)
    "Return true when ADDRESS and the word after it are in the used part of this thread's control stack."
    (declare (type sb-ext:word address))
    (<= (sap-int (sb-vm::current-sp)) address
        (- (sb-kernel:get-lisp-obj-address sb-vm:*control-stack-end*) (* 2 sb-vm:n-word-bytes))))

  (defconstant +caller-offset+ 0
    "The offset, in bytes from a frame pointer, of the frame pointer of the caller.")
  (defconstant +return-address-offset+ 8
    "The offset, in bytes from a frame pointer, of the return address.")

  (defun stack-place-offset (place)
    "Return the offset in bytes, from the frame pointer, of PLACE, a stack location (SB-C:SC+OFFSET) of the compiler."
    (sb-vm::frame-byte-offset (sb-c:sc+offset-offset place)))

  ;; Interrupted code
  (defun trapped-p (pc)
    "Return true when the code interrupted at the address PC was not interrupted, but has executed SBCL's trap instruction,
INT3, which precedes this address."
    (declare (type sb-ext:word pc))
    (eql #xCC (sap-ref-8 (int-sap pc) -1)))

  (defun changing-frames-p (pc frame-pointer)
    "Return true when the code interrupted at the address PC may be about to begin or end a call, so that FRAME-POINTER, its
frame pointer (a SAP), may belong to another frame."
    (declare (type sb-ext:word pc))
    ;; The PC may be between LEAVE and RET. Or the frame pointer may belong to the new frame of a call that has not begun:
    ;; the return address of such a frame is just after the call instruction.
    (or (member (sap-ref-8 (int-sap pc) 0) '(#xC3 #xF8 #xF9))
        (< 0 (- (sap-ref-word frame-pointer +return-address-offset+) pc) 64)))

  (defun stack-contains-p (context address)
    "Return true when the stack of the code interrupted in CONTEXT, an interrupt context, extends to ADDRESS."
    (<= (context-word context sb-vm::rsp-offset) address))

  (defun direct-call-target (return-address)
    "Return the target of the call that returns to RETURN-ADDRESS, or NIL if the call was not a relative CALL."
    (declare (type sb-ext:word return-address))
    (when (eql #xE8 (sap-ref-8 (int-sap return-address) -5))
      (+ return-address (signed-sap-ref-32 (int-sap return-address) -4))))

  (defun interrupted-context ()
    "Return the context of the code that was interrupted last in this thread, or NIL."
    (saved-interrupt-context))

  (defun interrupted-lisp-frame ()
    "Return the frame that SBCL finds for the code that was interrupted last in this thread, or NIL."
    (ignore-errors (sb-di::find-interrupted-frame)))

  (defun pausable-p ()
    "Return false when this thread was interrupted in C code, and so must not pause for a fork. On this processor,
sbcl_host_pause in ffi/shim.c makes this check."
    t)

  ;; Full calls
  (defun linkage-cell (name)
    "Return the linkage cell, an index, through which full calls of the function NAME go; or 0 if NAME has no such cell."
    (let ((fname (if (symbolp name) name (sb-int:find-fdefn name))))
      (if fname (sb-vm::fname-linkage-index fname) 0)))

  (defun linkage-cells (code)
    "Return the linkage cells to which the component CODE refers."
    (let ((fixups (sb-vm::%code-fixups code)))
      (if (eql fixups 0)
          '()
          (values (sb-c:unpack-code-fixup-locs fixups)))))

  (defun linkage-cell-name (cell)
    "Return the name of the function that is called through the linkage CELL, or NIL if it is unknown."
    (let ((fname (sb-vm::linkage-addr->name cell :index)))
      (cond ((sb-kernel:fdefn-p fname) (sb-kernel:fdefn-name fname))
            ((eql fname 0) nil)
            (t fname))))

  ;; Non-local exits: the assembly routine UNWIND (src/assembly/x86-64/assem-rtns.lisp) calls the cleanup code of each
  ;; UNWIND-PROTECT. Before the call, UNWIND pushes the block to unwind to, the start of the values and their number.
  (defconstant +exit-count-offset+ 8
    "The offset from the stack pointer, in cleanup code, of the number of values of the exit.")
  (defconstant +exit-start-offset+ 16
    "The offset from the stack pointer, in cleanup code, of the start of the exit's values; or, if their number is 0, of a
single value.")

  (defun exit-values (start count)
    "Return the list of the COUNT values of an exit whose start of values is START. The values go downwards from START."
    (let ((start (int-sap start)))
      (loop for index from 1 to count
            collect (sap-ref-lispobj start (- (* 8 index))))))

  (defun resume-exit (next count values)
    "Unwind to the block NEXT with VALUES, a list of COUNT values. If COUNT is 0, the first of VALUES is a single value."
    (declare (type index count))
    (when (zerop count)
      (sb-c::%unwind next (first values) 0))
    (let ((block (make-array count)))
      (declare (dynamic-extent block))
      ;; The values are in stack order: the first value has the highest address.
      (loop for value in values
            for place from (1- count) downto 0
            do (setf (svref block place) value))
      (sb-c::%unwind next
                     ;; The address is passed as the fixnum with the same bits.
                     (ash (+ (sb-kernel:get-lisp-obj-address block)
                             (- (* 8 (+ sb-vm:vector-data-offset count)) sb-vm:other-pointer-lowtag))
                          (- sb-vm:n-fixnum-tag-bits))
                     count)))

  ;; Patches
  (defun install-patch (function tag wrapper)
    "Encapsulate the function named FUNCTION with WRAPPER. TAG names the encapsulation."
    (encapsulate function tag wrapper))

  (defun remove-patch (function tag wrapper)
    "Undo INSTALL-PATCH."
    (declare (ignore wrapper))
    (sb-int:unencapsulate function tag))

  (defmacro define-machine-patches ()
    "Define the patches that only this kind of processor needs: none."
    '(progn))

  (defmacro define-exhaustion-patch (function condition)
    "Make FUNCTION, which the runtime calls when a stack is exhausted, signal only CONDITION: SBCL's function also prints a
line to *ERROR-OUTPUT*."
    `(define-patch ,function ()
       (lambda (function)
         (declare (ignore function))
         (let ((sb-debug:*stack-top-hint* nil))
           (error ',condition)))))

  ;; Marks of coverage: a mark is set when it is not 0.
  (defun coverage-mark-p (marks index)
    "Return true when the byte INDEX of MARKS, the coverage marks of a code component, is set."
    (/= 0 (sap-ref-8 marks index)))

  (defun clear-coverage-mark (marks index)
    "Clear the byte INDEX of MARKS, the coverage marks of a code component."
    (setf (sap-ref-8 marks index) 0))

  ;; Linux
  (defconstant +large-page-bytes+ (* 2 1024 1024)
    "The size of a large page of memory, or NIL if it depends on the kernel.")

  (defconstant +timer-create-call+ 222
    "The number of the system call timer_create.")
  (defconstant +timer-settime-call+ 223
    "The number of the system call timer_settime.")
  (defconstant +timer-delete-call+ 226
    "The number of the system call timer_delete.")

  #+linux
  (defun in-system-call-context-p (context)
    "Return true when the code interrupted in CONTEXT, an interrupt context, waited in a system call, or when the interruption
was pending until the code unblocked signals, as SBCL's runtime does after a collection. The kernel ends a waiting call
with EINTR, or makes the thread repeat the call. 0F 05 is the instruction SYSCALL."
    (flet ((syscall-at-p (address)
             (and (eql #x0f (sap-ref-8 (int-sap address) 0)) (eql #x05 (sap-ref-8 (int-sap address) 1)))))
      (let ((pc (sap-int (sb-vm:context-pc context)))
            (rax (context-word context sb-vm::rax-offset)))
        (if (syscall-at-p pc)
            ;; The calls that may block, by their number: read, write, open, poll, select, nanosleep, connect, accept, sendto,
            ;; recvfrom, sendmsg, recvmsg, wait4, flock, rt_sigtimedwait, rt_sigsuspend, futex, clock_nanosleep, epoll_wait,
            ;; waitid, openat, pselect6, ppoll, epoll_pwait and accept4.
            (member rax '(0 1 2 7 23 35 42 43 44 45 46 47 61 73 128 130 202 230 232 247 257 270 271 281 288))
            ;; The memory before the code may be unmapped, so a register is tested first: SYSCALL sets RCX to the address of
            ;; the next instruction. After EINTR, RAX is -4. After rt_sigprocmask, the first argument is at most 2 and the
            ;; fourth is 8; the first argument of other calls, such as malloc's calls, is an address or a descriptor. A call of
            ;; getdents64, which reads a directory, may take long but is never interrupted. B8 is MOV, which sets EAX.
            (and (eql pc (context-word context sb-vm::rcx-offset))
                 (syscall-at-p (- pc 2))
                 (or (eql rax (ldb (byte 64 0) -4))
                     (and (eql rax 0)
                          (<= (context-word context sb-vm::rdi-offset) 2)
                          (eql 8 (context-word context sb-vm::r10-offset)))
                     (and (eql #xb8 (sap-ref-8 (int-sap pc) -7)) (eql 217 (sap-ref-32 (int-sap pc) -6))))))))))

;;;; arm64. The control stack grows upwards, and contains only Lisp objects and addresses of code. C code runs on the alien
;;;; stack, to which the register NSP points. Full calls go through FDEFN objects, which are constants of the code.

#+arm64
(progn
  ;; Stacks and frames
  (defconstant +no-boundary+ (1- (ash 1 64))
    "The value of *USER-CODE-BOUNDARY* in a thread where no frame is the user's: no frame is inside this address.")

  (declaim (inline inner-frame-p))
  (defun inner-frame-p (address other)
    "Return true when the frame at ADDRESS is inside the frame at OTHER, which has called it directly or indirectly."
    (declare (type (unsigned-byte 64) address other))
    (> address other))

  (declaim (inline control-stack-room))
  (defun control-stack-room ()
    "Return the number of bytes from the stack pointer to the end of this thread's control stack."
    (- (sb-kernel:get-lisp-obj-address sb-vm:*control-stack-end*) (sap-int (sb-vm::current-sp))))

  (declaim (inline alien-stack-room))
  (defun alien-stack-room ()
    "Return the number of bytes that are free on this thread's alien stack, which grows downwards. The C stack of the thread
that booted the image is elsewhere: in this thread, return the size of an alien stack."
    (let ((room (- (sb-kernel:get-lisp-obj-address (sb-sys:%primitive sb-c:current-nsp))
                   (sap-int (sb-vm::current-thread-offset-sap sb-vm::thread-alien-stack-start-slot))))
          (size (extern-alien "thread_alien_stack_size" (unsigned 64))))
      (if (<= 0 room size) room size)))

  (defconstant +c-code-on-alien-stack+ t
    "True when C code that Lisp calls runs on the alien stack, and false when it runs on the control stack.")

  (defconstant +recycled-stacks-cleared+ t
    "True when SBCL overwrites the whole control stack of a thread that has ended before another thread uses it. Overwriting
takes long, and makes the whole stack resident.")

  (defun clear-unused-stack ()
    "Overwrite the 64 KiB above the stack pointer, so that stale references in them do not keep garbage alive."
    (let ((stack (sb-vm::current-sp))
          ;; The last three pages are guard pages.
          (end (min 65536 (- (control-stack-room) (* 4 sb-c:+backend-page-bytes+)))))
      (loop for offset of-type fixnum from 16 below end by 8
            do (setf (sap-ref-word stack offset) 0))))

  (declaim (inline on-stack-p))
  (defun on-stack-p (address)
    "Return true when ADDRESS and the word after it are in the used part of this thread's control stack."
    (declare (type sb-ext:word address))
    (<= (sb-kernel:get-lisp-obj-address sb-vm:*control-stack-start*) address
        (- (sap-int (sb-vm::current-sp)) (* 2 sb-vm:n-word-bytes))))

  (defconstant +caller-offset+ (* sb-vm:n-word-bytes sb-vm::ocfp-save-offset)
    "The offset, in bytes from a frame pointer, of the frame pointer of the caller.")
  (defconstant +return-address-offset+ (* sb-vm:n-word-bytes sb-vm::lra-save-offset)
    "The offset, in bytes from a frame pointer, of the return address.")

  (defun stack-place-offset (place)
    "Return the offset in bytes, from the frame pointer, of PLACE, a stack location (SB-C:SC+OFFSET) of the compiler."
    (* sb-vm:n-word-bytes (sb-c:sc+offset-offset place)))

  ;; Interrupted code
  (defun instruction-at (address)
    "Return the instruction at ADDRESS."
    (declare (type sb-ext:word address))
    (sap-ref-32 (int-sap address) 0))

  (defun trapped-p (pc)
    "Return true when the code interrupted at the address PC was not interrupted, but has executed SBCL's trap instruction,
BRK. The PC is the address of this instruction or, where the runtime has already skipped the instruction, the next
address."
    (flet ((brk-p (instruction)
             (eql #xD4200000 (logand instruction #xFFE0001F))))
      (or (brk-p (instruction-at pc)) (brk-p (instruction-at (- pc 4))))))

  (defun changing-frames-p (pc frame-pointer)
    "Return true when the code interrupted at the address PC may be about to begin or end a call, so that FRAME-POINTER, its
frame pointer (a SAP), may belong to another frame, or its frame may no longer be on the stack."
    (declare (ignore frame-pointer))
    (loop for address downfrom (- pc 4) by 4
          repeat 8
          for instruction = (instruction-at address)
          ;; Instructions before the last call or jump (BL, B, BLR, BR, RET) do not matter, because this call or jump is over.
          until (or (member (logand instruction #xFC000000) '(#x94000000 #x14000000))
                    (member (logand instruction #xFFFFFC1F) '(#xD63F0000 #xD61F0000 #xD65F0000)))
            ;; LDP CFP, LR, [CFP]; MOV CFP, register; LDR CFP, [register, offset]; MOV CSP, CFP; ADD CSP, OCFP, number
            thereis (or (eql instruction #xA9407BBD)
                        (eql #xAA0003FD (logandc2 instruction #x1F0000))
                        (eql #xF940001D (logand instruction #xFFC0001F))
                        (eql instruction #xAA1D03FB)
                        (eql #x9100033B (logand instruction #xFFC003FF)))))

  (defun stack-contains-p (context address)
    "Return true when the stack of the code interrupted in CONTEXT, an interrupt context, extends to ADDRESS."
    (< address (context-word context sb-vm::csp-offset)))

  (defun direct-call-target (return-address)
    "Return the target of the call that returns to RETURN-ADDRESS, or NIL if the call was not the instruction BL."
    (let* ((address (- return-address 4))
           (instruction (instruction-at address))
           (words (ldb (byte 26 0) instruction)))
      (when (eql #x94000000 (logand instruction #xFC000000))
        (+ address (* 4 (if (logbitp 25 words) (- words (ash 1 26)) words))))))

  (defun signal-context ()
    "Return the context of the code that the signal of INTERRUPT-THREAD, or a trap, interrupted last in this thread, or NIL.
SBCL's handlers bind a variable to this context."
    (let ((context (and (boundp 'sb-kernel:*current-internal-error-context*)
                        sb-kernel:*current-internal-error-context*)))
      (if (typep context 'system-area-pointer)
          (sap-alien context (* os-context-t))
          context)))

  (defun context-address (context)
    "Return the address of CONTEXT, an interrupt context."
    (sap-int (alien-sap context)))

  (defun interrupted-context ()
    "Return the context of the code that was interrupted last in this thread, or NIL. SBCL saves no context of C code, because
the collector would take its registers for Lisp objects."
    (let ((saved (saved-interrupt-context))
          (signal (signal-context)))
      ;; The contexts are on the C stack, which grows downwards.
      (if (and saved signal)
          (if (< (context-address signal) (context-address saved)) signal saved)
          (or saved signal))))

  (defun interrupted-lisp-frame ()
    "Return the frame that SBCL finds for the code that was interrupted last in this thread, or NIL if that was C code."
    (let ((saved (saved-interrupt-context)))
      (and saved
           (eql (context-address saved) (context-address (interrupted-context)))
           (ignore-errors (sb-di::find-interrupted-frame)))))

  (defun pausable-p ()
    "Return false when this thread was interrupted in C code, and so must not pause for a fork."
    (let ((context (interrupted-context)))
      (and context
           (sb-di::code-header-from-pc (sb-vm:context-pc context))
           t)))

  ;; Full calls
  (defun linkage-cell (name)
    "Return the linkage cell, an FDEFN, through which full calls of the function NAME go; or 0 if NAME has no such cell."
    (or (sb-int:find-fdefn name) 0))

  (defun linkage-cells (code)
    "Return the linkage cells to which the component CODE refers."
    (loop for index from sb-vm:code-constants-offset below (sb-kernel:code-header-words code)
          for constant = (sb-kernel:code-header-ref code index)
          when (sb-kernel:fdefn-p constant)
            collect constant))

  (defun linkage-cell-name (cell)
    "Return the name of the function that is called through the linkage CELL."
    (sb-kernel:fdefn-name cell))

  ;; Non-local exits: the assembly routine UNWIND (src/assembly/arm64/assem-rtns.lisp) calls the cleanup code of each
  ;; UNWIND-PROTECT. Before the call, UNWIND pushes the block to unwind to, the start of the values, their number, and
  ;; the address at which UNWIND continues.
  (defconstant +exit-count-offset+ -16
    "The offset from the stack pointer, in cleanup code, of the number of values of the exit.")
  (defconstant +exit-start-offset+ -24
    "The offset from the stack pointer, in cleanup code, of the start of the exit's values; or, if their number is 0, of a
single value.")

  (defun exit-values (start count)
    "Return the list of the COUNT values of an exit whose start of values is START. The values go upwards from START."
    (let ((start (int-sap start)))
      (loop for index from 0 below count
            collect (sap-ref-lispobj start (* 8 index)))))

  (defun unwind-with-arguments (next sb-int:&more start count)
    "Unwind to the block NEXT with the other arguments as values. The values are on the stack, from START on."
    (sb-c::%unwind next start count))

  (defun resume-exit (next count values)
    "Unwind to the block NEXT with VALUES, a list of COUNT values. If COUNT is 0, the first of VALUES is a single value."
    (declare (type index count))
    (if (zerop count)
        (sb-c::%unwind next (first values) 0)
        (apply #'unwind-with-arguments next values)))

  ;; Patches. When a stack is exhausted, the runtime jumps into the code of a function (arrange_return_to_c_function in
  ;; src/runtime/interrupt.c). An encapsulation, which is a closure, has no code of its own, so such a function is replaced.
  (defun install-patch (function tag wrapper)
    "Encapsulate the function named FUNCTION with WRAPPER. TAG names the encapsulation. If TAG is :REPLACEMENT, WRAPPER is a
list of two functions: the function with which to replace FUNCTION, and SBCL's function."
    (if (eq tag :replacement)
        (setf (sb-kernel:fdefn-fun (sb-int:find-fdefn function)) (first wrapper))
        (encapsulate function tag wrapper)))

  (defun remove-patch (function tag wrapper)
    "Undo INSTALL-PATCH."
    (if (eq tag :replacement)
        (setf (sb-kernel:fdefn-fun (sb-int:find-fdefn function)) (second wrapper))
        (sb-int:unencapsulate function tag)))

  (defmacro define-machine-patches ()
    "Define the patches that only this kind of processor needs. SBCL's SCRUB-CONTROL-STACK, which SUB-GC calls, overwrites the
whole unused part of the stack, and so makes it resident. ffi/shim.c replaces the same operation in the runtime."
    '(define-patch sb-sys:scrub-control-stack ()
       (lambda (scrub)
         (declare (ignore scrub))
         (clear-unused-stack))))

  (defmacro define-exhaustion-patch (function condition)
    "Make FUNCTION, to which the runtime jumps when a stack is exhausted, signal only CONDITION: SBCL's function also prints
a line to *ERROR-OUTPUT*."
    (let ((replacement (intern (format nil "SIGNAL-~A" (symbol-name condition)))))
      `(progn
         (define-assumption ,(format nil "the parameters of ~S" function)
           (null (parameter-names ',function)))
         (defun ,replacement ()
           ,(format nil "Signal ~S." condition)
           ;; The runtime has marked this thread as running C code. A collection would not see the frames that follow.
           (setf (sap-ref-word (sb-vm::current-thread-offset-sap sb-vm::thread-this-slot)
                               (* sb-vm:n-word-bytes sb-vm::thread-control-stack-pointer-slot))
                 0)
           (let ((sb-debug:*stack-top-hint* nil))
             (error ',condition)))
         (push (list ',function :replacement (list #',replacement (fdefinition ',function))) *patches*))))

  ;; Marks of coverage: a mark is set when it is not 255.
  (defun coverage-mark-p (marks index)
    "Return true when the byte INDEX of MARKS, the coverage marks of a code component, is set."
    (/= #xFF (if (vectorp marks) (aref marks index) (sap-ref-8 marks index))))

  (defun clear-coverage-mark (marks index)
    "Clear the byte INDEX of MARKS, the coverage marks of a code component."
    (if (vectorp marks)
        (setf (aref marks index) #xFF)
        (setf (sap-ref-8 marks index) #xFF)))

  ;; Linux
  (defconstant +large-page-bytes+ nil
    "The size of a large page of memory, or NIL if it depends on the kernel: it may be 512 MB.")

  (defconstant +timer-create-call+ 107
    "The number of the system call timer_create.")
  (defconstant +timer-settime-call+ 110
    "The number of the system call timer_settime.")
  (defconstant +timer-delete-call+ 111
    "The number of the system call timer_delete.")

  #+linux
  (defun in-system-call-context-p (context)
    "Return true when the code interrupted in CONTEXT, an interrupt context, waited in a system call, or when the interruption
was pending until the code unblocked signals, as SBCL's runtime does after a collection. The kernel ends a waiting call
with EINTR, or makes the thread repeat the call. Register 8 holds the number of the call, and register 0 its result."
    (flet ((svc-at-p (address) (eql #xD4000001 (instruction-at address))))
      (let ((pc (sap-int (sb-vm:context-pc context)))
            (call (context-word context sb-vm::nl8-offset)))
        (if (svc-at-p pc)
            ;; The calls that may block, by their number: epoll_pwait, flock, openat, read, write, pselect6, ppoll, waitid,
            ;; futex, nanosleep, clock_nanosleep, rt_sigsuspend, rt_sigtimedwait, accept, connect, sendto, recvfrom, sendmsg,
            ;; recvmsg, accept4 and wait4.
            (member call '(22 32 56 63 64 72 73 95 98 101 115 133 137 202 203 206 207 211 212 242 260))
            ;; The memory before a page of code may be unmapped. After EINTR, the result is -4. 135 is rt_sigprocmask. 61 is
            ;; getdents64, which reads a directory: the call may take long but is never interrupted.
            (and (logtest #xFFF pc)
                 (svc-at-p (- pc 4))
                 (or (eql (context-word context sb-vm::nl0-offset) (ldb (byte 64 0) -4))
                     (member call '(135 61)))))))))
