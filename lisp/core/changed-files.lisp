;;;; Changes on disk. ASDF compares dates alone, in whole seconds: it takes a file for up to date that was edited
;;;; within the second in which its fasl was made, or that came back with an older date. Here dates are compared to the
;;;; nanosecond, and files with what they were when this image compiled or loaded them.

(in-package "SBCL-HOST")

;;; The state of a file

(defstruct (file-state (:copier nil) (:predicate nil))
  "A file's dates, size and inode at some moment."
  ;; When its content was written, by its date, and when anything of the file was changed last, which no program can set: both
  ;; in nanoseconds of universal time.
  (written 0 :type integer :read-only t)
  (changed 0 :type integer :read-only t)
  (size 0 :type integer :read-only t)
  (inode 0 :type integer :read-only t))

(defun universal-nanoseconds (seconds &optional (nanoseconds 0))
  "Return the nanoseconds of universal time at SECONDS and NANOSECONDS of Unix time."
  (+ (* 1000000000 (+ seconds sb-impl::unix-to-universal-time)) nanoseconds))

#+linux
(defun exact-file-state (namestring)
  "Return the FILE-STATE of the file NAMESTRING, native; NIL when there is no such file, or statx(2) is not to be had."
  (let ((words (make-array 32 :element-type '(signed-byte 64) :initial-element 0)))
    (when (eql 0 (with-pinned-objects (words)
                   (alien-funcall (extern-alien "statx" (function int int c-string int unsigned-int system-area-pointer))
                                  ;; AT_FDCWD; STATX_MTIME, STATX_CTIME, STATX_INO and STATX_SIZE
                                  -100 namestring 0 #x3C0 (vector-sap words))))
      (flet ((date (word)
               (universal-nanoseconds (aref words word) (ldb (byte 32 0) (aref words (1+ word))))))
        (make-file-state :inode (aref words 4) :size (aref words 5) :changed (date 12) :written (date 14))))))

(defun file-state (namestring)
  "Return the FILE-STATE of the file NAMESTRING, native, or NIL when there is no such file."
  (or #+linux (exact-file-state namestring)
      (multiple-value-bind (found device inode mode links user group type size accessed written changed)
          (sb-unix:unix-stat namestring)
        (declare (ignore device mode links user group type accessed))
        (and found
             (make-file-state :inode inode
                              :size size
                              :written (universal-nanoseconds written)
                              :changed (universal-nanoseconds changed))))))

(defun content-date (state)
  "Return when the content of the file in STATE was written last, at the latest: a date later than the last change of the
file itself comes from another clock."
  (min (file-state-written state) (file-state-changed state)))

(defun file-changed-p (before namestring)
  "True when the file NAMESTRING, native, is not as it was in the state BEFORE. Programs that copy files set the date of the
content; the inode and the date of the last change tell such a file from its predecessor. A file whose mode was changed
counts as changed, and so does each file after its image was moved to another machine: it is loaded once more than needed."
  (let ((now (file-state namestring)))
    (not (and now
              (= (file-state-written before) (file-state-written now))
              (= (file-state-changed before) (file-state-changed now))
              (= (file-state-inode before) (file-state-inode now))
              (= (file-state-size before) (file-state-size now))))))

(defconstant +clock-tick+ 11000000
  "The nanoseconds after which what is written into a file is sure to give it a later date: kernels count dates in ticks of
10 ms or less.")

(defun await-later-dates (state)
  "Wait until what is made of the file in STATE has a later date, if the file was written within the last tick."
  (flet ((age ()
           (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-realtime)
             (- (universal-nanoseconds seconds nanoseconds) (content-date state)))))
    (loop repeat 20
          while (<= 0 (age) +clock-tick+)
          do (sleep 0.001))))

;;; Source files as this image loaded them

(defglobal **loaded-states** (make-hash-table :test 'equal :synchronized t)
  "The FILE-STATEs of source files when they were loaded last, or when the fasl was made that was, by native namestring.")

(defun note-loaded-state (namestring state)
  "Record that the source file NAMESTRING, native, is in STATE, a FILE-STATE or NIL, where this image loads it."
  (when state
    (setf (gethash namestring **loaded-states**) state)))

(defun note-source-state (source)
  "Record the state of SOURCE, which COMPILE-FILE is about to compile."
  (guarded (let ((namestring (sb-ext:native-namestring
                              (truename (merge-pathnames source (make-pathname :type "lisp"
                                                                               :defaults *default-pathname-defaults*))))))
             (note-loaded-state namestring (file-state namestring)))
      (failure)
    nil))

(defun source-changed-p (namestring created date)
  "True when the source file NAMESTRING, native, written at DATE, is not what code was compiled from that was written at
CREATED. Both are universal times; within the second this image's own record decides."
  (or (not (eql created date))
      (let ((loaded (gethash namestring **loaded-states**)))
        (and loaded
             (eql created (floor (file-state-written loaded) 1000000000))
             (file-changed-p loaded namestring)))))

;;; ASDF's actions: an operation on a component

(defglobal **action-states** (make-hash-table :test 'eq :weakness :key :synchronized t)
  "By component, what its files were when this image performed an operation on the component: lists of the operation's class
name and conses of native namestring and FILE-STATE.")

(defvar *performing* nil
  "The action that ASDF performs: a list of operation, component and what its files were before, as in **ACTION-STATES**.")

(defun native-names (pathnames)
  "Return the native namestrings of PATHNAMES."
  (loop for pathname in pathnames
        when pathname
          collect (sb-ext:native-namestring (merge-pathnames (translate-logical-pathname pathname)))))

(defun action-files (operation component)
  "Return the native namestrings of the files that OPERATION on COMPONENT reads; first the one that it compiles, if any. A
load reads the source as well, since the fasl stands for that."
  (remove-duplicates
   (native-names (append (asdf:input-files operation component)
                         (and (typep operation 'asdf/lisp-action:basic-load-op)
                              (typep component 'asdf:file-component)
                              (list (asdf:component-pathname component)))))
   :test #'string= :from-end t))

(defun action-states (operation component)
  "Return what the files are that OPERATION on COMPONENT reads: conses of native namestring and FILE-STATE."
  (loop for name in (action-files operation component)
        for state = (file-state name)
        when state
          collect (cons name state)))

(defun compiles-source-p (operation component)
  "True when OPERATION on COMPONENT makes a fasl of a source file."
  (and (typep operation 'asdf:compile-op) (typep component 'asdf:cl-source-file)))

(defun as-new-as-p (source fasl)
  "True when the file SOURCE, native, is not older than the file FASL."
  (let ((source (file-state source))
        (fasl (file-state fasl)))
    (and source fasl
         (>= (content-date source) (content-date fasl)))))

(defun made-since-p (outputs files)
  "True when OUTPUTS, native namestrings, were written after anything was changed of FILES."
  (flet ((states (names) (mapcar #'file-state names)))
    (let ((made (states outputs))
          (read (states files)))
      (and (notany #'null made)
           (notany #'null read)
           (loop for made in made
                 always (loop for read in read
                              always (> (content-date made) (file-state-changed read))))))))

(defun changed-files (operation component files)
  "Return those of FILES, native namestrings, that are not what they were when OPERATION on COMPONENT was performed; all
operations count on COMPONENT if OPERATION is NIL."
  (loop for (name . states) in (gethash component **action-states**)
        when (or (null operation) (eq name (type-of operation)))
          append (loop for (file . state) in states
                       when (and (member file files :test #'string=) (file-changed-p state file))
                         collect file)))

(defun stale-action-p (operation component)
  "True when OPERATION on COMPONENT must be performed since its files are not what they were: what ASDF does not see."
  (let ((files (action-files operation component))
        (outputs (native-names (asdf:output-files operation component))))
    (cond ((null files) nil)
          ((null outputs) (changed-files operation component files))
          (t (or (and (compiles-source-p operation component)
                      (as-new-as-p (first files) (first outputs)))
                 (and (changed-files nil component files)
                      ;; Another image may have done it.
                      (not (made-since-p outputs files))))))))

(defun note-performed (operation component)
  "Record that OPERATION on COMPONENT was performed, and of which files."
  (let ((states (if (and (eq operation (first *performing*)) (eq component (second *performing*)))
                    (third *performing*)
                    (action-states operation component))))
    (sb-ext:with-locked-hash-table (**action-states**)
      (setf (gethash component **action-states**)
            (acons (type-of operation) states
                   (remove (type-of operation) (gethash component **action-states**) :key #'car))))))

(defun note-loaded-source (states)
  "Record that a fasl is about to be loaded, the first of STATES, as in **ACTION-STATES**, and what its source is, the last of
them; unless that was edited since the fasl was made."
  (destructuring-bind ((fasl . made) &rest others) states
    (declare (ignore fasl))
    (destructuring-bind (source . state) (first (last others))
      (when (> (content-date made) (content-date state))
        (note-loaded-state source state)))))

(defun perform-noting-files (perform operation component)
  "What ASDF's PERFORM does. What its files are is known from before, in case they are edited meanwhile."
  (declare (type function perform))
  (let* ((states (guarded (action-states operation component) (failure) '()))
         (source (and states (compiles-source-p operation component) (cdr (first states)))))
    (when source
      (await-later-dates source)
      (setf states (guarded (action-states operation component) (failure) '())))
    (when (and (typep operation 'asdf:load-op) (typep component 'asdf:cl-source-file) (rest states))
      (note-loaded-source states))
    (let ((*performing* (list operation component states)))
      (funcall perform operation component))))

(defun compute-exact-stamp (compute plan operation component just-done)
  "What ASDF's COMPUTE-ACTION-STAMP, COMPUTE, does: return when the action was done and whether that was in this image, or NIL
and NIL when it is to be done."
  (declare (type function compute))
  (multiple-value-bind (stamp done) (funcall compute plan operation component :just-done just-done)
    (cond (just-done
           (guarded (note-performed operation component) (failure) nil)
           (values stamp done))
          ((and stamp (guarded (stale-action-p operation component) (failure) nil))
           (values nil nil))
          (t (values stamp done)))))

(defun exact-file-stamp (namestring)
  "Return ASDF's time stamp of the file NAMESTRING: when its content was written, in nanoseconds; or NIL when there is no
such file."
  (let ((state (guarded (file-state (first (native-names (list (parse-namestring namestring))))) (failure) nil)))
    (and state (content-date state))))
