;;;; trace-calls: which functions it traces, and how.
;;;;
;;;; Functions are encapsulated, as TRACE does it, under a type of their own: what the user traces stays as it is. Methods
;;;; are wrapped where SBCL makes effective methods of them (src/pcl/combin.lisp). Local functions get breakpoints
;;;; (src/code/debug-int.lisp), which are safe as long as one thread runs there: an instruction is put back, done, and
;;;; replaced again. The rest is global, so calls in all threads are seen.

(in-package "SBCL-HOST/TOOLS")

(defconstant +traced-functions+ 2000
  "How many functions are traced at once, at most.")

(defstruct (target (:copier nil) (:predicate nil) (:constructor make-target (name kind &optional object)))
  "Something that can be traced."
  ;; What its calls are shown with.
  (name nil :read-only t)
  ;; :FUNCTION, by its name; :METHOD, OBJECT; :LOCAL, a function whose SB-DI:DEBUG-FUN is OBJECT.
  (kind :function :type keyword :read-only t)
  (object nil :read-only t))

;;; Names

(defun name-tree (text)
  "Return TEXT, a function name as one types it, as a tree of strings; NIL when its parentheses do not match."
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
                        (setf position (min end (or (catch 'confused (token-end text position)) end)))
                        (if (= start position)
                            (return-from name-tree nil)
                            (subseq text start position)))))))
      (let ((tree (tree)))
        (skip)
        (and (= position end) tree)))))

