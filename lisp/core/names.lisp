;;;; Names as users write them: finds packages by name and suggests similar names. This file also distinguishes the Lisp
;;;; side's own packages from others.

(in-package "SBCL-HOST")

(defun edit-distance (a b limit)
  "Return the least number of insertions, deletions, replacements and transpositions of adjacent characters that change A
into B, or NIL when it exceeds LIMIT. Compute only the cells of the distance table that are within LIMIT of its diagonal."
  (declare (type string a b) (type (integer 0 10) limit))
  (when (<= (abs (- (length a) (length b))) limit)
    (flet ((row () (make-array (1+ (length b)) :element-type 'fixnum :initial-element (1+ limit))))
      (let ((row (row)) (above (row)) (higher (row)))
        (declare (type (simple-array fixnum (*)) row above higher))
        (loop for index to (min limit (length b)) do (setf (aref row index) index))
        (loop for i from 1 to (length a)
              for begin = (max 1 (- i limit))
              do (rotatef higher above row)
                 (setf (aref row (1- begin)) (if (eql begin 1) i (1+ limit)))
                 (loop for j from begin to (min (length b) (+ i limit))
                       for same = (char= (char a (1- i)) (char b (1- j)))
                       do (setf (aref row j)
                                (min (1+ (aref above j)) (1+ (aref row (1- j)))
                                     (+ (aref above (1- j)) (if same 0 1))))
                          (when (and (> i 1) (> j 1)
                                     (char= (char a (1- i)) (char b (- j 2)))
                                     (char= (char a (- i 2)) (char b (1- j))))
                            (setf (aref row j) (min (aref row j) (1+ (aref higher (- j 2))))))))
        (let ((distance (aref row (length b))))
          (and (<= distance limit) distance))))))

(defconstant +max-compared-name-length+ 100
  "The maximum length of a name for which similar names are looked for.")

(defun similar-names (name candidates)
  "Return up to five strings of CANDIDATES that are similar to NAME, most similar first."
  (let* ((limit (case (length name) ((0 1 2) 0) ((3 4 5) 1) (t 2)))
         (near (when (<= (length name) +max-compared-name-length+)
                 (loop for candidate in candidates
                       for distance = (edit-distance name candidate limit)
                       when distance collect (cons distance candidate)))))
    (loop for (nil . candidate) in (sort (remove-duplicates near :key #'cdr :test #'equal)
                                         (lambda (a b)
                                           (if (= (car a) (car b))
                                               (string< (cdr a) (cdr b))
                                               (< (car a) (car b)))))
          repeat 5
          collect candidate)))

(defconstant +max-compared-symbols+ 20000
  "The maximum number of a package's accessible symbols that SIMILAR-SYMBOL-NAMES compares with a name. In a package with
more symbols, the function compares only symbols whose names begin with that name.")

(defun many-symbols-p (package)
  "Return true when more than +MAX-COMPARED-SYMBOLS+ symbols are accessible in PACKAGE."
  (let ((count 0))
    (do-symbols (symbol package)
      (when (> (incf count) +max-compared-symbols+)
        (return t)))))

(defun similar-symbol-names (name package test)
  "Return the names of up to five symbols that are accessible in PACKAGE, satisfy TEST, and have names similar to the string
NAME, most similar first. To save time in a package with many symbols, consider only names that begin with NAME."
  (declare (type function test))
  (let ((candidates '())
        (many (many-symbols-p package)))
    (when (<= (length name) +max-compared-name-length+)
      (do-symbols (symbol package)
        (let ((candidate (symbol-name symbol)))
          (when (and (<= (abs (- (length candidate) (length name))) 2)
                     (or (not many) (eql (length name) (or (mismatch name candidate) (length name))))
                     (funcall test symbol))
            (push candidate candidates)))))
    (similar-names name candidates)))

(defun package-names ()
  "Return the names and nicknames of all packages."
  (mapcan (lambda (package) (cons (package-name package) (copy-list (package-nicknames package))))
          (list-all-packages)))

(defun host-package-p (package)
  "Return true when the name of PACKAGE is SBCL-HOST or begins with SBCL-HOST/, as the names of the Lisp side's packages do."
  (let ((name (package-name package)))
    (and name
         (or (string= "SBCL-HOST" name)
             (eql 10 (mismatch "SBCL-HOST/" name))))))

(defun host-packages ()
  "Return the packages of the Lisp side."
  (remove-if-not #'host-package-p (list-all-packages)))

(defun find-package-leniently (name)
  "Return the package that NAME, as a user writes it, designates; or NIL. If no package has exactly this name, strip spaces
and #: from NAME, and convert it to upper case unless it is in vertical bars: `foo` means FOO."
  (or (find-package name)
      (let* ((bare (string-left-trim "#:" (string-trim " " name)))
             (end (1- (length bare))))
        (find-package (if (and (plusp end) (char= (char bare 0) (char bare end) #\|))
                          (subseq bare 1 end)
                          (string-upcase bare))))))

(defun find-package-or-suggest (name)
  "Return the package that NAME, as a user writes it, designates. If there is no such package, signal an error that suggests
similar names."
  (or (find-package-leniently name)
      (error 'sb-kernel:simple-package-error
             :package name
             :format-control "There is no package named ~S.~@[ Did you mean ~{~A~^, ~}?~]"
             :format-arguments (list name (similar-names (string-upcase name) (package-names))))))

(defmacro with-inspection-syntax (() &body body)
  "Evaluate BODY with the printer and reader variables of WITH-SERVER-SYNTAX, detection of circles, and COMMON-LISP-USER as
the current package, so that symbols not accessible there print with a package prefix."
  `(with-server-syntax (:length 20 :level 4)
     (let ((*package* **user-package**)
           (*print-circle* t))
       ,@body)))
