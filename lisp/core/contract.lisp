;;;; The numbers and structures of the contract with the host: read from ffi/sbcl_host.h when this is compiled.

(in-package "SBCL-HOST")

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun header-tokens (text)
    "Return the tokens of TEXT, a C header without directives but #define: strings. A line's end is one after a directive."
    (let ((tokens '()) (directive nil) (position 0))
      (flet ((token (end)
               (push (subseq text position end) tokens)
               (setf position end)))
        (loop while (< position (length text))
              do (let ((character (char text position)))
                   (cond ((eql position (search "/*" text :start2 position :end2 (min (+ position 2) (length text))))
                          (setf position (+ 2 (search "*/" text :start2 position))))
                         ((char= character #\Newline)
                          (when directive (push ";" tokens))
                          (setf directive nil)
                          (incf position))
                         ((member character '(#\Space #\Tab)) (incf position))
                         ((or (alphanumericp character) (find character "_#"))
                          (when (char= character #\#) (setf directive t))
                          (token (or (position-if-not (lambda (c) (or (alphanumericp c) (char= c #\_))) text
                                                      :start (1+ position))
                                     (length text))))
                         (t (token (1+ position)))))))
      (nreverse tokens)))

  (defun header-integer (tokens)
    "Return the integer that TOKENS write: a number, or one that is shifted to the left, in parentheses; or NIL."
    (flet ((parse (token) (parse-integer token :junk-allowed t)))
      (cond ((null tokens) nil)
            ((null (rest tokens)) (parse (first tokens)))
            ((equal '("(" "<" "<" ")") (list (first tokens) (third tokens) (fourth tokens) (sixth tokens)))
             (ash (parse (second tokens)) (parse (fifth tokens)))))))

  (defun split-tokens (tokens separator)
    "Return the lists of tokens between those of TOKENS that are SEPARATOR, but for empty ones."
    (loop for end = (position separator tokens :test #'string=)
          for part = (subseq tokens 0 end)
          when part collect part
          while end
          do (setf tokens (nthcdr (1+ end) tokens))))

  (defun enum-numbers (body)
    "Return the names in BODY, the tokens of an enum, each with its number."
    (let ((number -1))
      (loop for (name nil value) in (split-tokens body ",")
            collect (cons name (setf number (if value (header-integer (list value)) (1+ number)))))))

  (defun structure-fields (body)
    "Return the names in BODY, the tokens of a struct of numbers of 32 and 64 bits and pointers, each with its offset; and
:SIZE with its size, in octets."
    (let ((offset 0) (depth 0) (field '()) (fields '()))
      (dolist (token body)
        (cond ((string= token "(") (incf depth) (push token field))
              ((string= token ")") (decf depth) (push token field))
              ((and (string= token ";") (zerop depth))
               (let* ((field (reverse (shiftf field '())))
                      (function (search '("(" "*") field :test #'equal))
                      (size (if (and (string= "32_t" (subseq (first field) (max 0 (- (length (first field)) 4))))
                                     (not (member "*" field :test #'string=)))
                                4
                                8)))
                 (setf offset (* size (ceiling offset size)))
                 (push (cons (if function (nth (+ function 2) field) (first (last field))) offset) fields)
                 (incf offset size)))
              (t (push token field))))
      (nreverse (cons (cons :size (* 8 (ceiling offset 8))) fields))))

  (defun read-header (file)
    "Return what FILE, the header, declares: lists of :CONSTANT, a name and an integer; of :ENUM or :STRUCT, a name and the
names in it, each with its number or offset; of :FUNCTION and the name of one that the core exports."
    (let ((tokens (header-tokens (with-open-file (stream file)
                                   (let ((text (make-string (file-length stream))))
                                     (subseq text 0 (read-sequence text stream)))))))
      (loop while tokens
            for (kind name next) = tokens
            for body-p = (equal "{" next)
            for end = (or (position (if body-p "}" ";") tokens :test #'string=) (length tokens))
            for body = (subseq tokens (min end (if body-p 3 2)) end)
            when (and (string= kind "#define") (header-integer body))
              collect (list :constant name (header-integer body))
            when (and (string= kind "enum") body-p)
              collect (list :enum name (enum-numbers body))
            when (and (string= kind "struct") body-p)
              collect (list :struct name (structure-fields body))
            when (string= kind "extern")
              collect (list :function (fifth tokens))
            do (setf tokens (nthcdr (1+ end) tokens)))))

  (defparameter *header*
    (macrolet ((header ()
                 `',(read-header (merge-pathnames "../../ffi/sbcl_host.h" (or *compile-file-truename* *load-truename*)))))
      (header))
    "What READ-HEADER returns for ffi/sbcl_host.h.")

  (defun declared (kind name)
    "Return what the header declares as KIND under NAME."
    (or (third (find-if (lambda (entry) (and (eq kind (first entry)) (string= name (second entry)))) *header*))
        (error "ffi/sbcl_host.h declares no ~(~A~) ~A." kind name)))

  (defun member-keyword (name prefix)
    "Return the keyword for NAME, a member of an enum whose members begin with PREFIX."
    (intern (substitute #\- #\_ (string-left-trim "_" (subseq name (mismatch prefix name)))) "KEYWORD"))

  (defun enum-codes (enum prefix)
    "Return a property list of the members of ENUM, without PREFIX, as keywords, and their numbers."
    (loop for (name . number) in (declared :enum enum)
          collect (member-keyword name prefix)
          collect number)))

(defmacro declared-number (name)
  "Return the number that the header gives NAME."
  (or (loop for (kind known members) in *header*
              thereis (case kind
                        (:constant (and (string= known name) members))
                        (:enum (cdr (assoc name members :test #'string=)))))
      (error "ffi/sbcl_host.h has no number ~A." name)))

(defmacro field-offset (structure field)
  "Return the offset of FIELD in STRUCTURE in octets, as the header declares both."
  (or (cdr (assoc field (declared :struct structure) :test #'equal))
      (error "struct ~A has no field ~A." structure field)))

(defmacro structure-size (structure)
  "Return the size of STRUCTURE in octets, as the header declares it."
  (cdr (assoc :size (declared :struct structure))))

(defmacro exported-functions ()
  "Return the names of the functions that the header says a core exports, as symbols."
  `'(,@(loop for (kind name) in *header*
             when (eq kind :function)
               collect (intern (substitute #\- #\_ (string-upcase name)) "SBCL-HOST"))))
