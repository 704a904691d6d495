;;;; Locating things in source text: from SBCL's debug information about a form to file, line, column and line of source.
;;;; Nothing here reads, interns or evaluates; the text is only scanned.

(in-package "SBCL-HOST")

;;; A form is represented by the position where it begins: an atom by that position, a cons by a list of the position
;;; and the representations of its elements. This representation is called a map of the form. 'X is (QUOTE X), and the
;;; form after a comma is its second element, which is how SBCL counts (SUB-FIND-SOURCE-PATHS in
;;; src/compiler/ir1tran.lisp). A form that begins with a reader macro of the user's is represented by a list of its
;;; position alone, since it may contain anything.

(defconstant +max-nesting+ 300
  "The maximum nesting depth at which subforms are found.")

(deftype source-text ()
  "A text to scan."
  '(simple-array character (*)))

(defun whitespace-p (character)
  "Return true when CHARACTER is whitespace in standard syntax."
  (member character '(#\Space #\Newline #\Tab #\Page #\Return #\Linefeed)))

(defun constituent-p (character)
  "Return true when CHARACTER continues a token."
  (not (or (whitespace-p character) (find character "\"'(),;`"))))

(defun scan-failed ()
  "Abort the scan, because the text is not in standard syntax or ends too early."
  (throw 'scan-failed nil))

(defun block-comment-end (text position)
  "Return the position after the block comment that begins at POSITION in TEXT."
  (declare (type source-text text) (type index position))
  (let ((depth 0))
    (loop
      (let ((next (and (< (1+ position) (length text)) (schar text (1+ position)))))
        (unless next (scan-failed))
        (cond ((and (char= (schar text position) #\#) (char= next #\|))
               (incf depth)
               (incf position 2))
              ((and (char= (schar text position) #\|) (char= next #\#))
               (incf position 2)
               (when (zerop (decf depth))
                 (return position)))
              (t (incf position)))))))

(defun delimited-end (text position delimiter)
  "Return the position after the next unescaped DELIMITER in TEXT, from POSITION on."
  (declare (type source-text text) (type index position))
  (loop
    (when (>= position (length text)) (scan-failed))
    (let ((character (schar text position)))
      (incf position)
      (cond ((char= character delimiter) (return position))
            ((char= character #\\) (incf position))))))

(defun token-end (text position)
  "Return the end of the token of TEXT that contains POSITION."
  (declare (type source-text text) (type index position))
  (loop
    (when (>= position (length text)) (return (length text)))
    (let ((character (schar text position)))
      (cond ((char= character #\\) (incf position 2))
            ((char= character #\|) (setf position (delimited-end text (1+ position) #\|)))
            ((constituent-p character) (incf position))
            (t (return position))))))

(defun feature-p (text form)
  "Return true when FORM, the map of a feature expression in TEXT, holds in this image."
  (flet ((name (form)
           (let ((token (subseq text form (token-end text form))))
             (string-upcase (subseq token (let ((colon (position #\: token :from-end t))) (if colon (1+ colon) 0)))))))
    (if (integerp form)
        (member (name form) *features* :test #'string=)
        (destructuring-bind (&optional operator &rest operands) (rest form)
          (unless (integerp operator) (scan-failed))
          (let ((operator (name operator)))
            (cond ((string= operator "AND") (every (lambda (operand) (feature-p text operand)) operands))
                  ((string= operator "OR") (some (lambda (operand) (feature-p text operand)) operands))
                  ((string= operator "NOT") (notany (lambda (operand) (feature-p text operand)) operands))
                  (t (scan-failed))))))))

(defun form-start (text position depth)
  "Return the start of the next form or closing parenthesis of TEXT, from POSITION on, after whitespace, comments, and
forms excluded by feature expressions. Return the length of TEXT when there is none. DEPTH is the nesting depth, from 0."
  (declare (type source-text text) (type index position depth))
  (loop
    (let ((character (if (< position (length text)) (schar text position) (return (length text))))
          (next (and (< (1+ position) (length text)) (schar text (1+ position)))))
      (cond ((whitespace-p character) (incf position))
            ((char= character #\;)
             (setf position (or (position #\Newline text :start position) (length text))))
            ((not (char= character #\#)) (return position))
            ((eql next #\|) (setf position (block-comment-end text position)))
            ((member next '(#\+ #\-))
             (multiple-value-bind (feature end) (scan-form text (+ position 2) (1+ depth))
               (setf position (if (eq (char= next #\+) (and (feature-p text feature) t))
                                  end
                                  (nth-value 1 (scan-form text end (1+ depth)))))))
            (t (return position))))))

(defun scan-elements (text position depth)
  "Return the maps of the elements of a list in TEXT, whose first element is at or after POSITION, and the position after
its closing parenthesis."
  (declare (type source-text text) (type index position depth))
  (let ((elements '()))
    (loop
      (let ((start (form-start text position depth)))
        (when (>= start (length text)) (scan-failed))
        (cond ((char= (schar text start) #\))
               (return (values (nreverse elements) (1+ start))))
              ((and (char= (schar text start) #\.) elements (= (token-end text start) (1+ start)))
               ;; The form after the dot is the list's tail: its elements, a comma's too, are elements of the list.
               (multiple-value-bind (tail end) (scan-form text (1+ start) depth)
                 (let ((close (form-start text end depth)))
                   (unless (and (< close (length text)) (char= (schar text close) #\))) (scan-failed))
                   (return (values (nreconc elements (if (consp tail) (rest tail) '())) (1+ close))))))
              (t (multiple-value-bind (element end) (scan-form text start depth)
                   (push element elements)
                   (setf position end))))))))

(defvar *source-package* nil
  "The package in which the text was read, as far as known, or NIL.")

(defvar *values-read* '()
  "The lists that #. has produced so far in this form. SBCL numbers the conses of each list only once.")

(defun scan-read-value (text position start)
  "Return the map of the value that #. at START of TEXT reads; the form after it is at POSITION. The value is taken for an
atom, whose map is START, unless that form is a variable that holds a list now, such as a list of declarations."
  (let* ((name (and (< position (length text)) (constituent-p (schar text position)) (token-name text position)))
         (symbol (and name *source-package* (find-symbol name *source-package*)))
         (value (and symbol (boundp symbol) (symbol-value symbol)))
         (left 1000))
    (labels ((represent (value)
               (if (and (consp value) (ignore-errors (list-length value)) (plusp (decf left)))
                   (cons start (mapcar #'represent value))
                   start)))
      (cond ((or (atom value) (member value *values-read* :test #'eq)) start)
            (t (push value *values-read*)
               (represent value))))))

(defun scan-dispatching (text start depth)
  "Return the map of the form of TEXT that begins with # at START, nested DEPTH deep, and the end of the form."
  (declare (type source-text text) (type index start depth))
  (let* ((position (or (position-if-not #'digit-char-p text :start (1+ start)) (scan-failed)))
         (next (1+ position)))
    (flet ((atom-of (text position)
             (values start (nth-value 1 (scan-form text position depth)))))
      (case (char-upcase (schar text position))
        (#\\ (values start (token-end text (1+ next))))
        (#\' (multiple-value-bind (form end) (scan-form text next depth)
               (values (list start start form) end)))
        (#\( (values start (nth-value 1 (scan-elements text next depth))))
        ((#\: #\*) (values start (token-end text next)))
        (#\. (values (scan-read-value text next start) (nth-value 1 (scan-form text next depth))))
        ((#\B #\O #\X #\R #\P #\C #\S #\A) (atom-of text next))
        (#\= (scan-form text next depth))
        (#\# (values start next))
        ((#\) #\< #\Space #\Tab #\Newline #\Return #\Page) (scan-failed))
        (#\" (values (list start) (delimited-end text next #\")))
        ;; Most other dispatching macros read one form: #L(foo !1), #?"text", #8@(1 2).
        (t (values (list start) (nth-value 1 (scan-form text next depth))))))))

(defun opaque-form-p (form)
  "Return true when FORM, in a map, begins with a reader macro of the user's."
  (and (consp form) (null (rest form))))

(defun scan-form (text position depth)
  "Return the map of the form that begins at or after POSITION in TEXT, nested DEPTH deep, and the end of the form."
  (declare (type source-text text) (type index position depth))
  (when (> depth +max-nesting+) (scan-failed))
  (let ((start (form-start text position depth))
        (depth (1+ depth)))
    (when (>= start (length text)) (scan-failed))
    (flet ((prefixed (length)
             (multiple-value-bind (form end) (scan-form text (+ start length) depth)
               (values (list start start form) end))))
      (case (schar text start)
        (#\( (multiple-value-bind (elements end) (scan-elements text (1+ start) depth)
               (values (if elements (cons start elements) start) end)))
        (#\) (scan-failed))
        (#\" (values start (delimited-end text (1+ start) #\")))
        ((#\' #\`) (prefixed 1))
        (#\, (prefixed (if (and (< (1+ start) (length text)) (find (schar text (1+ start)) "@.")) 2 1)))
        (#\# (scan-dispatching text start depth))
        (t (values start (token-end text start)))))))

(defun map-form (text &optional (start 0))
  "Return the map of the first form in TEXT at or after START, and its end; or NIL when the syntax is not understood."
  (let ((*values-read* '()))
    (catch 'scan-failed (scan-form text start 0))))

(defun form-position (form)
  "Return the position at which FORM, in a map, begins."
  (if (consp form) (first form) form))

(defun position-at-path (map path)
  "Return the position of the subform of MAP at PATH, a list of indices. If there is none, return the position of the
innermost enclosing form."
  (let ((form map))
    (dolist (index path (form-position form))
      (let ((element (and (consp form) (nth index (rest form)))))
        (if element
            (setf form element)
            (return (form-position form)))))))

(defun position-of-number (map number)
  "Return the position of the subform of MAP to which the compiler gave NUMBER, or NIL. The compiler numbers conses, outer
ones first (SUB-FIND-SOURCE-PATHS in src/compiler/ir1tran.lisp)."
  (labels ((visit (form depth)
             (when (consp form)
               (when (zerop number)
                 (return-from position-of-number (first form)))
               (decf number)
               (when (< depth 100)
                 (dolist (element (rest form))
                   (visit element (1+ depth)))))))
    (visit map 0)
    nil))

(defun token-position (token text &optional (start 0))
  "Return the first position in TEXT, from START on, of TOKEN as a whole token or after a package prefix, ignoring case;
or NIL."
  (declare (type string token) (type source-text text))
  (loop for from = start then (1+ found)
        for found = (search token text :start2 from :test #'char-equal)
        for end = (and found (+ found (length token)))
        while found
        when (and (or (zerop found)
                      (not (constituent-p (schar text (1- found))))
                      (find (schar text (1- found)) ":#|"))
                  (or (= end (length text)) (char= #\| (schar text end)) (not (constituent-p (schar text end)))))
          return found))

;;; Lines

(defvar *submitted-code* ""
  "The code that the client submitted to this evaluation.")

(defun line-and-column (text position)
  "Return the line and the column of POSITION in TEXT, both from 1."
  (let* ((end (min position (length text)))
         (newline (position #\Newline text :end end :from-end t)))
    (values (1+ (count #\Newline text :end end))
            (if newline (- end newline) (1+ end)))))

(defconstant +max-shown-line+ 100
  "The maximum number of characters shown of a line of source.")

(defun line-at (text position)
  "Return the line of TEXT that contains POSITION, trimmed. Of a line that is too long, return the part from POSITION on."
  (flet ((trim (start end) (string-trim '(#\Space #\Tab #\Return) (subseq text start end)))
         (cut (line) (if (> (length line) +max-shown-line+)
                         (concatenate 'string (subseq line 0 (1- +max-shown-line+)) "…")
                         line)))
    (let* ((position (min position (length text)))
           (start (let ((newline (position #\Newline text :end position :from-end t))) (if newline (1+ newline) 0)))
           (end (or (position #\Newline text :start position) (length text)))
           (line (trim start end)))
      (cut (if (> (length line) +max-shown-line+) (trim position end) line)))))

;;; Code that was evaluated

(defstruct (evaluated-form (:conc-name evaluated-) (:copier nil) (:predicate nil)
                           (:print-object (lambda (form stream)
                                            (print-unreadable-object (form stream)
                                              (format stream "evaluation ~D, line ~D"
                                                      (evaluated-evaluation form) (evaluated-line form))))))
  "A top-level form that was evaluated. Its definitions refer to it through SB-C::*SOURCE-PLIST*."
  (evaluation 0 :type index)
  ;; The position at which the form began in the submitted code.
  (start 0 :type index)
  (line 1 :type index)
  (text nil :type (or null simple-string))
  form)

(defconstant +max-kept-form+ 50000
  "The maximum length of a top-level form whose text is kept with its definitions.")

(defvar *evaluated-forms* '()
  "The forms that this evaluation has evaluated so far, newest first.")

(defun compact-subseq (text start end)
  "Return the part of TEXT from START to END, as a base string (one byte a character) if possible."
  (declare (type text text) (type index start end))
  (if (loop for position of-type index from start below end
            always (sb-kernel:base-char-p (schar text position)))
      (replace (make-string (- end start) :element-type 'base-char) text :start2 start :end2 end)
      (subseq text start end)))

(defun count-newlines (text start end)
  "Return the number of newlines in TEXT from START to END."
  (declare (type text text) (type index start end))
  (loop for position of-type index from start below end
        count (char= #\Newline (schar text position))))

(defun form-line (code start)
  "Return the line in CODE, the submitted code, of the form that begins at START. Count from the previously evaluated
form; counting from the beginning would take quadratic time for many forms."
  (declare (type text code) (type index start))
  (let ((before (first *evaluated-forms*)))
    (if (and before (<= (evaluated-start before) start))
        (+ (evaluated-line before) (count-newlines code (evaluated-start before) start))
        (1+ (count-newlines code 0 start)))))

(defun note-evaluated-form (form number code start end)
  "Return the value of SB-C::*SOURCE-PLIST* for the evaluation of FORM, which extends from START below END in CODE, by the
evaluation NUMBER."
  (declare (type text code) (type index start end))
  (let ((evaluated (make-evaluated-form
                    :evaluation number
                    :start start
                    :line (form-line code start)
                    :text (when (<= (- end start) +max-kept-form+) (compact-subseq code start end))
                    :form form)))
    (push evaluated *evaluated-forms*)
    (list :evaluation evaluated)))

(defun without-evaluation (plist)
  "Return PLIST without the properties that NOTE-EVALUATED-FORM put at its end."
  (ldiff plist (loop for tail on plist by #'cddr
                     when (typep (second tail) 'evaluated-form) return tail)))

(defun plist-evaluation (plist)
  "Return the EVALUATED-FORM in PLIST, or NIL."
  (let ((evaluated (getf plist :evaluation)))
    (and (typep evaluated 'evaluated-form) evaluated)))

(defun conses-at-path (form path)
  "Return the conses on PATH, a list of indices, through FORM, innermost first, each in a cons with the rest of the path
from there."
  (let ((conses '()))
    (loop
      (loop while (sb-int:comma-p form)
            do (unless (eql 1 (pop path)) (return-from conses-at-path conses))
               (setf form (sb-int:comma-expr form)))
      (unless (consp form) (return conses))
      (push (cons form path) conses)
      (when (null path) (return conses))
      (let ((tail (ignore-errors (nthcdr (pop path) form))))
        (setf form (and (consp tail) (car tail)))))))

(defun path-to-conses (conses form)
  "Return the path in FORM to the target of the first of CONSES, a list from CONSES-AT-PATH, that is a part of FORM; and
true. Return NIL and NIL when none is."
  (let ((best nil) (best-path '()) (steps 0))
    (labels ((visit (form path depth)
               (when (sb-int:comma-p form)
                 (setf form (list 'comma (sb-int:comma-expr form))))
               (when (and (consp form) (< depth 100))
                 (let ((found (member form conses :key #'car :test #'eq)))
                   (when (and found (or (null best) (tailp best found)))
                     (setf best found
                           best-path path)
                     (when (eq best conses)
                       (return-from path-to-conses (values (revappend path (cdr (first best))) t)))))
                 (loop for index of-type index from 0
                       for rest = form then (cdr rest)
                       while (and (consp rest) (< (incf steps) 100000))
                       do (visit (car rest) (cons index path) (1+ depth))))))
      (visit form '() 0)
      (if best
          (values (revappend best-path (cdr (first best))) t)
          (values '() nil)))))

;;; Files

(defconstant +max-file-octets+ 4000000
  "The maximum size of a file that is read.")
(defconstant +max-report-octets+ 8000000
  "The maximum total size of files, not counting the last one, that are cached for one report.")

(defvar *source-files* '()
  "The cache of files read for this report: lists of namestring, write date, octets, the last result of SCAN-FILE or NIL,
and the result of SCAN-START-POSITIONS or NIL.")
(defvar *known-places* nil
  "The cache of places found for this report: a hash table from SB-DI:DEBUG-FUNs to alists from program counters to
places; :NONE before there is any; NIL outside a report.")

(defmacro with-source-files (() &body body)
  "Evaluate BODY with a cache for files and locations, so that each is looked up only once."
  `(let ((*source-files* '())
         (*known-places* :none))
     ,@body))

(defun read-octets (namestring)
  "Return the octets of the file NAMESTRING, native; NIL when it is not a regular file or is too large."
  (when (eq :file (sb-impl::native-file-kind namestring t))
    (with-open-file (in (sb-ext:parse-native-namestring namestring) :element-type '(unsigned-byte 8) :if-does-not-exist nil)
      (when (and in (<= (file-length in) +max-file-octets+))
        (let ((octets (make-array (file-length in) :element-type '(unsigned-byte 8))))
          (subseq octets 0 (read-sequence octets in)))))))

(defun file-octets (namestring)
  "Return the octets of the file NAMESTRING, native, its write date, and its entry in *SOURCE-FILES* if there is one; or
NIL."
  (let* ((date (guarded (file-write-date (sb-ext:parse-native-namestring namestring)) (failure) nil))
         (known (find-if (lambda (known) (and (string= (first known) namestring) (eql (second known) date)))
                         *source-files*)))
    (cond ((null date) nil)
          (known (values (third known) date known))
          (t
           (let ((octets (guarded (read-octets namestring) (failure) nil)))
             (when *known-places*
               (when (> (reduce #'+ *source-files* :key (lambda (known) (length (third known)))) +max-report-octets+)
                 (setf *source-files* '()))
               (push (list namestring date octets nil nil) *source-files*))
             (values octets date (and *known-places* (first *source-files*))))))))

(defun balanced-p (text position)
  "Return true when no closing parenthesis follows within the next forms of TEXT from POSITION on."
  (loop repeat 20
        for next = (catch 'scan-failed (form-start text position 0))
        while (and next (< next (length text)))
        do (when (char= #\) (schar text next))
             (return nil))
           (setf position (or (nth-value 1 (map-form text next)) (length text)))
        finally (return t)))

(defun toplevel-form-p (before text map end whole)
  "Return true when TEXT can be the text of a top-level form, as it must be at a position that SBCL recorded unless the
file has changed. The text of a top-level form begins right after the previous form, hence after the character BEFORE,
or NIL at the beginning of the file. MAP and END are the map of the first form in TEXT, or NIL, and its end. WHOLE is
true when TEXT must contain no other form."
  (declare (type source-text text))
  (and (or (member before '(nil #\) #\"))
           (and (plusp (length text)) (whitespace-p (schar text 0))))
       (cond ((null map) (balanced-p text 0))
             ((not (find (schar text (form-position map)) "(#'`")) nil)
             (whole (eql end (length text)))
             (t (balanced-p text end)))))

(defun scan-file (entry octets start end)
  "Return the text of OCTETS from START below END, or to the end when END is NIL; the map and the end of the first form
in the text; and the value of TOPLEVEL-FORM-P. ENTRY is the file's entry in *SOURCE-FILES*, or NIL."
  (let ((known (fourth entry)))
    (unless (and known (eql start (first known)) (eql end (second known)))
      (let ((text (octets-text octets start (or end (length octets)))))
        (multiple-value-bind (map form-end) (map-form text)
          (setf known (list start end text map form-end
                            (toplevel-form-p (if (zerop start) nil (code-char (aref octets (1- start))))
                                             text map form-end (and end t))))))
      (when entry
        (setf (fourth entry) known)))
    (values-list (cddr known))))

(defun octets-text (octets start end)
  "Decode OCTETS from START below END as UTF-8."
  (coerce (sb-ext:octets-to-string octets :start (min start (length octets)) :end (min end (length octets))
                                          :external-format '(:utf-8 :replacement #\?))
          'source-text))

(defun shown-path (namestring)
  "Return NAMESTRING relative to the working directory if the file is below that directory, else NAMESTRING."
  (let ((directory (guarded (concatenate 'string (sb-posix:getcwd) "/") (failure) nil)))
    (if (and directory (> (length namestring) (length directory))
             (string= directory namestring :end2 (length directory)))
        (subseq namestring (length directory))
        namestring)))

(defstruct (place (:copier nil) (:predicate nil))
  "A place in a source file or in evaluated code."
  ;; The file or the evaluation: `src/a.lisp` or `evaluation 3`.
  (in "" :type string)
  ;; The line and the column from 1, or 0 if unknown.
  (line 0 :type index)
  (column 0 :type index)
  ;; The line of source, or NIL.
  (code nil :type (or null string))
  ;; The text of the top-level form, or NIL, and the position in that text.
  (text nil :type (or null source-text))
  (position 0 :type index))

(defun changed-file-place (namestring)
  "Return the place in the file NAMESTRING, native, for code whose file has changed since the code was compiled or
loaded."
  (make-place :in (concatenate 'string (shown-path namestring) " (changed since)")))

(defun file-place (namestring created start end find &optional name)
  "Return the place of a subform in the file NAMESTRING, native. The top-level form extends from START to END (or NIL),
in octets. FIND, a function of a map, returns the position of the subform. CREATED is the write date of the version for
which START and END are valid, or NIL when the file certainly is that version. Even if the dates are equal, the file may
have been changed within the same second. NAME is the name of the function that contains the subform, or NIL."
  (declare (type function find))
  (multiple-value-bind (octets date entry) (file-octets namestring)
    (let ((in (shown-path namestring)))
      (cond ((null octets) (make-place :in in))
            ((and created (source-changed-p namestring created date)) (changed-file-place namestring))
            ((null start) (make-place :in in))
            ((> start (length octets)) (if created (changed-file-place namestring) (make-place :in in)))
            (t
             (multiple-value-bind (text map form-end toplevel) (scan-file entry octets start end)
               (let ((position (or (and map (funcall find map))
                                   (catch 'scan-failed (form-start text 0 0))
                                   0)))
                 (if (and created
                          (not (and toplevel
                                    (or (null name) (null map) (not (defines-only-name-p map text))
                                        (< (or (token-position name text) form-end) form-end)))))
                     (changed-file-place namestring)
                     (multiple-value-bind (line column) (line-and-column text position)
                       (make-place :in in
                                   :line (+ line (count 10 octets :end start))
                                   :column (+ column (if (eql line 1) (characters-before octets start) 0))
                                   :code (line-at text position)
                                   :text text
                                   :position position))))))))))

(defun characters-before (octets position)
  "Return the number of characters before POSITION, an offset in OCTETS, in its line."
  (let ((newline (position 10 octets :end position :from-end t)))
    (length (octets-text octets (if newline (1+ newline) 0) position))))

(defun system-file-p (namestring)
  "Return true when NAMESTRING names a source file of SBCL's own."
  (eql 4 (mismatch "SYS:" namestring)))

(defun code-source (code)
  "Return the SB-DI:DEBUG-SOURCE of the code component CODE, or NIL."
  (let ((info (sb-kernel:%code-debug-info code)))
    (and (typep info 'sb-c::compiled-debug-info)
         (sb-c::debug-info-source info))))

;;; Code locations

(defun nearest-known-location (location)
  "Return LOCATION, or the beginning of its block if SBCL has no more precise information."
  (sb-debug::maybe-block-start-location location))

(defun path-of-number (form number)
  "Return the path in FORM, a list of indices, to the subform to which the compiler gave NUMBER, and true; or NIL and NIL.
Follow SUB-FIND-SOURCE-PATHS; FORM-NUMBER-TRANSLATIONS differs, as it counts a subform that occurs twice only once."
  (let ((seen (make-hash-table :test 'eq))
        (count 0))
    (labels ((visit (form path depth)
               (unless (gethash form seen)
                 (setf (gethash form seen) t)
                 (when (eql count number)
                   (return-from path-of-number (values (reverse path) t)))
                 (when (< depth 100)
                   (loop for index of-type index from 0
                         for tail = form then (cdr tail)
                         do (when (sb-int:comma-p tail)
                              (setf tail (list 'comma (sb-int:comma-expr tail))))
                            (when (or (atom tail) (> index 100000))
                              (return))
                            (let ((element (car tail)))
                              (when (sb-int:comma-p element)
                                (setf element (list 'comma (sb-int:comma-expr element))))
                              (cond ((consp element)
                                     (incf count)
                                     (visit element (cons index path) (1+ depth)))
                                    ((plusp index)
                                     (setf (gethash tail seen) t)))))))))
      (visit form '() 0)
      (values '() nil))))

(defun source-form-conses (source number)
  "Return the conses, as CONSES-AT-PATH does, that lead to the form numbered NUMBER in SOURCE, an SB-DI:DEBUG-SOURCE of
evaluated code."
  (let ((root (sb-di::core-debug-source-form source)))
    (multiple-value-bind (path found) (path-of-number root number)
      (and found (conses-at-path root path)))))

(defun name-package (name)
  "Return the package of the first symbol in NAME, a function name, that is not the system's; or NIL."
  (typecase name
    (null nil)
    (symbol (let ((package (symbol-package name)))
              (and package
                   (not (eq package (find-package "COMMON-LISP")))
                   (not (eq package (find-package "KEYWORD")))
                   (not (eql 3 (mismatch "SB-" (package-name package))))
                   package)))
    (cons (or (name-package (car name)) (name-package (cdr name))))))

(defun scan-start-positions (octets)
  "Return a vector of the positions of the top-level forms in OCTETS. As for SBCL, each form begins right after the
previous form."
  ;; Decode each octet to one character. The octets of non-ASCII characters become constituents, as the characters
  ;; themselves are.
  (let ((text (coerce (sb-ext:octets-to-string octets :external-format :latin-1) 'source-text))
        (positions (list 0))
        (*source-package* nil))
    (catch 'scan-failed
      (loop (push (nth-value 1 (scan-form text (first positions) 0)) positions)))
    (coerce (nreverse positions) 'vector)))

(defun start-positions (source namestring)
  "Return a vector of the positions, in octets, of the top-level forms in the file NAMESTRING, native; or NIL. SOURCE, an
SB-DI:DEBUG-SOURCE, contains them, unless it is of a compiled file that is still being loaded, which stores them last."
  (or (sb-di:debug-source-start-positions source)
      (multiple-value-bind (octets date entry) (file-octets namestring)
        (declare (ignore date))
        (when octets
          (or (and entry (fifth entry))
              (let ((positions (scan-start-positions octets)))
                (when entry
                  (setf (fifth entry) positions))
                positions))))))

(defun source-form-place (source toplevel number name)
  "Return the place of the form numbered NUMBER in the top-level form numbered TOPLEVEL (NIL if unknown) of SOURCE, an
SB-DI:DEBUG-SOURCE. NAME is the name of the function that contains the form. Return NIL when the code is SBCL's own or
its place is unknown."
  (let ((file (sb-di:debug-source-namestring source))
        (evaluated (plist-evaluation (sb-c::debug-source-plist source)))
        (*source-package* (name-package name)))
    (cond ((and (null file) evaluated)
           (evaluated-place evaluated
                             ;; With very little debug information, the source has no form.
                             (and (typep source 'sb-c::core-debug-source)
                                  (sb-di::core-debug-source-form source)
                                  (guarded (source-form-conses source number) (failure) '()))))
          ((or (null file) (system-file-p file)) nil)
          (t
           (let* ((namestring (sb-ext:native-namestring (parse-namestring file)))
                  (starts (start-positions source namestring)))
             (flet ((start (number) (and number starts (< number (length starts)) (aref starts number))))
               (file-place namestring
                           (sb-di:debug-source-created source)
                           (start toplevel) (and toplevel (start (1+ toplevel)))
                           (lambda (map) (position-of-number map number))
                           (and (symbolp name) (symbol-name name)))))))))

(defun find-location-place (location)
  "Find the place of LOCATION without the cache of LOCATION-PLACE."
  (let* ((source (sb-di:code-location-debug-source location))
         (file (sb-di:debug-source-namestring source)))
    (unless (and file (system-file-p file))
      (source-form-place source
                         (guarded (sb-di:code-location-toplevel-form-offset location) (failure) nil)
                         (guarded (sb-di:code-location-form-number location) (failure) 0)
                         (sb-di:debug-fun-name (sb-di:code-location-debug-fun location))))))

(defun location-place (location)
  "Return the place of LOCATION, an SB-DI:CODE-LOCATION, or NIL when it is SBCL's own or unknown."
  (let ((function (sb-di:code-location-debug-fun location))
        (counter (sb-di::compiled-code-location-pc location)))
    (when (eq *known-places* :none)
      (setf *known-places* (make-hash-table :test 'eq)))
    (let ((known (and *known-places* (assoc counter (gethash function *known-places*)))))
      (if known
          (cdr known)
          (let ((place (find-location-place (guarded (nearest-known-location location) (failure) location))))
            (when *known-places*
              (push (cons counter place) (gethash function *known-places*)))
            place)))))

(defun evaluated-place (evaluated conses)
  "Return the place in EVALUATED, an EVALUATED-FORM, of the target of the first of CONSES, a list from CONSES-AT-PATH,
that is a part of it."
  (let* ((text (and (evaluated-text evaluated) (coerce (evaluated-text evaluated) 'source-text)))
         (position (or (multiple-value-bind (path found) (path-to-conses conses (evaluated-form evaluated))
                         (when (and found text)
                           (let ((map (map-form text)))
                             (and map (position-at-path map path)))))
                       0)))
    (make-place :in (format nil "evaluation ~D" (evaluated-evaluation evaluated))
                :line (+ (evaluated-line evaluated) (if text (count #\Newline text :end position) 0))
                :code (and text (line-at text position))
                :text text
                :position position)))

(defun place-label (place)
  "Return the text for PLACE, such as `src/a.lisp:12`, without the line of source."
  (let ((in (place-in place)))
    (cond ((zerop (place-line place)) in)
          ((eql 11 (mismatch "evaluation " in)) (format nil "~A, line ~D" in (place-line place)))
          (t (format nil "~A:~D" in (place-line place))))))

;;; Definitions

(defun read-name (text)
  "Return the symbol name that a standard reader makes of the token TEXT, and the position of the colons after its package
prefix, or NIL."
  (let ((name (make-array (length text) :element-type 'character :fill-pointer 0))
        (colon nil)
        (barred nil)
        (escaped nil))
    (loop for character across text
          for position from 0
          do (cond (escaped (vector-push character name)
                            (setf escaped nil))
                   ((char= character #\\) (setf escaped t))
                   ((char= character #\|) (setf barred (not barred)))
                   (barred (vector-push character name))
                   ((char= character #\:)
                    (unless colon (setf colon position))
                    (setf (fill-pointer name) 0))
                   (t (vector-push (char-upcase character) name))))
    (values (coerce name 'text) colon)))

(defun token-name (text position)
  "Return the symbol name that a standard reader makes of the token of TEXT at POSITION."
  (values (read-name (subseq text position (or (catch 'scan-failed (token-end text position)) position)))))

(defun definition-form-p (form text)
  "Return true when FORM, a map in TEXT, looks like a definition."
  (and (consp form) (integerp (second form))
       (eql 3 (mismatch "DEF" (token-name text (second form))))))

(defun defines-p (form text name)
  "Return true when FORM, a map in TEXT, looks like a definition of NAME, a string."
  (and (definition-form-p form text)
       (let* ((named (third form))
              (first (if (consp named) (second named) named)))
         (flet ((named-p (form) (and (integerp form) (string= name (token-name text form)))))
           (or (named-p first)
               ;; (SETF NAME)
               (and (consp named) (named-p (third named))))))))

(defun defines-only-name-p (map text)
  "Return true when MAP, of a top-level form of TEXT, is of a kind of form that defines nothing except the name in it."
  (and (consp map) (integerp (second map))
       (member (token-name text (second map))
               '("DEFUN" "DEFMACRO" "DEFGENERIC" "DEFMETHOD" "DEFVAR" "DEFPARAMETER" "DEFCONSTANT" "DEFTYPE"
                 "IN-PACKAGE" "DEFPACKAGE" "DECLAIM")
               :test #'string=)))

(defun definition-position (map text name &key exactly method)
  "Return the position of the definition of NAME, a string, in MAP, of a top-level form of TEXT: the position of a
subform that looks like the definition, with preference for the method with the signature METHOD, if given. Otherwise,
unless EXACTLY, return the position of the whole form if it looks like a definition that may define NAME too. Else
return NIL."
  (labels ((visit (form depth key)
             (when (and (consp form) (< depth 20))
               (when (and (defines-p form text name)
                          (or (null key) (equal key (form-signature form text))))
                 (return-from definition-position (first form)))
               (dolist (element (rest form))
                 (visit element (1+ depth) key)))))
    (when method
      (visit map 0 method))
    (visit map 0 nil)
    (and (not exactly) (definition-form-p map text) (not (defines-only-name-p map text)) (first map))))

(defun method-signature (qualifiers specializers)
  "Return the signature that distinguishes a method from others of its generic function: a list of the names of its
QUALIFIERS and of its SPECIALIZERS except T. Elements that are not symbols or named classes are NIL."
  (flet ((name (thing) (and (symbolp thing) (symbol-name thing))))
    (list (mapcar #'name qualifiers)
          (loop for specializer in specializers
                for class = (and (typep specializer 'class) (class-name specializer))
                unless (eq class t)
                  collect (and class (name class))))))

(defun form-signature (form text)
  "Return the METHOD-SIGNATURE of FORM, a map in TEXT, if it is a DEFMETHOD form, else NIL."
  (when (and (consp form) (integerp (second form)) (string= "DEFMETHOD" (token-name text (second form))))
    (let* ((rest (nthcdr 3 form))
           (lambda-list (position-if #'consp rest)))
      (flet ((name (form) (and (integerp form) (token-name text form))))
        (when lambda-list
          (list (mapcar #'name (subseq rest 0 lambda-list))
                (loop for parameter in (rest (nth lambda-list rest))
                      until (and (integerp parameter) (char= #\& (schar text parameter)))
                      when (and (consp parameter) (not (equal "T" (name (third parameter)))))
                        collect (name (third parameter)))))))))

(defun form-text (text position)
  "Return the text of the form at POSITION of TEXT, or NIL."
  (multiple-value-bind (map end) (map-form text position)
    (and map (subseq text position end))))

(defun toplevel-start (text number)
  "Return the position of top-level form NUMBER, from 0, of TEXT, or NIL."
  (catch 'scan-failed
    (let ((position 0))
      (loop repeat number
            do (setf position (nth-value 1 (scan-form text position 0))))
      (form-start text position 0))))

(defun toplevel-starts (text)
  "Return a vector of the positions of the top-level forms of TEXT, up to the first that is not understood."
  (let ((starts '())
        (position 0))
    (catch 'scan-failed
      (loop
        (let ((start (form-start text position 0)))
          (when (>= start (length text))
            (return))
          (push start starts)
          (setf position (nth-value 1 (scan-form text start 0))))))
    (coerce (nreverse starts) 'simple-vector)))

(defun definition-place (source name &optional method)
  "Return the place of the definition of NAME, a string, or of its method with the signature METHOD. SOURCE is its
definition source from SB-INTROSPECT. Return NIL when the place is unknown."
  (let ((evaluated (plist-evaluation (sb-introspect:definition-source-plist source)))
        (file (sb-introspect:definition-source-pathname source)))
    (cond (file
           (if (system-file-p (namestring file))
               (make-place :in (namestring file))
               (file-definition-place (sb-ext:native-namestring file)
                                      (first (sb-introspect:definition-source-form-path source))
                                      (sb-introspect:definition-source-file-write-date source)
                                      name method)))
          (evaluated
           (let* ((place (evaluated-place evaluated '()))
                  (text (place-text place))
                  (map (and text (map-form text)))
                  (position (or (and map (definition-position map text name :method method)) 0)))
             (when text
               (setf (place-position place) position
                     (place-code place) (line-at text position)
                     (place-line place) (+ (evaluated-line evaluated) (count #\Newline text :end position))))
             place)))))

(defun file-definition-place (namestring number created name method)
  "Return the place of the definition of NAME, a string, or of its method with the signature METHOD, in the top-level
form NUMBER, or NIL, of the file NAMESTRING. CREATED is the write date of the version that was loaded, or NIL when the
date is unknown; then only a form that defines exactly NAME counts."
  (multiple-value-bind (octets date) (file-octets namestring)
    (if (and octets created (source-changed-p namestring created date))
        (changed-file-place namestring)
        (let* ((text (and octets number (octets-text octets 0 (length octets))))
               (start (and text (toplevel-start text number)))
               (map (and start (< start (length text)) (map-form text start)))
               (position (and map (definition-position map text name :exactly (not created) :method method))))
          (cond (position
                 (multiple-value-bind (line column) (line-and-column text position)
                   (make-place :in (shown-path namestring) :line line :column column
                               :code (line-at text position) :text text :position position)))
                ;; The file was changed within the second in which it was written.
                ((and map created (defines-only-name-p map text)) (changed-file-place namestring))
                (t (make-place :in (shown-path namestring))))))))

;;; Files that are compiled or loaded

(defun heading-word (text position)
  "Return the word that a heading shows for the form at or after POSITION of TEXT, and the end of the word: a token, a
string, or the heading of a quoted form. Return NIL for anything else, or if it is too long."
  (let ((start (catch 'scan-failed (form-start text position 0))))
    (flet ((char-at (position) (and (< position (length text)) (schar text position))))
      (cond ((null start) nil)
            ((and (eql #\' (char-at start)) (eql #\( (char-at (1+ start))))
             (let ((heading (form-heading text (1+ start))))
               (and heading (values (format nil "'~A" heading) (length text)))))
            (t
             (let* ((stringp (eql #\" (char-at start)))
                    (end (catch 'scan-failed
                           (if stringp (delimited-end text (1+ start) #\") (token-end text start)))))
               (when (and end (< start end (+ start 50)) (not (find #\Newline text :start start :end end)))
                 (let ((word (subseq text start end)))
                   (values (if stringp word (string-upcase word)) end)))))))))

(defun form-heading (text &optional (position 0))
  "Return the heading of the form at or after POSITION of TEXT, such as (DEFUN F) or (EVAL '(DEFUN F)), or NIL."
  (let ((start (catch 'scan-failed (form-start text position 0))))
    (when (and start (< start (length text)) (char= (schar text start) #\())
      (multiple-value-bind (operator end) (heading-word text (1+ start))
        (when operator
          (format nil "(~A~@[ ~A~])" operator (heading-word text end)))))))

(defun unreadable-file-place (condition)
  "Return the file, line, column and form heading of CONDITION, a reader error in a file, as WARNING-PLACE does."
  (let* ((stream (stream-error-stream condition))
         (namestring (sb-ext:native-namestring (pathname stream)))
         (octets (file-octets namestring))
         (start (and (sb-impl::form-tracking-stream-p stream)
                     (sb-impl::form-tracking-stream-form-start-byte-pos stream))))
    (if (and octets start)
        (let ((text (octets-text octets 0 (length octets)))
              (characters (length (octets-text octets 0 start))))
          (multiple-value-bind (line column) (line-and-column text characters)
            (values (shown-path namestring) line column (form-heading (subseq text characters)))))
        (values (shown-path namestring) 0 0 nil))))

(defun context-heading (context)
  "Return the heading, such as (DEFUN F), of the form in CONTEXT, an SB-C::COMPILER-ERROR-CONTEXT; or NIL."
  (let ((heading (first (last (sb-c::compiler-error-context-context context)))))
    (when heading
      (with-server-syntax (:length 6 :level 3)
        (guarded (let ((text (princ-to-string (substitute #\Space #\Newline (prin1-to-string heading)))))
                   (if (> (length text) +max-shown-line+)
                       (concatenate 'string (subseq text 0 (1- +max-shown-line+)) "…")
                       text))
            (failure)
          nil)))))

(defun submitted-place (context)
  "Return the place in the submitted code of CONTEXT, an SB-C::COMPILER-ERROR-CONTEXT of code in no file, or NIL."
  (let* ((form (sb-c::compiler-error-context-original-form context))
         (path (sb-c::compiler-error-context-original-source-path context))
         ;; A warning at the end of the compilation unit has no source information any more.
         (root (and sb-c::*source-info*
                    (not (eq context sb-c::*compiler-error-context*))
                    (guarded (values (sb-c::find-source-root (first (last path)) sb-c::*source-info*)) (failure) nil)))
         (conses (or (conses-at-path root (reverse (butlast path)))
                     (conses-at-path form '()))))
    (dolist (evaluated *evaluated-forms* (and *evaluated-forms* (not (eq context sb-c::*compiler-error-context*))
                                              (evaluated-place (first *evaluated-forms*) '())))
      (when (nth-value 1 (path-to-conses conses (evaluated-form evaluated)))
        (return (evaluated-place evaluated conses))))))

(defconstant +max-searched-frames+ 100000
  "The maximum number of frames to search for the loader's.")

(defun loader-frame ()
  "Return the innermost frame of the file loader or file compiler, or of a top-level form of a compiled file being loaded,
if there is one."
  (when (or *load-truename* *compile-file-truename*)
    (loop for frame = (sb-di:top-frame) then (sb-di:frame-down frame)
          repeat +max-searched-frames+
          while frame
          when (let ((function (sb-di:frame-debug-fun frame)))
                 (or (eq :toplevel (sb-di:debug-fun-kind function))
                     (member (sb-di:debug-fun-name function)
                             '(sb-int:load-as-source sb-fasl::load-as-fasl sb-c::sub-compile-file))))
            return frame)))

(defun compiler-place ()
  "Return a list of the values of WARNING-PLACE for the compiler's current position, or NIL."
  (let* ((context (and (or (boundp 'sb-c::*compiler-error-bailout*) sb-c::*compiler-error-context*)
                       (sb-c::find-error-context nil)))
         (file (and context (sb-c::compiler-error-context-file-name context)))
         (place (cond ((null context) nil)
                      ((pathnamep file)
                       (let ((path (reverse (butlast (sb-c::compiler-error-context-original-source-path context)))))
                         (file-place (sb-ext:native-namestring (merge-pathnames file)) nil
                                     (sb-c::compiler-error-context-file-position context) nil
                                     (lambda (map) (position-at-path map path)))))
                      ;; Code compiled by a file that is being loaded is not part of the submitted code.
                      ((loader-frame) nil)
                      ((find #\Newline (the string *submitted-code*)) (submitted-place context)))))
    (and place
         (list (and (pathnamep file) (place-in place))
               (place-line place)
               (place-column place)
               (context-heading context)))))

(defun source-file-place ()
  "Return the place of the top-level form of a source file that is being compiled or loaded (LOAD-AS-SOURCE in
src/code/target-load.lisp), or NIL."
  (let* ((info (and (boundp 'sb-c::*source-info*) sb-c::*source-info*))
         (file (and info (sb-c::get-toplevelish-file-info info)))
         (name (and file (sb-c::file-info-pathname file)))
         (positions (and file (sb-c::file-info-positions file))))
    (when (and (pathnamep name) (plusp (length positions)))
      (file-place (sb-ext:native-namestring (merge-pathnames name)) nil
                  (aref positions (1- (length positions))) nil #'form-position))))

(defun loading-place ()
  "Return a list of the values of WARNING-PLACE for the top-level form of a file that is being loaded or compiled, or NIL."
  (let* ((frame (loader-frame))
         (place (and frame
                     (case (sb-di:debug-fun-name (sb-di:frame-debug-fun frame))
                       ((sb-int:load-as-source sb-c::sub-compile-file) (source-file-place))
                       ;; Between two forms.
                       (sb-fasl::load-as-fasl
                        (and *load-truename*
                             (make-place :in (shown-path (sb-ext:native-namestring *load-truename*)))))
                       (t (location-place (sb-di:frame-code-location frame)))))))
    (and place
         (list (place-in place) (place-line place) (place-column place)
               (and (place-text place) (form-heading (place-text place)))))))

(defconstant +max-located-warnings+ 300
  "The maximum number of warnings of an evaluation whose place is determined. Fewer are reported.")

(defvar *located-warnings* 0
  "The number of warnings of this evaluation whose place has been determined.")

(defun warning-place (condition)
  "Return the place of the compiler when it signals CONDITION, as four values: the file, or NIL for the submitted code;
the line and the column, or 0 where they are unknown or the submitted code has a single line; and the heading of the
enclosing form, or NIL."
  (values-list
   (or (guarded (cond ((typep condition 'sb-c::input-error-in-compile-file)
                       (multiple-value-list (unreadable-file-place condition)))
                      ((<= (incf *located-warnings*) +max-located-warnings+) (or (compiler-place) (loading-place))))
           (failure)
         nil)
       '(nil 0 0 nil))))
