;;;; Preparing and saving the core.

(in-package "SBCL-HOST")

(defun note-core-contents ()
  "Check the assumptions about SBCL, register the contribs, remove the paths of the build machine, and record the
systems and packages of the core. All systems and packages that are loaded later count as the user's."
  (check-assumptions)
  (preload-contribs)
  (replace-build-paths)
  (setf **core-systems** (already-loaded-systems)
        **system-packages** (remove **user-package** (list-all-packages))))

(defun prepare-core ()
  "Turn a stock SBCL, in which the Lisp side and perhaps other systems are loaded, into the image to save."
  ;; The running image must not look for systems where ASDF found them on the build machine.
  (asdf:clear-configuration)
  (setf uiop:*user-cache* nil
        *compile-verbose* nil
        *compile-print* nil)
  (pushnew 'collect-after-threads sb-ext:*after-gc-hooks*)
  (setf **thread-variables** (thread-variables))
  (install-patches))

(defun hide-packages ()
  "Unexport all symbols of the Lisp side's packages, so that users who list exported symbols do not find them. Then lock
the packages."
  (let ((packages (host-packages)))
    (dolist (package packages)
      (loop for symbol being the external-symbols of package
            collect symbol into symbols
            finally (unexport symbols package)))
    (mapc #'sb-ext:lock-package packages)))

(defun save-core (file)
  "Prepare this image for saving, write it to the core FILE, a native namestring, and end this SBCL. NOTE-CORE-CONTENTS
must have been called before."
  (prepare-core)
  (hide-packages)
  (when sb-impl::*finalizer-thread*
    (sb-impl::finalizer-thread-stop))
  ;; SBCL would stop the finalizer thread when it saves. The thread is already stopped: here, or by build.lisp.
  (let ((*saving-image* t))
    (sb-ext:save-lisp-and-die (sb-ext:parse-native-namestring file)
                              :callable-exports *exported-functions*)))
