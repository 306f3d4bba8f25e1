#!/usr/bin/env bash
# tinyshakespeare.sh: DIR/tinyshakespeare.txt, 1,115,394 bytes of ASCII, 65 symbols; public domain.
#
#     bash data/tinyshakespeare.sh [DIR]
#
# data/kjv.sh makes a larger text without GitHub. The rest is as in data/fetch.sh.
. "$(dirname "$0")/fetch.sh"
begin "$@"
commit=6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e
fetch "$dir/tinyshakespeare.txt" \
    sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed \
    "https://raw.githubusercontent.com/karpathy/char-rnn/$commit/data/tinyshakespeare/input.txt"
echo "$dir/tinyshakespeare.txt: $(wc -c <"$dir/tinyshakespeare.txt") bytes"
