;;;; Changes each internal name of SBCL in sbcl-internals.sexp in every way in which a newer SBCL may have changed it, and
;;;; tests that the check reports it. Each change is made in a forked process, because it may break the process.
;;;; The environment variable SBCL_MCP_LISP_DIR names the directory of the Lisp side.

(require :asdf)
(defvar *directory* (uiop:parse-native-namestring (sb-ext:posix-getenv "SBCL_MCP_LISP_DIR") :ensure-directory t))
(asdf:load-asd (merge-pathnames "sbcl-host.asd" *directory*))
(mapc #'require (remove-if (lambda (name) (eql 0 (search "sbcl-host/" name)))
                           (asdf:system-depends-on (asdf:find-system "sbcl-host"))))
(load (merge-pathnames "build/sbcl-internals.lisp" *directory*))

(in-package "SBCL-INTERNALS")

(defvar *table* (merge-pathnames "build/sbcl-internals.sexp" cl-user::*directory*))

(defun succeeds-in-child-p (function)
  "Call FUNCTION in a forked process, for at most 30 seconds, and return whether it returned true there."
  (finish-output)
  (let ((process (sb-alien:alien-funcall (sb-alien:extern-alien "fork" (function sb-alien:int)))))
    (when (zerop process)
      (sb-posix:alarm 30)
      (let ((code 2))
        (unwind-protect (setf code (handler-case (if (funcall function) 0 1)
                                     (serious-condition (failure)
                                       (ignore-errors (format t "~&  ~A~%" failure) (finish-output))
                                       3)))
          (sb-alien:alien-funcall (sb-alien:extern-alien "_exit" (function sb-alien:void sb-alien:int)) code))))
    (let ((status (nth-value 1 (sb-posix:waitpid process 0))))
      (and (sb-posix:wifexited status) (zerop (sb-posix:wexitstatus status))))))

;;; The changes

(defun clear (class kind name)
  "Remove the information KIND of CLASS about NAME from SBCL."
  (ecase class
    (:function (ecase kind
                 (:source-transform (sb-int:clear-info :function :source-transform name))
                 (:info (sb-int:clear-info :function :info name))))
    (:setf (sb-int:clear-info :setf :expander name))
    (:variable (sb-int:clear-info :variable :kind name))
    (:type (sb-int:clear-info :type :expander name))
    (:alien-type (sb-int:clear-info :alien-type :kind name))))

