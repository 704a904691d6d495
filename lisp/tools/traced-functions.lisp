;;;; trace-calls: finding the functions to trace, and tracing them.
;;;;
;;;; Functions are encapsulated as by TRACE, but with an encapsulation type of their own, so that the user's own traces are
;;;; not affected. Methods are wrapped where SBCL makes effective methods of them (src/pcl/combin.lisp). Local functions get
;;;; breakpoints (src/code/debug-int.lisp), which are safe only while a single thread runs the function: SBCL restores the
;;;; original instruction, executes it, and sets the breakpoint again. Encapsulations, wrappers and breakpoints are global,
;;;; so calls in all threads are seen.

(in-package "SBCL-HOST/TOOLS")

(defconstant +max-traced-functions+ 2000
  "Maximum number of functions that are traced at once.")

(defstruct (target (:copier nil) (:predicate nil) (:constructor make-target (name kind &optional object)))
  "A function or method that can be traced."
  ;; The name under which calls of the target are shown.
  (name nil :read-only t)
  ;; :FUNCTION for the function that NAME designates; :METHOD for the method OBJECT; or :LOCAL for the local function whose
  ;; SB-DI:DEBUG-FUN is OBJECT.
  (kind :function :type keyword :read-only t)
  (object nil :read-only t))

;;; Function names as the client types them

