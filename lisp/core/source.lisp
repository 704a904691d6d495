;;;; Locating forms in source text: turns SBCL's debug information about a form into a file, a line, a column and the text
;;;; of the line. The functions here never read forms, intern symbols or evaluate code; they only scan the text.

(in-package "SBCL-HOST")

;;; The map of a form represents the form by positions in the text. The map of an atom is the position where the atom
;;; begins. The map of a list is a list of the position where it begins and the maps of its elements. 'X counts as
;;; (QUOTE X), and the form after a comma as the second element of a list, because SBCL counts so (SUB-FIND-SOURCE-PATHS
;;; in src/compiler/ir1tran.lisp). The map of a form that begins with a reader macro of the user's is a list of the
;;; position alone, because such a form may contain anything.

(defconstant +max-nesting+ 300
  "The maximum nesting depth of a form that is scanned. The scan of a deeper form fails.")

(deftype source-text ()
  "A string to scan, such as the contents of a file."
  '(simple-array character (*)))

(defun whitespace-p (character)
  "Return true when CHARACTER is whitespace in standard syntax."
  (member character '(#\Space #\Newline #\Tab #\Page #\Return #\Linefeed)))

(defun constituent-p (character)
  "Return true when CHARACTER can be part of a token in standard syntax."
  (not (or (whitespace-p character) (find character "\"'(),;`"))))

(defun fail-scan ()
  "Abort the scan, because the text is not in standard syntax or ends too early."
  (throw 'scan-failed nil))

(defun block-comment-end (text position)
  "Return the position after the block comment that begins at POSITION in TEXT. The scan fails if the comment does not end."
  (declare (type source-text text) (type index position))
  (let ((depth 0))
    (loop
      (let ((next (and (< (1+ position) (length text)) (schar text (1+ position)))))
        (unless next (fail-scan))
        (cond ((and (char= (schar text position) #\#) (char= next #\|))
               (incf depth)
               (incf position 2))
              ((and (char= (schar text position) #\|) (char= next #\#))
               (incf position 2)
               (when (zerop (decf depth))
                 (return position)))
              (t (incf position)))))))

(defun delimited-end (text position delimiter)
  "Return the position after the next DELIMITER in TEXT, from POSITION on, that no backslash precedes. The scan fails if
TEXT contains no such DELIMITER."
  (declare (type source-text text) (type index position))
  (loop
    (when (>= position (length text)) (fail-scan))
    (let ((character (schar text position)))
      (incf position)
      (cond ((char= character delimiter) (return position))
            ((char= character #\\) (incf position))))))

(defun token-end (text position)
  "Return the end of the token in TEXT. POSITION is its start or another position in it."
  (declare (type source-text text) (type index position))
  (loop
    (when (>= position (length text)) (return (length text)))
    (let ((character (schar text position)))
      (cond ((char= character #\\) (incf position 2))
            ((char= character #\|) (setf position (delimited-end text (1+ position) #\|)))
            ((constituent-p character) (incf position))
            (t (return position))))))

(defun feature-p (text form)
  "Return true when the feature expression in TEXT with the map FORM (see FORM-MAP) holds in this image."
  (flet ((name (form)
           (let ((token (subseq text form (token-end text form))))
             (string-upcase (subseq token (let ((colon (position #\: token :from-end t))) (if colon (1+ colon) 0)))))))
    (if (integerp form)
        (member (name form) *features* :test #'string=)
        (destructuring-bind (&optional operator &rest operands) (rest form)
          (unless (integerp operator) (fail-scan))
          (let ((operator (name operator)))
            (cond ((string= operator "AND") (every (lambda (operand) (feature-p text operand)) operands))
                  ((string= operator "OR") (some (lambda (operand) (feature-p text operand)) operands))
                  ((string= operator "NOT") (notany (lambda (operand) (feature-p text operand)) operands))
                  (t (fail-scan))))))))

(defun form-start (text position depth)
  "Return the start of the next form or closing parenthesis of TEXT, from POSITION on. Skip whitespace, comments, and
forms that #+ or #- excludes. Return the length of TEXT when nothing follows. DEPTH is the nesting depth, from 0."
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
  "Return the maps (see FORM-MAP) of the elements of a list in TEXT, and the position after the closing parenthesis of the
list. POSITION is the position after the opening parenthesis. DEPTH is the nesting depth of the elements."
  (declare (type source-text text) (type index position depth))
  (let ((elements '()))
    (loop
      (let ((start (form-start text position depth)))
        (when (>= start (length text)) (fail-scan))
        (cond ((char= (schar text start) #\))
               (return (values (nreverse elements) (1+ start))))
              ((and (char= (schar text start) #\.) elements (= (token-end text start) (1+ start)))
               ;; The form after the dot is the tail of the list. If the tail is a list, or a comma and a form, which counts
               ;; as a list, its elements are elements of the whole list.
               (multiple-value-bind (tail end) (scan-form text (1+ start) depth)
                 (let ((close (form-start text end depth)))
                   (unless (and (< close (length text)) (char= (schar text close) #\))) (fail-scan))
                   (return (values (nreconc elements (if (consp tail) (rest tail) '())) (1+ close))))))
              (t (multiple-value-bind (element end) (scan-form text start depth)
                   (push element elements)
                   (setf position end))))))))

(defvar *source-package* nil
  "The package in which SBCL probably read the text that is scanned, or NIL if it is unknown.")

(defvar *read-time-values* '()
  "The lists that #. has produced so far in the form that is scanned. SBCL numbers the conses of each list only once.")

(defun scan-read-time-value (text position start)
  "Return the map (see FORM-MAP) of the value that the reader gets from #. in TEXT. START is the position of #. and POSITION
is the position of the form after it. If this form is a variable that now holds a list, such as a list of declarations,
return the map of the list, in which every position is START. Otherwise assume that the value is an atom, and return START."
  (let* ((name (and (< position (length text)) (constituent-p (schar text position)) (token-name text position)))
         (symbol (and name *source-package* (find-symbol name *source-package*)))
         (value (and symbol (boundp symbol) (symbol-value symbol)))
         (left 1000))
    (labels ((represent (value)
               (if (and (consp value) (ignore-errors (list-length value)) (plusp (decf left)))
                   (cons start (mapcar #'represent value))
                   start)))
      (cond ((or (atom value) (member value *read-time-values* :test #'eq)) start)
            (t (push value *read-time-values*)
               (represent value))))))

(defun scan-sharpsign-form (text start depth)
  "Return the map (see FORM-MAP) and the end of the form that begins with # at START in TEXT. DEPTH is the form's nesting
depth."
  (declare (type source-text text) (type index start depth))
  (let* ((position (or (position-if-not #'digit-char-p text :start (1+ start)) (fail-scan)))
         (next (1+ position)))
    (flet ((atom-of (text position)
             (values start (nth-value 1 (scan-form text position depth)))))
      (case (char-upcase (schar text position))
        (#\\ (values start (token-end text (1+ next))))
        (#\' (multiple-value-bind (form end) (scan-form text next depth)
               (values (list start start form) end)))
        (#\( (values start (nth-value 1 (scan-elements text next depth))))
        ((#\: #\*) (values start (token-end text next)))
        (#\. (values (scan-read-time-value text next start) (nth-value 1 (scan-form text next depth))))
        ((#\B #\O #\X #\R #\P #\C #\S #\A) (atom-of text next))
        (#\= (scan-form text next depth))
        (#\# (values start next))
        ((#\) #\< #\Space #\Tab #\Newline #\Return #\Page) (fail-scan))
        (#\" (values (list start) (delimited-end text next #\")))
        ;; Most other dispatching macros read one form: #L(foo !1), #?"text", #8@(1 2).
        (t (values (list start) (nth-value 1 (scan-form text next depth))))))))

(defun opaque-form-p (form)
  "Return true when FORM, a map (see FORM-MAP), represents a form that begins with a reader macro of the user's."
  (and (consp form) (null (rest form))))

(defun scan-form (text position depth)
  "Return the map (see FORM-MAP) and the end of the first form that begins at or after POSITION in TEXT. DEPTH is the form's
nesting depth. The scan fails if there is no such form, if its syntax is not standard, or if it is nested too deeply."
  (declare (type source-text text) (type index position depth))
  (when (> depth +max-nesting+) (fail-scan))
  (let ((start (form-start text position depth))
        (depth (1+ depth)))
    (when (>= start (length text)) (fail-scan))
    (flet ((prefixed (length)
             (multiple-value-bind (form end) (scan-form text (+ start length) depth)
               (values (list start start form) end))))
      (case (schar text start)
        (#\( (multiple-value-bind (elements end) (scan-elements text (1+ start) depth)
               (values (if elements (cons start elements) start) end)))
        (#\) (fail-scan))
        (#\" (values start (delimited-end text (1+ start) #\")))
        ((#\' #\`) (prefixed 1))
        (#\, (prefixed (if (and (< (1+ start) (length text)) (find (schar text (1+ start)) "@.")) 2 1)))
        (#\# (scan-sharpsign-form text start depth))
        (t (values start (token-end text start)))))))

(defun form-map (text &optional (start 0))
  "Return the map and the end of the first form in TEXT at or after START; or NIL when the scan fails. A map represents a
form by positions in TEXT: an atom by the position where it begins, a list by a list of its position and the maps of its
elements (see the beginning of this file)."
  (let ((*read-time-values* '()))
    (catch 'scan-failed (scan-form text start 0))))

(defun form-position (map)
  "Return the position at which the form with the map MAP begins (see FORM-MAP)."
  (if (consp map) (first map) map))

(defun position-at-path (map path)
  "Return the position of the subform at PATH in the form with the map MAP (see FORM-MAP). PATH is a list of indices,
outermost first. If there is no such subform, return the position of the innermost form on the path."
  (let ((form map))
    (dolist (index path (form-position form))
      (let ((element (and (consp form) (nth index (rest form)))))
        (if element
            (setf form element)
            (return (form-position form)))))))

(defun position-of-form-number (map number)
  "Return the position of the subform to which the compiler gave NUMBER in a form, or NIL. MAP is the map of the form (see
FORM-MAP). The compiler numbers conses from 0, outer conses before the conses in them (SUB-FIND-SOURCE-PATHS in
src/compiler/ir1tran.lisp)."
  (labels ((visit (form depth)
             (when (consp form)
               (when (zerop number)
                 (return-from position-of-form-number (first form)))
               (decf number)
               (when (< depth 100)
                 (dolist (element (rest form))
                   (visit element (1+ depth)))))))
    (visit map 0)
    nil))

(defun token-position (token text &optional (start 0))
  "Return the first position in TEXT, from START on, at which TOKEN is a whole token or follows a package prefix; or NIL.
Ignore case."
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

;;; Lines and columns
(defvar *submitted-code* ""
  "The code that the client submitted to this evaluation.")

(defun line-and-column (text position)
  "Return the line and the column of POSITION in TEXT, both from 1."
  (let* ((end (min position (length text)))
         (newline (position #\Newline text :end end :from-end t)))
    (values (1+ (count #\Newline text :end end))
            (if newline (- end newline) (1+ end)))))

(defconstant +max-shown-line-length+ 100
  "The maximum number of shown characters of a source line.")

(defun line-at (text position)
  "Return the line of TEXT that contains POSITION, without whitespace at both ends. Of a line that is longer than
+MAX-SHOWN-LINE-LENGTH+, return the part from POSITION on, truncated to that length."
  (flet ((trim (start end) (string-trim '(#\Space #\Tab #\Return) (subseq text start end)))
         (cut (line) (if (> (length line) +max-shown-line-length+)
                         (concatenate 'string (subseq line 0 (1- +max-shown-line-length+)) "…")
                         line)))
    (let* ((position (min position (length text)))
           (start (let ((newline (position #\Newline text :end position :from-end t))) (if newline (1+ newline) 0)))
           (end (or (position #\Newline text :start position) (length text)))
           (line (trim start end)))
      (cut (if (> (length line) +max-shown-line-length+) (trim position end) line)))))

;;; Code that was evaluated

(defstruct (evaluated-form (:conc-name evaluated-) (:copier nil) (:predicate nil)
                           (:print-object (lambda (form stream)
                                            (print-unreadable-object (form stream)
                                              (format stream "evaluation ~D, line ~D"
                                                      (evaluated-evaluation form) (evaluated-line form))))))
  "A top-level form that was evaluated. SB-C::*SOURCE-PLIST* contains this structure during the evaluation, so SBCL records
it with the form's definitions. TEXT is NIL for a form longer than +MAX-KEPT-FORM-LENGTH+."
  (evaluation 0 :type index)
  ;; The position at which the form began in the submitted code.
  (start 0 :type index)
  (line 1 :type index)
  (text nil :type (or null simple-string))
  form)

(defconstant +max-kept-form-length+ 50000
  "The maximum number of characters in a top-level form whose text is kept with its definitions.")

(defvar *evaluated-forms* '()
  "The forms that this evaluation has evaluated so far, newest first.")

(defun compact-subseq (text start end)
  "Return the part of TEXT from START below END, as a base string (one byte per character) if possible."
  (declare (type text text) (type index start end))
  (if (loop for position of-type index from start below end
            always (sb-kernel:base-char-p (schar text position)))
      (replace (make-string (- end start) :element-type 'base-char) text :start2 start :end2 end)
      (subseq text start end)))

(defun count-newlines (text start end)
  "Return the number of newlines in TEXT from START below END."
  (declare (type text text) (type index start end))
  (loop for position of-type index from start below end
        count (char= #\Newline (schar text position))))

(defun form-line (code start)
  "Return the line, from 1, of the form that begins at START in CODE, the submitted code. Count from the previously
evaluated form, because counting from the beginning of CODE would take quadratic time for many forms."
  (declare (type text code) (type index start))
  (let ((before (first *evaluated-forms*)))
    (if (and before (<= (evaluated-start before) start))
        (+ (evaluated-line before) (count-newlines code (evaluated-start before) start))
        (1+ (count-newlines code 0 start)))))

(defun note-evaluated-form (form number code start end)
  "Record FORM in *EVALUATED-FORMS*, and return the value of SB-C::*SOURCE-PLIST* for its evaluation. FORM extends from
START below END in CODE. NUMBER is the number of the evaluation."
  (declare (type text code) (type index start end))
  (let ((evaluated (make-evaluated-form
                    :evaluation number
                    :start start
                    :line (form-line code start)
                    :text (when (<= (- end start) +max-kept-form-length+) (compact-subseq code start end))
                    :form form)))
    (push evaluated *evaluated-forms*)
    (list :evaluation evaluated)))

(defun plist-without-evaluated-form (plist)
  "Return PLIST, a value of SB-C::*SOURCE-PLIST*, without the properties at its end that NOTE-EVALUATED-FORM returned."
  (ldiff plist (loop for tail on plist by #'cddr
                     when (typep (second tail) 'evaluated-form) return tail)))

(defun plist-evaluated-form (plist)
  "Return the EVALUATED-FORM in PLIST, a value of SB-C::*SOURCE-PLIST*, or NIL."
  (let ((evaluated (getf plist :evaluation)))
    (and (typep evaluated 'evaluated-form) evaluated)))

(defun conses-along-path (form path)
  "Follow PATH, a list of indices, from FORM to a subform, the target. Return a list of the conses passed on the way,
innermost first, each as (CONS . REST), where REST is the path from CONS to the target."
  (let ((conses '()))
    (loop
      (loop while (sb-int:comma-p form)
            do (unless (eql 1 (pop path)) (return-from conses-along-path conses))
               (setf form (sb-int:comma-expr form)))
      (unless (consp form) (return conses))
      (push (cons form path) conses)
      (when (null path) (return conses))
      (let ((tail (ignore-errors (nthcdr (pop path) form))))
        (setf form (and (consp tail) (car tail)))))))

(defun path-to-conses (conses form)
  "Return two values: the path in FORM to the target of CONSES, a list that CONSES-ALONG-PATH returned; and true. The target
may be a part of a macro expansion and not of FORM, so the path leads through the innermost cons in CONSES that is a part
of FORM. A cons inside a list of FORM, such as the body of a DEFUN, stands for the list's element at this position. If no
cons in CONSES is a part of FORM, return NIL and NIL."
  (let ((best nil) (best-path '()) (steps 0))
    (labels ((note (cons path)
               (let ((found (member cons conses :key #'car :test #'eq)))
                 (when (and found (or (null best) (tailp best found)))
                   (setf best found
                         best-path path)
                   (when (eq best conses)
                     (return-from path-to-conses (values (revappend path (cdr (first best))) t))))))
             (visit (form path depth)
               (when (sb-int:comma-p form)
                 (setf form (list 'comma (sb-int:comma-expr form))))
               (when (and (consp form) (< depth 100))
                 (note form path)
                 (loop for index of-type index from 0
                       for rest = form then (cdr rest)
                       while (and (consp rest) (< (incf steps) 100000))
                       do (when (plusp index)
                            (note rest (cons index path)))
                          (visit (car rest) (cons index path) (1+ depth))))))
      (visit form '() 0)
      (if best
          (values (revappend best-path (cdr (first best))) t)
          (values '() nil)))))

;;; Source locations

(defconstant +max-file-octets+ 4000000
  "The maximum size of a source file that is read, in octets.")
(defconstant +max-report-octets+ 8000000
  "The maximum total size of the files cached for one report, in octets. If it is exceeded, the cache is emptied before the
next file is added.")

(defvar *source-files* '()
  "The cache of the files read for this report. The entry of a file is a list of its namestring; its write date; its octets,
or NIL if it could not be read; a list of the arguments START and END and the values of the last call of SCAN-FILE for the
file, or NIL; and the value of SCAN-START-POSITIONS, or NIL.")
(defvar *known-source-locations* nil
  "The cache of source locations found for this report: a hash table from SB-DI:DEBUG-FUNs to alists from program counters to
source locations; :NONE before the first source location is found; NIL outside a report.")

(defmacro with-source-files (() &body body)
  "Evaluate BODY with caches of source files and of code locations."
  `(let ((*source-files* '())
         (*known-source-locations* :none))
     ,@body))

(defun read-octets (namestring)
  "Return the octets of the file with the native namestring NAMESTRING; NIL when it does not exist, is not a regular file,
or is too large."
  (when (eq :file (sb-impl::native-file-kind namestring t))
    (with-open-file (in (sb-ext:parse-native-namestring namestring) :element-type '(unsigned-byte 8) :if-does-not-exist nil)
      (when (and in (<= (file-length in) +max-file-octets+))
        (let ((octets (make-array (file-length in) :element-type '(unsigned-byte 8))))
          (subseq octets 0 (read-sequence octets in)))))))

(defun file-octets (namestring)
  "Return three values for the file with the native namestring NAMESTRING: its octets, or NIL if it could not be read; its
write date; and its entry in *SOURCE-FILES*, or NIL outside a report. Return NIL if there is no such file."
  (let* ((date (guarded (file-write-date (sb-ext:parse-native-namestring namestring)) (failure) nil))
         (known (find-if (lambda (known) (and (string= (first known) namestring) (eql (second known) date)))
                         *source-files*)))
    (cond ((null date) nil)
          (known (values (third known) date known))
          (t
           (let ((octets (guarded (read-octets namestring) (failure) nil)))
             (when *known-source-locations*
               (when (> (reduce #'+ *source-files* :key (lambda (known) (length (third known)))) +max-report-octets+)
                 (setf *source-files* '()))
               (push (list namestring date octets nil nil) *source-files*))
             (values octets date (and *known-source-locations* (first *source-files*))))))))

(defun balanced-p (text position)
  "Return true when no unmatched closing parenthesis stands among the next 20 forms of TEXT, from POSITION on."
  (loop repeat 20
        for next = (catch 'scan-failed (form-start text position 0))
        while (and next (< next (length text)))
        do (when (char= #\) (schar text next))
             (return nil))
           (setf position (or (nth-value 1 (form-map text next)) (length text)))
        finally (return t)))

(defun toplevel-form-p (before text map end whole)
  "Return true when TEXT, a part of a file, can begin with a top-level form. TEXT begins at a position that SBCL recorded,
right after the previous top-level form, so a false result means that the file has changed. BEFORE is the
character before TEXT, or NIL at the beginning of the file. MAP is the map of the first form in TEXT (see FORM-MAP), or NIL,
and END is the end of this form. WHOLE is true when TEXT must contain nothing but this form."
  (declare (type source-text text))
  (and (or (member before '(nil #\) #\"))
           (and (plusp (length text)) (whitespace-p (schar text 0))))
       (cond ((null map) (balanced-p text 0))
             ((not (find (schar text (form-position map)) "(#'`")) nil)
             (whole (eql end (length text)))
             (t (balanced-p text end)))))

(defun scan-file (entry octets start end)
  "Decode OCTETS, the contents of a file, from START below END, or to the end when END is NIL. Return the text; the map and
the end of the first form in the text, as FORM-MAP does; and the value of TOPLEVEL-FORM-P for the text. ENTRY is the file's
entry in *SOURCE-FILES*, in which the values are cached, or NIL."
  (let ((known (fourth entry)))
    (unless (and known (eql start (first known)) (eql end (second known)))
      (let ((text (octets-text octets start (or end (length octets)))))
        (multiple-value-bind (map form-end) (form-map text)
          (setf known (list start end text map form-end
                            (toplevel-form-p (if (zerop start) nil (code-char (aref octets (1- start))))
                                             text map form-end (and end t))))))
      (when entry
        (setf (fourth entry) known)))
    (values-list (cddr known))))

(defun octets-text (octets start end)
  "Return the text of OCTETS from START below END, decoded as UTF-8. Invalid octets become question marks."
  (coerce (sb-ext:octets-to-string octets :start (min start (length octets)) :end (min end (length octets))
                                          :external-format '(:utf-8 :replacement #\?))
          'source-text))

(defun shown-path (namestring)
  "Return NAMESTRING relative to the working directory if it names a file below this directory, else NAMESTRING unchanged."
  (let ((directory (guarded (concatenate 'string (sb-posix:getcwd) "/") (failure) nil)))
    (if (and directory (> (length namestring) (length directory))
             (string= directory namestring :end2 (length directory)))
        (subseq namestring (length directory))
        namestring)))

(defstruct (source-location (:copier nil) (:predicate nil))
  "A location in a source file or in evaluated code."
  ;; The name of the file or evaluation, such as `src/a.lisp` or `evaluation 3`.
  (source-name "" :type string)
  ;; The line and the column from 1, or 0 if unknown.
  (line 0 :type index)
  (column 0 :type index)
  ;; The text of the line, or NIL.
  (line-text nil :type (or null string))
  ;; The text that contains the top-level form, or NIL, and the position of the location in that text.
  (text nil :type (or null source-text))
  (position 0 :type index))

(defun changed-file-location (namestring)
  "Return a source location without a line for code in the file with the native namestring NAMESTRING, which has changed
since the code was compiled or loaded."
  (make-source-location :source-name (concatenate 'string (shown-path namestring) " (file has changed)")))

(defun file-location (namestring created start end find &optional name)
  "Return the source location of a subform in the file with the native namestring NAMESTRING. START and END are the offsets,
in octets, between which the subform's top-level form lies, or NIL if unknown. FIND is a function that is called with the map
of the top-level form (see FORM-MAP) and returns the position of the subform, or NIL. CREATED is the write date of the
version of the file to which START and END refer, or NIL when the file certainly still has this version. NAME is the name
of the function that contains the subform, a string, or NIL. The file may have changed although its write date is CREATED,
within the same second, so also check that a form at START can define NAME."
  (declare (type function find))
  (multiple-value-bind (octets date entry) (file-octets namestring)
    (let ((in (shown-path namestring)))
      (cond ((null octets) (make-source-location :source-name in))
            ((and created (source-changed-p namestring created date)) (changed-file-location namestring))
            ((null start) (make-source-location :source-name in))
            ((> start (length octets))
             (if created (changed-file-location namestring) (make-source-location :source-name in)))
            (t
             (multiple-value-bind (text map form-end toplevel) (scan-file entry octets start end)
               (let ((position (or (and map (funcall find map))
                                   (catch 'scan-failed (form-start text 0 0))
                                   0)))
                 (if (and created
                          (not (and toplevel
                                    (or (null name) (null map) (not (defines-only-name-p map text))
                                        (< (or (token-position name text) form-end) form-end)))))
                     (changed-file-location namestring)
                     (multiple-value-bind (line column) (line-and-column text position)
                       (make-source-location :source-name in
                                             :line (+ line (count 10 octets :end start))
                                             :column (+ column (if (eql line 1) (column-at-octet octets start) 0))
                                             :line-text (line-at text position)
                                             :text text
                                             :position position))))))))))

(defun column-at-octet (octets position)
  "Return the number of characters between POSITION, an offset in OCTETS, and the beginning of its line."
  (let ((newline (position 10 octets :end position :from-end t)))
    (length (octets-text octets (if newline (1+ newline) 0) position))))

(defun system-file-p (namestring)
  "Return true when NAMESTRING names a source file of SBCL's own or of the Lisp side."
  (eql 4 (mismatch "SYS:" namestring)))

(defun code-source (code)
  "Return the SB-DI:DEBUG-SOURCE of the code component CODE, or NIL."
  (let ((info (sb-kernel:%code-debug-info code)))
    (and (typep info 'sb-c::compiled-debug-info)
         (sb-c::debug-info-source info))))

;;; Source locations of code locations

(defun nearest-known-code-location (code-location)
  "Return CODE-LOCATION, or the code location at the beginning of its block if SBCL has no more precise information."
  (sb-debug::maybe-block-start-location code-location))

(defun path-of-form-number (form number)
  "Return the path, a list of indices, to the subform of FORM to which the compiler gave NUMBER, and true; or NIL and NIL.
Count as SBCL's SUB-FIND-SOURCE-PATHS does. SBCL's FORM-NUMBER-TRANSLATIONS counts a subform that occurs twice only once."
  (let ((seen (make-hash-table :test 'eq))
        (count 0))
    (labels ((visit (form path depth)
               (unless (gethash form seen)
                 (setf (gethash form seen) t)
                 (when (eql count number)
                   (return-from path-of-form-number (values (reverse path) t)))
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
  "Return the conses on the path to a subform of evaluated code, as CONSES-ALONG-PATH does, or NIL if there is no such
subform. SOURCE is the code's SB-DI:DEBUG-SOURCE, and NUMBER is the number that the compiler gave to the subform."
  (let ((root (sb-di::core-debug-source-form source)))
    (multiple-value-bind (path found) (path-of-form-number root number)
      (and found (conses-along-path root path)))))

(defun submitted-lambda-p (source)
  "Return true when the code of SOURCE, an SB-DI:DEBUG-SOURCE, was compiled from a lambda expression in the evaluated form. Such
an expression may be compiled by itself. SBCL's EVAL compiles most other forms as (LAMBDA () FORM)."
  (let ((evaluated (plist-evaluated-form (sb-c::debug-source-plist source)))
        ;; With very little debug information, the source has no form.
        (form (and (typep source 'sb-c::core-debug-source) (sb-di::core-debug-source-form source))))
    (and evaluated
         (typep form '(cons (member lambda function sb-int:named-lambda)))
         (nth-value 1 (path-to-conses (conses-along-path form '()) (evaluated-form evaluated))))))

(defun function-name-package (name)
  "Return the package of the first symbol in NAME, a function name, whose package is not COMMON-LISP, KEYWORD or one of
SBCL's; or NIL."
  (typecase name
    (null nil)
    (symbol (let ((package (symbol-package name)))
              (and package
                   (not (eq package (find-package "COMMON-LISP")))
                   (not (eq package (find-package "KEYWORD")))
                   (not (eql 3 (mismatch "SB-" (package-name package))))
                   package)))
    (cons (or (function-name-package (car name)) (function-name-package (cdr name))))))

(defun scan-start-positions (octets)
  "Return a vector of the positions of the top-level forms in OCTETS, the contents of a file. As SBCL does, let each form
begin right after the end of the previous form."
  ;; Decode each octet to one character. The octets of non-ASCII characters become constituents, as the characters
  ;; themselves are.
  (let ((text (coerce (sb-ext:octets-to-string octets :external-format :latin-1) 'source-text))
        (positions (list 0))
        (*source-package* nil))
    (catch 'scan-failed
      (loop (push (nth-value 1 (scan-form text (first positions) 0)) positions)))
    (coerce (nreverse positions) 'vector)))

(defun start-positions (source namestring)
  "Return a vector of the positions, in octets, of the top-level forms in the file with the native namestring NAMESTRING; or
NIL. Take the positions from SOURCE, an SB-DI:DEBUG-SOURCE. While a compiled file is still being loaded, SOURCE does not
have the positions yet, so scan the file."
  (or (sb-di:debug-source-start-positions source)
      (multiple-value-bind (octets date entry) (file-octets namestring)
        (declare (ignore date))
        (when octets
          (or (and entry (fifth entry))
              (let ((positions (scan-start-positions octets)))
                (when entry
                  (setf (fifth entry) positions))
                positions))))))

(defun source-form-location (source toplevel number name)
  "Return the source location of a subform of a top-level form, or NIL when the code is SBCL's own or its source location is
unknown. SOURCE is the code's SB-DI:DEBUG-SOURCE. TOPLEVEL is the number of the top-level form, or NIL if unknown. NUMBER is
the number that the compiler gave to the subform. NAME is the name of the function that contains the subform. For code that
COMPILE or EVAL compiled while a file was being loaded, return the source location of the top-level form that called it."
  (let ((file (sb-di:debug-source-namestring source))
        (evaluated (plist-evaluated-form (sb-c::debug-source-plist source)))
        (*source-package* (function-name-package name)))
    (cond ((and (null file) evaluated)
           (evaluated-form-location evaluated
                                    ;; With very little debug information, the source has no form.
                                    (and (typep source 'sb-c::core-debug-source)
                                         (sb-di::core-debug-source-form source)
                                         (guarded (source-form-conses source number) (failure) '()))))
          ((or (null file) (system-file-p file)) nil)
          (t
           (let* ((namestring (sb-ext:native-namestring (parse-namestring file)))
                  (starts (start-positions source namestring))
                  (compiled-form (and (typep source 'sb-c::core-debug-source) (sb-di::core-debug-source-form source))))
             (when compiled-form
               ;; TOPLEVEL and NUMBER refer to COMPILED-FORM. SOURCE has the positions of the top-level forms read so far.
               (let ((count (length (sb-di:debug-source-start-positions source))))
                 (setf toplevel (and (plusp count) (1- count))
                       name nil)))
             (flet ((start (number) (and number starts (< number (length starts)) (aref starts number))))
               (file-location namestring
                              (sb-di:debug-source-created source)
                              (start toplevel) (and toplevel (start (1+ toplevel)))
                              (lambda (map) (and (not compiled-form) (position-of-form-number map number)))
                              (and name (symbolp name) (symbol-name name)))))))))

(defun find-source-location (code-location)
  "Return the source location of CODE-LOCATION as CODE-LOCATION-SOURCE-LOCATION does, but without a cache."
  (let* ((source (sb-di:code-location-debug-source code-location))
         (file (sb-di:debug-source-namestring source)))
    (unless (and file (system-file-p file))
      (source-form-location source
                            (guarded (sb-di:code-location-toplevel-form-offset code-location) (failure) nil)
                            (guarded (sb-di:code-location-form-number code-location) (failure) 0)
                            (sb-di:debug-fun-name (sb-di:code-location-debug-fun code-location))))))

(defun code-location-source-location (code-location)
  "Return the source location of CODE-LOCATION, an SB-DI:CODE-LOCATION; or NIL when the code is SBCL's own or its source
location is unknown. Cache the source location in *KNOWN-SOURCE-LOCATIONS*."
  (let ((function (sb-di:code-location-debug-fun code-location))
        (counter (sb-di::compiled-code-location-pc code-location)))
    (when (eq *known-source-locations* :none)
      (setf *known-source-locations* (make-hash-table :test 'eq)))
    (let ((known (and *known-source-locations* (assoc counter (gethash function *known-source-locations*)))))
      (if known
          (cdr known)
          (let ((location (find-source-location
                           (guarded (nearest-known-code-location code-location) (failure) code-location))))
            (when *known-source-locations*
              (push (cons counter location) (gethash function *known-source-locations*)))
            location)))))

(defun evaluated-form-location (evaluated conses)
  "Return the source location of a subform of EVALUATED, an EVALUATED-FORM. The subform is the target of CONSES, a list that
CONSES-ALONG-PATH returned. If no cons in CONSES is a part of the form, return the source location of the whole form."
  (let* ((text (and (evaluated-text evaluated) (coerce (evaluated-text evaluated) 'source-text)))
         (position (or (multiple-value-bind (path found) (path-to-conses conses (evaluated-form evaluated))
                         (when (and found text)
                           (let ((map (form-map text)))
                             (and map (position-at-path map path)))))
                       0)))
    (make-source-location :source-name (format nil "evaluation ~D" (evaluated-evaluation evaluated))
                          :line (+ (evaluated-line evaluated) (if text (count #\Newline text :end position) 0))
                          :line-text (and text (line-at text position))
                          :text text
                          :position position)))

(defun source-location-label (location)
  "Return the text that names LOCATION: `src/a.lisp:12`, `evaluation 3, line 2`, or only the file if the line is unknown."
  (let ((in (source-location-source-name location)))
    (cond ((zerop (source-location-line location)) in)
          ((eql 11 (mismatch "evaluation " in)) (format nil "~A, line ~D" in (source-location-line location)))
          (t (format nil "~A:~D" in (source-location-line location))))))

;;; Source locations of definitions

(defun read-name (text)
  "Return the symbol name that the reader makes of the token TEXT under the standard readtable; the position in TEXT of the
first colon after the package prefix, or NIL if TEXT has no package prefix; and NIL, or a clause that says why TEXT ends
inside a name."
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
    (values (coerce name 'text)
            colon
            (cond (escaped "no character follows the backslash at its end")
                  (barred "a vertical bar in it is not closed")))))

(defun fail-unfinished-name (text problem)
  "Signal that TEXT does not spell a symbol because of PROBLEM, the third value of READ-NAME."
  (error "~A does not spell a symbol: ~A. In a name, \\| spells a vertical bar, and \\\\ a backslash." text problem))

(defun token-name (text position)
  "Return the symbol name that the reader makes of the token at POSITION in TEXT under the standard readtable."
  (values (read-name (subseq text position (or (catch 'scan-failed (token-end text position)) position)))))

(defun definition-form-p (form text)
  "Return true when the form in TEXT with the map FORM (see FORM-MAP) looks like a definition: its operator's name begins
with DEF."
  (and (consp form) (integerp (second form))
       (eql 3 (mismatch "DEF" (token-name text (second form))))))

(defun defines-p (form text name)
  "Return true when the form in TEXT with the map FORM (see FORM-MAP) looks like a definition of NAME, a string, or of
(SETF NAME)."
  (and (definition-form-p form text)
       (let* ((named (third form))
              (first (if (consp named) (second named) named)))
         (flet ((named-p (form) (and (integerp form) (string= name (token-name text form)))))
           (or (named-p first)
               ;; NAMED may be the map of (SETF NAME).
               (and (consp named) (named-p (third named))))))))

(defun defines-only-name-p (map text)
  "Return true when the top-level form in TEXT with the map MAP (see FORM-MAP) is a form, such as DEFUN or IN-PACKAGE, that
defines at most one name: its first argument."
  (and (consp map) (integerp (second map))
       (member (token-name text (second map))
               '("DEFUN" "DEFMACRO" "DEFGENERIC" "DEFMETHOD" "DEFVAR" "DEFPARAMETER" "DEFCONSTANT" "DEFTYPE"
                 "IN-PACKAGE" "DEFPACKAGE" "DECLAIM")
               :test #'string=)))

(defun definition-position (map text name &key exactly method)
  "Return the position of the definition of NAME, a string, in the top-level form of TEXT with the map MAP (see FORM-MAP):
the position of a subform that looks like the definition. If METHOD is given, prefer the method with this signature (see
METHOD-SIGNATURE). If no subform looks like the definition, return NIL if EXACTLY is true. Otherwise return the position
of the whole form if it looks like a definition that may define further names, else NIL."
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
  "Return the signature that distinguishes a method from the other methods of its generic function: a list of two lists, the
names of the QUALIFIERS and the names of the SPECIALIZERS except T. The name is NIL for a qualifier that is not a symbol
and for a specializer that is not a class with a name."
  (flet ((name (thing) (and (symbolp thing) (symbol-name thing))))
    (list (mapcar #'name qualifiers)
          (loop for specializer in specializers
                for class = (and (typep specializer 'class) (class-name specializer))
                unless (eq class t)
                  collect (and class (name class))))))

(defun form-signature (form text)
  "If the form in TEXT with the map FORM (see FORM-MAP) is a DEFMETHOD form, return the signature of its method, as
METHOD-SIGNATURE does; else NIL."
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
  "Return the text of the form at POSITION in TEXT, or NIL when its syntax is not understood."
  (multiple-value-bind (map end) (form-map text position)
    (and map (subseq text position end))))

(defun toplevel-start (text number)
  "Return the position of the top-level form with NUMBER, from 0, in TEXT; or NIL when the syntax before it is not
understood."
  (catch 'scan-failed
    (let ((position 0))
      (loop repeat number
            do (setf position (nth-value 1 (scan-form text position 0))))
      (form-start text position 0))))

(defun toplevel-starts (text)
  "Return a vector of the positions of the top-level forms of TEXT, up to and including the first form whose syntax is not
understood."
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

(defun definition-location (source name &optional method)
  "Return the source location of the definition of NAME, a string; or, if NAME is NIL, of the top-level form that made the
definition. If METHOD, a value of METHOD-SIGNATURE, is given, prefer the method of NAME with this signature. SOURCE is the
definition source that SB-INTROSPECT returns for the definition. Return NIL when the source location is unknown."
  (let ((evaluated (plist-evaluated-form (sb-introspect:definition-source-plist source)))
        (file (sb-introspect:definition-source-pathname source)))
    (cond (file
           (if (system-file-p (namestring file))
               (make-source-location :source-name (namestring file))
               (file-definition-location (sb-ext:native-namestring file)
                                         (first (sb-introspect:definition-source-form-path source))
                                         (sb-introspect:definition-source-file-write-date source)
                                         name method)))
          (evaluated
           (let* ((location (evaluated-form-location evaluated '()))
                  (text (source-location-text location))
                  (map (and text (form-map text)))
                  (position (or (and map name (definition-position map text name :method method)) 0)))
             (when text
               (setf (source-location-position location) position
                     (source-location-line-text location) (line-at text position)
                     (source-location-line location) (+ (evaluated-line evaluated) (count #\Newline text :end position))))
             location)))))

(defun file-definition-location (namestring number created name method)
  "Return the source location of the definition of NAME, a string, in the file with the native namestring NAMESTRING. If
METHOD, a value of METHOD-SIGNATURE, is not NIL, prefer the method of NAME with this signature. NUMBER is the number of the
top-level form, or NIL if unknown. If no subform looks like the definition, return the source location of the top-level form,
such as a call of a macro that made the definition; also do so if NAME is NIL. CREATED is the write date of the version that
was loaded. If CREATED is NIL, because this date is unknown, only a form that defines exactly NAME counts."
  (multiple-value-bind (octets date) (file-octets namestring)
    (if (and octets created (source-changed-p namestring created date))
        (changed-file-location namestring)
        (let* ((text (and octets number (octets-text octets 0 (length octets))))
               (start (and text (toplevel-start text number)))
               (map (and start (< start (length text)) (form-map text start)))
               (position (cond ((null map) nil)
                               ((null name) (form-position map))
                               ((definition-position map text name :exactly (not created) :method method))
                               ;; The form calls a macro whose name does not begin with DEF.
                               ((and created (consp map) (not (defines-only-name-p map text))) (first map)))))
          (cond (position
                 (multiple-value-bind (line column) (line-and-column text position)
                   (make-source-location :source-name (shown-path namestring) :line line :column column
                                         :line-text (line-at text position) :text text :position position)))
                ;; If the form certainly defines another name although the write dates are equal, the file was changed
                ;; within the same second.
                ((and map created (defines-only-name-p map text)) (changed-file-location namestring))
                (t (make-source-location :source-name (shown-path namestring))))))))

;;; Source locations in files that are being compiled or loaded

(defun heading-word (text position)
  "Return the word that FORM-HEADING shows for the form at or after POSITION in TEXT, and the position at which to look for
the next word. The word is a token, a string, or the heading of a quoted list, after which no other word is shown. Return
NIL for other forms, and for tokens and strings that contain a newline or have 50 or more characters."
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
  "Return the heading of the form at or after POSITION in TEXT: its operator and first argument, as in (DEFUN F) or
(EVAL '(DEFUN F)). Return NIL for a form without a suitable operator."
  (let ((start (catch 'scan-failed (form-start text position 0))))
    (when (and start (< start (length text)) (char= (schar text start) #\())
      (multiple-value-bind (operator end) (heading-word text (1+ start))
        (when operator
          (format nil "(~A~@[ ~A~])" operator (heading-word text end)))))))

(defun unreadable-file-location (condition)
  "Return four values, as WARNING-LOCATION does, for CONDITION, a reader error in a file: the file, and the line, column and
heading of the form in which the error occurred."
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
  "Return the heading, such as (DEFUN F), of the innermost definition around the form in CONTEXT, or of the top-level form
if there is no definition; or NIL. CONTEXT is an SB-C::COMPILER-ERROR-CONTEXT."
  (let ((heading (first (last (sb-c::compiler-error-context-context context)))))
    (when heading
      (with-server-syntax (:length 6 :level 3)
        (guarded (let ((text (princ-to-string (substitute #\Space #\Newline (prin1-to-string heading)))))
                   (if (> (length text) +max-shown-line-length+)
                       (concatenate 'string (subseq text 0 (1- +max-shown-line-length+)) "…")
                       text))
            (failure)
          nil)))))

(defun variable-conses (context)
  "If CONTEXT, an SB-C::COMPILER-ERROR-CONTEXT, is about a variable, return the conses whose car is this variable in the form
around it, each as a list of the cons alone; else NIL. The variable itself is a symbol, which may occur in many forms."
  (let* ((path (sb-c::compiler-error-context-path context))
         (name (first path))
         (around (if (consp (second path)) (second path) (sb-c::compiler-error-context-original-form context))))
    (and (symbolp name)
         (loop for tail on around
               when (eq name (car tail))
                 collect (list tail)))))

(defun submitted-form-location (context)
  "Return the source location, in the submitted code, of the form that CONTEXT is about; or NIL. CONTEXT is an
SB-C::COMPILER-ERROR-CONTEXT of code outside any file."
  (let* ((form (sb-c::compiler-error-context-original-form context))
         (path (sb-c::compiler-error-context-original-source-path context))
         ;; The context of a warning at the end of the compilation unit was recorded earlier. The source information that
         ;; belongs to this context no longer exists.
         (late (eq context sb-c::*compiler-error-context*))
         (root (and sb-c::*source-info*
                    (not late)
                    (guarded (values (sb-c::find-source-root (first (last path)) sb-c::*source-info*)) (failure) nil)))
         (conses (append (and late (variable-conses context))
                         (or (conses-along-path root (reverse (butlast path)))
                             (conses-along-path form '())))))
    (dolist (evaluated *evaluated-forms* (and *evaluated-forms* (not late)
                                              (evaluated-form-location (first *evaluated-forms*) '())))
      (when (nth-value 1 (path-to-conses conses (evaluated-form evaluated)))
        (return (evaluated-form-location evaluated conses))))))

(defconstant +max-searched-frames+ 100000
  "The maximum number of frames that LOADER-FRAME searches.")

(defun loader-frame ()
  "Return the innermost frame that belongs to LOAD, to COMPILE-FILE, or to a top-level form of a compiled file that is being
loaded; or NIL."
  (when (or *load-truename* *compile-file-truename*)
    (loop for frame = (sb-di:top-frame) then (sb-di:frame-down frame)
          repeat +max-searched-frames+
          while frame
          when (let ((function (sb-di:frame-debug-fun frame)))
                 (or (eq :toplevel (sb-di:debug-fun-kind function))
                     (member (sb-di:debug-fun-name function)
                             '(sb-int:load-as-source sb-fasl::load-as-fasl sb-c::sub-compile-file))))
            return frame)))

(defun compiler-location ()
  "Return a list of the four values that WARNING-LOCATION returns, for the form that the compiler is processing; or NIL if
the source location is unknown."
  (let* ((context (and (or (compiling-p) sb-c::*compiler-error-context*)
                       (sb-c::find-error-context nil)))
         (file (and context (sb-c::compiler-error-context-file-name context)))
         (location (cond ((null context) nil)
                         ((pathnamep file)
                          (let ((path (reverse (butlast (sb-c::compiler-error-context-original-source-path context)))))
                            (file-location (sb-ext:native-namestring (merge-pathnames file)) nil
                                           (sb-c::compiler-error-context-file-position context) nil
                                           (lambda (map) (position-at-path map path)))))
                         ;; While a file is being loaded, the code that is compiled is not part of the submitted code.
                         ((loader-frame) nil)
                         ((find #\Newline (the string *submitted-code*)) (submitted-form-location context)))))
    (and location
         (list (and (pathnamep file) (source-location-source-name location))
               (source-location-line location)
               (source-location-column location)
               (context-heading context)))))

(defun toplevel-form-location ()
  "Return the source location of the top-level form of a source file that is being compiled or loaded (LOAD-AS-SOURCE in
src/code/target-load.lisp), or NIL."
  (let* ((info (and (boundp 'sb-c::*source-info*) sb-c::*source-info*))
         (file (and info (sb-c::get-toplevelish-file-info info)))
         (name (and file (sb-c::file-info-pathname file)))
         (positions (and file (sb-c::file-info-positions file))))
    (when (and (pathnamep name) (plusp (length positions)))
      (file-location (sb-ext:native-namestring (merge-pathnames name)) nil
                     (aref positions (1- (length positions))) nil #'form-position))))

(defun loading-location ()
  "Return a list of the four values that WARNING-LOCATION returns, for the current top-level form of a file that is being
loaded or compiled; or NIL."
  (let* ((frame (loader-frame))
         (location (and frame
                        (case (sb-di:debug-fun-name (sb-di:frame-debug-fun frame))
                          ((sb-int:load-as-source sb-c::sub-compile-file) (toplevel-form-location))
                          ;; In this case, the loader is between two top-level forms.
                          (sb-fasl::load-as-fasl
                           (and *load-truename*
                                (make-source-location :source-name (shown-path (sb-ext:native-namestring *load-truename*)))))
                          (t (code-location-source-location (sb-di:frame-code-location frame)))))))
    (and location
         (list (source-location-source-name location) (source-location-line location) (source-location-column location)
               (and (source-location-text location) (form-heading (source-location-text location)))))))

(defconstant +max-located-warnings+ 300
  "The maximum number of an evaluation's warnings for which source locations are determined. Reports show fewer warnings than
this.")

(defvar *located-warning-count* 0
  "The number of warnings of this evaluation so far, not counting reader errors in files.")

(defun warning-location (condition)
  "Return the source location of the code that CONDITION, a warning from the compiler, is about. Called while CONDITION is
being signalled. Return four values: the file, or NIL for the submitted code; the line and the column, which are 0 if they
are unknown or the submitted code has a single line; and the heading of the enclosing form, or NIL."
  (values-list
   (or (guarded (cond ((typep condition 'sb-c::input-error-in-compile-file)
                       (multiple-value-list (unreadable-file-location condition)))
                      ((<= (incf *located-warning-count*) +max-located-warnings+)
                       (or (compiler-location) (loading-location))))
           (failure)
         nil)
       '(nil 0 0 nil))))
