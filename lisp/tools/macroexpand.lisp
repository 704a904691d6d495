;;;; macroexpand: the expansion of a form, as source. The form is not evaluated: only macro functions run.

(in-package "SBCL-HOST/TOOLS")

;;; Reading the form

(defun read-first-form (text)
  "Return the first form of TEXT, read as the session would read it but with #. disabled. The second value is true if another
form follows."
  (let ((*read-eval* nil)
        (*read-suppress* nil))
    ;; WITH-INPUT-FROM-STRING would close the stream, but the report of a reader error gives the position in the open stream.
    (let ((stream (make-string-input-stream text)))
      (values (read stream)
              (not (eq stream (guarded (read stream nil stream) (failure) nil)))))))

;;; Expanding a form

(defconstant +max-expansions+ 10000
  "Maximum number of macro forms that are expanded for one request.")

(defvar *expansion-steps* '()
  "The expansion steps of this request, newest first: lists of the macro's name, the operator of its expansion, and the
number of times that the step occurred in a row.")

(defvar *expansion-count* 0
  "The number of macro forms expanded for this request.")

(defun form-operator (form)
  "Return the operator of FORM, or FORM itself if it is an atom. If the operator is a list, return the first element of the
list, such as LAMBDA."
  (cond ((atom form) form)
        ((consp (car form)) (if (eq (caar form) 'lambda) 'lambda (caar form)))
        (t (car form))))

(defvar *expanding-form* nil
  "The macro form whose expansion was begun last, or NIL.")

(defvar *recording-steps* t
  "True while each expansion is recorded as a step; false while macros are expanded in the definitions of local macros, which
are not part of the requested expansion.")

(defun record-step (form expansion)
  "Record in *EXPANSION-STEPS* the step from FORM to EXPANSION. If the step equals the last one, only increment the number
of times that the step occurred."
  (let ((step (list (form-operator form) (form-operator expansion))))
    (if (and *expansion-steps* (equal step (butlast (first *expansion-steps*))))
        (incf (third (first *expansion-steps*)))
        (push (append step (list 1)) *expansion-steps*))))

(defun call-recording-steps (function)
  "Return the values of FUNCTION, which expands macros, and record the steps in *EXPANSION-STEPS*. Signal an error when more
than +MAX-EXPANSIONS+ macro forms are expanded."
  (declare (type function function))
  (let* ((hook *macroexpand-hook*)
         (*macroexpand-hook*
           (lambda (expander form environment)
             (when *recording-steps*
               (when (> (incf *expansion-count*) +max-expansions+)
                 (error "The expansion was stopped after ~D macro forms: it may be infinite." +max-expansions+))
               (setf *expanding-form* form))
             (let ((expansion (let ((*macroexpand-hook* hook))
                                (funcall hook expander form environment))))
               (when *recording-steps*
                 (record-step form expansion))
               expansion))))
    (funcall function)))

(defun expand (form depth)
  "Return the expansion of FORM to DEPTH, and true if anything was expanded. DEPTH is \"once\" for a single step, \"full\" to
expand until the result is not a macro form, or \"all\" to expand the subforms, too."
  (call-recording-steps
   (lambda ()
     (cond ((string= depth "once") (macroexpand-1 form))
           ((string= depth "all")
            ;; MACROEXPAND-ALL does not call *MACROEXPAND-HOOK* for a symbol macro.
            (values (sb-cltl2:macroexpand-all (if (symbolp form) (macroexpand form) form)) (plusp *expansion-count*)))
           (t (macroexpand form))))))

;;; Printing an expansion

(defconstant +max-walked-conses+ 100000
  "Maximum number of conses of an expansion that are examined.")

(defun map-uninterned-symbols (function form)
  "Call FUNCTION with the uninterned symbols in FORM, in order. Return true if all of FORM was examined."
  (declare (type function function))
  (let ((left +max-walked-conses+))
    (declare (type fixnum left))
    (labels ((visit (form depth)
               (loop
                 (typecase form
                   (cons
                    (when (or (minusp (decf left)) (> depth 500))
                      (return-from map-uninterned-symbols nil))
                    (visit (car form) (1+ depth))
                    (setf form (cdr form)))
                   (sb-impl::comma (setf form (sb-int:comma-expr form)))
                   (t
                    (when (and (symbolp form) form (null (symbol-package form)))
                      (funcall function form))
                    (return))))))
      (visit form 0)
      t)))

(defun readable-names (form)
  "Return a hash table from the uninterned symbols in FORM to uninterned symbols with distinct names such as G1, G2 and
STREAM1. Return NIL if FORM is too large, or circular."
  (let ((bases (make-hash-table :test 'equal))
        (names (make-hash-table :test 'eq)))
    (flet ((base (symbol)
             (let ((bare (string-right-trim "0123456789" (symbol-name symbol))))
               (if (string= bare "") (symbol-name symbol) bare))))
      (and (map-uninterned-symbols (lambda (symbol)
                                     (pushnew symbol (gethash (base symbol) bases) :test #'eq))
                                   form)
           (progn
             (loop for base being the hash-keys of bases using (hash-value symbols)
                   do (loop for symbol in (reverse symbols)
                            for number from 1
                            do (setf (gethash symbol names)
                                     (make-symbol (if (and (null (rest symbols)) (string= base (symbol-name symbol)))
                                                      base
                                                      (format nil "~A~D" base number))))))
             names)))))

(defun rename-uninterned-symbols (form)
  "Return FORM with its uninterned symbols replaced by the symbols that READABLE-NAMES chooses. If FORM is circular or very
large, return FORM itself, and true as the second value."
  (let ((names (readable-names form)))
    (labels ((rename (form)
               (typecase form
                 (cons
                  (let* ((head (list (rename (car form))))
                         (tail head))
                    (loop
                      (setf form (cdr form))
                      (cond ((consp form)
                             (setf tail (setf (cdr tail) (list (rename (car form))))))
                            (t (setf (cdr tail) (if form (rename form) nil))
                               (return head))))))
                 (sb-impl::comma (sb-int:unquote (rename (sb-int:comma-expr form)) (sb-int:comma-kind form)))
                 (symbol (values (gethash form names form)))
                 (t form))))
      (cond ((null names) (values form t))
            ((zerop (hash-table-count names)) (values form nil))
            (t (values (rename form) nil))))))

(defconstant +max-expansion-length+ 200000
  "Maximum number of characters of an expansion that are printed.")

(defun printed-source (form)
  "Return FORM printed as source. The second value is NIL if the text is complete, :ENOUGH if it was cut at
+MAX-EXPANSION-LENGTH+ characters, or the condition that ended the printing."
  (multiple-value-bind (form circular) (rename-uninterned-symbols form)
    (with-server-syntax (:length nil :level nil)
      (let ((*print-pretty* t) (*print-case* :downcase) (*print-right-margin* 100) (*print-circle* circular))
        (bounded-text +max-expansion-length+ (lambda (stream) (prin1 form stream)))))))

(defconstant +max-piece-length+ 8000
  "Maximum number of characters of a text in one record.")

(defun push-expansion (text)
  "Push records of TEXT, an expansion, in pieces of at most +MAX-PIECE-LENGTH+ characters."
  (loop for start from 0 below (length text) by +max-piece-length+
        do (push-record "expansion" :text (subseq text start (min (length text) (+ start +max-piece-length+))))))

;;; The query MACROEXPAND

(defconstant +max-named-steps+ 40
  "Maximum number of expansion steps that are reported by name.")

(defun operator-text (operator)
  "Return OPERATOR, the operator of a form or an atom, as text."
  (with-server-syntax (:length 3 :level 2)
    (let ((*print-gensym* nil))
      (bounded-prin1-text operator 60))))

(defun push-steps ()
  "Push records of the first +MAX-NAMED-STEPS+ of *EXPANSION-STEPS*, oldest first, and of the number of further steps."
  (let ((steps (reverse *expansion-steps*)))
    (loop for (macro result count) in steps
          repeat +max-named-steps+
          do (push-record "step" :operator (operator-text macro) :result (operator-text result) :count count))
    (when (> (length steps) +max-named-steps+)
      (push-record "more" :count (- (length steps) +max-named-steps+)))))

(defun no-expansion-text (form depth)
  "Return a sentence that says why FORM does not expand to DEPTH."
  (let* ((operator (and (consp form) (car form)))
         (name (operator-text (form-operator form))))
    (with-server-syntax ()
      (cond ((string= depth "all") "The form contains no macro form.")
            ((not (consp form)) (format nil "~A is not a macro form." name))
            ((not (symbolp operator)) "The form is not a macro form.")
            (t
             (format nil "~A ~A~A~@[ Macros with similar names: ~{~A~^, ~}.~]"
                     name
                     (cond ((special-operator-p operator) "is a special operator")
                           ((fboundp operator) "is a function")
                           (t "names no function or macro"))
                     (if (fboundp operator)
                         ", so the form is not a macro form. Pass depth `all` to expand the form's subforms."
                         ", so the form is not a macro form.")
                     (and (not (fboundp operator))
                          (similar-symbol-names (symbol-name operator) *package* #'macro-function))))))))

(defun push-form-expansion (text depth)
  "Push records of the expansion of the first form of TEXT to DEPTH. Reading TEXT interns symbols, as it would in an
evaluation: macro functions may keep the symbols that they get, so the symbols must be those of the session."
  (let* ((*expansion-steps* '())
         (*expansion-count* 0)
         (*expanding-form* nil)
         ;; Discard the output of macro functions.
         (*standard-output* (make-broadcast-stream))
         (*error-output* *standard-output*)
         (*trace-output* *standard-output*))
    (block expansion
      (flet ((fail (condition when)
               (push-steps)
               (push-record "error"
                            :class (type-name-text (class-name-of condition))
                            :message (lambda (stream)
                                       (with-server-syntax (:length 1000 :level 50)
                                         (let ((*print-escape* nil))
                                           (princ condition stream))))
                            :during when)
               (return-from expansion)))
        (multiple-value-bind (form more)
            (guarded (read-first-form text)
                (condition)
              (fail condition "reading the form"))
          (multiple-value-bind (expansion expanded)
              (guarded (expand form depth)
                  (condition)
                (fail condition (if *expanding-form*
                                    (with-server-syntax (:length 6 :level 3)
                                      (format nil "expanding ~A" (bounded-prin1-text *expanding-form* 200)))
                                    "expanding the form")))
            (unless expanded
              (push-record "note" :text (no-expansion-text form depth)))
            (push-steps)
            (multiple-value-bind (printed cut) (printed-source expansion)
              (push-expansion printed)
              (when cut
                (push-record "note" :text (if (eq cut :enough)
                                              (format nil "Only the first ~D characters of the expansion are shown."
                                                      +max-expansion-length+)
                                              (format nil "The expansion cannot be printed completely: printing failed with ~A."
                                                      (type-name-text (class-name-of cut)))))))
            (when more
              (push-record "note" :text "Only the first form was expanded."))))))))

(define-query :macroexpand (&key form depth package)
  "Push records of the expansion of the first form in the string FORM to DEPTH, \"once\", \"full\" or \"all\". PACKAGE is a
package name, or NIL for the current package."
  (let ((*package* (if package (find-package-or-suggest package) (current-package))))
    (push-form-expansion form depth)))
