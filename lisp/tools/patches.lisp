;;;; Changes to SBCL for the tools, and what is taken for granted of it for them.

(in-package "SBCL-HOST/TOOLS")

(define-patch asdf:perform-with-restarts (operation component)
  #'perform-action
  'loading)

(define-patch sb-pcl::maybe-trace-method (gf method fun fmf-p)
  #'wrap-traced-method)

;; Steps of an expansion are those of the form, not those of defining the macros of its MACROLET.
(define-patch sb-walker::convert-macro-to-lambda (llist body env name)
  (lambda (convert &rest arguments)
    (let ((*noting-steps* nil))
      (apply (the function convert) arguments))))

(define-assumption "that a copy of a package gets its own symbols"
  (let* ((package (symbol-package 'private-copy))
         (copy (private-copy package))
         (name "a name of no symbol"))
    (and (eq 'private-copy (find-symbol "PRIVATE-COPY" copy))
         (intern name copy)
         (null (find-symbol name package)))))

(define-assumption "the cells that full calls go through"
  (member (linkage-index 'code-source) (linkage-indices (function-code #'system-code-p))))

(define-assumption "the cross-references of code"
  (let ((found nil))
    (map-xrefs (lambda (kind name number)
                 (declare (ignore number))
                 (when (and (eq kind :calls) (eq name 'code-source))
                   (setf found t)))
               #'system-code-p)
    found))