(defun name-tree (text)
  "Parse TEXT, a function name as the client types it. Return a tree: a string for an atom, or a list of trees. Return NIL if
the parentheses do not match."
  (let ((position 0)
        (end (length text)))
    (labels ((skip ()
               (setf position (or (position-if-not (lambda (character) (find character '(#\Space #\Tab #\Newline #\')))
                                                   text :start position)
                                  end)))
             (tree ()
               (skip)
               (cond ((= position end) (return-from name-tree nil))
                     ((char= #\( (char text position))
                      (incf position)
                      (loop do (skip)
                               (when (= position end)
                                 (return-from name-tree nil))
                            until (char= #\) (char text position))
                            collect (tree)
                            finally (incf position)))
                     (t
                      (let ((start position))
                        (setf position (min end (or (catch 'scan-failed (token-end text position)) end)))
                        (if (= start position)
                            (return-from name-tree nil)
                            (subseq text start position)))))))
      (let ((tree (tree)))
        (skip)
        (and (= position end) tree)))))

(defun tree-matches-p (tree object)
  "Return true when TREE, a tree of strings, spells OBJECT, a tree of symbols, numbers and other atoms."
  (cond ((consp object)
         (and (consp tree) (= (length tree) (length object)) (every #'tree-matches-p tree object)))
        ((null tree) (null object))
        ((consp tree) nil)
        ((symbolp object)
         (string-equal (subseq tree (1+ (or (position #\: tree :from-end t) -1))) object))
        (t (string-equal tree (guarded (with-server-syntax () (prin1-to-string object)) (failure) "")))))

(defun tree-starts-with-p (tree word)
  "Return true when TREE is a list whose first element is the string WORD, in any case."
  (and (consp tree) (stringp (first tree)) (string-equal word (first tree))))

(defun method-tree-p (tree)
  "Return true when TREE names a method, as (method foo (integer)) or as (:method foo (integer)). Lists of frames and of
references show the name of a method with :METHOD."
  (or (tree-starts-with-p tree "method") (tree-starts-with-p tree ":method")))

(defun tree-text (tree)
  "Return the text of TREE, a function name as a tree of strings, in lower case."
  (format nil "~(~A~)" tree))

(defun traceable-p (name)
  "Return true when NAME, a function name, names a function that can be traced."
  (and (fboundp name)
       (not (and (symbolp name) (or (macro-function name) (special-operator-p name))))))

(defun function-name-of-tree (tree package)
  "Return the function name that TREE, such as foo, pkg::foo, (setf foo) or (cas foo), spells in the package named PACKAGE.
Signal an error if TREE does not name a function that can be traced."
  (let* ((operator (cond ((not (and (consp tree) (= 2 (length tree)))) nil)
                         ((tree-starts-with-p tree "setf") 'setf)
                         ((or (tree-starts-with-p tree "cas") (tree-starts-with-p tree "sb-ext:cas")) 'sb-ext:cas)))
         (text (if operator (second tree) tree)))
    (unless (stringp text)
      (error "~A is not the name of a function. Names have the form foo, (setf foo), (method foo (integer)) or ~
              (labels bar :in foo)."
             (tree-text tree)))
    (multiple-value-bind (symbol found name looked-in) (locate-symbol text package)
      (let ((name-of (if operator (list operator symbol) symbol)))
        (cond ((and found (traceable-p name-of)) name-of)
              ((and found (symbolp name-of) (fboundp name-of))
               (error "~A is a ~:[macro~;special operator~]: only functions can be traced." text
                      (special-operator-p name-of)))
              (t
               (error "There is no function ~A in package ~A.~@[ Similar names: ~{~A~^, ~}.~] ~
                       Names of local functions have the form (labels bar :in foo)."
                      (if operator (tree-text tree) name) (package-name looked-in)
                      (similar-symbol-names name looked-in #'traceable-p))))))))

;;; Tracing methods

(defun method-of-tree (tree package)
  "Return the method that TREE, such as (method foo :around (integer)), designates in the package named PACKAGE. The second
value is SBCL's name of the method. Signal an error if there is no such method."
  (let* ((name (function-name-of-tree (second tree) package))
         (function (fdefinition name)))
    (unless (typep function 'generic-function)
      (error "~S is not a generic function: it has no methods." name))
    (let ((named (mapcar (lambda (method) (cons method (sb-pcl::method-trace-name function method)))
                         (sb-mop:generic-function-methods function))))
      (loop for (method . known) in named
            when (tree-matches-p (cddr tree) (cddr known))
              do (return-from method-of-tree (values method known)))
      (error "~A is not defined. ~:[~S has no methods.~;The methods of ~S:~{~%  ~(~S~)~}~@[~%  and ~D more~]~]"
             (tree-text tree) named name
             (mapcar #'cdr (subseq named 0 (min 10 (length named))))
             (and (> (length named) 10) (- (length named) 10))))))

(declaim (type list **traced-methods**))
(defglobal **traced-methods** '()
  "The methods that are traced, as lists of a method, its tracer and its name.")

(defun wrap-traced-method (wrap generic-function method function fast)
  "Return the function that an effective method of GENERIC-FUNCTION calls for METHOD, whose own function is FUNCTION. WRAP is
SBCL's SB-PCL::MAYBE-TRACE-METHOD, which returns this function. If METHOD is traced, wrap the function once more, so
that its calls are recorded. FAST is true if FUNCTION takes a permutation vector and the next method before its arguments."
  (declare (type function wrap))
  (let ((wrapped (funcall wrap generic-function method function fast)))
    (loop for (traced tracer name) in **traced-methods**
          when (eq method traced)
            do (let ((inner wrapped) (tracer tracer) (name name))
                 (setf wrapped (lambda (&rest all)
                                 (call-traced tracer name
                                              (lambda (&rest arguments)
                                                (declare (ignore arguments))
                                                (apply (the function inner) all))
                                              (if fast (nthcdr 2 all) (first all)))))))
    wrapped))

(defun remake-effective-methods (method)
  "Have SBCL recompute the effective methods of METHOD's generic function."
  (reinitialize-instance (sb-mop:method-generic-function method)))

;;; Tracing local functions

(defun local-functions (function block-name)
  "Return the names of the local functions that were compiled as part of FUNCTION. BLOCK-NAME is the name of FUNCTION's
block, which is part of the names of its local functions."
  (loop for known across (sb-di::get-debug-info-fun-map
                          (sb-kernel:%code-debug-info (sb-kernel:fun-code-header (sb-kernel:%fun-fun function))))
        for name = (and (sb-c::compiled-debug-fun-p known)
                        (null (sb-c::compiled-debug-fun-kind known))
                        (sb-c::compiled-debug-fun-name known))
        when (and (typep name '(cons (member flet labels) (cons t (cons (eql :in)))))
                  (equal block-name (fourth name)))
          collect name))

(defun local-target (tree package)
  "Return the target that TREE, such as (labels bar :in foo) or (flet bar :in (method foo (integer))), designates in the
package named PACKAGE. Signal an error if there is no such local function, or if it cannot be traced."
  (unless (and (= 4 (length tree)) (stringp (second tree)) (stringp (third tree)) (string-equal ":in" (third tree)))
    (error "~A is not the name of a local function. Such names have the form (labels bar :in foo)." (tree-text tree)))
  (let* ((method (and (method-tree-p (fourth tree))
                      (multiple-value-list (method-of-tree (fourth tree) package))))
         (outer (if method (second method) (function-name-of-tree (fourth tree) package)))
         (function (if method
                       (let ((all (sb-mop:method-function (first method))))
                         (if (typep all 'sb-pcl::%method-function)
                             (or (sb-pcl::%method-function-fast-function all) all)
                             all))
                       (global-function outer)))
         (generic (typep function 'generic-function))
         (locals (unless generic
                   (local-functions function (nth-value 1 (sb-int:valid-function-name-p
                                                           (if method (second outer) outer))))))
         (name (find-if (lambda (known) (tree-matches-p (second tree) (second known))) locals)))
    (cond (generic
           (error "~S is a generic function: name the method that ~A is in, such as (method ~(~S~) (integer))."
                  outer (second tree) outer))
          ((null name)
           (error "~S has no local function ~A in its compiled code~@[, only~{ ~(~S~)~^,~}~]. ~
                   SBCL merges a function into its caller if the function is inline or called only once. To prevent the ~
                   merging, add (declare (notinline ~(~A~))) to the caller, and a second call or #'~:*~(~A~)."
                  outer (second tree) locals (second tree))))
    (let ((debug-fun (sb-di:fun-debug-fun function :local-name name)))
      (when (eq :fixed (sb-c::compiled-debug-fun-returns (sb-di::compiled-debug-fun-compiler-debug-fun debug-fun)))
        (error "~S was compiled with too little debug information to tell where ~A returns: compile it with ~
                (optimize (debug 1)) or higher."
               outer (second tree)))
      (make-target (list (first name) (second name) :in outer) :local debug-fun))))

(declaim (type list **breakpoint-functions**))
(defglobal **breakpoint-functions** '()
  "The local functions in which BREAK-AT-LOCAL-CALLS has set breakpoints, as SBCL's SB-C::COMPILED-DEBUG-FUNs.")

(defun check-breakpoints-possible (target foreground)
  "Signal an error unless breakpoints can now be set in TARGET, a local function. FOREGROUND is true if the evaluation stays
in the foreground."
  (let* ((name (target-name target))
         (known (sb-di::compiled-debug-fun-compiler-debug-fun (target-object target)))
         (reason (cond ((not foreground) "in a call with `wait` or `background`")
                       ((or (user-threads) (rest **evaluation-threads**)) "while other threads run")
                       ((member known **breakpoint-functions**) "by two evaluations at once")
                       ((find-if (lambda (traced)
                                   (and (typep traced '(cons (member flet labels)))
                                        (eq (second traced) (second name))
                                        (equal (fourth traced) (fourth name))))
                                 (sb-ext:with-locked-hash-table (sb-debug::*traced-funs*)
                                   (loop for traced being the hash-keys of sb-debug::*traced-funs* collect traced)))
                        "while TRACE traces it"))))
    (when reason
      (error "~S cannot be traced ~A: SBCL traces local functions by breakpoints, which work for one thread and one tracer ~
              at a time. Trace the enclosing function." name reason))))

(defun break-at-local-calls (tracer target)
  "Have TRACER record the calls of TARGET, a local function, by breakpoints. Return a list of these breakpoints."
  (flet ((hook (function)
           (declare (type function function))
           (lambda (frame &rest arguments)
             (unless (or *recording-call* (not (tracer-active tracer)))
               (let ((*recording-call* t))
                 (guarded (apply function frame arguments) (failure) nil))))))
    (let* ((debug-fun (target-object target))
           (start (sb-di:make-breakpoint (hook (lambda (frame breakpoint)
                                                 (declare (ignore breakpoint))
                                                 (open-local-call tracer (target-name target) frame)))
                                         debug-fun :kind :fun-start))
           (end (sb-di:make-breakpoint (hook (lambda (frame breakpoint values cookie)
                                               (declare (ignore frame breakpoint))
                                               (end-local-call tracer cookie values)))
                                       debug-fun :kind :fun-end
                                       :fun-end-cookie (hook (lambda (frame cookie)
                                                               (declare (ignore frame))
                                                               (begin-local-call tracer cookie))))))
      ;; The order matters: START must open a call before END learns the cookie of the call.
      (sb-di:activate-breakpoint start)
      (sb-di:activate-breakpoint end)
      (list start end))))

;;; Targets of all kinds

(defun find-target (text)
  "Return the target that TEXT designates in *PACKAGE*. Signal an error if TEXT designates nothing that can be traced."
  (let ((tree (name-tree text)))
    (cond ((null tree) (error "~S is not the name of a function. Names have the form foo, (setf foo), ~
                                   (method foo (integer)) or (labels bar :in foo)." text))
          ((method-tree-p tree)
           (multiple-value-bind (method name) (method-of-tree tree "")
             (make-target name :method method)))
          ((or (tree-starts-with-p tree "labels") (tree-starts-with-p tree "flet"))
           (local-target tree ""))
          (t (make-target (function-name-of-tree tree "") :function)))))

(defun functions-of-package (package)
  "Return the names of the functions that can be traced and whose home package is PACKAGE."
  (let ((names '()))
    (do-symbols (symbol package)
      (when (eq package (symbol-package symbol))
        (dolist (name (list symbol (list 'setf symbol) (list 'sb-ext:cas symbol)))
          (when (traceable-p name)
            (pushnew name names :test #'equal)))))
    names))

(defun find-targets (functions package)
  "Return the targets that FUNCTIONS, a list of strings, designate in *PACKAGE*. If FUNCTIONS is empty, return the functions
of the package named PACKAGE as targets. Signal an error if one of FUNCTIONS cannot be traced, or if the package has no
functions or too many, is locked, or belongs to the server."
  (if functions
      (remove-duplicates (mapcar #'find-target functions) :test #'equal :key #'target-name)
      (let ((found (find-package-or-suggest package)))
        (when (or (sb-ext:package-locked-p found) (host-package-p found))
          (error "Package ~A is locked, so it cannot be traced as a whole: list the functions to trace in `functions`."
                 (package-name found)))
        (let ((names (functions-of-package found)))
          (cond ((null names)
                 (error "Package ~A has no functions of its own: list the functions to trace in `functions`."
                        (package-name found)))
                ((> (length names) +max-traced-functions+)
                 (error "Package ~A has ~D functions, but at most ~D can be traced: list the functions to trace ~
                        in `functions`."
                        (package-name found) (length names) +max-traced-functions+)))
          (mapcar (lambda (name) (make-target name :function)) names)))))

(defun trace-target (tracer target type)
  "Have TRACER record the calls of TARGET. If TARGET is encapsulated, TYPE, a symbol, is the type of the encapsulation.
Return a function that stops the recording."
  (let ((name (target-name target))
        (object (target-object target)))
    (ecase (target-kind target)
      (:function
       (encapsulate name type (lambda (function &rest arguments)
                                (call-traced tracer name function arguments)))
       (lambda () (sb-int:unencapsulate name type)))
      (:method
       (let ((entry (list object tracer name)))
         (sb-ext:atomic-push entry **traced-methods**)
         (remake-effective-methods object)
         (lambda ()
           (sb-ext:atomic-update **traced-methods** (lambda (entries) (remove entry entries)))
           (remake-effective-methods object))))
      (:local
       (let ((breakpoints (break-at-local-calls tracer target))
             (known (sb-di::compiled-debug-fun-compiler-debug-fun object))
             (stop nil))
         (flet ((undo ()
                  (sb-ext:atomic-update **thread-start-hooks** (lambda (functions) (remove stop functions)))
                  (sb-ext:atomic-update **breakpoint-functions** (lambda (functions) (remove known functions)))
                  (mapc #'sb-di:delete-breakpoint breakpoints)))
           (setf stop (lambda ()
                        (setf (tracer-stopped tracer) t)
                        (undo)))
           (sb-ext:atomic-push known **breakpoint-functions**)
           (sb-ext:atomic-push stop **thread-start-hooks**)
           #'undo))))))

(defun call-with-tracing (tracer targets function)
  "Return the values of FUNCTION, and have TRACER trace TARGETS meanwhile."
  (declare (type function function))
  (let ((undo '())
        ;; Each evaluation has an encapsulation type of its own: several evaluations may trace the same function at once.
        (type (make-symbol "TRACE-CALLS")))
    (unwind-protect
         (progn
           (sb-ext:without-package-locks
             (dolist (target targets)
               (without-interrupts
                 (push (trace-target tracer target type) undo))))
           (funcall function))
      (setf (tracer-active tracer) nil)
      (without-interrupts
        (sb-ext:without-package-locks
          (dolist (function undo)
            (guarded (funcall (the function function)) (failure) nil)))))))

(define-operation :trace-calls (evaluate &key functions package depth limit (shown limit) foreground)
  "Evaluate the code, and meanwhile trace FUNCTIONS, a list of strings that name functions. If FUNCTIONS is empty, trace the
functions of PACKAGE. Record up to LIMIT calls that are nested in fewer than DEPTH recorded calls, and push up to SHOWN of
the recorded calls. FOREGROUND is true if the evaluation stays in the foreground."
  (let* ((targets (find-targets functions package))
         (locals (remove :local targets :key #'target-kind :test-not #'eq))
         (tracer (make-tracer depth limit locals)))
    (dolist (target locals)
      (check-breakpoints-possible target foreground))
    (unwind-protect
         (call-with-tracing tracer targets #'evaluate)
      (close-thread-activations tracer)
      (push-traced-calls tracer (length targets) shown))))
