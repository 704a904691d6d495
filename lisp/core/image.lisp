;;;; The core: what the image is like when the build saves it.

(in-package "SBCL-HOST")

(defun note-core-contents ()
  "Note which systems and packages are SBCL's and this one's: what comes later is the user's."
  (check-assumptions)
  (preload-contribs)
  (forget-builder)
  (setf **core-systems** (already-loaded-systems)
        **system-packages** (remove **user-package** (list-all-packages))))

(defun prepare-core ()
  "Make of a stock SBCL with this system, and perhaps others, the image that is saved."
  ;; What ASDF found on the machine that built the core is not to be looked for on the one that runs it.
  (asdf:clear-configuration)
  (setf uiop:*user-cache* nil
        *compile-verbose* nil
        *compile-print* nil)
  (pushnew 'clear-up-after-threads sb-ext:*after-gc-hooks*)
  (setf **thread-variables** (thread-variables))
  (install-patches))

(defun hide-packages ()
  "Have users find nothing of the Lisp side's packages where what packages export is looked for, and lock them."
  (let ((packages (host-packages)))
    (dolist (package packages)
      (loop for symbol being the external-symbols of package
            collect symbol into symbols
            finally (unexport symbols package)))
    (mapc #'sb-ext:lock-package packages)))

(defun save-core (file)
  "End this SBCL and save what it has become, after NOTE-CORE-CONTENTS, as the core FILE, a native namestring."
  (prepare-core)
  (hide-packages)
  (sb-ext:save-lisp-and-die (sb-ext:parse-native-namestring file)
                            :callable-exports *exported-functions*))
