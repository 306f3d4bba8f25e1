#!/usr/bin/env bash
# kjv.sh: DIR/kjv.txt, the King James Bible from Debian's packages bible-kjv and bible-kjv-text,
# 4,137,850 bytes of ASCII, a verse a line; public domain.
#
#     bash data/kjv.sh [DIR]
#
# Takes the packages if they are installed, and otherwise fetches them, without root. The rest is as
# in data/fetch.sh.
. "$(dirname "$0")/fetch.sh"
begin "$@"
hash=b5c4940bcfeee072c0935b5200d0f9d88a00a0199cb0961d16133458fcdfae5d
out=$dir/kjv.txt
if [ -e "$out" ]; then
    ! said=$(wrong "$out" "sha256:$hash") || fail 3 "$out: $said" "remove it to have it made"
else
    scratch
    bible=/usr/bin/bible lib=/usr/lib
    if [ ! -x $bible ] || [ ! -e $lib/bible.data ]; then
        debian "$tmp" bible-kjv bible-kjv-text ||
            fail 3 "bible-kjv: Debian's package is not here and apt-get cannot fetch it" \
                "apt-get update, then run it again"
        bible=$tmp$bible lib=$tmp$lib
    fi
    "$bible" -p "$lib" -f gen1:1-rev22:21 | sed -E 's/^[^ ]+ //' >"$tmp/kjv.txt"
    ! said=$(wrong "$tmp/kjv.txt" "sha256:$hash") || fail 3 "$bible: $said"
    mv "$tmp/kjv.txt" "$out" || exit 3
fi
echo "$out: $(wc -c <"$out") bytes"
