#!/usr/bin/env bash
# test_data.sh: the scripts that fetch corpora, without the network: a directory and a server on
# this machine stand in for it. Debian's packages are real, where apt-get finds them.
#
#     bash dev/test_data.sh
#
# Prints a line for every check that fails or is skipped, and at the end `N passed, N failed`. It
# needs curl, python3; the last checks also build/test_images.
set -u
cd "$(dirname "$0")/.." || exit 3
export LC_ALL=C no_proxy=127.0.0.1 PYTHONDONTWRITEBYTECODE=1
unset MIRROR SHA256 KIND PARTS
tmp=$(mktemp -d) || exit 3
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$tmp"' EXIT
passed=0 failed=0
web=$tmp/web
mkdir "$web"

# check WHAT COMMAND...: one check
check() {
    local what=$1
    shift
    if "$@" >/dev/null 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL $what: not so: $*"
        tail -n 3 "$tmp/out" "$tmp/err" 2>/dev/null
    fi
}

# run CODE NAME [ARGUMENTS]: data/NAME.sh ends with CODE within 20 s; if that is not 0, with one
# error line and at most one hint
run() {
    local code=$1 name=$2 got
    shift 2
    timeout 20 bash "data/$name.sh" "$@" >"$tmp/out" 2>"$tmp/err"
    got=$?
    check "$name $*: code $code, got $got" [ $got = "$code" ]
    [ "$code" = 0 ] || check "$name $*: an error and a hint" awk '
        NR == 1 && !/^error: / || NR == 2 && !/^hint: / || NR > 2 { exit bad = 1 }
        END { exit bad || !NR }' "$tmp/err"
}

says() { check "it says $1" grep -q -e "$1" "$tmp/out" "$tmp/err"; }
same() { check "$1 is as expected" cmp "$1" "$2"; }
none() { check "$1 is not there" [ ! -e "$1" ]; }
hash() { sha256sum "$1" | cut -d ' ' -f 1; }

# ---- usage, and no network at all: every address and every mirror of Debian ends at a closed port

for name in tinyshakespeare wikitext103 cifar10 cifar5m fashion_mnist kjv; do
    run 2 $name one two
    run 2 $name --help
    : >"$tmp/file"
    run 3 $name "$tmp/file"
    if [ $name = fashion_mnist ] && [ -d /usr/share/datasets/fashion-mnist ]; then continue; fi
    if [ $name = kjv ] && [ -x /usr/bin/bible ]; then continue; fi
    http_proxy=http://127.0.0.1:1 https_proxy=http://127.0.0.1:1 run 3 $name "$tmp/offline"
    says "cannot fetch"
done
check "nothing is left offline" [ -z "$(find "$tmp/offline" -type f)" ]
KIND=all run 2 wikitext103 "$tmp/offline"
for parts in 5 "0 x" -1 "0,1" " " "0 0" "1 0"; do
    PARTS=$parts run 2 cifar5m "$tmp/offline"
done

# ---- one file: right, wrong, resumed, there

text=$web/tinyshakespeare.txt got=$tmp/a/tinyshakespeare.txt
seq 1 50000 >"$text"
export MIRROR=file://$web SHA256
SHA256=$(hash "$text")
run 0 tinyshakespeare "$tmp/a"
same "$got" "$text"
MIRROR=http://127.0.0.1:1 run 0 tinyshakespeare "$tmp/a" # it is there: no network is asked
SHA256=$(hash data/kjv.sh) run 3 tinyshakespeare "$tmp/a"
says "tinyshakespeare.txt: expected SHA-256 $(hash data/kjv.sh), got $SHA256"
same "$got" "$text"
rm "$got"
SHA256=$(hash data/kjv.sh) run 3 tinyshakespeare "$tmp/a"
says "expected SHA-256 $(hash data/kjv.sh), got $SHA256, of what it sends"
check "nothing wrong is left" [ -z "$(ls "$tmp/a")" ]
SHA256='' run 3 tinyshakespeare "$tmp/a" # the published one
says "expected SHA-256 86c4e6aa"
head -c 100000 "$text" >"$got.part"
run 0 tinyshakespeare "$tmp/a"
says ", from byte 100000"
same "$got" "$text"
rm "$got" && head -c 100000 /dev/zero >"$got.part" # of another file
run 0 tinyshakespeare "$tmp/a"
same "$got" "$text"
rm "$got" && cat "$text" "$text" >"$got.part" # longer than it should be
run 0 tinyshakespeare "$tmp/a"
same "$got" "$text"
rm "$got" && cp "$text" "$got.part"
MIRROR=http://127.0.0.1:1 run 0 tinyshakespeare "$tmp/a" # only the name was missing
same "$got" "$text"
rm "$got" && head -c 1000 "$text" >"$got.part"
MIRROR=http://127.0.0.1:1 run 3 tinyshakespeare "$tmp/a"
check "what has come is kept" [ "$(wc -c <"$got.part")" = 1000 ]
rm "$got.part"
check "no part is left" [ -z "$(ls "$tmp/a")" ]

here=$PWD
mkdir "$tmp/elsewhere" && cd "$tmp/elsewhere" || exit 3
check "a directory beside the caller" bash "$here/data/tinyshakespeare.sh" "the texts"
same "$tmp/elsewhere/the texts/tinyshakespeare.txt" "$text"
cd "$here" || exit 3

# ---- a server that cannot go on in the middle of a file

