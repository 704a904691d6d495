;;;; Detects changes of files for ASDF, which compares only dates, in whole seconds. ASDF therefore misses an edit within
;;;; the second in which the fasl was made, and a file that was restored with an older date. The code below compares dates
;;;; to the nanosecond, and compares files with their state when this image compiled or loaded them.

(in-package "SBCL-HOST")

;;; The state of a file

(defstruct (file-state (:copier nil) (:predicate nil))
  "A file's dates, size and inode at a certain time."
  ;; MTIME is the date of the last change of the content; programs can set it. CTIME is the date of the last change of the
  ;; content or the inode; programs cannot set it. Both dates are in nanoseconds of universal time.
  (mtime 0 :type integer :read-only t)
  (ctime 0 :type integer :read-only t)
  (size 0 :type integer :read-only t)
  (inode 0 :type integer :read-only t))

(defun universal-nanoseconds (seconds &optional (nanoseconds 0))
  "Convert Unix time in SECONDS and NANOSECONDS to nanoseconds of universal time."
  (+ (* 1000000000 (+ seconds sb-impl::unix-to-universal-time)) nanoseconds))

#+linux
(defun exact-file-state (namestring)
  "Return the FILE-STATE, with dates to the nanosecond, of the file whose native namestring is NAMESTRING. Return NIL
when the file does not exist or statx(2) is not available."
  (let ((words (make-array 32 :element-type '(signed-byte 64) :initial-element 0)))
    (when (eql 0 (with-pinned-objects (words)
                   (alien-funcall (extern-alien "statx" (function int int c-string int unsigned-int system-area-pointer))
                                  ;; -100 is AT_FDCWD. The mask is STATX_MTIME, STATX_CTIME, STATX_INO and STATX_SIZE.
                                  -100 namestring 0 #x3C0 (vector-sap words))))
      (flet ((date (word)
               (universal-nanoseconds (aref words word) (ldb (byte 32 0) (aref words (1+ word))))))
        (make-file-state :inode (aref words 4) :size (aref words 5) :ctime (date 12) :mtime (date 14))))))

(defun file-state (namestring)
  "Return the FILE-STATE of the file whose native namestring is NAMESTRING, or NIL when there is no such file."
  (or #+linux (exact-file-state namestring)
      (multiple-value-bind (found device inode mode links user group type size accessed written changed)
          (sb-unix:unix-stat namestring)
        (declare (ignore device mode links user group type accessed))
        (and found
             (make-file-state :inode inode
                              :size size
                              :mtime (universal-nanoseconds written)
                              :ctime (universal-nanoseconds changed))))))

(defun content-date (state)
  "Return the latest time at which the content of STATE's file can have been written: the earlier of its mtime and ctime.
An mtime later than the ctime is not reliable, because a program or another machine's clock has set it."
  (min (file-state-mtime state) (file-state-ctime state)))

(defun file-changed-p (before namestring)
  "Return true when the file whose native namestring is NAMESTRING no longer has the state BEFORE. Comparing the mtime
is not enough, because programs that copy files may preserve it; the inode and ctime then differ. A file also counts as
changed after a change of its mode, or after the image was moved to another machine; the file is then loaded once more
than necessary."
  (let ((now (file-state namestring)))
    (not (and now
              (= (file-state-mtime before) (file-state-mtime now))
              (= (file-state-ctime before) (file-state-ctime now))
              (= (file-state-inode before) (file-state-inode now))
              (= (file-state-size before) (file-state-size now))))))

(defconstant +clock-tick+ 11000000
  "The time, in nanoseconds, after which a second write to a file is certain to give the file a later date. Kernels take
file dates from a clock whose ticks last 10 ms or less.")

(defun await-clock-tick (state)
  "If the file whose FILE-STATE is STATE was written within the last clock tick, wait until another write would give the
file a later date, but no longer than some 20 ms."
  (flet ((age ()
           (multiple-value-bind (seconds nanoseconds) (sb-unix:clock-gettime sb-unix:clock-realtime)
             (- (universal-nanoseconds seconds nanoseconds) (content-date state)))))
    (loop repeat 20
          while (<= 0 (age) +clock-tick+)
          do (sleep 0.001))))

;;; Source files as this image loaded them

(defglobal **loaded-file-states** (make-hash-table :test 'equal :synchronized t)
  "A table from the native namestrings of source files that were compiled or loaded to FILE-STATEs. The state is the state of
the source file when it was last compiled or loaded; or, if its fasl was loaded, when the fasl was made.")

(defun note-loaded-file-state (namestring state)
  "Record STATE, a FILE-STATE or NIL, as the state in which this image loads the source file whose native namestring is
NAMESTRING."
  (when state
    (setf (gethash namestring **loaded-file-states**) state)))

(defun note-source-state (source)
  "Record the state of the file SOURCE, which COMPILE-FILE is about to compile."
  (guarded (let ((namestring (sb-ext:native-namestring
                              (truename (merge-pathnames source (make-pathname :type "lisp"
                                                                               :defaults *default-pathname-defaults*))))))
             (note-loaded-file-state namestring (file-state namestring)))
      (failure)
    nil))

(defun source-changed-p (namestring created date)
  "Return true when the source file whose native namestring is NAMESTRING has changed since it was compiled. CREATED is
the write date of the version that was compiled, and DATE is the write date of the file now; both are universal times.
If the dates are equal, the file may have been edited again within that second. In this case, compare it with the state
that this image recorded when it compiled or loaded the file, if any."
  (or (not (eql created date))
      (let ((loaded (gethash namestring **loaded-file-states**)))
        (and loaded
             (eql created (floor (file-state-mtime loaded) 1000000000))
             (file-changed-p loaded namestring)))))

;;; ASDF's actions: an action is an operation on a component

(defglobal **action-states** (make-hash-table :test 'eq :weakness :key :synchronized t)
  "The states of each component's files when this image last performed operations on the component. Keys are components.
Values are alists from the class name of an operation to an alist from native namestrings to FILE-STATEs.")

(defvar *current-action* nil
  "The action that ASDF is performing, or NIL: a list of the operation, the component, and an alist from the native
namestrings of the files to their FILE-STATEs before the action.")

(defun native-namestrings (pathnames)
  "Return the native namestrings of PATHNAMES, a list of pathnames. Elements that are NIL are skipped."
  (loop for pathname in pathnames
        when pathname
          collect (sb-ext:native-namestring (merge-pathnames (translate-logical-pathname pathname)))))

(defun action-files (operation component)
  "Return the native namestrings of the files that OPERATION on COMPONENT reads, beginning with the file that OPERATION
compiles, if any. For a load operation, include the source from which the fasl was made."
  (remove-duplicates
   (native-namestrings (append (asdf:input-files operation component)
                               (and (typep operation 'asdf/lisp-action:basic-load-op)
                                    (typep component 'asdf:file-component)
                                    (list (asdf:component-pathname component)))))
   :test #'string= :from-end t))

(defun action-states (operation component)
  "Return an alist from native namestrings to FILE-STATEs for the files that OPERATION on COMPONENT reads."
  (loop for name in (action-files operation component)
        for state = (file-state name)
        when state
          collect (cons name state)))

(defun compiles-source-p (operation component)
  "Return true when OPERATION on COMPONENT compiles a source file to a fasl."
  (and (typep operation 'asdf:compile-op) (typep component 'asdf:cl-source-file)))

(defun at-least-as-new-p (source fasl)
  "Return true when SOURCE and FASL, native namestrings, name existing files and the source is not older than the fasl."
  (let ((source (file-state source))
        (fasl (file-state fasl)))
    (and source fasl
         (>= (content-date source) (content-date fasl)))))

(defun outputs-newer-p (outputs files)
  "Return true when all files of OUTPUTS were written after the last change of each file of FILES. Both are lists of
native namestrings; the result is false if a file does not exist."
  (flet ((states (names) (mapcar #'file-state names)))
    (let ((made (states outputs))
          (read (states files)))
      (and (notany #'null made)
           (notany #'null read)
           (loop for made in made
                 always (loop for read in read
                              always (> (content-date made) (file-state-ctime read))))))))

(defun changed-files (operation component files)
  "Return the members of FILES, native namestrings, that have changed since OPERATION on COMPONENT was performed or, if
OPERATION is NIL, since any operation on COMPONENT was performed."
  (loop for (name . states) in (gethash component **action-states**)
        when (or (null operation) (eq name (type-of operation)))
          append (loop for (file . state) in states
                       when (and (member file files :test #'string=) (file-changed-p state file))
                         collect file)))

(defun stale-action-p (operation component)
  "Return true when OPERATION on COMPONENT must be performed because its files have changed in a way that ASDF does not
detect."
  (let ((files (action-files operation component))
        (outputs (native-namestrings (asdf:output-files operation component))))
    (cond ((null files) nil)
          ((null outputs) (changed-files operation component files))
          (t (or (and (compiles-source-p operation component)
                      (at-least-as-new-p (first files) (first outputs)))
                 (and (changed-files nil component files)
                      ;; Another image may have performed the action since this image did.
                      (not (outputs-newer-p outputs files))))))))

(defun note-performed-action (operation component)
  "Record that OPERATION on COMPONENT was performed, with the states of its files: those before the action if they are
in *CURRENT-ACTION*, else the current states."
  (let ((states (if (and (eq operation (first *current-action*)) (eq component (second *current-action*)))
                    (third *current-action*)
                    (action-states operation component))))
    (sb-ext:with-locked-hash-table (**action-states**)
      (setf (gethash component **action-states**)
            (acons (type-of operation) states
                   (remove (type-of operation) (gethash component **action-states**) :key #'car))))))

(defun note-fasl-source-state (states)
  "Record the state of the source of a fasl that is about to be loaded, unless the source was edited after the fasl was
made. STATES is an alist from native namestrings to FILE-STATEs, whose first entry is the fasl and whose last is the
source."
  (destructuring-bind ((fasl . made) &rest others) states
    (declare (ignore fasl))
    (destructuring-bind (source . state) (first (last others))
      (when (> (content-date made) (content-date state))
        (note-loaded-file-state source state)))))

(defun perform-recording-file-states (perform operation component)
  "Call PERFORM, ASDF's function, to perform OPERATION on COMPONENT. Record the states of the files as they were before
the call, because the files may be edited during the call."
  (declare (type function perform))
  (let* ((states (guarded (action-states operation component) (failure) '()))
         (source (and states (compiles-source-p operation component) (cdr (first states)))))
    (when source
      (await-clock-tick source)
      (setf states (guarded (action-states operation component) (failure) '())))
    (when (and (typep operation 'asdf:load-op) (typep component 'asdf:cl-source-file) (rest states))
      (note-fasl-source-state states))
    (let ((*current-action* (list operation component states)))
      (funcall perform operation component))))

(defun component-file (component)
  "Return the native namestring of COMPONENT, an ASDF component, if it is a Lisp source file; else NIL."
  (and (typep component 'asdf:cl-source-file)
       (guarded (sb-ext:native-namestring (asdf:component-pathname component)) (failure) nil)))

(defvar *files-to-reload* '()
  "The native namestrings of the source files that ASDF must load again even if they are up to date: while a form is restored,
the files that the form loaded again in the lost image, without those that the restore has already loaded.")

(defun reload-due-p (operation component)
  "Return true when OPERATION loads COMPONENT, an ASDF component, and the file of COMPONENT is in *FILES-TO-RELOAD*."
  (and *files-to-reload*
       (typep operation 'asdf:load-op)
       (member (component-file component) *files-to-reload* :test #'equal)))

(defun compute-exact-stamp (compute plan operation component just-done)
  "Return the values of COMPUTE, ASDF's COMPUTE-ACTION-STAMP: the time stamp of OPERATION on COMPONENT in PLAN, and
whether this image performed it. Return NIL and NIL when the action is stale. When only the load of an up-to-date fasl is
due, return the time stamp and NIL, as in an image that has not loaded the fasl. If JUST-DONE is true, the action has just
been performed: record the action and the states of its files."
  (declare (type function compute))
  (multiple-value-bind (stamp done) (funcall compute plan operation component :just-done just-done)
    (cond (just-done
           (guarded (note-performed-action operation component) (failure) nil)
           (when (reload-due-p operation component)
             (setf *files-to-reload* (remove (component-file component) *files-to-reload* :test #'equal)))
           (values stamp done))
          ((and stamp (guarded (stale-action-p operation component) (failure) nil))
           (values nil nil))
          ((reload-due-p operation component)
           (values stamp nil))
          (t (values stamp done)))))

(defun exact-file-stamp (namestring)
  "Return the time stamp of the file NAMESTRING for ASDF: the CONTENT-DATE, in nanoseconds. Return NIL when there is no
such file."
  (let ((state (guarded (file-state (first (native-namestrings (list (parse-namestring namestring))))) (failure) nil)))
    (and state (content-date state))))
