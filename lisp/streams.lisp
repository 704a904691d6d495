;;;; Streams whose output goes to the host as it is printed.

(in-package "SBCL-HOST")

;;; Operations of a stream's MISC function: %STREAM-OPCODE in SBCL's src/code/ansi-stream.lisp, which the finished
;;; image no longer has.
(eval-when (:compile-toplevel :load-toplevel :execute)
  (defconstant +force-output+ 2)
  (defconstant +finish-output+ 3)
  (defconstant +charpos+ 4)
  (defconstant +element-type+ 7)
  (defconstant +element-mode+ 8)
  (defconstant +external-format+ 9)
  (defconstant +line-length+ 10)
  (defconstant +close+ 15))

(defconstant +buffer-size+ 1024
  "Characters that a stream keeps back before it hands them over.")

(declaim (type (unsigned-byte 64) *job-id*))
(defvar *job-id* 0
  "The job that this thread works for; 0 for none. Threads made by the user's code inherit it.")

(defvar *spare-buffer* nil
  "A buffer of this thread's that no stream uses just now, or NIL.")

(defstruct (host-stream (:include sb-kernel:ansi-stream
                         (cout #'send-character)
                         (sout #'send-string)
                         (misc #'operate-host-stream))
                        (:constructor make-host-stream (event-kind &key limited (line-buffered t)
                                                                         (job-id *job-id*)))
                        (:copier nil)
                        (:predicate nil))
  "A character output stream that pushes EVENT-KIND events of the job JOB-ID."
  (event-kind 0 :type (unsigned-byte 32))
  (job-id 0 :type (unsigned-byte 64))
  ;; Only this thread uses the buffer; what others write goes to the host directly, so that no lock is needed.
  (owner sb-thread:*current-thread*)
  (buffer nil :type (or null text))
  (fill 0 :type index)
  (column 0 :type index)
  ;; True: throw to ENOUGH when the host keeps no more.
  (limited nil)
  ;; True: hand over each line.
  (line-buffered t)
  ;; The other stream of the job, if there is one: what was written to that before goes first.
  (sibling nil :type (or null host-stream)))

(defmethod print-object ((stream host-stream) out)
  (print-unreadable-object (stream out :type t :identity t)))

(declaim (inline ensure-buffer))
(defun ensure-buffer (stream)
  "Return STREAM's buffer, made if it has none yet, with the other stream's flushed."
  (let ((sibling (host-stream-sibling stream)))
    (when (and sibling (plusp (host-stream-fill sibling)))
      (flush-host-stream sibling)))
  (or (host-stream-buffer stream)
      (setf (host-stream-buffer stream) (or (shiftf *spare-buffer* nil) (make-string +buffer-size+)))))

(defun finish-host-stream (stream)
  "Hand over what STREAM has kept back, and its buffer to the next stream."
  (flush-host-stream stream)
  (when (host-stream-buffer stream)
    (shiftf *spare-buffer* (host-stream-buffer stream) nil)))

(defun flush-host-stream (stream)
  "Hand over what STREAM has kept back."
  (declare (type host-stream stream))
  (let ((fill (host-stream-fill stream)))
    (unless (zerop fill)
      (setf (host-stream-fill stream) 0)
      (when (and (event-text (host-stream-job-id stream) (host-stream-event-kind stream) 0
                             (the text (host-stream-buffer stream)) 0 fill)
                 (host-stream-limited stream))
        (throw 'enough nil)))))

(defun send-character (stream character)
  "The stream's WRITE-CHAR."
  (declare (type host-stream stream) (type character character))
  (if (eq sb-thread:*current-thread* (host-stream-owner stream))
      (let ((buffer (ensure-buffer stream)))
        (when (>= (host-stream-fill stream) +buffer-size+)
          (flush-host-stream stream))
        (setf (schar buffer (host-stream-fill stream)) character)
        (incf (host-stream-fill stream))
        (cond ((char= character #\Newline)
               (setf (host-stream-column stream) 0)
               (when (host-stream-line-buffered stream)
                 (flush-host-stream stream)))
              (t (incf (host-stream-column stream)))))
      (event (host-stream-job-id stream) (host-stream-event-kind stream) 0 (string character)))
  character)

(defun send-string (stream string start end)
  "The stream's WRITE-STRING."
  (declare (type host-stream stream) (type string string) (type index start) (type (or index null) end))
  (sb-kernel:with-array-data ((string string) (start start) (end end) :check-fill-pointer t)
    (let ((length (- end start)))
      (cond ((zerop length))
            ((not (eq sb-thread:*current-thread* (host-stream-owner stream)))
             (event-text (host-stream-job-id stream) (host-stream-event-kind stream) 0 string start end))
            (t
             (let ((newline (position #\Newline string :start start :end end :from-end t))
                   (buffer (ensure-buffer stream)))
               (setf (host-stream-column stream)
                     (if newline
                         (- end newline 1)
                         (+ (host-stream-column stream) length)))
               (when (> (+ (host-stream-fill stream) length) +buffer-size+)
                 (flush-host-stream stream))
               (cond ((> length +buffer-size+)
                      (when (and (event-text (host-stream-job-id stream) (host-stream-event-kind stream) 0
                                             string start end)
                                 (host-stream-limited stream))
                        (throw 'enough nil)))
                     (t
                      (replace buffer string :start1 (host-stream-fill stream) :start2 start :end2 end)
                      (incf (host-stream-fill stream) length)
                      (when (and newline (host-stream-line-buffered stream))
                        (flush-host-stream stream)))))))))
  string)

(defun operate-host-stream (stream operation argument)
  "The stream's other operations. Closing it does nothing: the next evaluation needs it as much as this one."
  (declare (type host-stream stream) (ignore argument))
  (case operation
    ((#.+force-output+ #.+finish-output+)
     (when (eq sb-thread:*current-thread* (host-stream-owner stream))
       (flush-host-stream stream))
     nil)
    (#.+charpos+ (host-stream-column stream))
    ((#.+element-type+ #.+element-mode+) 'character)
    (#.+external-format+ :utf-8)
    (#.+line-length+ 80)
    (#.+close+ t)))

(defvar *job-streams* '()
  "The streams that CALL-WITH-JOB-STREAMS made for this thread.")

(defun change-job (job-id)
  "Have this thread work for JOB-ID from now on."
  (setf *job-id* job-id)
  (dolist (stream *job-streams*)
    (flush-host-stream stream)
    (setf (host-stream-job-id stream) job-id)))

(defun call-with-job-streams (function)
  "Call FUNCTION with the standard streams bound to fresh ones of this thread's job, and flush them afterwards."
  (declare (type function function) (dynamic-extent function))
  (let* ((out (make-host-stream (event-code :stdout)))
         (err (make-host-stream (event-code :stderr)))
         (in (make-concatenated-stream))
         ;; MAKE-TWO-WAY-STREAM but for its checks, which are generic functions.
         (io (sb-impl::%make-two-way-stream in out))
         (*job-streams* (progn (setf (host-stream-sibling out) err
                                     (host-stream-sibling err) out)
                               (list out err)))
         (*standard-output* out)
         (*error-output* err)
         (*trace-output* err)
         (*standard-input* in)
         (*query-io* io)
         (*debug-io* io)
         (*terminal-io* io))
    (unwind-protect (funcall function)
      (finish-host-stream out)
      (finish-host-stream err))))
