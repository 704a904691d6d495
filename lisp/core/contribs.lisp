;;;; SBCL's contribs, which are part of the core. ASDF and REQUIRE must not look for the files of contribs, and the core
;;;; must not contain paths of the build machine.

(in-package "SBCL-HOST")

(defglobal **contribs** '()
  "The names of the contribs in the core, which are also the names of their ASDF systems.")

(defglobal **omitted-contribs**
    '(("sb-aclrepl" . "it is a REPL for a terminal")
      ("sb-capstone" . "it needs the foreign library capstone")
      ("sb-executable" . "it writes programs for the command sbcl")
      ("sb-gmp" . "it needs the foreign library GMP")
      ("sb-mpfr" . "it needs the foreign library MPFR")
      ("sb-perf" . "it supports Linux perf and needs a process of its own")
      ("sb-simd" . "it would take several megabytes in every image")
      ("sb-simple-streams" . "it would replace the streams of the whole image"))
  "The contribs that the core does not contain, each with the reason.")

(defun omitted-contrib-reason (name)
  "Return two sentences that say why this image lacks the system NAME and which contribs it contains. Return NIL unless
NAME, a string designator, is the name of an omitted contrib or begins with SB-. Return NIL also for a contrib that the
image contains: ASDF may reject such a contrib because of its version."
  (when (and (typep name '(or string symbol character))
             (not (member name **contribs** :test #'string-equal)))
    (let ((reason (cdr (assoc name **omitted-contribs** :test #'string-equal))))
      (when (or reason (eql 3 (mismatch "sb-" (string name) :test #'char-equal)))
        (format nil "~:@(~A~) is ~A: ~{~A~^, ~}."
                name
                (if reason
                    (format nil "a contrib of SBCL that this image does not contain: ~A. The image contains" reason)
                    (format nil "not a contrib of SBCL ~A. The image contains" (lisp-implementation-version)))
                **contribs**)))))

(defun refuse-omitted-contrib (name)
  "Signal an error that says why the module NAME is missing, if NAME looks like a contrib. This function is the last
member of SB-EXT:*MODULE-PROVIDER-FUNCTIONS*."
  (let ((reason (omitted-contrib-reason name)))
    (when reason
      (error 'sb-int:extension-failure :format-control "~A" :format-arguments (list reason) :references '()))))

(defmethod print-object :after ((condition asdf:missing-component) stream)
  (let ((reason (omitted-contrib-reason (asdf/find-component:missing-requires condition))))
    (when (and reason (not *print-escape*))
      (terpri stream)
      (write-string reason stream))))

(defun preload-contribs ()
  "Make REQUIRE and ASDF treat the contribs in the core as loaded, wherever their files are."
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
      ;; The contrib itself has provided only its upper-case name. ASDF calls REQUIRE with the lower-case name, even if it
      ;; finds the contrib's .asd file in another SBCL.
      (provide name)
      (asdf:clear-system name)
      (asdf:register-preloaded-system name :version version)))
  (setf sb-ext:*module-provider-functions*
        (append sb-ext:*module-provider-functions* '(refuse-omitted-contrib))))

(defun build-directories ()
  "Return an alist from logical namestrings to directories of the build machine: the directories of the contribs'
sources, of loaded contrib files, and of the file that is being loaded. SBCL puts the name of that file into the names
of methods that it combines during the load."
  (list (cons "SYS:CONTRIB;" (directory-namestring (translate-logical-pathname "SYS:CONTRIB;X.LISP")))
        (cons "SYS:CONTRIB;" (directory-namestring (merge-pathnames "contrib/" (sb-int:sbcl-homedir-pathname))))
        (cons "SYS:SRC;" (directory-namestring *load-truename*))))

(defun map-function-names (function)
  "Call FUNCTION with the name of each compiled function that reports may show. FUNCTION is called with some other
objects too, which it must ignore."
  (dolist (code (sb-vm:list-allocated-objects :all :type sb-vm:code-header-widetag))
    (dotimes (entry (sb-kernel:code-n-entries code))
      (funcall function (sb-kernel:%simple-fun-name (sb-kernel:%code-entry-point code entry))))
    (let ((info (sb-kernel:%code-debug-info code)))
      (when (typep info 'sb-c::compiled-debug-info)
        (funcall function (sb-c::compiled-debug-info-name info))
        (let ((functions (sb-c::compiled-debug-info-fun-map info)))
          (when (simple-vector-p functions)
            (map nil function functions)))))))

(defun replace-build-paths ()
  "In the debug information of the image, replace the names of the contribs' source files by logical pathnames of the
host SYS, which SBCL also uses for its own source files. Reports show these pathnames in the names of functions that are
named after their file, and as the sources of definitions in .asd files. SYS is translated to directories that do not
exist until SB-EXT:SET-SBCL-SOURCE-LOCATION sets the location of the sources."
  (let ((directories (build-directories)))
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
