;;;; The numbers and structure layouts of the contract with the host, read from ffi/sbcl_host.h at compile time.

(in-package "SBCL-HOST")

(eval-when (:compile-toplevel :load-toplevel :execute)
  (defun header-tokens (text)
    "Return the tokens of TEXT, a C header, as strings, without comments. The newline that ends a preprocessor directive
becomes the token \";\"."
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
    "Return the integer that TOKENS denote: a number, or a parenthesised left shift of a number. Return NIL for anything
else."
    (flet ((parse (token) (parse-integer token :junk-allowed t)))
      (cond ((null tokens) nil)
            ((null (rest tokens)) (parse (first tokens)))
            ((equal '("(" "<" "<" ")") (list (first tokens) (third tokens) (fourth tokens) (sixth tokens)))
             (ash (parse (second tokens)) (parse (fifth tokens)))))))

  (defun split-tokens (tokens separator)
    "Split TOKENS at each SEPARATOR and return the non-empty parts, as lists."
    (loop for end = (position separator tokens :test #'string=)
          for part = (subseq tokens 0 end)
          when part collect part
          while end
          do (setf tokens (nthcdr (1+ end) tokens))))

  (defun enum-numbers (body)
    "Return an alist of the members of an enum and their numbers. BODY is the list of tokens between its braces."
    (let ((number -1))
      (loop for (name nil value) in (split-tokens body ",")
            collect (cons name (setf number (if value (header-integer (list value)) (1+ number)))))))

  (defun structure-fields (body)
    "Return an alist of the fields of a struct and their offsets in octets, with :SIZE for the size of the struct. BODY is
the list of tokens between its braces. Fields may be 32-bit and 64-bit integers and pointers."
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
    "Return the declarations in FILE, the header, as lists: (:CONSTANT name integer); (:ENUM name members) and (:STRUCT
name fields), each with an alist of numbers or offsets; and (:FUNCTION name) for each function that the core exports."
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

  (defparameter *header-declarations*
    (macrolet ((header ()
                 `',(read-header (merge-pathnames "../../ffi/sbcl_host.h" (or *compile-file-truename* *load-truename*)))))
      (header))
    "The declarations in ffi/sbcl_host.h, as READ-HEADER returns them.")

  (defun header-declaration (kind name)
    "Return the alist that the header declares for the KIND (:ENUM or :STRUCT) called NAME: an enum's members with their
numbers, or a struct's fields with their offsets. Signal an error if there is no such declaration."
    (or (third (find-if (lambda (entry) (and (eq kind (first entry)) (string= name (second entry)))) *header-declarations*))
        (error "ffi/sbcl_host.h declares no ~(~A~) ~A." kind name)))

  (defun member-keyword (name prefix)
    "Return the keyword for NAME, an enum member whose name begins with PREFIX."
    (intern (substitute #\- #\_ (string-left-trim "_" (subseq name (mismatch prefix name)))) "KEYWORD"))

  (defun enum-codes (enum prefix)
    "Return a property list from the members of ENUM to their numbers. The members are keywords, without PREFIX."
    (loop for (name . number) in (header-declaration :enum enum)
          collect (member-keyword name prefix)
          collect number)))

(defmacro declared-number (name)
  "Expand to the number that the header gives NAME, a constant or an enum member."
  (or (loop for (kind known members) in *header-declarations*
              thereis (case kind
                        (:constant (and (string= known name) members))
                        (:enum (cdr (assoc name members :test #'string=)))))
      (error "ffi/sbcl_host.h declares no constant or enum member ~A." name)))

(defmacro field-offset (structure field)
  "Expand to the offset in octets of FIELD in STRUCTURE, as the header declares it."
  (or (cdr (assoc field (header-declaration :struct structure) :test #'equal))
      (error "struct ~A in ffi/sbcl_host.h has no field ~A." structure field)))

(defmacro structure-size (structure)
  "Expand to the size of STRUCTURE in octets, as the header declares it."
  (cdr (assoc :size (header-declaration :struct structure))))

(defmacro exported-functions ()
  "Expand to the names of the functions that the header declares for a core to export, as symbols."
  `'(,@(loop for (kind name) in *header-declarations*
             when (eq kind :function)
               collect (intern (substitute #\- #\_ (string-upcase name)) "SBCL-HOST"))))