(defun tree-means-p (tree object)
  "True when TREE, of strings, is how one types OBJECT, of symbols, numbers and the like."
  (cond ((consp object)
         (and (consp tree) (= (length tree) (length object)) (every #'tree-means-p tree object)))
        ((null tree) (null object))
        ((consp tree) nil)
        ((symbolp object)
         (string-equal (subseq tree (1+ (or (position #\: tree :from-end t) -1))) object))
        (t (string-equal tree (guarded (with-server-syntax () (prin1-to-string object)) (failure) "")))))

(defun tree-begins-p (tree word)
  "True when TREE is a list that begins with WORD."
  (and (consp tree) (stringp (first tree)) (string-equal word (first tree))))

(defun method-tree-p (tree)
  "True when TREE names a method: (method foo (integer)), or (:method foo (integer)) as frames and references have it."
  (or (tree-begins-p tree "method") (tree-begins-p tree ":method")))

(defun tree-text (tree)
  "Return TREE as one types it, in lower case."
  (format nil "~(~A~)" tree))

(defun traceable-p (name)
  "True when NAME, a function name, has a function that can be traced."
  (and (fboundp name)
       (not (and (symbolp name) (or (macro-function name) (special-operator-p name))))))

(defun function-name-of-tree (tree package)
  "Return the function name that TREE means in the package named PACKAGE: foo, pkg::foo or (setf foo). Signal an error when it
has no function."
  (let* ((setf (and (tree-begins-p tree "setf") (= 2 (length tree))))
         (text (if setf (second tree) tree)))
    (unless (stringp text)
      (error "~A is no name of a function: foo, (setf foo), (method foo (integer)) and (labels bar :in foo) are."
             (tree-text tree)))
    (multiple-value-bind (symbol found name looked-in) (locate-symbol text package)
      (let ((name-of (if setf (list 'setf symbol) symbol)))
        (cond ((and found (traceable-p name-of)) name-of)
              ((and found (symbolp name-of) (fboundp name-of))
               (error "~A is a ~:[macro~;special operator~]: only functions can be traced." text
                      (special-operator-p name-of)))
              (t
               (error "There is no function ~A in package ~A.~@[ Near names: ~{~A~^, ~}.~] Local functions are named as ~
                       (labels bar :in foo)."
                      (if setf (tree-text tree) name) (package-name looked-in)
                      (near-symbol-names name looked-in #'traceable-p))))))))

;;; Methods

(defun method-of-tree (tree package)
  "Return the method that TREE, (method foo :around (integer)), means in the package named PACKAGE, and its name."
  (let* ((name (function-name-of-tree (second tree) package))
         (function (fdefinition name)))
    (unless (typep function 'generic-function)
      (error "~S is no generic function: it has no methods." name))
    (let ((named (mapcar (lambda (method) (cons method (sb-pcl::method-trace-name function method)))
                         (sb-mop:generic-function-methods function))))
      (loop for (method . known) in named
            when (tree-means-p (cddr tree) (cddr known))
              do (return-from method-of-tree (values method known)))
      (error "There is no ~A. The methods of ~S:~{~%  ~(~S~)~}~@[~%  and ~D more~]" (tree-text tree) name
             (mapcar #'cdr (subseq named 0 (min 10 (length named))))
             (and (> (length named) 10) (- (length named) 10))))))

(declaim (type list **traced-methods**))
(defglobal **traced-methods** '()
  "The methods that are traced: lists of a method, the tracer and the method's name.")

(defun wrap-traced-method (wrap generic-function method function fast)
  "Return what WRAP makes of FUNCTION, METHOD's in an effective method of GENERIC-FUNCTION, that has traced calls recorded.
FAST is true of one that takes a permutation vector and the next method before its arguments."
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
  "Have the effective methods made anew that METHOD is in."
  (reinitialize-instance (sb-mop:method-generic-function method)))

;;; Local functions

(defun local-functions (function block-name)
  "Return the names of the local functions that were compiled with FUNCTION, in which a block has the name BLOCK-NAME."
  (loop for known across (sb-di::get-debug-info-fun-map
                          (sb-kernel:%code-debug-info (sb-kernel:fun-code-header (sb-kernel:%fun-fun function))))
        for name = (and (sb-c::compiled-debug-fun-p known)
                        (null (sb-c::compiled-debug-fun-kind known))
                        (sb-c::compiled-debug-fun-name known))
        when (and (typep name '(cons (member flet labels) (cons t (cons (eql :in)))))
                  (equal block-name (fourth name)))
          collect name))

(defun local-target (tree package)
  "Return the target that TREE, (labels bar :in foo) or (flet bar :in (method foo (integer))), means in the package named
PACKAGE."
  (unless (and (= 4 (length tree)) (stringp (second tree)) (stringp (third tree)) (string-equal ":in" (third tree)))
    (error "~A is no name of a local function: (labels bar :in foo) is." (tree-text tree)))
  (let* ((method (and (method-tree-p (fourth tree))
                      (multiple-value-list (method-of-tree (fourth tree) package))))
         (outer (if method (second method) (function-name-of-tree (fourth tree) package)))
         (function (if method
                       (let ((all (sb-mop:method-function (first method))))
                         (if (typep all 'sb-pcl::%method-function)
                             (or (sb-pcl::%method-function-fast-function all) all)
                             all))
                       (fdefinition outer)))
         (generic (typep function 'generic-function))
         (locals (unless generic
                   (local-functions function (nth-value 1 (sb-int:valid-function-name-p
                                                           (if method (second outer) outer))))))
         (name (find-if (lambda (known) (tree-means-p (second tree) (second known))) locals)))
    (cond (generic
           (error "~S is a generic function: name the method that ~A is in, as (method ~(~S~) (integer))."
                  outer (second tree) outer))
          ((null name)
           (error "~S has no local function ~A in its compiled code~:[: it has none~;~:*; it has~{ ~(~S~)~^,~}~]. SBCL makes ~
                   one that is called from a single place, or inline, a part of its caller: ~
                   (declare (notinline ~(~A~))) there, and a second call or #'~:*~(~A~), keep it."
                  outer (second tree) locals (second tree))))
    (let ((debug-fun (sb-di:fun-debug-fun function :local-name name)))
      (when (eq :fixed (sb-c::compiled-debug-fun-returns (sb-di::compiled-debug-fun-compiler-debug-fun debug-fun)))
        (error "~S was compiled with too little debug information to tell where ~A returns: compile it under ~
                (optimize (debug 1)) or more."
               outer (second tree)))
      (make-target (list (first name) (second name) :in outer) :local debug-fun))))

(declaim (type list **broken-functions**))
(defglobal **broken-functions** '()
  "The local functions with breakpoints of this file, as SBCL's compiler describes them.")

(defun check-breakable (target foreground)
  "Signal an error when there can be no breakpoints in TARGET, a local function, now. FOREGROUND is true of an evaluation that
ends there."
  (let* ((name (target-name target))
         (known (sb-di::compiled-debug-fun-compiler-debug-fun (target-object target)))
         (reason (cond ((not foreground) "in an evaluation that may be in the background")
                       ((or (user-threads) (rest **evaluation-threads**)) "while other threads run")
                       ((member known **broken-functions**) "by two evaluations at once")
                       ((find-if (lambda (traced)
                                   (and (typep traced '(cons (member flet labels)))
                                        (eq (second traced) (second name))
                                        (equal (fourth traced) (fourth name))))
                                 (loop for traced being the hash-keys of sb-debug::*traced-funs* collect traced))
                        "while TRACE traces it"))))
    (when reason
      (error "~S cannot be traced ~A: SBCL traces local functions by breakpoints, which are for one thread and one user. ~
              Trace the function around it." name reason))))

(defun break-at-local-calls (tracer target)
  "Have the calls of TARGET, a local function, recorded by TRACER. Return its breakpoints."
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
      ;; In this order: a call is opened before it is known by a cookie.
      (sb-di:activate-breakpoint start)
      (sb-di:activate-breakpoint end)
      (list start end))))

;;; All

(defun target-of-text (text)
  "Return the target that TEXT means in *PACKAGE*."
  (let ((tree (name-tree text)))
    (cond ((null tree) (error "~S is no name of a function." text))
          ((method-tree-p tree)
           (multiple-value-bind (method name) (method-of-tree tree "")
             (make-target name :method method)))
          ((or (tree-begins-p tree "labels") (tree-begins-p tree "flet"))
           (local-target tree ""))
          (t (make-target (function-name-of-tree tree "") :function)))))

(defun functions-of-package (package)
  "Return the names of the functions in PACKAGE that are its own."
  (let ((names '()))
    (do-symbols (symbol package)
      (when (eq package (symbol-package symbol))
        (dolist (name (list symbol (list 'setf symbol)))
          (when (traceable-p name)
            (pushnew name names :test #'equal)))))
    names))

(defun targets (functions package)
  "Return the targets that FUNCTIONS mean, a list of texts, in *PACKAGE*, or else those of the functions in PACKAGE."
  (if functions
      (remove-duplicates (mapcar #'target-of-text functions) :test #'equal :key #'target-name)
      (let ((found (find-user-package package)))
        (when (or (sb-ext:package-locked-p found) (host-package-p found))
          (error "Package ~A is SBCL's own (it is locked): name the functions of it that are to be traced."
                 (package-name found)))
        (let ((names (functions-of-package found)))
          (cond ((null names)
                 (error "Package ~A has no functions of its own." (package-name found)))
                ((> (length names) +traced-functions+)
                 (error "Package ~A has ~D functions, and ~D are traced at most: name those that matter."
                        (package-name found) (length names) +traced-functions+)))
          (mapcar (lambda (name) (make-target name :function)) names)))))

(defun trace-target (tracer target type)
  "Have the calls of TARGET recorded by TRACER; TYPE, a symbol, is for its encapsulations. Return a function that undoes it."
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
                  (sb-ext:atomic-update **before-threads** (lambda (functions) (remove stop functions)))
                  (sb-ext:atomic-update **broken-functions** (lambda (functions) (remove known functions)))
                  (mapc #'sb-di:delete-breakpoint breakpoints)))
           (setf stop (lambda ()
                        (setf (tracer-stopped tracer) t)
                        (undo)))
           (sb-ext:atomic-push known **broken-functions**)
           (sb-ext:atomic-push stop **before-threads**)
           #'undo))))))

(defun call-with-traced (tracer targets function)
  "Call FUNCTION with TARGETS traced by TRACER."
  (declare (type function function))
  (let ((undo '())
        ;; Of its own: several evaluations may trace a function at once.
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
  "Evaluate the code with FUNCTIONS traced, a list of texts, or else those of PACKAGE; record calls less than DEPTH recorded
ones deep, LIMIT at most, and tell of SHOWN of them. FOREGROUND is true of an evaluation that ends there."
  (let* ((targets (targets functions package))
         (locals (remove :local targets :key #'target-kind :test-not #'eq))
         (tracer (make-tracer depth limit locals)))
    (dolist (target locals)
      (check-breakable target foreground))
    (unwind-protect
         (call-with-traced tracer targets #'evaluate)
      (close-all tracer)
      (push-traced-calls tracer (length targets) shown))))
