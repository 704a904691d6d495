;;;; Code coverage by SB-COVER: each form of covered code has a mark, which is set when the form runs. Coverage is recorded
;;;; only in a fresh image, never in the session's image.

(in-package "SBCL-HOST/TESTING")

;;; Loading systems with coverage marks

(defun direct-dependencies (system)
  "Return the systems on which SYSTEM depends directly."
  (loop for name in (ignore-errors (asdf:system-depends-on system))
        for needed = (ignore-errors (asdf:find-system (asdf/find-component:resolve-dependency-name system name) nil))
        when needed
          collect needed))

(defun needed-systems (system)
  "Return SYSTEM and all systems on which it depends, dependencies first."
  (let ((found '()))
    (labels ((visit (system)
               (unless (member system found :test #'eq)
                 (mapc #'visit (direct-dependencies system))
                 (pushnew system found :test #'eq))))
      (visit system))
    (nreverse found)))

(defun system-directory (system)
  "Return the directory of the .asd file that defines SYSTEM, as a pathname, or NIL if there is no such file. For a system that
ASDF infers from a source file, return the directory of the primary system, because ASDF:SYSTEM-SOURCE-DIRECTORY knows none."
  (let ((file (asd-file system)))
    (and file (uiop:pathname-directory-pathname (sb-ext:parse-native-namestring file)))))

(defun system-in-directory-p (system root)
  "Return true when the files of SYSTEM are below the directory ROOT."
  (let ((directory (system-directory system)))
    (and directory root (uiop:subpathp directory root))))

(defun framework-name-p (name)
  "Return true when NAME is the name of a test framework's system."
  (member name '("fiveam" "parachute" "rove" "lisp-unit2" "sb-rt" "rt") :test #'string-equal))

(defun named-like-test-system-p (system)
  "Return true when the name of SYSTEM contains `test', which suggests that SYSTEM holds tests."
  (search "test" (asdf:component-name system)))

(defun test-system-p (system)
  "Return true when SYSTEM is likely to hold tests: it uses a framework, or its name contains `test'."
  (or (named-like-test-system-p system)
      (some #'framework-name-p
            (mapcar (lambda (dependency) (if (stringp dependency) dependency (format nil "~(~A~)" dependency)))
                    (asdf:system-depends-on system)))))

(defun externally-tested-systems (tests)
  "Return the systems that TESTS, test systems, are likely to test, for use when the directory of TESTS holds only tests. The
candidates are the dependencies of TESTS and of their auxiliary test systems, except frameworks. If the names of some
candidates occur in the names of TESTS, return only those candidates."
  (let ((found '()))
    (labels ((visit (system)
               (dolist (needed (direct-dependencies system))
                 (cond ((or (member needed tests)
                            (framework-name-p (asdf:component-name needed))
                            (null (system-directory needed))))
                       ((test-system-p needed) (visit needed))
                       (t (pushnew needed found))))))
      (mapc #'visit tests))
    (flet ((named-p (system)
             (some (lambda (test) (search (asdf:component-name system) (asdf:component-name test))) tests)))
      (or (remove-if-not #'named-p found) found))))

(defun tested-systems (needed root)
  "Return the systems among NEEDED that the tests in the directory ROOT are likely to test."
  (let ((own (remove-if-not (lambda (system) (system-in-directory-p system root)) needed)))
    (or (remove-if #'test-system-p own)
        (let ((roots (and (every #'named-like-test-system-p own)
                          (mapcar #'system-directory (externally-tested-systems own)))))
          (remove-if-not (lambda (system)
                           (and (not (test-system-p system))
                                (some (lambda (root) (system-in-directory-p system root)) roots)))
                         needed))
        ;; If one system has both code and tests, EXCLUDED-FORM-P later recognizes the forms of the tests.
        own)))

;; If a function were expanded inline in its callers, its own forms would never seem to run.
(declaim (type boolean *loading-with-marks*))
(defvar *loading-with-marks* nil
  "True while code is loaded with coverage marks. Meanwhile proclamations that allow inline expansion are ignored.")

(defun inline-proclamation-p (form)
  "Return true when FORM, a declaration specifier, allows the inline expansion of functions."
  (member (car form) '(inline sb-ext:maybe-inline)))

(defun load-with-coverage (systems scratch)
  "Load SYSTEMS, which hold tests, and their dependencies. The systems under test, which TESTED-SYSTEMS finds, are loaded
with coverage marks. The compiled files of the systems under test, and of systems that are loaded after them, go into the
directory SCRATCH. Return the systems under test."
  (let* ((root (system-directory (first (last systems))))
         (needed (remove-duplicates (mapcan #'needed-systems (reverse systems)) :from-end t))
         (marked (tested-systems needed root))
         ;; OWN also contains the systems that depend on a marked system. These systems are loaded after the marked
         ;; systems: if such a system were loaded first, ASDF would load the marked system without marks.
         (own (remove-if-not (lambda (system)
                               (or (system-in-directory-p system root) (intersection marked (needed-systems system))))
                             needed)))
    (dolist (system (set-difference needed own))
      (asdf:load-system system))
    ;; The location of compiled files changes below. Systems that are already loaded must not be compiled again because of
    ;; this change.
    (dolist (name (asdf:already-loaded-systems))
      (asdf:register-immutable-system name))
    ;; Frameworks use this variable to find the source of a compiled file (Rove's RESOLVE-FILE).
    (setf uiop:*user-cache* (uiop:resolve-location (list scratch :implementation) :ensure-directory t :wilden nil))
    (asdf:initialize-output-translations '(:output-translations (t :user-cache) :ignore-inherited-configuration))
    (unwind-protect
         (progn
           (proclaim '(optimize (sb-cover:store-coverage-data 3)))
           (let ((*loading-with-marks* t))
             (mapc #'asdf:load-system (remove-if-not (lambda (system) (member system marked)) needed))))
      (proclaim '(optimize (sb-cover:store-coverage-data 0))))
    ;; A source file may be newer than its compiled file, as after a change of the clock. ASDF would compile such a file
    ;; again, without marks, if its system were not immutable.
    (dolist (system marked)
      (asdf:register-immutable-system (asdf:component-name system)))
    (mapc #'asdf:load-system own)
    marked))

;;; Coverage marks

(defstruct (coverage (:copier nil) (:predicate nil))
  "The coverage marks in the code of this image."
  ;; CODES and STARTS are parallel vectors: the code components, and the number of the first mark of each component.
  (codes #() :type simple-vector :read-only t)
  (starts #() :type simple-vector :read-only t)
  ;; The total number of marks.
  (count 0 :type index :read-only t))

(declaim (type (or null coverage) *coverage*))
(defvar *coverage* nil
  "The COVERAGE whose marks record the code that a test ran, or NIL when coverage is not recorded.")

(defun marked-codes ()
  "Return the code components with marks."
  (loop for codes in (cdr sb-int:*code-coverage-info*)
        append (loop for index below (sb-int:weak-vector-len codes)
                     for code = (sb-int:weak-vector-ref codes index)
                     when (and code (sb-c::code-coverage-map code))
                       collect code)))

(defun current-coverage ()
  "Return a COVERAGE of all marks in this image."
  (let ((codes (coerce (marked-codes) 'simple-vector))
        (count 0))
    (make-coverage :codes codes
                   :starts (map 'simple-vector
                                (lambda (code)
                                  (prog1 count
                                    (incf count (length (sb-c::code-coverage-map code)))))
                                codes)
                   :count count)))

(defun mark-set-p (code index)
  "Return true when mark INDEX of CODE is set, which means that the mark's form has run."
  (coverage-mark-p (sb-cover::code-coverage-marks code) index))

(defun clear-mark (code index)
  "Clear mark INDEX of CODE."
  (clear-coverage-mark (sb-cover::code-coverage-marks code) index))

(defun clear-marks ()
  "Clear all marks."
  (map nil #'sb-cover:reset-coverage (coverage-codes *coverage*)))

(defun mark-bits ()
  "Return a bit vector with a bit for each mark, which is 1 if the mark is set."
  (let ((bits (make-array (coverage-count *coverage*) :element-type 'bit :initial-element 0)))
    (loop for code across (coverage-codes *coverage*)
          for start across (coverage-starts *coverage*)
          do (with-pinned-objects (code)
               (dotimes (index (length (sb-c::code-coverage-map code)))
                 (when (mark-set-p code index)
                   (setf (sbit bits (+ start index)) 1)))))
    bits))

(defun clear-marks-except (bits)
  "Clear all marks except those whose bits are 1 in BITS, a value of MARK-BITS."
  (declare (type simple-bit-vector bits))
  (loop for code across (coverage-codes *coverage*)
        for start across (coverage-starts *coverage*)
        do (with-pinned-objects (code)
             (dotimes (index (length (sb-c::code-coverage-map code)))
               (when (and (zerop (sbit bits (+ start index))) (mark-set-p code index))
                 (clear-mark code index))))))

(defun call-preserving-marks (function)
  "Return the values of FUNCTION, which examines or prints a failure. Clear the marks that only FUNCTION has set, because
the test did not run that code."
  (declare (type function function))
  (if *coverage*
      (let ((marks (mark-bits)))
        (unwind-protect (funcall function)
          (clear-marks-except marks)))
      (funcall function)))
