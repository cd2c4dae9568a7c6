#!/bin/sh
# Asks Claude Code. The task is on standard input, the answer goes to standard output.
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT && cd "$folder"
IS_SANDBOX=1 CLAUDE_CONFIG_DIR=$folder/.claude CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 \
    "$here/node_modules/.bin/claude" -p --model claude-sonnet-5 --allowedTools Bash
