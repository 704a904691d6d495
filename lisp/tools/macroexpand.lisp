;;;; macroexpand: what a form expands to, as source. Nothing of it is evaluated but macro functions.

(in-package "SBCL-HOST/TOOLS")

;;; Reading without interning

(defun private-copy (package)
  "Return a package that is PACKAGE to the reader and the printer, in which symbols can be interned that PACKAGE does
not get. It is in no list of packages."
  (flet ((copy-table (table)
           (let ((copy (copy-structure table))
                 (cells (sb-impl::symtbl-%cells table)))
             (setf (sb-impl::symtbl-%cells copy) (cons (car cells) (copy-seq (cdr cells))))
             copy)))
    (let ((copy (copy-structure package)))
      (setf (sb-impl::package-internal-symbols copy) (copy-table (sb-impl::package-internal-symbols package)))
      copy)))

(defun new-qualified-names (text)
  "Return what symbols TEXT would intern that stand in it with the package they are of, keywords too: lists of package
and name."
  (let ((names '()))
    (loop for start = 0 then (1+ colon)
          for colon = (position #\: text :start start)
          while colon
          do (let* ((begin (1+ (or (position-if-not #'constituent-p text :end colon :from-end t) -1)))
                    (name (or (position #\: text :start colon :test #'char/=) (length text)))
                    (package (if (= begin colon)
                                 (find-package "KEYWORD")
                                 (user-package (subseq text begin colon)))))
               (when (and package (< name (length text)) (constituent-p (char text name)))
                 (let ((name (token-name text name)))
                   (unless (nth-value 1 (find-symbol name package))
                     (push (list package name) names))))))
    names))

(defun call-without-interning (text function)
  "Call FUNCTION, which reads TEXT, so that what it interns is gone when it has returned."
  (declare (type function function))
  (let ((new (new-qualified-names (coerce text 'source-text))))
    (unwind-protect (let ((*package* (private-copy (current-package))))
                      (funcall function))
      (loop for (package name) in new
            do (multiple-value-bind (symbol status) (find-symbol name package)
                 ;; Unless somebody else has found a use for it.
                 (when (and status (eq (symbol-package symbol) package) (null (symbol-plist symbol))
                            (or (keywordp symbol) (null (symbol-kinds symbol))))
                   (sb-ext:without-package-locks (unintern symbol package))))))))

(defun read-first-form (text)
  "Return the first form of TEXT, read as the session would, but for #., and true when another one follows."
  (let ((*read-eval* nil)
        (*read-suppress* nil))
    ;; One that is still there when an error is reported, which says where it is.
    (let ((stream (make-string-input-stream text)))
      (values (read stream)
              (not (eq stream (guarded (read stream nil stream) (failure) nil)))))))

;;; Expanding

(defconstant +expansions+ 10000
  "How many macro forms are expanded for one question.")

(defvar *steps* '()
  "The steps of this question, newest first: lists of the name of the macro, what the expansion begins with, and how
often this happened in a row.")

(defvar *expanded* 0
  "How many macro forms have been expanded for this question.")

(defun form-operator (form)
  "Return what FORM is called by: its operator, or itself."
  (cond ((atom form) form)
        ((consp (car form)) (if (eq (caar form) 'lambda) 'lambda (caar form)))
        (t (car form))))

(defvar *expanding* nil
  "The form that is being expanded.")

(defvar *noting-steps* t
  "False while macros are expanded that are no part of the form: in the definitions of local ones.")

(defun note-step (form expansion)
  "Note in *STEPS* that FORM was expanded to EXPANSION."
  (let ((step (list (form-operator form) (form-operator expansion))))
    (if (and *steps* (equal step (butlast (first *steps*))))
        (incf (third (first *steps*)))
        (push (append step (list 1)) *steps*))))

(defun call-with-noted-steps (function)
  "Call FUNCTION, which expands macros, and note in *STEPS* which."
  (declare (type function function))
  (let* ((hook *macroexpand-hook*)
         (*macroexpand-hook*
           (lambda (expander form environment)
             (when *noting-steps*
               (when (> (incf *expanded*) +expansions+)
                 (error "More than ~D macro forms have been expanded, and there is no end." +expansions+))
               (setf *expanding* form))
             (let ((expansion (let ((*macroexpand-hook* hook))
                                (funcall hook expander form environment))))
               (when *noting-steps*
                 (note-step form expansion))
               expansion))))
    (funcall function)))

(defun expand (form depth)
  "Return the expansion of FORM to DEPTH, a string, and true when it was expanded at all."
  (call-with-noted-steps
   (lambda ()
     (cond ((string= depth "once") (macroexpand-1 form))
           ((string= depth "all") (values (sb-cltl2:macroexpand-all form) (plusp *expanded*)))
           (t (macroexpand form))))))

;;; Printing

(defconstant +walked-conses+ 100000
  "How many conses of an expansion are looked through.")

(defun map-uninterned (function form)
  "Call FUNCTION with the uninterned symbols in FORM, in their order. Return true when all of it was looked through."
  (declare (type function function))
  (let ((left +walked-conses+))
    (declare (type fixnum left))
    (labels ((visit (form depth)
               (loop
                 (typecase form
                   (cons
                    (when (or (minusp (decf left)) (> depth 500))
                      (return-from map-uninterned nil))
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
  "Return a hash table from the uninterned symbols in FORM to others that are called G1, G2, STREAM1 and so on, each by
a name of its own; or NIL when FORM is too large, or circular."
  (let ((bases (make-hash-table :test 'equal))
        (names (make-hash-table :test 'eq)))
    (flet ((base (symbol)
             (let ((bare (string-right-trim "0123456789" (symbol-name symbol))))
               (if (string= bare "") (symbol-name symbol) bare))))
      (and (map-uninterned (lambda (symbol)
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

(defun with-readable-names (form)
  "Return FORM with its uninterned symbols named as READABLE-NAMES has it; and true when it is circular or very large."
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

(defconstant +expansion-text+ 200000
  "Characters of an expansion that are printed.")

(defun source-printed (form)
  "Return FORM as one would write it in source, and true when that is not all of it."
  (multiple-value-bind (form circular) (with-readable-names form)
    (with-server-syntax (:length nil :level nil)
      (let ((*print-pretty* t) (*print-case* :downcase) (*print-right-margin* 100) (*print-circle* circular))
        (multiple-value-bind (text result)
            (bounded-text +expansion-text+ (lambda (stream) (prin1 form stream)))
          (values text (and result t)))))))

(defconstant +text-piece+ 8000
  "Characters of a text that go in one record.")

(defun push-expansion (text)
  "Push TEXT, an expansion, in pieces that a field can hold."
  (loop for start from 0 below (length text) by +text-piece+
        do (push-record "expansion" :text (subseq text start (min (length text) (+ start +text-piece+))))))

;;; The question

(defconstant +named-steps+ 40
  "How many steps are named.")

(defun operator-text (operator)
  "Return OPERATOR, of a step, as text."
  (with-server-syntax (:length 3 :level 2)
    (let ((*print-gensym* nil))
      (printed operator 60))))

(defun push-steps ()
  "Push records of the *STEPS*, in their order."
  (let ((steps (reverse *steps*)))
    (loop for (macro result count) in steps
          repeat +named-steps+
          do (push-record "step" :operator (operator-text macro) :result (operator-text result) :count count))
    (when (> (length steps) +named-steps+)
      (push-record "more" :count (- (length steps) +named-steps+)))))

(defun nothing-to-expand (form depth)
  "Return a sentence that says why FORM does not expand to DEPTH."
  (let* ((operator (and (consp form) (car form)))
         (name (operator-text (form-operator form))))
    (with-server-syntax ()
      (cond ((string= depth "all") "There is no macro form in it.")
            ((not (consp form)) (format nil "~A is no macro form." name))
            ((not (symbolp operator)) "It is no macro form.")
            (t
             (format nil "~A ~A: there is nothing to expand~A.~@[ Macros of near names: ~{~A~^, ~}.~]"
                     name
                     (cond ((special-operator-p operator) "is a special operator")
                           ((fboundp operator) "is a function")
                           (t "is not defined"))
                     (if (fboundp operator) " but its subforms, with depth all" "")
                     (and (not (fboundp operator))
                          (near-symbol-names (symbol-name operator) *package* #'macro-function))))))))

(defun push-expansion-of (text depth)
  "Push records of what the first form of TEXT expands to. *PACKAGE* is a private copy."
  (let* ((*steps* '())
         (*expanded* 0)
         (*expanding* nil)
         ;; What macro functions print is nobody's.
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
                (fail condition (if *expanding*
                                    (with-server-syntax (:length 6 :level 3)
                                      (format nil "expanding ~A" (printed *expanding* 200)))
                                    "expanding the form")))
            ;; A symbol macro is no macro form, but expands.
            (unless (or expanded (and (symbolp form) (not (eq form expansion))))
              (push-record "note" :text (nothing-to-expand form depth)))
            (push-steps)
            (multiple-value-bind (printed cut) (source-printed expansion)
              (push-expansion printed)
              (when cut
                (push-record "note" :text "It is too long, or has no end, to be shown whole.")))
            (when more
              (push-record "note" :text "Only the first form was expanded."))))))))

(define-query :macroexpand (&key form depth package)
  "Push records of what the first form of the string FORM expands to: to DEPTH, \"once\", \"full\" or \"all\", in
PACKAGE, the name of one, or NIL for the current one."
  (let ((*package* (if package (find-user-package package) (current-package))))
    (call-without-interning form (lambda () (push-expansion-of form depth)))))
