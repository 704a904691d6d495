#!/bin/sh
# After an edit: what the reader would refuse in the Lisp file that was edited. Claude Code passes the call as JSON on
# standard input and, on status 2, shows standard error to the agent.
command -v sbcl-mcp >/dev/null || exit 0
# A file's name is a JSON string; one with a quotation mark or a backslash in it is not checked.
file=$(tr '\n' ' ' | sed -n 's/.*"file_path"[[:space:]]*:[[:space:]]*"\([^"\\]*\)".*/\1/p')
case $file in
    *.lisp | *.lsp | *.cl | *.asd) ;;
    *) exit 0 ;;
esac
[ -f "$file" ] || exit 0
sbcl-mcp check "$file" >&2
[ $? -ne 1 ] || exit 2