python3 -u -m http.server 0 --bind 127.0.0.1 --directory "$web" >"$tmp/port" 2>"$tmp/log" &
server=$!
for _ in $(seq 100); do
    port=$(sed -nE 's/.* port ([0-9]+) .*/\1/p' "$tmp/port")
    [ -z "$port" ] || break
    sleep 0.1
done
MIRROR=http://127.0.0.1:$port
run 0 tinyshakespeare "$tmp/a"
same "$got" "$text"
rm "$got" && head -c 1000 "$text" >"$got.part"
run 0 tinyshakespeare "$tmp/a"
same "$got" "$text"
rm "$got"
MIRROR=http://127.0.0.1:$port/absent run 3 tinyshakespeare "$tmp/a"
says "error: 404"
check "no part is left of a page" [ -z "$(ls "$tmp/a")" ]

# ---- archives, made here in the formats of the real ones

python3 - "$web" <<'END' || exit 3
import io, sys, tarfile, zipfile
sys.path.insert(0, "data")
import images
web = sys.argv[1]
for name, part, splits in (("wikitext-103-raw", "raw", "train valid test"),
                           ("wikitext-103", "tokens", "train valid test"), ("bad", "raw", "train")):
    with zipfile.ZipFile(f"{web}/{name}-v1.zip", "w") as z:
        for split in splits.split():
            folder = name.replace("bad", "wikitext-103-raw")
            z.writestr(f"{folder}/wiki.{split}.{part}", f"{name} {split}\n")
def records(n, salt):
    return b"".join(bytes([i % 10]) + images.some_bytes(3072, i + salt) for i in range(n))
with tarfile.open(f"{web}/cifar-10-binary.tar.gz", "w:gz") as t:
    for i, name in enumerate([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]):
        info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
        info.size = 3073 * (i + 1)
        t.addfile(info, io.BytesIO(records(i + 1, i)))
for part in range(6):
    n = part + 2
    x = images.to_npy("|u1", (n, 32, 32, 3), images.some_bytes(n * 3072, part))
    with open(f"{web}/part{part}.npz", "wb") as f:
        f.write(images.to_npz(X=x, Y=images.to_npy("<i8", (n,), b"\1\0\0\0\0\0\0\0" * n)))
END
SHA256=$(hash "$web/wikitext-103-raw-v1.zip")
run 0 wikitext103 "$tmp/a"
for split in train valid test; do
    check "WikiText's $split" grep -x "wikitext-103-raw $split" \
        "$tmp/a/wikitext-103-raw/$split.txt"
done
MIRROR='' run 0 wikitext103 "$tmp/a" # it is there
SHA256=$(hash "$web/wikitext-103-v1.zip") KIND=words run 0 wikitext103 "$tmp/a"
check "WikiText of words" grep -x "wikitext-103 test" "$tmp/a/wikitext-103/test.txt"
cp "$web/bad-v1.zip" "$web/wikitext-103-raw-v1.zip"
SHA256=$(hash "$web/bad-v1.zip") run 3 wikitext103 "$tmp/b"
none "$tmp/b/wikitext-103-raw"

SHA256=$(hash "$web/cifar-10-binary.tar.gz")
run 0 cifar10 "$tmp/a"
says "15 images to train on, 6 to evaluate on, 32 x 32 x 3"
says "mean 0.4914 0.4822 0.4465, deviation 0.2023 0.1994 0.2010"
mkdir "$tmp/data" # not the repository's
CDPATH=$tmp MIRROR='' run 0 cifar10 "$tmp/a"
SHA256='' run 3 cifar10 "$tmp/b"
says "expected SHA-256 c4a38c50"
cp "$tmp/a/cifar10.images" "$tmp/b/cifar10.images" && echo >>"$tmp/b/cifar10.images"
run 3 cifar10 "$tmp/b"
says "got .* bytes"

unset SHA256
PARTS="0 1" run 0 cifar5m "$tmp/a"
says "cifar5m-01.images: 5 images to train on, 7 to evaluate on"
says "part1.npz: .* SHA-256 $(hash "$web/part1.npz")"
head -c 3000 "$web/part3.npz" >"$tmp/cut" && mv "$tmp/cut" "$web/part3.npz"
run 3 cifar5m "$tmp/b"
says "part3.npz: .* it is no zip file, or not a whole one"
none "$tmp/b/cifar5m/part3.npz.part"
none "$tmp/b/cifar5m.images"
for file in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
    gzip -c Makefile >"$web/$file-ubyte.gz"
done
run 3 fashion_mnist "$tmp/b"
says "train-images-idx3-ubyte.gz: cannot fetch .* expected SHA-256 c59f468a"
check "nothing is half made" [ -z "$(find "$tmp/a" "$tmp/b" -name 'tmp-*' -o -name '*.part*')" ]

# ---- Debian's packages

unset MIRROR
packages=$(apt-get download --print-uris dataset-fashion-mnist bible-kjv 2>/dev/null)
if [ -z "$packages" ]; then
    echo "SKIP Debian's packages: apt-get does not know them"
else
    run 0 kjv "$tmp/a"
    says "kjv.txt: 4137850 bytes"
    run 0 kjv "$tmp/a"
    echo >>"$tmp/a/kjv.txt"
    run 3 kjv "$tmp/a"
    run 0 fashion_mnist "$tmp/a"
    says "60000 images to train on, 10000 .* mean 0.2860, deviation 0.3530"
    check "Fashion-MNIST as C reads it" env FASHION_MNIST="$tmp/a/fashion_mnist.images" \
        build/test_images
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
