;;;; Changes to SBCL and ASDF for the tools, and the tools' assumptions about SBCL.

(in-package "SBCL-HOST/TOOLS")

(define-patch asdf:perform-with-restarts (operation component)
  #'perform-asdf-action
  'loading)

(define-patch asdf/system-registry:sysdef-central-registry-search (system)
  #'search-definition-entries)

(define-patch sb-pcl::maybe-trace-method (gf method fun fmf-p)
  #'wrap-traced-method)

;; Expansions inside the macro definitions of a MACROLET are not steps of the requested expansion, so do not record them.
(define-patch sb-walker::convert-macro-to-lambda (llist body env name)
  (lambda (convert &rest arguments)
    (let ((*recording-steps* nil))
      (apply (the function convert) arguments))))

(define-assumption "the linkage cells through which full calls go"
  (let ((cell (linkage-cell 'code-source)))
    (and (member cell (linkage-cells (function-code #'system-code-p)))
         (eq 'code-source (linkage-cell-name cell)))))

(define-assumption "the cross-references of code"
  (let ((found nil))
    (map-xrefs (lambda (kind name number)
                 (declare (ignore number))
                 (when (and (eq kind :calls) (eq name 'code-source))
                   (setf found t)))
               #'system-code-p)
    found))
