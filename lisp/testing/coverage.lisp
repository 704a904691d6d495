;;;; Which code runs: what is loaded for that marks its forms (SB-COVER). For an image of its own, beside the session's.

(in-package "SBCL-HOST/TESTING")

;;; Loading

(defun direct-dependencies (system)
  "Return the systems that SYSTEM itself says it needs."
  (loop for name in (ignore-errors (asdf:system-depends-on system))
        for needed = (ignore-errors (asdf:find-system (asdf/find-component:resolve-dependency-name system name) nil))
        when needed
          collect needed))

(defun needed-systems (system)
  "Return SYSTEM and all the systems that it needs, what is needed first."
  (let ((found '()))
    (labels ((visit (system)
               (unless (member system found :test #'eq)
                 (mapc #'visit (direct-dependencies system))
                 (pushnew system found :test #'eq))))
      (visit system))
    (nreverse found)))

(defun of-project-p (system root)
  "True when the files of SYSTEM are below the directory ROOT."
  (let ((directory (asdf:system-source-directory system)))
    (and directory root (uiop:subpathp directory root))))

(defun framework-name-p (name)
  "True when NAME is that of a system that is a framework for tests."
  (member name '("fiveam" "parachute" "rove" "lisp-unit2" "sb-rt" "rt") :test #'string-equal))

(defun called-test-p (system)
  "True when the name of SYSTEM says that it is tests."
  (search "test" (asdf:component-name system)))

(defun tests-anything-p (system)
  "True when SYSTEM is likely to hold tests: it uses a framework, or its name says so."
  (or (called-test-p system)
      (some #'framework-name-p
            (mapcar (lambda (dependency) (if (stringp dependency) dependency (format nil "~(~A~)" dependency)))
                    (asdf:system-depends-on system)))))

(defun tested-elsewhere (tests)
  "Return the systems that those of TESTS, which have no code in their own directory, are likely to test: what they
need, and aids of theirs do, but for frameworks; where some of that gives one of them its name, only this."
  (let ((found '()))
    (labels ((visit (system)
               (dolist (needed (direct-dependencies system))
                 (cond ((or (member needed tests)
                            (framework-name-p (asdf:component-name needed))
                            (null (asdf:system-source-directory needed))))
                       ((tests-anything-p needed) (visit needed))
                       (t (pushnew needed found))))))
      (mapc #'visit tests))
    (flet ((named-p (system)
             (some (lambda (test) (search (asdf:component-name system) (asdf:component-name test))) tests)))
      (or (remove-if-not #'named-p found) found))))

(defun tested-systems (needed root)
  "Return the systems among NEEDED that are likely to be what those in the directory ROOT test."
  (let ((own (remove-if-not (lambda (system) (of-project-p system root)) needed)))
    (or (remove-if #'tests-anything-p own)
        (let ((roots (and (every #'called-test-p own)
                          (mapcar #'asdf:system-source-directory (tested-elsewhere own)))))
          (remove-if-not (lambda (system)
                           (and (not (tests-anything-p system))
                                (some (lambda (root) (of-project-p system root)) roots)))
                         needed))
        ;; Where one system has both, its tests are told from the rest by their forms.
        own)))

;; Of a function that is expanded in its callers, none of its forms would run.
(declaim (type boolean *marking*))
(defvar *marking* nil
  "True while code is loaded that marks its forms: what it proclaims to be inline is not.")

(defun inline-proclamation-p (form)
  "True when FORM, a declaration specifier, makes functions inline."
  (member (car form) '(inline sb-ext:maybe-inline)))

(defun load-with-coverage (systems scratch)
  "Load SYSTEMS and what they need; the code that they test with marks, in the same directory if there is any. What is
compiled for that goes into the directory SCRATCH."
  (let* ((root (asdf:system-source-directory (first (last systems))))
         (needed (remove-duplicates (mapcan #'needed-systems (reverse systems)) :from-end t))
         (marked (tested-systems needed root))
         ;; What needs that code would load it without marks.
         (own (remove-if-not (lambda (system)
                               (or (of-project-p system root) (intersection marked (needed-systems system))))
                             needed)))
    (dolist (system (set-difference needed own))
      (asdf:load-system system))
    ;; They are good as they are, wherever compiled files are to go.
    (dolist (name (asdf:already-loaded-systems))
      (asdf:register-immutable-system name))
    ;; Frameworks find by it which file a compiled one is of (Rove's RESOLVE-FILE).
    (setf uiop:*user-cache* (uiop:resolve-location (list scratch :implementation) :ensure-directory t :wilden nil))
    (asdf:initialize-output-translations '(:output-translations (t :user-cache) :ignore-inherited-configuration))
    (unwind-protect
         (progn
           (proclaim '(optimize (sb-cover:store-coverage-data 3)))
           (let ((*marking* t))
             (mapc #'asdf:load-system (remove-if-not (lambda (system) (member system marked)) needed))))
      (proclaim '(optimize (sb-cover:store-coverage-data 0))))
    ;; A file of theirs that is newer than what was compiled of it, as by a clock ahead, is not compiled again without marks.
    (dolist (system marked)
      (asdf:register-immutable-system (asdf:component-name system)))
    (mapc #'asdf:load-system own)
    marked))

;;; Marks

(defstruct (coverage (:copier nil) (:predicate nil))
  "What marks there are in the code of this image."
  ;; Vectors of code components, and of the number of the first mark of each.
  (codes #() :type simple-vector :read-only t)
  (starts #() :type simple-vector :read-only t)
  (count 0 :type index :read-only t))

(declaim (type (or null coverage) *coverage*))
(defvar *coverage* nil
  "The marks that tell what a test ran, or NIL when that is not asked for.")

(defun marked-codes ()
  "Return the code components with marks."
  (loop for codes in (cdr sb-int:*code-coverage-info*)
        append (loop for index below (sb-int:weak-vector-len codes)
                     for code = (sb-int:weak-vector-ref codes index)
                     when (and code (sb-c::code-coverage-map code))
                       collect code)))

(defun present-coverage ()
  "Return the marks that there are."
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
  "True when what the mark INDEX of CODE stands for has run."
  (let ((marks (sb-cover::code-coverage-marks code)))
    #+(or x86-64 x86) (/= 0 (sap-ref-8 marks index))
    #-(or x86-64 x86) (/= #xFF (if (vectorp marks) (aref marks index) (sap-ref-8 marks index)))))

(defun unset-mark (code index)
  "Have the mark INDEX of CODE not be set."
  (let ((marks (sb-cover::code-coverage-marks code)))
    #+(or x86-64 x86) (setf (sap-ref-8 marks index) 0)
    #-(or x86-64 x86) (if (vectorp marks)
                          (setf (aref marks index) #xFF)
                          (setf (sap-ref-8 marks index) #xFF))))

(defun forget-marks ()
  "Have no mark be set."
  (map nil #'sb-cover:reset-coverage (coverage-codes *coverage*)))

(defun set-marks ()
  "Return a bit vector of the marks that are set."
  (let ((bits (make-array (coverage-count *coverage*) :element-type 'bit :initial-element 0)))
    (loop for code across (coverage-codes *coverage*)
          for start across (coverage-starts *coverage*)
          do (with-pinned-objects (code)
               (dotimes (index (length (sb-c::code-coverage-map code)))
                 (when (mark-set-p code index)
                   (setf (sbit bits (+ start index)) 1)))))
    bits))

(defun forget-marks-but (bits)
  "Have no mark be set but those of BITS, as SET-MARKS returns them."
  (declare (type simple-bit-vector bits))
  (loop for code across (coverage-codes *coverage*)
        for start across (coverage-starts *coverage*)
        do (with-pinned-objects (code)
             (dotimes (index (length (sb-c::code-coverage-map code)))
               (when (and (zerop (sbit bits (+ start index))) (mark-set-p code index))
                 (unset-mark code index))))))

(defun call-unmarked (function)
  "Return the values of FUNCTION, which sets no marks: it tells of a failure."
  (declare (type function function))
  (if *coverage*
      (let ((marks (set-marks)))
        (unwind-protect (funcall function)
          (forget-marks-but marks)))
      (funcall function)))