(defun other-function (name)
  "Return a function that does the same as NAME, with another lambda list."
  (let ((function (if (fboundp name) (fdefinition name) #'list)))
    (declare (type function function))
    (lambda (&rest moved) (apply function moved))))

(defun be-function (name)
  "Redefine NAME as a function with another lambda list."
  (when (consp (sb-int:info :function :source-transform name))
    (clear :function :source-transform name))
  (let ((macro (and (symbolp name) (macro-function name))))
    (when macro
      (fmakunbound name))
    (setf (fdefinition name) (other-function (if macro 'list name)))))

(defun be-macro (symbol)
  "Redefine SYMBOL as a macro, as SBCL 2.6.5 did with MUTEX-STATE, which was the accessor of a slot."
  (when (consp (sb-int:info :function :source-transform symbol))
    (clear :function :source-transform symbol))
  (when (eq :special-form (sb-int:info :function :kind symbol))
    (setf (sb-int:info :function :kind symbol) :function))
  ;; Prevents a redefinition warning, whose handlers may need the function.
  (fmakunbound symbol)
  (setf (macro-function symbol) (lambda (form environment) (declare (ignore environment)) `(logand (slot ,form) 3))))

(defun be-undefined (name)
  "Make the operator NAME undefined."
  (when (and (symbolp name) (consp (sb-int:info :function :source-transform name)))
    (clear :function :source-transform name))
  (fmakunbound name))

(defun return-more-values (symbol)
  "Declare that the function SYMBOL returns seven values."
  (setf (sb-int:info :function :type symbol)
        (sb-kernel:specifier-type '(function * (values t t t t t t t &optional)))))

(defun other-slot (slot)
  "Return a copy of SLOT, a structure slot's description, with another type."
  (let ((copy (copy-structure slot)))
    (setf (slot-value copy 'type) 'hash-table)
    copy))

(defun change-slot (symbol change)
  "Replace the description of the slot that SYMBOL reads by the result of CHANGE on it."
  (destructuring-bind (structure . slot) (sb-int:info :function :source-transform symbol)
    (setf (sb-int:info :function :source-transform symbol) (cons structure (funcall change slot)))))

(defun toggle-read-only (slot)
  "Return a copy of SLOT, a structure slot's description, with its read-only flag inverted."
  (loop with before = (sb-kernel:dsd-read-only slot)
        for bit below 8
        for copy = (copy-structure slot)
        do (setf (slot-value copy 'sb-kernel::bits) (logxor (ash 1 bit) (slot-value copy 'sb-kernel::bits)))
        unless (eq before (sb-kernel:dsd-read-only copy))
          return copy))

(defun change-included-slot (symbol name change)
  "Replace the description of the slot NAME of the structure SYMBOL by the result of CHANGE on it. NIL removes the slot."
  (let ((structure (sb-kernel:find-defstruct-description symbol)))
    (setf (sb-kernel:dd-slots structure)
          (loop for slot in (sb-kernel:dd-slots structure)
                for changed = (if (string= name (sb-kernel:dsd-name slot)) (funcall change slot) slot)
                when changed
                  collect changed))))

(defun be-class (symbol class)
  "Make SYMBOL name CLASS, or no class if that is NIL."
  (let ((cell (sb-kernel:find-classoid-cell symbol :create t)))
    (unless class
      (setf (sb-kernel:classoid-cell-classoid cell) nil))
    (setf (sb-kernel:classoid-cell-pcl-class cell) class)))

(defclass other-class () ())
(defstruct parent)
(defstruct (other-structure (:include parent)))

(defun forget-slots (names)
  "Remove the direct slots of the condition classes NAMES."
  (dolist (name names)
    (setf (slot-value (find-class (let ((*package* (find-package "KEYWORD"))) (read-from-string name))) 'sb-pcl::direct-slots)
          '())))

(defun be-variable (symbol kind)
  "Make SYMBOL a variable of KIND."
  (setf (sb-int:info :variable :kind symbol) kind))

(defvar *needed-to-call* '(sb-kernel:%coerce-callable-to-fun sb-kernel:find-classoid)
  "Functions that the check itself calls. They are not redefined as functions or made undefined.")

(defvar *needed-to-define* '(sb-kernel:%coerce-callable-to-fun sb-kernel:find-classoid sb-kernel::classoid-cell-typep
                             sb-vm::fname-linkage-index)
  "Functions that SBCL needs while it defines a macro. They are not redefined as macros.")

(defun changes (symbol facet)
  "Return the possible changes of FACET of SYMBOL: lists of a description and a function that makes the change."
  (macrolet ((list-changes (&rest changes)
               `(list ,@(loop for (description form) in changes collect `(list ,description (lambda () ,form))))))
    (ecase (first facet)
      (:function (append (unless (member symbol *needed-to-call*)
                           (list-changes ("takes other arguments" (be-function symbol))
                                         ("is undefined" (be-undefined symbol))))
                         (unless (member symbol *needed-to-define*)
                           (list-changes ("is a macro" (be-macro symbol))))
                         (when (integerp (third facet))
                           (list-changes ("returns more values" (return-more-values symbol))))))
      (:macro (list-changes ("takes other arguments" (be-macro symbol))
                            ("is a function" (be-function symbol))
                            ("is undefined" (be-undefined symbol))))
      (:special-operator (list-changes ("is a macro" (be-macro symbol))
                                       ("is a function" (setf (sb-int:info :function :kind symbol) :function))))
      (:open-coded (list-changes ("is unknown to the compiler" (clear :function :info symbol))
                                 ("is a macro" (be-macro symbol))
                                 ("takes other arguments"
                                  (setf (sb-int:info :function :type symbol)
                                        (sb-kernel:specifier-type '(function (t t t t t t) nil))))))
      ((:slot :read-only-slot)
       (list-changes ("is a macro" (be-macro symbol))
                     ("is a function" (be-function symbol))
                     ("is undefined" (be-undefined symbol))
                     ("has another type" (change-slot symbol #'other-slot))
                     ("is written otherwise" (change-slot symbol #'toggle-read-only))))
      (:structure-function (list-changes ("is a macro" (be-macro symbol))
                                         ("is an ordinary function" (be-function symbol))))
      (:setf-function (list-changes ("takes other arguments" (be-function `(setf ,symbol)))
                                    ("is undefined" (be-undefined `(setf ,symbol)))))
      (:setf-expander (list-changes ("is no place" (clear :setf :expander symbol))))
      ((:special :global)
       (append (list-changes ("is a constant" (be-variable symbol :constant))
                             ("is a symbol macro" (be-variable symbol :macro))
                             ("is no variable" (clear :variable :kind symbol)))
               (list-changes ("has another type"
                              (setf (sb-int:info :variable :type symbol)
                                    (sb-kernel:specifier-type 'hash-table))))))
      (:constant (list-changes ("is a variable" (be-variable symbol :special))
                               ("is no constant" (clear :variable :kind symbol))
                               ("has a value of another type" (progn (be-variable symbol :special)
                                                                     (set symbol (make-hash-table))
                                                                     (be-variable symbol :constant)))))
      ((:symbol-macro :alien-variable)
       (list-changes ("is a variable" (be-variable symbol :special))
                     ("is no variable" (clear :variable :kind symbol))))
      ((:structure :condition :class :built-in-class)
       (list-changes ("is no class" (be-class symbol nil))
                     ("is a class of another kind" (be-class symbol (find-class 'other-class)))
                     ("has other parents" (be-class symbol (find-class (if (eq :structure (first facet))
                                                                           'other-structure
                                                                           'print-not-readable))))))
      (:type (list-changes ("is no type" (clear :type :expander symbol))
                           ("is a class" (be-class symbol (find-class 'other-class)))
                           ("takes other arguments" (eval `(deftype ,symbol (moved) moved)))))
      (:alien-type (list-changes ("is no alien type" (clear :alien-type :kind symbol))))
      (:included-slot (list-changes ("has another type" (change-included-slot symbol (second facet) #'other-slot))
                                    ("is gone" (change-included-slot symbol (second facet) (constantly nil)))))
      (:policy-quality (list-changes ("is no quality"
                                      (sb-int:encapsulate 'sb-c::policy-quality-name-p 'moved
                                                          (lambda (function name)
                                                            (and (not (eq name symbol)) (funcall function name)))))))
      (:slot-name (list-changes ("names no slot" (forget-slots (rest facet)))))
      ((:symbol :lambda-list-keyword) '()))))

(defun all-changes (entry)
  "Return the possible changes of the name in ENTRY: lists of a description and a function that makes the change."
  (destructuring-bind (package name features &rest facets) entry
    (declare (ignore features))
    (if (string= package "C")
        (list (list "is gone" (lambda ()
                                (sb-int:encapsulate 'sb-sys:find-foreign-symbol-address 'moved
                                                    (lambda (function symbol)
                                                      (unless (string= symbol name) (funcall function symbol)))))))
        (let ((symbol (find-named-symbol package name)))
          (cons (list "is gone" (lambda () (unintern symbol package)))
                (loop for facet in facets append (changes symbol facet)))))))

;;; The tests

(defvar *failures* 0)

(defun expect (text holds)
  "Report the failure TEXT unless HOLDS is true."
  (unless holds
    (incf *failures*)
    (format t "~&FAILED: ~A~%" text)))

(defun moved-p (entry machine)
  "True if the check reports that the name in ENTRY, and no other, has moved."
  (destructuring-bind (package name &rest rest) entry
    (declare (ignore rest))
    (equal (list (if (string= package "C") name (format nil "~A::~A" package name)))
           (mapcar #'first (changed-names (list entry) machine)))))

(defun check-message ()
  "Return the message of the check in this SBCL, or NIL if nothing has moved."
  (handler-case (progn (check-table *table*) nil)
    (error (failure) (princ-to-string failure))))

(defun says-p (&rest texts)
  "True if the check of the whole table prints a line that contains each of TEXTS."
  (let ((message (check-message)))
    (when message
      (with-input-from-string (stream message)
        (loop for line = (read-line stream nil)
              while line
                thereis (loop for text in texts always (search text line)))))))

(defun newer-byte-readers ()
  "Change the argument types of the streams' byte readers as SBCL did after 2.6.7."
  (change-included-slot 'sb-kernel:ansi-stream "N-BIN"
                        (lambda (slot)
                          (let ((copy (copy-structure slot)))
                            (setf (slot-value copy 'type)
                                  '(function (stream (or (simple-array * (*)) sb-sys:system-area-pointer)
                                              sb-int:index sb-int:index &optional t)
                                    sb-int:index))
                            copy))))

(defun test-changes ()
  "Test each change of each name in the table. Return the number of changes."
  (multiple-value-bind (entries machine) (read-table *table*)
    (loop for entry in entries
          for (package name features) = entry
          when (or (eq features t) (uiop:featurep features))
            sum (let ((changes (all-changes entry)))
                  (loop for (description change) in changes
                        do (expect (format nil "~A::~A ~A: the check does not say so" package name description)
                                 (succeeds-in-child-p (lambda ()
                                                        (funcall change)
                                                        (moved-p entry machine)))))
                  (length changes)))))

(defun run ()
  "Run all tests and exit."
  (sb-impl::finalizer-thread-stop)
  (dolist (package (list-all-packages))
    (sb-ext:unlock-package package))
  (handler-bind ((warning #'muffle-warning))
    (expect "the SBCL that the table is of has moved" (null (check-message)))
    (expect "the byte readers of SBCL after 2.6.7 are not noticed"
          (succeeds-in-child-p (lambda ()
                                 (newer-byte-readers)
                                 (says-p "SB-KERNEL::ANSI-STREAM" "N-BIN"))))
    (let ((changes (test-changes)))
      (format t "~&~D changes, ~D failed~%" changes *failures*)
      (sb-ext:exit :code (if (zerop *failures*) 0 1) :abort t))))

(run)
