;;;; Changes to SBCL and ASDF for the tools, and the tools' assumptions about SBCL.

(in-package "SBCL-HOST/TOOLS")

(define-patch asdf:perform-with-restarts (operation component)
  #'perform-action
  'loading)

(define-patch sb-pcl::maybe-trace-method (gf method fun fmf-p)
  #'wrap-traced-method)

;; Do not record the expansions in the macro definitions of a MACROLET as steps of the expansion of the form.
(define-patch sb-walker::convert-macro-to-lambda (llist body env name)
  (lambda (convert &rest arguments)
    (let ((*recording-steps* nil))
      (apply (the function convert) arguments))))

(define-assumption "a copy of a package has a symbol table of its own"
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
