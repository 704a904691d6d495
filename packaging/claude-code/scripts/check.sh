#!/bin/sh
# Checks the syntax of a Lisp file after an edit. Claude Code passes the tool call as JSON on standard input and, on
# status 2, shows standard error to the agent.
command -v sbcl-mcp >/dev/null || exit 0
# The file name is a JSON string. Names with a quotation mark or a backslash are not checked.
file=$(tr '\n' ' ' | sed -n 's/.*"file_path"[[:space:]]*:[[:space:]]*"\([^"\\]*\)".*/\1/p')
case $file in
    *.lisp | *.lsp | *.cl | *.asd) ;;
    *) exit 0 ;;
esac
[ -f "$file" ] || exit 0
sbcl-mcp check "$file" >&2
[ $? -ne 1 ] || exit 2
