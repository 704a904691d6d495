;;;; SBCL's contribs, which the core carries: ASDF and REQUIRE are not to look for their files, and no path of the machine
;;;; that built the core stays in it.

(in-package "SBCL-HOST")

(defglobal **contribs** '()
  "The names of the contribs that the core carries, as ASDF names systems.")

(defglobal **contribs-left-out**
    '(("sb-aclrepl" . "it is a REPL for a terminal")
      ("sb-capstone" . "it needs the foreign library capstone")
      ("sb-executable" . "it writes programs for the command sbcl")
      ("sb-gmp" . "it needs the foreign library GMP")
      ("sb-mpfr" . "it needs the foreign library MPFR")
      ("sb-perf" . "it is for Linux perf and a process of its own")
      ("sb-simd" . "it would take several megabytes in every image")
      ("sb-simple-streams" . "it would replace the streams of the whole image"))
  "The contribs that the core does not carry, each with the reason.")

(defun contrib-left-out (name)
  "Return a sentence that says why the system NAME, a string designator, is not here when it is a contrib that the core
does not carry, or called like one; or NIL."
  (when (typep name '(or string symbol character))
    (let ((reason (cdr (assoc name **contribs-left-out** :test #'string-equal))))
      (when (or reason (eql 3 (mismatch "sb-" (string name) :test #'char-equal)))
        (format nil "~:@(~A~) is ~A: ~{~A~^, ~}."
                name
                (if reason
                    (format nil "a contrib of SBCL that this image does not carry: ~A. Those it carries" reason)
                    (format nil "no contrib of SBCL ~A. This image carries" (lisp-implementation-version)))
                **contribs**)))))

(defun require-contrib-left-out (name)
  "A member of SB-EXT:*MODULE-PROVIDER-FUNCTIONS* that comes last: say why the module NAME is not here, if it is a
contrib."
  (let ((reason (contrib-left-out name)))
    (when reason
      (error 'sb-int:extension-failure :format-control "~A" :format-arguments (list reason) :references '()))))

(defmethod print-object :after ((condition asdf:missing-component) stream)
  (let ((reason (contrib-left-out (asdf/find-component:missing-requires condition))))
    (when (and reason (not *print-escape*))
      (terpri stream)
      (write-string reason stream))))

(defun preload-contribs ()
  "Have REQUIRE and ASDF take the contribs that are loaded for loaded, wherever their files are."
  (let ((version (string-right-trim "." (subseq (lisp-implementation-version) 0
                                                (position-if-not (lambda (character)
                                                                   (or (digit-char-p character)
                                                                       (char= character #\.)))
                                                                 (lisp-implementation-version))))))
    (setf **contribs** (sort (remove-if-not (lambda (name)
                                              (typep (asdf:registered-system name) 'asdf:require-system))
                                            (asdf:registered-systems))
                             #'string<))
    (dolist (name **contribs**)
      ;; Under this name ASDF requires what REQUIRE knows in upper case, as with the .asd file of another SBCL.
      (provide name)
      (asdf:clear-system name)
      (asdf:register-preloaded-system name :version version)))
  (setf sb-ext:*module-provider-functions*
        (append sb-ext:*module-provider-functions* '(require-contrib-left-out))))

(defun builder-directories ()
  "Return a list of conses of the name that a directory of the machine that builds the core gets, and its namestring:
those of the contribs' sources, of what is loaded, and of this file, for methods that are combined while it is loaded."
  (list (cons "SYS:CONTRIB;" (directory-namestring (translate-logical-pathname "SYS:CONTRIB;X.LISP")))
        (cons "SYS:CONTRIB;" (directory-namestring (merge-pathnames "contrib/" (sb-int:sbcl-homedir-pathname))))
        (cons "SYS:SRC;" (directory-namestring *load-truename*))))

(defun map-function-names (function)
  "Call FUNCTION with what names the compiled functions in reports, and with other things."
  (dolist (code (sb-vm:list-allocated-objects :all :type sb-vm:code-header-widetag))
    (dotimes (entry (sb-kernel:code-n-entries code))
      (funcall function (sb-kernel:%simple-fun-name (sb-kernel:%code-entry-point code entry))))
    (let ((info (sb-kernel:%code-debug-info code)))
      (when (typep info 'sb-c::compiled-debug-info)
        (funcall function (sb-c::compiled-debug-info-name info))
        (let ((functions (sb-c::compiled-debug-info-fun-map info)))
          (when (simple-vector-p functions)
            (map nil function functions)))))))

(defun forget-builder ()
  "Name the source files of the contribs by the logical host SYS, as SBCL names its own, where reports show them: in the
names of functions that are called after their file, and as the sources of what .asd files define. SYS leads nowhere
until SB-EXT:SET-SBCL-SOURCE-LOCATION says where the sources are."
  (let ((directories (builder-directories)))
    (labels ((logical-name (name)
               (loop for (logical . directory) in directories
                       thereis (and (eql (mismatch directory name) (length directory))
                                    (format nil "~A~:@(~A~)" logical
                                            (substitute #\; #\/ (subseq name (length directory)))))))
             (rename (name)
               (loop for rest on name
                     while (consp rest)
                     do (let ((part (car rest)))
                          (typecase part
                            (cons (rename part))
                            (string (let ((logical-name (logical-name part)))
                                      (when logical-name
                                        (setf (car rest) logical-name)))))))))
      (map-function-names (lambda (name) (when (consp name) (rename name))))
      (dolist (source (sb-vm:list-allocated-objects :all :type sb-vm:instance-widetag :test #'sb-c::debug-source-p))
        (let ((name (sb-c::debug-source-namestring source)))
          (when (and name (logical-name name))
            (setf (sb-c::debug-source-namestring source) (logical-name name)))))))
  (setf (logical-pathname-translations "SYS")
        (loop for component in '("src" "contrib" "output")
              collect (list (format nil "SYS:~:@(~A~);**;*.*.*" component)
                            (format nil "/nonexistent/sbcl/~A/**/*.*" component)))))
