#!/usr/bin/env bash
# wikitext103.sh: DIR/wikitext-103-raw/{train,valid,test}.txt, 0.5 GB of Wikipedia; CC BY-SA.
#
#     bash data/wikitext103.sh [DIR]               as it was written: for characters, GPT-2's tokens
#     KIND=words bash data/wikitext103.sh [DIR]    DIR/wikitext-103/: rare words are <unk>
#
# The author's address and the first one, which may be gone; 0.2 GB to fetch. The rest is as in
# data/fetch.sh.
. "$(dirname "$0")/fetch.sh"
begin "$@"
case ${KIND:=raw} in
raw)
    name=wikitext-103-raw part=raw
    hash=91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794
    ;;
words)
    name=wikitext-103 part=tokens
    hash=242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590
    ;;
*) fail 2 "KIND: expected raw or words, got $KIND" ;;
esac
need python3
if [ ! -e "$dir/$name" ]; then
    zip=$dir/$name-v1.zip
    fetch "$zip" sha256:$hash https://wikitext.smerity.com/$name-v1.zip \
        https://s3.amazonaws.com/research.metamind.io/wikitext/$name-v1.zip
    scratch
    python3 -m zipfile -e "$zip" "$tmp" 2>/dev/null || fail 3 "$zip: cannot unpack it in $tmp"
    mkdir "$tmp/made" || exit 3
    for split in train valid test; do
        mv "$tmp/$name/wiki.$split.$part" "$tmp/made/$split.txt" 2>/dev/null ||
            fail 3 "$zip: expected $name/wiki.$split.$part in it"
    done
    mv "$tmp/made" "$dir/$name" || exit 3
fi
for split in train valid test; do
    echo "$dir/$name/$split.txt: $(wc -c <"$dir/$name/$split.txt") bytes"
done
