#!/bin/sh
# Asks Codex, with the tools that it runs itself. The task is on standard input, the answer goes to standard output.
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT && cd "$folder"
CODEX_HOME=$folder "$here/node_modules/.bin/codex" exec --skip-git-repo-check \
    --disable multi_agent -c web_search=disabled \
    -c model=gpt-5-mini -c model_provider=any -c model_providers.any.name=any \
    -c "model_providers.any.base_url=$OPENAI_BASE_URL" -c model_providers.any.env_key=OPENAI_API_KEY \
    -c model_providers.any.wire_api=responses -
